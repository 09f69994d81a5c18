"""Transposed windows against an enumeration of every tap (tier: no process)."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hyperslab.geometry import Cut, TransposedWindow

fixed = settings(derandomize=True, deadline=None, max_examples=400, database=None)


@st.composite
def windows(draw: st.DrawFn) -> TransposedWindow:
    stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return TransposedWindow(
        kernel=draw(st.integers(1, 5)),
        stride=stride,
        padding=draw(st.integers(0, 4)),
        extra=draw(st.integers(0, max(stride, dilation) - 1)),
        dilation=dilation,
    )


def touched_by(window: TransposedWindow, i: int) -> set[int]:
    """The outputs of one input, tap by tap."""
    first = i * window.stride - window.padding
    return {first + tap * window.dilation for tap in range(window.kernel)}


@fixed
@given(windows(), st.integers(0, 9), st.integers(1, 6))
def test_reads_spans_what_touches_the_outputs(window: TransposedWindow, lo: int, n: int) -> None:
    wanted = set(range(lo, lo + n))
    inputs = [i for i in range(-20, 30) if touched_by(window, i) & wanted]
    first, end = window.reads((lo, lo + n))
    assert set(inputs) <= set(range(first, end))
    if window.dilation == 1 and inputs:
        assert (first, end) == (min(inputs), max(inputs) + 1)


@fixed
@given(windows(), st.integers(1, 12), st.integers(1, 4))
def test_every_shard_is_one_call(window: TransposedWindow, extent: int, parts: int) -> None:
    """What the op makes of the inputs of a crop, by torch's own formula, is the shard."""
    outputs = window.outputs(extent)
    assume(extent >= parts and outputs >= parts)
    placed = window.cut_outputs(Cut.balanced("width", extent, parts), outputs)
    assert placed.extent == outputs
    assert not placed.thin
    for lo, hi in placed.intervals:
        crop = window.crop((lo, hi), extent)
        first, end = crop.inputs
        op = TransposedWindow(
            window.kernel, window.stride, crop.padding, crop.extra, window.dilation
        )
        assert first * window.stride - window.padding + crop.padding == lo
        assert op.outputs(end - first) == hi - lo
        wanted = set(range(lo, hi))
        inputs = {i for i in range(extent) if touched_by(window, i) & wanted}
        assert inputs <= set(range(first, end))


@fixed
@given(windows(), st.integers(1, 12))
def test_the_whole_volume_is_the_plain_call(window: TransposedWindow, extent: int) -> None:
    outputs = window.outputs(extent)
    assume(outputs >= 1 and window.padding < window.span and window.extra < window.stride)
    assume(window.reads((0, outputs))[0] <= 0 and window.reads((0, outputs))[1] >= extent)
    crop = window.crop((0, outputs), extent)
    assert (crop.inputs, crop.padding, crop.extra) == ((0, extent), window.padding, window.extra)
