"""Goes through volumes in windows that overlap, each of them cut over all ranks.

The result is what MONAI's `sliding_window_inference` gives in serial: the same windows in the
same order, the same weights, and their sum in float32. Each rank sums up its own part of the
volume, and holds of that no more than the layers that windows to come may reach.

Legend: N samples, C channels or classes, (D, H, W) voxels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from hyperslab.comm import Grid
from hyperslab.formats import optional
from hyperslab.geometry import Box, Partition
from hyperslab.tensor import Sharded
from hyperslab.tensor.root_rank import first_copies, send_boxes
from hyperslab.train.samples import WindowPolicy


def blended_layers(
    extents: tuple[int, ...],
    policy: WindowPolicy,
    predict: Callable[[Box], Sharded],
    owners: Mapping[int, Box],
    grid: Grid,
    first: int = 0,
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield this rank's part of a volume's scores, layers (box, (C, d, h, w)) as they are final.

    All ranks call it. Those whose boxes have the same layers get the same ones, and ranks without a
    box empty ones of all layers. Only layers that a window to come may reach are held: as deep as a
    window, and of the rank's own box. The scores are there until the next ones are asked for.

    Distribution scheme: 1. ``predict`` gives the scores (1, C, d, h, w) of a window, cut over all
    ranks, 2. each rank sends every owner its part of that, 3. the owner weighs it and adds it to
    those of the windows before, in their order.

    Args:
        extents: voxels of the volume (D, H, W).
        policy: the windows.
        predict: predicts a window, which may reach over the edge of the volume.
        owners: the box of the volume whose scores a rank gets; ranks without one get nothing.
        grid: all ranks.
        first: layers before this one are not asked for; windows that end there are left out.
    """
    weights = _weights(policy)
    volume = Box((first, 0, 0), extents)
    wanted = {rank: box.intersect(volume) for rank, box in owners.items()}
    nothing = Box((first, 0, 0), (extents[0], 0, 0))
    scores = _OpenLayers(wanted.get(grid.rank, nothing), policy.size[0])
    windows = [box for box in _windows(extents, policy) if box.hi[0] > first]
    for lo, boxes in itertools.groupby(windows, key=lambda box: box.lo[0]):
        yield from scores.finish(lo)
        for box in boxes:
            found = cast(Sharded, predict(box).float())
            offset = (0, *box.lo)
            owned = {
                rank: Box(part.lo[1:], part.hi[1:]).shift(offset)
                for rank, part in first_copies(found.partition, grid).items()
            }
            classes = found.shape[1]
            asked = {
                rank: Box((0, *part.lo), (classes, *part.hi))
                for rank, own in wanted.items()
                if not (part := own.intersect(box)).empty
            }
            block = found.local.detach()[0]
            arrived = send_boxes(block, owned, asked, grid, "the scores of a window")
            if arrived is not None:
                own = wanted[grid.rank].intersect(box)
                scores.add(own, arrived.cpu(), weights[own.slices(box)])
    yield from scores.finish(extents[0])


