"""Derives the cut of an output, and the input that it reads, for operators that slide windows.

Convolution, pooling and interpolation share it: from windows to cuts, covers and halos. Inputs
without a batch dim, (channels, *space), get one while a rule runs: `with_batch`.

Legend: a *spatial dim* is counted from 0 after batch and channel; tensor dim = spatial dim + 2.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Container, Sequence
from typing import Any

import torch

from hyperslab.comm import Grid, log_once, per_grid
from hyperslab.errors import LayoutError
from hyperslab.geometry import Cover, Cut, Partition, WindowMap
from hyperslab.ops.overloads import Operator, spatial_dims
from hyperslab.tensor import Sharded
from hyperslab.util.torch_internals import tree_map_only


def batched_input(x: object, n: int, name: str) -> Sharded:
    """Returns an operator's input of batch, channels and ``n`` spatial dims, its channels whole."""
    if not isinstance(x, Sharded):
        raise LayoutError(f"{name}: the input must be the cut tensor, not one of its parameters")
    cuts = x.partition.cuts
    if len(cuts) != n + 2:
        image = "give a network of images x.squeeze(2) of volumes of depth 1"
        remedy = "use x.unsqueeze(0) before cutting it" if len(cuts) < n + 2 else image
        raise LayoutError(
            f"{name} needs a batched input of {n + 2} dims, got {x.partition}\n    {remedy}"
        )
    return x if cuts[1] is None else with_whole(x, (1,), name)


def with_whole(x: Sharded, dims: Sequence[int], name: str) -> Sharded:
    """Returns the same tensor with ``dims`` whole, which an operator takes for channels, say.

    They are cut where a spatial dim has taken their place, as in a network that looks at slices.
    The axes that cut them cut others from here on, in one exchange, so that no rank holds more than
    before; where no other dim is free their ranks repeat the work. The log says so once.
    """
    if not x.partition.axes or all(x.partition.cuts[dim] is None for dim in dims):
        return x
    if x.partition.merged:  # tokens, say: a reshape has left them cut
        x.gather_merged()
        return with_whole(x, dims, name)
    partition, _ = cut_elsewhere(x.partition, dims, dims)
    log_once(
        x.grid,
        f"{name} needs the whole of dim {', '.join(map(str, dims))} of {x.partition}: from here on "
        f"it is {partition}",
    )
    return x.redistribute(partition, f"a change of the cut before {name}")


def placement(
    partition: Partition,
    grid: Grid,
    windows: Sequence[WindowMap],
    extents: Sequence[int],
    name: str,
) -> tuple[Partition, tuple[Cut | None, ...]]:
    """Cuts every spatial dim of the output; returns the input's partition and these cuts.

    Where an axis has more ranks than the output has elements, or where its ranks would fetch
    nearly everything as their halo, the input is to be gathered along that axis first, so that its
    ranks repeat the work from there on; the log says so once.
    """
    if any(extent < 1 for extent in extents):
        shape = " x ".join(map(str, partition.shape))
        raise LayoutError(f"{name}: the window is larger than the input {shape}")
    cuts = tuple(
        cut and _unless_equal(cut, window.cut_outputs(cut, extent))
        for cut, window, extent in zip(partition.cuts[2:], windows, extents, strict=True)
    )
    thin = [
        cut.axis
        for dim, (cut, window) in enumerate(zip(cuts, windows, strict=True), start=2)
        if cut is not None and (cut.thin or reads_nearly_all(window, cut, partition.shape[dim]))
    ]
    if not thin:
        return partition, cuts
    log_thin(grid, f"{name}: output", tuple(extents), tuple(thin), "; gathered there,")
    return placement(partition.without(thin), grid, windows, extents, name)


SHAPES_NAMED = 4
"""The most shapes that are logged for an operator: each scan may have its own."""


@per_grid
def log_thin(
    grid: Grid, what: str, extents: tuple[int, ...], axes: tuple[str, ...], how: str
) -> None:
    """Logs that ranks along ``axes`` repeat each other's work, once for each of a few shapes."""
    shapes = _shapes_logged(grid, what, axes)
    shapes.append(extents)
    if len(shapes) <= SHAPES_NAMED:
        more = "; further shapes are not named" if len(shapes) == SHAPES_NAMED else ""
        grid.log(
            f"{what} {' x '.join(map(str, extents))} is too thin to be cut along "
            f"{', '.join(axes)} of {grid}{how} its ranks repeat the work from here on{more}",
            logging.INFO,
        )


