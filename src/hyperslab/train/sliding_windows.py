"""Goes through volumes in windows that overlap, each of them cut over all ranks.

The result is what MONAI's `sliding_window_inference` gives in serial: the same windows in the
same order, the same weights, and their sum in float32 on the main rank.

Legend: N samples, C channels or classes, (D, H, W) voxels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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


def blended_scores(
    extents: tuple[int, ...], policy: WindowPolicy, predict: Callable[[Box], Sharded]
) -> torch.Tensor | None:
    """Return a volume's scores (C, D, H, W) on the main rank, None on the others; all call it.

    Distribution scheme: 1. ``predict`` gives the scores (1, C, d, h, w) of a window, cut over all
    ranks, 2. the main rank collects them, weighs them and adds them to those of the windows before.
    """
    boxes = list(_windows(extents, policy))
    around = Box.around(boxes)
    weights = _weights(policy)
    scores: torch.Tensor | None = None
    total = torch.zeros(around.shape)
    for box in boxes:
        found = gather_to_main(cast(Sharded, predict(box).float()))
        if found is None:
            continue
        part = torch.from_numpy(found[0])
        if scores is None:
            scores = torch.zeros(len(part), *around.shape)
        at = box.slices(around)
        scores[:, *at] += part * weights
        total[at] += weights
    if scores is None:
        return None
    return (scores / total)[:, *Box.whole(extents).slices(around)]


@dataclass(frozen=True)
class WindowedModel:
    """A network of so many ``classes`` that goes through its input in windows.

    What windows hold beyond a volume is 0, as the lowest value is for a network.
    """

    model: Callable[[Sharded], Sharded]
    policy: WindowPolicy
    classes: int

    def __call__(self, x: Sharded) -> Sharded:
        """The scores (N, C, D, H, W) of ``x`` (N, C', D, H, W), cut as that; every rank calls it.

        Distribution scheme: 1. the main rank collects the samples, 2. gives every rank its box of
        a window for `blended_scores`, 3. and its box of what comes of all of them.

        Raises:
            LayoutError: a window is too small for the grid or the network.
        """
        whole = gather_to_main(x)

        def predict_window(sample: int, box: Box) -> Sharded:
            wanted = Box((0, *box.lo), (x.shape[1], *box.hi))
            part = None if whole is None else take_filled(whole[sample], wanted, 0)[None]
            return self.model(_cut(part, x.grid.partition((1, *wanted.shape)), x))

        blended = [
            blended_scores(tuple(x.shape[2:]), self.policy, partial(predict_window, sample))
            for sample in range(x.shape[0])
        ]
        there = [found.numpy() for found in blended if found is not None]
        shape = (x.shape[0], self.classes, *x.shape[2:])
        return _cut(np.stack(there) if there else None, Partition(shape, x.partition.cuts), x)


def _cut(volume: NDArray[Any] | None, partition: Partition, like: Sharded) -> Sharded:
    """Cut what the main rank holds over all ranks, as float32."""
    block = scatter_from_main(volume, partition, np.dtype(np.float32), like.grid)
    return Sharded.from_local(torch.from_numpy(block).to(like.grid.device), partition, like.grid)


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
