"""Windows against torch's own extents and an enumeration of every tap (tier: no process)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperslab.geometry import Cut, Window

fixed = settings(derandomize=True, deadline=None, max_examples=200, database=None)
windows = st.builds(
    Window,
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    dilation=st.integers(1, 3),
)


def read_by(window: Window, output: int) -> list[int]:
    """The inputs of one output, tap by tap."""
    first = output * window.stride - window.before
    return [first + tap * window.dilation for tap in range(window.kernel)]


@fixed
@given(windows, st.integers(0, 6), st.integers(1, 5))
def test_reads_spans_what_the_outputs_read(window: Window, lo: int, count: int) -> None:
    inputs = [i for o in range(lo, lo + count) for i in read_by(window, o)]
    assert window.reads((lo, lo + count)) == (min(inputs), max(inputs) + 1)


@fixed
@given(windows, st.integers(0, 8), st.integers(-4, 20), st.integers(1, 6))
def test_taps_are_those_that_meet_the_inputs(
    window: Window, output: int, lo: int, extent: int
) -> None:
    meets = [t for t, i in enumerate(read_by(window, output)) if lo <= i < lo + extent]
    first, end = window.taps(output, (lo, lo + extent))
    assert list(range(first, end)) == meets


CASES = [
    (k, s, p, d, e)
    for k, s, p, d, e in itertools.product(
        range(1, 5), range(1, 5), range(3), range(1, 3), range(1, 13)
    )
    if e + 2 * p >= (k - 1) * d + 1
]


def test_outputs_are_as_many_as_torch_makes() -> None:
    for k, s, p, d, extent in CASES:
        window = Window(k, s, p, p, d)
        x, weight = torch.zeros(1, 1, extent), torch.zeros(1, 1, k)
        made = F.conv1d(x, weight, stride=s, padding=p, dilation=d).shape[2]
        assert window.outputs(extent) == made, window
        if p <= k // 2:
            for ceil in (False, True):
                pooled = F.max_pool1d(x, k, s, p, d, ceil_mode=ceil).shape[2]
                assert window.outputs(extent, ceil=ceil) == pooled, (window, extent, ceil)


def test_every_output_is_owned_once_and_reads_only_the_volume_and_its_padding() -> None:
    """All windows of `CASES`, cut in 1 to 4: what the ranks make and read, index by index."""
    for (k, s, p, d, extent), parts in itertools.product(CASES, range(1, 5)):
        if extent < parts:
            continue
        window, cut = Window(k, s, p, p, d), Cut.balanced("width", extent, parts)
        outputs = window.outputs(extent)
        placed = window.cut_outputs(cut, outputs)
        owners = [rank for rank, (a, b) in enumerate(placed.intervals) for _ in range(a, b)]
        assert len(owners) == outputs == placed.extent, (window, cut)
        assert placed.parts == parts
        assert owners == sorted(owners)
        if outputs >= parts:
            assert not placed.thin, (window, cut)
        for a, b in placed.intervals:
            if a == b:
                continue
            lo, hi = window.reads((a, b))
            needed = {i for o in range(a, b) for i in read_by(window, o)}
            assert needed <= set(range(lo, hi))
            assert -p <= lo
            assert hi <= extent + p


@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (3, 1), (5, 1), (3, 2)])
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_symmetric_windows_stay_aligned(kernel: int, dilation: int, stride: int) -> None:
    """Strided layers stay aligned with a cut at multiples of the stride, so halos are thin."""
    pad = dilation * (kernel - 1) // 2
    window = Window(kernel, stride, pad, pad, dilation)
    cut = Cut("width", (0, 8, 16, 20))
    assert window.cut_outputs(cut, window.outputs(20)).bounds == tuple(
        bound // stride for bound in cut.bounds
    )
