"""Sliding windows: a volume predicted in parts that overlap, each of them cut over all ranks.

What comes out is what MONAI's `sliding_window_inference` gives in serial: the same windows in the
same order, the same weights, and their sum in float32 on the main rank. A window may be larger than
one device has room for; of the whole volume only the main rank's host memory holds the classes'
scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab.errors import DataError
from hyperslab.formats.shared import optional
from hyperslab.geometry import Box
from hyperslab.predict.network import Network
from hyperslab.predict.volumes import Volume
from hyperslab.tensor.main_rank import gather_to_main

Blend = Literal["constant", "gaussian"]


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
        """By what a prediction is known again, as JSON has it."""
        return {"window": list(self.size), "overlap": self.overlap, "blend": self.blend}


def check_goes_with_windows(network: Network) -> None:
    """Refuse a network to which windows are not what it was trained on.

    Raises:
        DataError: it predicts numbers, or each volume is divided by its mean.
    """
    if not network.about.classes:
        raise DataError("windows are for networks that give voxels classes; this one gives numbers")
    if network.transform.name == "mean":
        raise DataError(
            "data.transform=mean divides by the mean of a whole volume, which a window has not\n"
            "    predict whole volumes: leave --window out"
        )


def predict_windows(
    network: Network, volume: Volume, policy: WindowPolicy, where: str
) -> NDArray[np.uint8] | None:
    """The classes (D, H, W) of a volume on the main rank, None on the others; every rank calls it.

    Distribution scheme: 1. for each window every rank gets its box of it, 2. the network predicts
    it, 3. the main rank collects the scores, weighs them and adds them to those of the others.

    Raises:
        DataError: on every rank: values that cannot be right, or the extra ``medical`` is missing.
        LayoutError: a window is too small for the grid or the network.
    """
    channels, *extents = volume.shape
    weights = _weights(policy)
    scores: torch.Tensor | None = None
    total = torch.zeros(())
    boxes = list(_windows(tuple(extents), policy))
    around = Box.around(boxes)
    for box in boxes:
        wanted = Box((0, *box.lo), (channels, *box.hi))
        logits = network(volume.block(network.grid, wanted), wanted.shape, where)
        found = gather_to_main(logits)
        if found is None:
            continue
        part = torch.from_numpy(found[0]).float()
        if scores is None:
            scores = torch.zeros(len(part), *around.shape)
            total = torch.zeros(around.shape)
        at = box.slices(around)
        scores[:, *at] += part * weights
        total[at] += weights
    if scores is None:
        return None
    inside = Box.whole(extents).slices(around)
    mask = (scores / total)[:, *inside].argmax(0)
    return mask.numpy().astype(np.uint8)


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
    """Of the voxels of a window (D, H, W)."""
    weights: torch.Tensor = optional.monai_data().compute_importance_map(
        policy.size, mode=policy.blend, sigma_scale=0.125, device="cpu"
    )
    return weights
