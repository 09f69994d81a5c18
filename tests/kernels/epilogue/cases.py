"""Awkward blocks and chains, and what compiled kernels must give for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from hyperslab.kernels import epilogue, normalization, reorder
from hyperslab.kernels.memory_format import CHANNELS_LAST

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Case:
    """A block and a chain on it."""

    shape: tuple[int, ...]
    pool: list[int]
    maximum: bool
    slope: float
    rows: int  # of a normalisation; 0: none
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

    def numbers(self, count: int) -> torch.Tensor | None:
        """Of the channels, as ``norm`` and ``through`` are."""
        if self.rows == 0:
            return None
        generator = torch.Generator().manual_seed(self.seed + count)
        return torch.randn((count, self.rows, self.shape[1]), generator=generator)


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
        rows=draw(st.sampled_from([0, 1, batch])),
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


def check_chain(case: Case) -> None:
    x = case.filled(case.shape, case.dtype)
    norm = case.numbers(3)
    chain: tuple[Any, ...] = (case.slope, case.pool, case.maximum)
    want, marks = epilogue.chain_forward(x, norm, *chain, True, case.result)
    y, got_marks = torch.ops.hyperslab.chain_forward(x, norm, *chain, True, case.result)
    assert torch.equal(got_marks, marks)
    averages = bool(case.pool) and not case.maximum
    (assert_near if averages else assert_equal)(y, want)
    into = torch.empty_like(y).fill_(torch.nan)
    marks_beside = torch.ops.hyperslab.chain_forward_into(x, norm, *chain, True, into)
    assert torch.equal(marks_beside, got_marks)
    assert_equal(into, y)

    g = case.filled(want.shape, case.result)
    wants_x = None if norm is None else x
    for through in (case.numbers(2), None):
        arguments = (g, marks, wants_x, norm, through, *chain, case.shape, case.dtype)
        want_dx = epilogue.chain_backward(*arguments)
        got_dx = torch.ops.hyperslab.chain_backward(*arguments)
        assert_near(got_dx, want_dx)
    if norm is not None:
        finite = case.ordered(x.nan_to_num(0, 2, -2))
        g = case.ordered(g.nan_to_num(0, 2, -2))
        want_sums = epilogue.chain_backward_sums(g, marks, finite, norm, *chain)
        got_sums = torch.ops.hyperslab.chain_backward_sums(g, marks, finite, norm, *chain)
        size = max(1.0, float(want_sums.abs().max()))
        torch.testing.assert_close(got_sums, want_sums, rtol=1e-6, atol=1e-6 * size)


def of_one_part(sums: torch.Tensor) -> torch.Tensor:
    """Sums of x and x * x, which are the same whatever the parts were."""
    total, square, around = sums
    return torch.stack([total, square + around])


def check_channel_sums(case: Case) -> None:
    x = case.filled(case.shape, case.dtype)
    divisors = [g for g in range(1, x.shape[1] + 1) if x.shape[1] % g == 0]
    for groups in (0, divisors[case.seed % len(divisors)]):
        want = epilogue.channel_sums(x, groups)
        got = torch.ops.hyperslab.channel_sums(x, groups)
        torch.testing.assert_close(
            of_one_part(got), of_one_part(want), rtol=1e-12, atol=1e-12, equal_nan=True
        )


def check_numbers(rows: int, groups: int, pool: int, seed: int) -> None:
    """Of ``rows`` x ``groups`` sums, of ``pool`` channels each."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows * groups, 20, generator=generator, dtype=torch.float64)
    values = values * 10.0 ** (seed % 4) + seed % 7
    values[0] = 3.0  # without variance
    made = epilogue.channel_sums(values[None], rows * groups)
    channels = groups * pool
    weight, bias = torch.randn(2, channels, generator=generator).unbind()
    for affine in ((weight, bias), (weight, None), (None, bias), (None, None)):
        arguments = (made, *affine, 20, 1e-5, channels, pool)
        found = torch.ops.hyperslab.normalisation(*arguments)
        torch.testing.assert_close(found, normalization.normalisation(*arguments))
        given = torch.randn(2, rows, channels, generator=generator, dtype=torch.float64)
        gradients = torch.ops.hyperslab.parameter_gradients(given, *found, pool)
        want = normalization.parameter_gradients(given, *found, pool)
        torch.testing.assert_close(gradients, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            torch.ops.hyperslab.through_statistics(gradients[2], *found, 20, pool),
            normalization.through_statistics(gradients[2], *found, 20, pool),
        )


def check_running(channels: int, momentum: float, dtype: torch.dtype, seed: int) -> None:
    """Running statistics, which change in place, to the last bit."""
    generator = torch.Generator().manual_seed(seed)
    moments = torch.randn(4, 1, channels, generator=generator, dtype=torch.float64).exp()
    before = torch.randn(2, channels, generator=generator).to(dtype)
    found, expected = before.clone(), before.clone()
    torch.ops.hyperslab.running_statistics(moments, *found, momentum, 20 / 19)
    normalization.running_statistics(moments, *expected, momentum, 20 / 19)
    assert torch.equal(found, expected)
    assert momentum == 0 or not torch.equal(found, before)


def check_reorder(case: Case) -> None:
    x = case.filled(case.shape, case.dtype)
    if x.dim() > 3:
        assert_equal(
            torch.ops.hyperslab.reorder(x, not case.channels_last, case.result),
            reorder.reorder(x, not case.channels_last, case.result),
        )
    into = torch.empty_like(x, dtype=case.result).fill_(torch.nan)
    torch.ops.hyperslab.reorder_into(x, into)
    assert_equal(into, x.to(case.result))
    got = torch.ops.hyperslab.reorder(x, case.channels_last, case.result)
    into = torch.empty_like(got).fill_(torch.nan)
    torch.ops.hyperslab.reorder_into(x, into)
    assert_equal(into, got)
    assert_equal(got, reorder.reorder(x, case.channels_last, case.result))
