"""The compiled kernels against their plain references, on awkward blocks (tier: no process)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperslab.memory_format import CHANNELS_LAST
from hyperslab.ops.kernels.fused import (
    chain_backward,
    chain_backward_sums,
    chain_forward,
    channel_sums,
    reorder,
)
from hyperslab.ops.kernels.fused.compiled import chains, library, sums, transposition

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.skipif(
    library.library() is None, reason="no compiler: the references run, and have their own test"
)


@dataclass(frozen=True)
class Case:
    """A block and a chain on it."""

    shape: tuple[int, ...]
    pool: list[int]
    maximum: bool
    slope: float
    scale_rows: int  # 0: no scale
    dtype: torch.dtype
    result: torch.dtype
    channels_last: bool
    seed: int

    def filled(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Ties, zeros of both signs, infinities and NaN among normal numbers."""
        generator = torch.Generator().manual_seed(self.seed + len(shape))
        x = torch.randn(*shape, generator=generator)
        kind = torch.randint(0, 60, shape, generator=generator)
        x = torch.where(kind < 20, (x * 2).round() / 2, x)
        specials = {20: -0.0, 21: 0.0, 22: torch.inf, 23: -torch.inf, 24: torch.nan}
        for number, value in specials.items():
            x = torch.where(kind == number, value, x)
        return self.ordered(x.to(dtype))

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        if not self.channels_last:
            return x.contiguous()
        memory_format = CHANNELS_LAST[x.dim()]
        return torch.empty_like(x, memory_format=memory_format).copy_(x)

    def scales(self, count: int) -> list[torch.Tensor | None]:
        if self.scale_rows == 0:
            return [None] * count
        generator = torch.Generator().manual_seed(self.seed)
        shape = (count, self.scale_rows, self.shape[1])
        return list(torch.randn(shape, generator=generator).unbind())


@st.composite
def cases(draw: st.DrawFn, *, samples: int = 3) -> Case:
    dims = draw(st.sampled_from([3, 3, 3, 2, 1]))
    pool = draw(st.sampled_from([[], [2] * dims, None]))
    if pool is None:
        pool = [draw(st.integers(1, 3)) for _ in range(dims)]
    counts = [draw(st.integers(1, 5 if dims == 3 else 9)) for _ in range(dims)]
    if draw(st.booleans()):
        counts[-1] = draw(st.integers(1, 40))  # several vectors
    extents = [n * k for n, k in zip(counts, pool or [1] * dims, strict=True)]
    batch = draw(st.integers(1, samples))
    channels = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 17, 32, 48, 70]))
    return Case(
        shape=(batch, channels, *extents),
        pool=pool,
        maximum=draw(st.booleans()),
        slope=draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])),
        scale_rows=draw(st.sampled_from([0, 1, batch])),
        dtype=draw(st.sampled_from(DTYPES)),
        result=draw(st.sampled_from(DTYPES)),
        channels_last=dims > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 20)),
    )


def assert_equal(got: torch.Tensor, want: torch.Tensor, message: str = "") -> None:
    """Bit for bit but for the kind of NaN and the sign of zero."""
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=message or None)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """But for the order of a few sums in float32."""
    assert got.stride() == want.stride()
    rtol = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[got.dtype]
    torch.testing.assert_close(got, want, rtol=rtol, atol=rtol / 2, equal_nan=True)


EXAMPLES = settings(max_examples=60, deadline=None)


@EXAMPLES
@given(cases())
def test_chain(case: Case) -> None:
    x = case.filled(case.shape, case.dtype)
    scale, shift, b, c = case.scales(4)
    chain: tuple[Any, ...] = (case.slope, case.pool, case.maximum)
    want, marks = chain_forward.reference(x, scale, shift, *chain, True, case.result)
    y, got_marks = chains.compiled_chain_forward(x, scale, shift, *chain, True, case.result)
    assert torch.equal(got_marks, marks)
    averages = bool(case.pool) and not case.maximum
    (assert_near if averages else assert_equal)(y, want)

    g = case.filled(want.shape, case.result)
    wants_x = None if scale is None else x
    for factors in ((b, c), (None, None)):
        arguments = (g, marks, wants_x, scale, shift, *factors, *chain, case.shape, case.dtype)
        want_dx = chain_backward.reference(*arguments)
        got_dx = chains.compiled_chain_backward(*arguments)
        assert_near(got_dx, want_dx)
    if scale is not None:
        finite = case.ordered(x.nan_to_num(0, 2, -2))
        g = case.ordered(g.nan_to_num(0, 2, -2))
        want_sums = chain_backward_sums.reference(g, marks, finite, scale, shift, *chain)
        got_sums = sums.compiled_backward_sums(g, marks, finite, scale, shift, *chain)
        size = max(1.0, float(want_sums.abs().max()))
        torch.testing.assert_close(got_sums, want_sums, rtol=1e-6, atol=1e-6 * size)


