"""Distributes padding and cropping: ``F.pad``, the padding modules, convolutions with their modes.

Legend: an output ``o`` of a dim is padded at ``before`` and reads the *source* ``o - before``,
which is an index of the input where it lies inside it and else goes by the mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hyperslab.comm import log_once, plan_exchange
from hyperslab.comm.exchange import fetch
from hyperslab.errors import LayoutError
from hyperslab.geometry import Cover, Interval, Partition, Window
from hyperslab.tensor import Sharded, gather, register

WHAT = "the exchange of pad"


@register(F.pad, family="spatial")
def pad(
    input: Sharded, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Sharded:
    """Constant, reflect, replicate and circular, also negative; the cut stays where it is.

    Distribution scheme:
    1. The planes that padding adds join the first and the last shard.
    2. constant: one exchange that asks for the source, outside of which is the value.
    3. reflect, replicate: the same for the sources inside (mostly the own block, no message),
       and the local op on the ranks at the edge of the volume.
    4. circular: dim by dim, so that corners need no message of their own, the first and the last
       rank fetch what is wrapped around.
    """
    return _padded(input, [int(p) for p in pad], mode, 0 if value is None else value)


@register(torch.constant_pad_nd, family="spatial")
def constant_pad_nd(input: Sharded, pad: Sequence[int], value: float = 0) -> Sharded:
    """As ``F.pad`` with a constant."""
    return _padded(input, [int(p) for p in pad], "constant", value)


def _padded(x: Sharded, pads: list[int], mode: str, value: float) -> Sharded:
    # Torch's own checks, on the global shape.
    F.pad(torch.empty(x.shape, dtype=x.dtype, device="meta"), pads, mode, value)
    if mode == "constant":
        return _constant(x, pads, value)
    return _circular(x, pads) if mode == "circular" else _at_edge(x, pads, mode)


def _windows(ndim: int, pads: Sequence[int]) -> list[Window]:
    """Turns padding into windows of one element; ``pads`` begin with the last dim."""
    count = ndim - len(pads) // 2
    pairs = zip(pads[-2::-2], pads[::-2], strict=True)
    return [Window(1)] * count + [Window(1, before=a, after=b) for a, b in pairs]


def _place(x: Sharded, windows: Sequence[Window]) -> tuple[Sharded, Partition]:
    """Places the output; gathers the input where too little is left to be cut."""
    extents = tuple(w.outputs(e) for w, e in zip(windows, x.shape, strict=True))
    cuts = tuple(
        cut and window.cut_outputs(cut, extent)
        for cut, window, extent in zip(x.partition.cuts, windows, extents, strict=True)
    )
    thin = [cut.axis for cut in cuts if cut is not None and cut.thin]
    if not thin:
        return x, Partition(extents, cuts)
    log_once(
        x.grid,
        f"pad: {' x '.join(map(str, extents))} is too thin to be cut along {', '.join(thin)} of "
        f"{x.grid}; gathered there, its ranks repeat the work from here on",
    )
    return _place(gather(x, thin), windows)


def _sources(partition: Partition, windows: Sequence[Window]) -> list[tuple[Interval, ...]]:
    """Lists, per dim of an output, the sources of each of its shards."""
    return [
        tuple(window.reads(out) for out in intervals)
        for window, intervals in zip(windows, partition.cover.intervals, strict=True)
    ]


def _constant(x: Sharded, pads: Sequence[int], value: float) -> Sharded:
    windows = _windows(x.dim(), pads)
    x, partition = _place(x, windows)
    cover = Cover(partition.cover.axes, tuple(_sources(partition, windows)))
    plan = plan_exchange(x.partition, cover, x.grid)
    return x.like(_fresh(fetch(x.block, plan, fill=value, what=WHAT), x), partition)


def _fresh(local: torch.Tensor, x: Sharded) -> torch.Tensor:
    """Copies where nothing was copied yet: torch's padding never gives a view."""
    theirs = x.block.untyped_storage().data_ptr()
    return local.clone() if local.untyped_storage().data_ptr() == theirs else local


