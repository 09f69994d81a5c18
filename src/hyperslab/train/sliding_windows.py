"""Goes through volumes in windows that overlap, each of them cut over all ranks.

The result is what MONAI's `sliding_window_inference` gives in serial: the same windows in the
same order, the same weights, and their sum in float32 on the main rank.

Legend: N samples, C channels or classes, (D, H, W) voxels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab.errors import DataError
from hyperslab.formats import optional
from hyperslab.formats.views import take_filled
from hyperslab.geometry import Box, Partition
from hyperslab.tensor import Sharded
from hyperslab.tensor.root_rank import gather_to_main, scatter_from_main

Blend = Literal["constant", "gaussian"]

WINDOWS_NEED_CLASSES = "windows are for networks that give voxels classes; this one gives numbers"


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """``size``: voxels of a window along D, H and W. ``overlap``: of neighbours, a share of that.

    ``blend``: where windows overlap all count alike, or those whose centre is nearer count more.

    Raises:
        DataError: a size is less than 1, the overlap not in [0, 1), or there is no such blend.
    """

    size: tuple[int, int, int]
    overlap: float = 0.5
    blend: Blend = "gaussian"

    def __post_init__(self) -> None:
        if min(self.size) < 1 or not 0 <= self.overlap < 1 or self.blend not in get_args(Blend):
            raise DataError(
                f"window {self.size}, overlap {self.overlap:g}, blend {self.blend!r}: needs 1 "
                f"voxel at least, 0 <= overlap < 1, and {' or '.join(get_args(Blend))}"
            )

    @property
    def facts(self) -> dict[str, object]:
        """Return the facts by which a prediction is known again, as JSON has them."""
        return {"window": list(self.size), "overlap": self.overlap, "blend": self.blend}


class BlendedScores:
    """The classes' scores of a volume (D, H, W), of which windows bring parts, in their order.

    They are on the main rank alone; every rank goes through the ``boxes`` and calls `add`.
    """

    def __init__(self, extents: tuple[int, ...], policy: WindowPolicy) -> None:
        self.boxes = list(_windows(extents, policy))
        self.inside = Box.whole(extents)
        self.around = Box.around(self.boxes)
        self.weights = _weights(policy)
        self.scores: torch.Tensor | None = None
        self.total = torch.zeros(())

    def add(self, box: Box, logits: Sharded) -> None:
        """Add the scores of a window (1, C, d, h, w); every rank calls it."""
        found = gather_to_main(cast(Sharded, logits.float()))
        if found is None:
            return
        part = torch.from_numpy(found[0])
        if self.scores is None:
            self.scores = torch.zeros(len(part), *self.around.shape)
            self.total = torch.zeros(self.around.shape)
        at = box.slices(self.around)
        self.scores[:, *at] += part * self.weights
        self.total[at] += self.weights

    def result(self) -> torch.Tensor | None:
        """Return the weighted mean scores (C, D, H, W) on the main rank, None on the others."""
        if self.scores is None:
            return None
        return (self.scores / self.total)[:, *self.inside.slices(self.around)]


@dataclass(frozen=True)
class WindowedModel:
    """A network of classes that goes through its input in windows.

    What windows hold beyond a volume is 0, as the lowest value is for a network.
    """

    model: Callable[[Sharded], Sharded]
    policy: WindowPolicy

    def __call__(self, x: Sharded) -> Sharded:
        """The scores (N, C, D, H, W) of ``x`` (N, C', D, H, W), cut as that; every rank calls it.

        Distribution scheme: 1. the main rank collects the samples, 2. gives every rank its box of
        a window, 3. the network predicts it, 4. the main rank collects the scores, weighs them and
        adds them up, 5. and gives every rank its box of all of them.

        Raises:
            LayoutError: a window is too small for the grid or the network.
        """
        whole = gather_to_main(x)
        blended = []
        classes = 0
        for sample in range(x.shape[0]):
            scores = BlendedScores(tuple(x.shape[2:]), self.policy)
            for box in scores.boxes:
                logits = self.model(self._window(x, None if whole is None else whole[sample], box))
                classes = logits.shape[1]
                scores.add(box, logits)
            blended.append(scores.result())
        there = [found.numpy() for found in blended if found is not None]
        shape = (x.shape[0], classes, *x.shape[2:])
        partition = Partition(shape, x.partition.cuts)
        volume = np.stack(there) if there else None
        return _cut_window(volume, partition, x)

    def _window(self, x: Sharded, whole: NDArray[Any] | None, box: Box) -> Sharded:
        channels = x.shape[1]
        wanted = Box((0, *box.lo), (channels, *box.hi))
        part = None
        if whole is not None:
            part = take_filled(whole, wanted, 0)[None]
        return _cut_window(part, x.grid.partition((1, *wanted.shape)), x)


def _cut_window(volume: NDArray[Any] | None, partition: Partition, like: Sharded) -> Sharded:
    """Cut what the main rank holds over all ranks, as float32."""
    block = scatter_from_main(volume, partition, np.dtype(np.float32), like.grid)
    local = torch.from_numpy(block).to(like.grid.device)
    return Sharded.from_local(local, partition, like.grid)


def _windows(extents: tuple[int, ...], policy: WindowPolicy) -> Iterator[Box]:
    """In MONAI's order; a volume that is smaller than a window lies in the middle of it."""
    rims = [max(size - extent, 0) for size, extent in zip(policy.size, extents, strict=True)]
    first = [rim // 2 for rim in rims]
    whole = tuple(extent + rim for extent, rim in zip(extents, rims, strict=True))
    steps = tuple(
        size if size == extent else max(1, int(size * (1 - policy.overlap)))
        for size, extent in zip(policy.size, whole, strict=True)
    )
    utils = optional.monai_data()
    for slices in utils.dense_patch_slices(whole, policy.size, steps):
        intervals = [(s.start, s.stop) for s in slices[-3:]]
        yield Box.of(intervals).shift([-begin for begin in first])


def _weights(policy: WindowPolicy) -> torch.Tensor:
    """Return the weights of the voxels of a window (D, H, W)."""
    weights: torch.Tensor = optional.monai_data().compute_importance_map(
        policy.size, mode=policy.blend, sigma_scale=0.125, device="cpu"
    )
    return weights
