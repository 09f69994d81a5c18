"""Volumes with a class for every voxel: the keys of LBANN's LiTS files and of our own.

``volume`` is (C, D, H, W); ``segmentation`` has the same voxels and 1 or C channels, which are then
equal, of any type that holds whole numbers. The names of the classes are the attribute ``classes``
of the file; where it is missing they are LiTS's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError, printable

SCAN_KEYS = ("volume", "segmentation")
LIVER = ("background", "liver", "tumour")
MOST_CLASSES = 256
"""Classes that uint8 can tell apart."""


def check_segmentation(where: str, volume: Any, labels: Any) -> None:
    """Refuse data sets that do not belong together.

    Raises:
        DataError: the labels' shape does not fit the volume's, or they are no numbers.
    """
    fits = labels.ndim == 4 and labels.shape[0] in (1, volume.shape[0])
    if not fits or labels.shape[1:] != volume.shape[1:]:
        raise DataError(
            f"{where}: 'segmentation' has shape {labels.shape} but 'volume' has {volume.shape}"
        )
    if labels.dtype.kind not in "iuf":
        raise DataError(f"{where}: 'segmentation' is {labels.dtype}; needs numbers")


def classes_of(where: str, file: Any) -> tuple[str, ...]:
    """The names of the classes, background first.

    Raises:
        DataError: the attribute holds something else than 2 to 256 different names.
    """
    if "classes" not in file.attrs:
        return LIVER
    raw = np.atleast_1d(file.attrs["classes"]).tolist()
    text = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in raw]
    names = tuple(map(printable, text))
    if not 2 <= len(names) <= MOST_CLASSES or len({*names, ""}) != len(names) + 1:
        raise DataError(
            f"{where}: the attribute 'classes' is {raw}; needs 2 to {MOST_CLASSES} names"
        )
    return names


def as_classes(stored: NDArray[Any], where: str) -> NDArray[np.uint8]:
    """The labels (1 or C, d, h, w) of a file as classes (d, h, w).

    Raises:
        DataError: the channels differ, or a label is no whole number of 0 to 255.
    """
    labels = stored[0]
    with np.errstate(invalid="ignore"):
        whole = labels.astype(np.uint8)
    if (whole != labels).any():
        raise DataError(f"{where}: 'segmentation' holds labels that are no classes")
    if (stored[1:] != labels).any():
        raise DataError(f"{where}: the channels of 'segmentation' are not equal")
    return whole


def check_classes(labels: NDArray[Any], classes: tuple[str, ...], where: str) -> None:
    """Refuse labels without a class before they reach a loss.

    Raises:
        DataError: there is one, or the labels are not uint8.
    """
    if labels.dtype != np.uint8:
        raise DataError(f"{where}: labels are {labels.dtype}, not uint8")
    if labels.size and labels.max() >= len(classes):
        raise DataError(
            f"{where} holds label {labels.max()} but there are {len(classes)} classes: "
            f"{', '.join(classes)}"
        )