@EXAMPLES
@given(cases(), st.booleans())
def test_channel_sums(case: Case, whole: bool) -> None:
    x = case.filled(case.shape, case.dtype)
    divisors = [g for g in range(1, x.shape[1] + 1) if x.shape[1] % g == 0]
    for groups in (0, divisors[case.seed % len(divisors)]):
        want = channel_sums.reference(x, groups)
        got = sums.compiled_channel_sums(x, groups)
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13, equal_nan=True)


@EXAMPLES
@given(cases())
def test_reorder(case: Case) -> None:
    x = case.filled(case.shape, case.dtype)
    if x.dim() > 3:
        assert_equal(
            transposition.compiled_reorder(x, not case.channels_last, case.result),
            reorder.reference(x, not case.channels_last, case.result),
        )
    got = transposition.compiled_reorder(x, case.channels_last, case.result)
    assert_equal(got, reorder.reference(x, case.channels_last, case.result))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("maximum", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 4, 40, 1200), (2, 600, 2, 4, 6), (2, 16, 32, 32, 64)])
def test_large_blocks_on_threads(
    shape: tuple[int, ...], maximum: bool, channels_last: bool
) -> None:
    """Several pieces a row, parts of them on threads; rows that share bytes are not parted."""
    case = Case(shape, [2] * 3, maximum, 0.01, 0, torch.float32, torch.float32, channels_last, 1)
    x = case.filled(shape, torch.float32)
    scale = torch.rand(1, shape[1]) + 0.5
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for pool in (case.pool, []):
            chain: tuple[Any, ...] = (0.01, pool, maximum)
            want, marks = chain_forward.reference(x, None, None, *chain, True, x.dtype)
            y, got_marks = chains.compiled_chain_forward(x, None, None, *chain, True, x.dtype)
            assert torch.equal(got_marks, marks)
            assert_near(y, want)
            none = (None,) * 5
            arguments = (y, marks, *none, *chain, shape, x.dtype)
            assert_near(
                chains.compiled_chain_backward(*arguments), chain_backward.reference(*arguments)
            )
            finite = case.ordered(x.nan_to_num(0, 2, -2))
            _, winners = chain_forward.reference(finite, scale, scale, *chain, True, x.dtype)
            g = case.ordered(torch.randn(y.shape))
            arguments = (g, winners, finite, scale, scale, *chain)
            torch.testing.assert_close(
                sums.compiled_backward_sums(*arguments),
                chain_backward_sums.reference(*arguments),
                rtol=1e-6,
                atol=1e-3,
            )
        got = transposition.compiled_reorder(x, not channels_last, torch.bfloat16)
        assert_equal(got, reorder.reference(x, not channels_last, torch.bfloat16))
        torch.testing.assert_close(
            sums.compiled_channel_sums(finite, 0), channel_sums.reference(finite, 0)
        )
    finally:
        torch.set_num_threads(before)


def test_sums_do_not_cancel() -> None:
    """As good as float64 sums of the values."""
    x = torch.randn(1, 2, 8, 16, 16) * 1e-3 + 1000
    for t in (x, x.contiguous(memory_format=torch.channels_last_3d)):
        count = 8 * 16 * 16
        total, squares = sums.compiled_channel_sums(t, 0)
        variance = squares / count - (total / count) ** 2
        torch.testing.assert_close(
            variance, t.double().var((0, 2, 3, 4), correction=0), rtol=1e-3, atol=0
        )


def test_every_number_of_half_precision() -> None:
    """All 65536 are read and written as torch does, and so are float32 between them."""
    halves = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    steps = torch.arange(0, 1 << 32, 40009, dtype=torch.int64).to(torch.int32).view(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        for x in (halves.view(dtype), steps):
            for result in DTYPES:
                for count in (len(x), 7):
                    part = x[:count].view(1, 1, count)
                    y, _ = chains.compiled_chain_forward(
                        part, None, None, 1.0, [], False, False, result
                    )
                    torch.testing.assert_close(
                        y, part.float().to(result), rtol=0, atol=0, equal_nan=True
                    )


def test_refuses_marks_of_another_block() -> None:
    g = torch.ones(1, 2, 4)
    marks = torch.zeros(0, dtype=torch.uint8)
    with pytest.raises(ValueError, match="0 bytes of marks"):
        chains.compiled_chain_backward(
            g, marks, None, None, None, None, None, 0.0, [], False, (1, 2, 4), g.dtype
        )