def _at_edge(x: Sharded, pads: Sequence[int], mode: str) -> Sharded:
    """Pads by the modes that repeat what is next to the edge."""
    windows = _windows(x.dim(), pads)
    x, partition = _place(x, windows)
    sources = _sources(partition, windows)
    hulls = [
        tuple(_hull(source, extent, mode) for source in choices)
        for choices, extent in zip(sources, x.shape, strict=True)
    ]
    wanted, held = (Cover(partition.cover.axes, tuple(c)) for c in (sources, hulls))
    local = fetch(x.block, plan_exchange(x.partition, held, x.grid), what=WHAT)
    mine = wanted.box(x.grid.coords)
    hull = held.box(x.grid.coords)
    first = [max(0, -lo) for lo in mine.lo]
    last = [max(0, hi - extent) for hi, extent in zip(mine.hi, x.shape, strict=True)]
    if any(first) or any(last):
        sides = [side for pair in zip(last, first, strict=True) for side in pair][::-1]
        local = F.pad(local, sides[: len(pads)], mode)
    for dim, (lo, extent) in enumerate(zip(mine.lo, mine.shape, strict=True)):
        if local.shape[dim] != extent:  # a reflection that reaches beyond this rank's planes
            local = local.narrow(dim, lo + first[dim] - hull.lo[dim], extent)
    return x.like(_fresh(local, x), partition)


def _hull(source: Interval, extent: int, mode: str) -> Interval:
    """Finds the inputs that the op makes ``source`` of: from the edge on where it reaches over."""
    lo = max(source[0], 0)
    hi = min(source[1], extent)
    reflect = mode == "reflect"
    if source[0] < 0:
        hi = max(hi, 1 - source[0] * reflect)
    if source[1] > extent:
        lo = min(lo, extent - 1 - (source[1] - extent) * reflect)
    return lo, hi


def _circular(x: Sharded, pads: Sequence[int]) -> Sharded:
    y = _constant(x, [min(0, p) for p in pads], 0) if min(pads, default=0) < 0 else x
    windows = _windows(x.dim(), [max(0, p) for p in pads])
    for dim, window in enumerate(windows):
        if max(window.before, window.after) > y.shape[dim]:
            raise LayoutError(
                f"pad: {window.before} and {window.after} planes of circular padding in dim {dim} "
                f"need as many to repeat, of {y.partition}"
            )
        if y.partition.cuts[dim] is not None and window != Window(1):
            y = _wrap(y, dim, window)
            windows[dim] = Window(1)
    sides = [side for window in windows for side in (window.after, window.before)][::-1]
    local = F.pad(y.block, sides[: len(pads)], "circular") if any(sides) else y.block
    return y.like(_fresh(local, x), _place(y, windows)[1])


def _wrap(x: Sharded, dim: int, window: Window) -> Sharded:
    """Pads a cut dim circularly."""
    extent = x.shape[dim]
    cut = x.partition.cuts[dim]
    assert cut is not None
    nothing = ((0, 0),) * (cut.parts - 1)
    left = _piece(x, dim, ((extent - window.before, extent), *nothing))
    right = _piece(x, dim, (*nothing, (0, window.after)))
    wider = window.outputs(extent)
    partition = x.partition.with_dim(dim, wider, window.cut_outputs(cut, wider))
    # Also on ranks that get nothing: those that send something get its gradient back.
    return x.like(torch.cat([left, x.block, right], dim), partition)


def _piece(x: Sharded, dim: int, intervals: tuple[Interval, ...]) -> torch.Tensor:
    """Fetches the part of one dim that each shard asks for."""
    cover = x.partition.cover
    chosen = (*cover.intervals[:dim], intervals, *cover.intervals[dim + 1 :])
    return fetch(x.block, plan_exchange(x.partition, Cover(cover.axes, chosen), x.grid), what=WHAT)
