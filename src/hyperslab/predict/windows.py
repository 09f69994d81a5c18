"""Sliding windows: a volume predicted in windows that overlap, each of them cut over all ranks.

A window may be larger than one device has room for; of the whole volume only the main rank's host
memory holds the classes' scores.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hyperslab.data.transforms import MeanScale
from hyperslab.errors import DataError
from hyperslab.evaluate.sliding_windows import OF_CLASSES_ONLY, BlendedScores, WindowPolicy
from hyperslab.geometry import Box
from hyperslab.predict.network import Network
from hyperslab.predict.volumes import Volume


def check_goes_with_windows(network: Network) -> None:
    """Refuse a network to which windows are not what it was trained on.

    Raises:
        DataError: it predicts numbers, or each volume is divided by its mean.
    """
    if not network.about.classes:
        raise DataError(OF_CLASSES_ONLY)
    if isinstance(network.transform, MeanScale):
        raise DataError(
            f"data.transform={network.transform.name} divides by the mean of a whole volume, "
            "which a window has not\n"
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
    blended = BlendedScores(tuple(extents), policy)
    for box in blended.boxes:
        wanted = Box((0, *box.lo), (channels, *box.hi))
        blended.add(box, network(volume.block(network.grid, wanted), wanted.shape, where))
    scores = blended.result()
    return None if scores is None else scores.argmax(0).numpy().astype(np.uint8)
