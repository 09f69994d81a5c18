"""The compiled kernels against their plain references, on awkward blocks (tier: no process)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperslab.kernels import compile as library
from hyperslab.kernels import epilogue, normalization, reorder
from tests.kernels.epilogue.cases import (
    DTYPES,
    Case,
    assert_equal,
    assert_near,
    cases,
    check_chain,
    check_channel_sums,
    check_numbers,
    check_reorder,
    check_running,
    of_one_part,
)

pytestmark = pytest.mark.skipif(
    library.library() is None, reason="no compiler: the references run, and have their own test"
)

EXAMPLES = settings(max_examples=60, deadline=None)


@EXAMPLES
@given(cases())
def test_chain(case: Case) -> None:
    check_chain(case)


@pytest.mark.parametrize("slope", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("channels", [16, 48])
@pytest.mark.parametrize("result", DTYPES)
def test_averages_over_cubes(result: torch.dtype, channels: int, slope: float) -> None:
    """Of two voxels a side, which have a kernel of their own: in short and in long lines."""
    for extents in ((2, 4, 6), (4, 2, 132)):
        for dtype in (result, torch.float32):
            shape = (2, channels, *extents)
            check_chain(Case(shape, [2] * 3, False, slope, 0, dtype, result, True, channels))


@EXAMPLES
@given(cases())
def test_channel_sums(case: Case) -> None:
    check_channel_sums(case)


@EXAMPLES
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5), st.integers(0, 1000))
def test_numbers(rows: int, groups: int, pool: int, seed: int) -> None:
    check_numbers(rows, groups, pool, seed)


@EXAMPLES
@given(
    st.integers(1, 70),
    st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0]),
    st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 1000),
)
def test_running_statistics(channels: int, momentum: float, dtype: torch.dtype, seed: int) -> None:
    check_running(channels, momentum, dtype, seed)


def test_running_statistics_of_other_channels_are_refused() -> None:
    moments = torch.ones(4, 1, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="size"):
        torch.ops.hyperslab.running_statistics(moments, torch.zeros(4), torch.zeros(4), 0.1, 1.0)


@EXAMPLES
@given(cases())
def test_reorder(case: Case) -> None:
    check_reorder(case)


@EXAMPLES
@given(
    st.sampled_from([3, 4, 16, 70]),
    st.tuples(st.integers(3, 6), st.integers(2, 9), st.integers(2, 40)),
    st.tuples(st.integers(0, 2), st.integers(1, 3)),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
)
def test_reorder_window(
    channels: int,
    extents: tuple[int, ...],
    window: tuple[int, int],
    dtype: torch.dtype,
    result: torch.dtype,
) -> None:
    """Of planes of a block no copy is made first: the kernel takes the gaps between channels."""
    block = torch.randn(2, channels, *extents).to(dtype)
    for memory_format in (torch.contiguous_format, torch.channels_last_3d):
        x = block.contiguous(memory_format=memory_format)[:, :, window[0] : sum(window)]
        to_last = memory_format is torch.contiguous_format
        wanted = torch.channels_last_3d if to_last else torch.contiguous_format
        expected = x.to(result, copy=True).contiguous(memory_format=wanted)
        got = torch.ops.hyperslab.reorder(x, to_last, result)
        assert got.is_contiguous(memory_format=wanted)
        assert torch.equal(got, expected)
        if to_last and x.shape[2] > 1:
            assert plan_of(x, result) is not None, "the kernel runs"
            assert plan_of(x[..., :-1], result) is None, "gaps between voxels"


def plan_of(x: torch.Tensor, dtype: torch.dtype) -> object:
    return reorder._plan(x.shape, x.stride(), x.dtype, dtype, True)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("maximum", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 4, 40, 1200), (2, 600, 2, 4, 6), (2, 16, 32, 32, 64)])
def test_large_blocks_on_threads(
    shape: tuple[int, ...], maximum: bool, channels_last: bool
) -> None:
    """Several pieces a row, parts of them on threads; rows that share bytes are not parted."""
    case = Case(shape, [2] * 3, maximum, 0.01, 0, torch.float32, torch.float32, channels_last, 1)
    x = case.filled(shape, torch.float32)
    norm = torch.rand(3, 1, shape[1]) + 0.5
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for pool in (case.pool, []):
            chain: tuple[Any, ...] = (0.01, pool, maximum)
            want, marks = epilogue.chain_forward(x, None, *chain, True, x.dtype)
            y, got_marks = torch.ops.hyperslab.chain_forward(x, None, *chain, True, x.dtype)
            assert torch.equal(got_marks, marks)
            assert_near(y, want)
            none = (None,) * 3
            arguments = (y, marks, *none, *chain, shape, x.dtype)
            assert_near(
                torch.ops.hyperslab.chain_backward(*arguments),
                epilogue.chain_backward(*arguments),
            )
            finite = case.ordered(x.nan_to_num(0, 2, -2))
            _, winners = epilogue.chain_forward(finite, norm, *chain, True, x.dtype)
            g = case.ordered(torch.randn(y.shape))
            arguments = (g, winners, finite, norm, *chain)
            torch.testing.assert_close(
                torch.ops.hyperslab.chain_backward_sums(*arguments),
                epilogue.chain_backward_sums(*arguments),
                rtol=1e-6,
                atol=1e-3,
            )
        got = torch.ops.hyperslab.reorder(x, not channels_last, torch.bfloat16)
        assert_equal(got, reorder.reorder(x, not channels_last, torch.bfloat16))
        torch.testing.assert_close(
            of_one_part(torch.ops.hyperslab.channel_sums(finite, 0)),
            of_one_part(epilogue.channel_sums(finite, 0)),
        )
    finally:
        torch.set_num_threads(before)


def test_sums_do_not_cancel() -> None:
    """As good as float64 sums of the values."""
    x = torch.randn(1, 2, 8, 16, 16) * 1e-3 + 1000
    for t in (x, x.contiguous(memory_format=torch.channels_last_3d)):
        count = 8 * 16 * 16
        made = torch.ops.hyperslab.channel_sums(t, 0)
        _, moments = normalization.normalisation(made, None, None, count, 1e-5, 2, 1)
        variance = t.double().var((0, 2, 3, 4), correction=0)
        torch.testing.assert_close(moments[1, 0], variance, rtol=1e-9, atol=0)


def test_every_number_of_half_precision() -> None:
    """All 65536 are read and written as torch does, and so are float32 between them."""
    halves = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    steps = torch.arange(0, 1 << 32, 40009, dtype=torch.int64).to(torch.int32).view(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        for x in (halves.view(dtype), steps):
            for result in DTYPES:
                for count in (len(x), 7):
                    part = x[:count].view(1, 1, count)
                    y, _ = torch.ops.hyperslab.chain_forward(
                        part, None, 1.0, [], False, False, result
                    )
                    torch.testing.assert_close(
                        y, part.float().to(result), rtol=0, atol=0, equal_nan=True
                    )


def test_refuses_marks_of_another_block() -> None:
    g = torch.ones(1, 2, 4)
    marks = torch.zeros(0, dtype=torch.uint8)
    with pytest.raises(ValueError, match="0 bytes of marks"):
        torch.ops.hyperslab.chain_backward(
            g, marks, None, None, None, 0.0, [], False, (1, 2, 4), g.dtype
        )


def test_refuses_another_block() -> None:
    x, g = torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 8, 8)
    norm, none = torch.ones(3, 1, 2), torch.empty(0, dtype=torch.uint8)
    with pytest.raises(ValueError, match="by one \\[1, 2, 4, 4\\]"):
        torch.ops.hyperslab.chain_backward(
            g, none, x, norm, None, 0.0, [], False, g.shape, torch.float32
        )