class _OpenLayers:
    """Sums up the scores of the layers (C, d, h, w) of a box that windows may still reach.

    A window is at most ``depth`` layers deep, so that layer z lies at z modulo that.
    """

    def __init__(self, own: Box, depth: int) -> None:
        self.own = own
        self.done = self.own.lo[0]
        self.depth = max(1, min(depth, self.own.shape[0]))
        self.scores: torch.Tensor | None = None
        self.weights = torch.zeros(self.depth, *self.own.shape[1:])

    def add(self, box: Box, scores: torch.Tensor, weights: torch.Tensor) -> None:
        """Add the scores (C, d, h, w) of a box, times its weights (d, h, w)."""
        if self.scores is None:
            self.scores = torch.zeros(len(scores), *self.weights.shape)
        scores *= weights
        for at, part in self._pieces(*box.interval(0)):
            here = (at, *box.slices(self.own)[1:])
            there = slice(part.start - box.lo[0], part.stop - box.lo[0])
            self.scores[:, *here] += scores[:, there]
            self.weights[here] += weights[there]

    def finish(self, end: int) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the mean scores of the layers before ``end`` that are still held, in place."""
        begin, self.done = self.done, max(self.done, min(end, self.own.hi[0]))
        for at, part in self._pieces(begin, self.done):
            box = Box((part.start, *self.own.lo[1:]), (part.stop, *self.own.hi[1:]))
            if self.scores is None:  # of a box without voxels
                yield box, torch.empty(0, *box.shape)
                continue
            yield box, self.scores[:, at].div_(self.weights[at])
            self.scores[:, at] = 0
            self.weights[at] = 0

    def _pieces(self, lo: int, hi: int) -> Iterator[tuple[slice, slice]]:
        """Yield where layers lie here, and which ones they are."""
        while lo < hi:
            at = lo % self.depth
            many = min(hi - lo, self.depth - at)
            yield slice(at, at + many), slice(lo, lo + many)
            lo += many


@dataclass(frozen=True)
class WindowedModel:
    """A network of so many ``classes`` that goes through its input in windows.

    What windows hold beyond a volume is 0, as the lowest value is for a network.
    """

    model: Callable[[Sharded], Sharded]
    policy: WindowPolicy
    classes: int

    def __call__(self, x: Sharded) -> Sharded:
        """Score ``x`` (N, C', D, H, W): (N, C, D, H, W), cut as that; every rank calls it.

        Distribution scheme: 1. each rank sends every other one its box of a window, 2.
        `blended_layers` brings the scores home to the boxes of ``x``.

        Raises:
            LayoutError: a window is too small for the grid or the network.
        """
        grid = x.grid
        boxes = {rank: x.partition.box(grid.coords_of(rank)) for rank in range(grid.size)}
        held = first_copies(x.partition, grid)
        block = x.local.detach()
        own = boxes[grid.rank]
        ours = Box((own.lo[0], 0, *own.lo[2:]), (own.hi[0], self.classes, *own.hi[2:]))
        result = torch.empty(ours.shape)

        def predict_window(sample: int, box: Box) -> Sharded:
            partition = grid.partition((1, x.shape[1], *box.shape))
            offset = (sample, 0, *box.lo)
            asked = {
                rank: partition.box(grid.coords_of(rank)).shift(offset) for rank in range(grid.size)
            }
            what = "the boxes of a window"
            part = send_boxes(block, held, asked, grid, what, fill=0)
            assert part is not None
            return self.model(Sharded.from_local(part, partition, grid))

        for sample in range(x.shape[0]):
            owners = {
                rank: Box(box.lo[2:], box.hi[2:])
                for rank, box in boxes.items()
                if box.lo[0] <= sample < box.hi[0]
            }
            predict = partial(predict_window, sample)
            layers = blended_layers(tuple(x.shape[2:]), self.policy, predict, owners, grid)
            for box, scores in layers:
                if not box.empty:
                    place = Box((sample, 0, *box.lo), (sample + 1, self.classes, *box.hi))
                    result[place.slices(ours)] = scores[None]
        shape = (x.shape[0], self.classes, *x.shape[2:])
        partition = Partition(shape, x.partition.cuts)
        return Sharded.from_local(result.to(grid.device), partition, grid)


def _windows(extents: tuple[int, ...], policy: WindowPolicy) -> Iterator[Box]:
    """List windows in MONAI's order; a volume that is smaller lies in the middle of one."""
    rims = [max(size - extent, 0) for size, extent in zip(policy.size, extents, strict=True)]
    first = [rim // 2 for rim in rims]
    whole = tuple(extent + rim for extent, rim in zip(extents, rims, strict=True))
    steps = tuple(
        size if size == extent else max(1, int(size * (1 - policy.overlap)))
        for size, extent in zip(policy.size, whole, strict=True)
    )
    utils = optional.monai_data()
    for slices in utils.dense_patch_slices(whole, policy.size, steps):
        intervals = [(int(s.start), int(s.stop)) for s in slices[-3:]]
        yield Box.of(intervals).shift([-begin for begin in first])


def _weights(policy: WindowPolicy) -> torch.Tensor:
    """Return the weights of the voxels of a window (D, H, W)."""
    weights: torch.Tensor = optional.monai_data().compute_importance_map(
        policy.size, mode=policy.blend, sigma_scale=0.125, device="cpu"
    )
    return weights