@per_grid
def _shapes_logged(grid: Grid, what: str, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    return []


def _unless_equal(cut: Cut, outputs: Cut) -> Cut:
    """Keeps the cut where every rank has the outputs of its inputs, also one of merged dims."""
    return cut if cut.bounds == outputs.bounds else outputs


def reads_nearly_all(window: WindowMap, cut: Cut, extent: int) -> bool:
    """Returns whether ranks that ``cut`` the outputs read three quarters of the inputs on average.

    Gathering then moves little more than the halos do, and the layers that follow, which are the
    small ones of a network, need no message at all. Not where the map grows: larger ones follow.
    """
    spans = (window.reads(out) for out in cut.intervals)
    read = sum(min(hi, extent) - max(lo, 0) for lo, hi in spans)
    return 4 * read >= 3 * cut.parts * max(extent, cut.extent)


def cut_elsewhere(
    partition: Partition, dims: Sequence[int], needed: Sequence[int], avoided: Container[int] = ()
) -> tuple[Partition, tuple[str, ...]]:
    """Moves cuts away from ``dims`` to others, so that every rank keeps as much as it has.

    A dim that takes a cut over has as many elements as the axis has ranks and is cut evenly, if
    there is a choice. Where no dim is free, the axes of ``needed`` dims cut nothing any more and
    are returned as well; the cuts of the others stay.

    Args:
        partition: how the tensor is cut.
        dims: the dims to free.
        needed: those of them that must be whole.
        avoided: dims that take a cut over only if no other does.

    >>> halves = Cut.balanced("depth", 4, 2)
    >>> str(cut_elsewhere(Partition((1, 4, 6), (None, halves, None)), [1], [1])[0])
    '1 x 4 x 6 (dim 2 in 2 by depth)'
    """
    shape = partition.shape
    cuts = list(partition.cuts)
    gathered = []
    for dim in dims:
        cut = cuts[dim]
        if cut is None:
            continue
        free = [d for d, c in enumerate(cuts) if c is None and d not in dims]
        homes = [d for d in free if shape[d] >= cut.parts]
        if homes:
            home = max(homes, key=lambda d: (d not in avoided, shape[d] % cut.parts == 0, shape[d]))
            cuts[home] = Cut.balanced(cut.axis, shape[home], cut.parts)
        elif dim in needed:
            gathered.append(cut.axis)
        else:
            continue
        cuts[dim] = None
    return Partition(shape, tuple(cuts)), tuple(gathered)


def cut_of_result(cut: Cut | None, extent: int) -> Cut | None:
    """Returns the cut of a dim that has now this extent; none where a rank would have nothing."""
    return cut if cut is None or cut.extent == extent else cut.rebalanced(extent)


def read_cover(
    partition: Partition,
    windows: Sequence[WindowMap],
    cuts: Sequence[Cut | None],
    extents: Sequence[int],
    covered: Sequence[bool],
) -> Cover:
    """Returns the box of the input that every rank needs for its box of the output.

    Spatial dims that are ``covered`` reach over the edges of the volume by the padding; the
    others keep their extent, and the op itself pads them.
    """
    cover = partition.cover
    axes, intervals = list(cover.axes), list(cover.intervals)
    for dim, (window, cut, extent) in enumerate(zip(windows, cuts, extents, strict=True)):
        if covered[dim]:
            outs = cut.intervals if cut is not None else ((0, extent),)
            axes[dim + 2] = cut.axis if cut is not None else None
            intervals[dim + 2] = tuple(window.reads(out) for out in outs)
    return Cover(tuple(axes), tuple(intervals))


def output_partition(
    partition: Partition, channels: int, extents: Sequence[int], cuts: Sequence[Cut | None]
) -> Partition:
    """Returns the output's partition: batch as the input, channels whole, space as placed.

    It is the input's own object where it is equal, see `hyperslab.tensor.sharded`.
    """
    batch, channel = partition.cuts[:2]
    output = Partition((partition.shape[0], channels, *extents), (batch, channel, *cuts))
    return partition if output == partition else output


def with_batch(run: Operator) -> Operator:
    """Decorates a rule ``(operator, input, ...)``: its input gets a batch dim while it runs.

    Of an operator for n spatial dims an input of n + 1 dims has none.
    """

    @functools.wraps(run)
    def rule(operator: Operator, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, Sharded):
            return run(operator, input, *args, **kwargs)
        if len(input.partition.cuts) != spatial_dims(operator) + 1:
            return run(operator, input, *args, **kwargs)
        check_unbatched(input, operator.__name__)
        result = run(operator, batch_of_one(input), *args, **kwargs)
        return tree_map_only(Sharded, only_sample, result)

    return rule


def check_unbatched(x: Sharded, name: str) -> None:
    """Refuse (channels, *space) with cut channels, which `hyperslab.shard` took for the batch."""
    cut = x.partition.cuts[0]
    if cut is not None:
        raise LayoutError(
            f"{name} takes dim 0 of an input without a batch dim for the channels, but it is cut: "
            f"{x.partition} on {x.grid}\n    use x.unsqueeze(0) before cutting it, or a grid with "
            f"{cut.axis}=1"
        )


def batch_of_one(x: Sharded) -> Sharded:
    partition = Partition((1, *x.partition.shape), (None, *x.partition.cuts))
    return x.like(x.block.unsqueeze(0), partition)


def only_sample(x: Sharded) -> Sharded:
    return x.like(x.block.squeeze(0), x.partition.without_dim(0))
