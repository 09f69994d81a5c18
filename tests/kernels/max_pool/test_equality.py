"""The maximum over windows: compiled, reference and torch's own (tier: no process)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperslab.kernels import compile as library
from hyperslab.kernels import max_pool
from hyperslab.kernels.memory_format import CHANNELS_LAST, memory_format_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


@dataclass(frozen=True)
class Case:
    """Windows over a block."""

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    ceil: bool
    dtype: torch.dtype
    result: torch.dtype
    channels_last: bool
    seed: int

    @property
    def extents(self) -> tuple[int, ...]:
        x = torch.empty(self.shape, device="meta")
        pool = POOLS[len(self.kernel)]
        return tuple(pool(x, *self.windows, 1, self.ceil).shape[2:])

    @property
    def windows(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return self.kernel, self.stride, self.padding

    def filled(self, shape: tuple[int, ...], *, special: bool) -> torch.Tensor:
        """Ties, and with ``special`` infinities and NaN among normal numbers."""
        generator = torch.Generator().manual_seed(self.seed + len(shape))
        x = torch.randn(*shape, generator=generator)
        kind = torch.randint(0, 30, shape, generator=generator)
        x = torch.where(kind < 10, (x * 2).round() / 2, x)
        for number, value in {10: torch.inf, 11: torch.nan}.items() if special else ():
            x = torch.where(kind == number, value, x)
        x = torch.where((kind > 11) & (kind < 24), -torch.inf, x) if special else x
        return self.ordered(x.to(self.dtype))

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        if not self.channels_last:
            return x.contiguous()
        return x.contiguous(memory_format=CHANNELS_LAST[x.dim()])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = draw(st.sampled_from([3, 3, 2, 1]))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(dims))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    extents = tuple(draw(st.integers(max(k, 2), 9)) for k in kernel)
    channels = draw(st.sampled_from([1, 2, 3, 16, 17, 80]))
    return Case(
        shape=(draw(st.integers(1, 2)), channels, *extents),
        kernel=kernel,
        stride=tuple(draw(st.integers(1, 3)) for _ in range(dims)),
        padding=padding,
        ceil=draw(st.booleans()),
        dtype=draw(st.sampled_from(DTYPES)),
        result=draw(st.sampled_from(DTYPES)),
        channels_last=dims > 1 and channels > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


@settings(deadline=None, max_examples=80)
@given(case=cases(), special=st.booleans())
def test_the_reference_is_torchs(case: Case, special: bool) -> None:
    x = case.filled(case.shape, special=special).float()
    x = x.contiguous().requires_grad_()  # in channels last torch's forgets where -inf was
    y = POOLS[len(case.kernel)](x, *case.windows, 1, case.ceil)
    mine, winners = max_pool.window_maximum(
        x.detach(), *case.windows, case.extents, True, torch.float32
    )
    torch.testing.assert_close(mine, y.detach(), rtol=0, atol=0, equal_nan=True)
    g = torch.randn(y.shape)
    (dx,) = torch.autograd.grad(y, x, g)
    back = max_pool.window_maximum_backward(
        g, winners, *case.windows, x.shape, case.channels_last, torch.float32
    )
    torch.testing.assert_close(back, dx)


@pytest.mark.skipif(library.library() is None, reason="no compiler: the references run")
@settings(deadline=None, max_examples=150)
@given(case=cases(), special=st.booleans())
def test_compiled_is_the_reference(case: Case, special: bool) -> None:
    x = case.filled(case.shape, special=special)
    given_ = (x, *case.windows, case.extents, True, case.result)
    expected, of_expected = max_pool.window_maximum(*given_)
    y, winners = torch.ops.hyperslab.window_maximum(*given_)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(winners, of_expected)
    assert y.stride() == expected.stride()
    assert memory_format_of(y) == memory_format_of(x) or 1 in y.shape
    g = case.filled(tuple(y.shape), special=False).to(case.result)
    options = (winners, *case.windows, case.shape, case.channels_last, case.dtype)
    dx = torch.ops.hyperslab.window_maximum_backward(g, *options)
    wide = max_pool.window_maximum_backward(g.double(), *options[:-1], torch.float64)
    eps = torch.finfo(case.dtype).eps
    torch.testing.assert_close(dx.double(), wide, rtol=2 * eps, atol=1e-6)
    assert dx.is_contiguous(memory_format=memory_format_of(case.ordered(dx)))


def test_without_marks_none_are_made() -> None:
    x = torch.randn(1, 3, 6, 5, 4)
    windows = ((3, 3, 3), (2, 2, 2), (1, 1, 1), (3, 3, 2))
    y, winners = torch.ops.hyperslab.window_maximum(x, *windows, False, torch.float32)
    assert torch.equal(y, F.max_pool3d(x, 3, 2, 1))
    assert winners.numel() == 0


@pytest.mark.parametrize("channels_last", [False, True])
def test_forms_on_the_meta_device(channels_last: bool) -> None:
    x = torch.randn(2, 3, 6, 5, 4)
    x = x.contiguous(memory_format=torch.channels_last_3d) if channels_last else x
    windows = ((3, 3, 3), (2, 2, 2), (1, 1, 1))
    given_ = (*windows, (3, 3, 2), True, torch.bfloat16)
    for real, form in zip(
        torch.ops.hyperslab.window_maximum(x, *given_),
        torch.ops.hyperslab.window_maximum(x.to("meta"), *given_),
        strict=True,
    ):
        assert (real.shape, real.stride(), real.dtype) == (form.shape, form.stride(), form.dtype)
    options = (*windows, x.shape, channels_last, torch.float32)
    backward = torch.ops.hyperslab.window_maximum_backward
    y, winners = torch.ops.hyperslab.window_maximum(x, *given_)
    dx = backward(y, winners, *options)
    form = backward(y.to("meta"), winners.to("meta"), *options)
    assert (dx.shape, dx.stride(), dx.dtype) == (form.shape, form.stride(), form.dtype)


def test_what_a_byte_cannot_name_is_refused() -> None:
    x = torch.randn(1, 1, 8, 8, 8)
    windows = ((7, 7, 7), (1, 1, 1), (0, 0, 0), (2, 2, 2))
    for run in (max_pool.window_maximum, torch.ops.hyperslab.window_maximum):
        with pytest.raises(ValueError, match="more than 256 taps"):
            run(x, *windows, True, torch.float32)
    with pytest.raises(ValueError, match="winners"):
        torch.ops.hyperslab.window_maximum_backward(
            torch.randn(1, 1, 3, 3, 3),
            torch.zeros(1, 1, 2, 3, 3, dtype=torch.uint8),
            *((2, 2, 2), (1, 1, 1), (0, 0, 0)),
            (1, 1, 4, 4, 4),
            False,
            torch.float32,
        )
