"""Labels beside volumes: arrays of classes in the same files, under a key of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats.mapped.stored import ArrayAt
from hyperslab.formats.shared.data_map import OWN_DATA
from hyperslab.formats.source import Array


def has_rows(volume: ArrayAt, labels: ArrayAt) -> bool:
    """Whether the first dim of both counts samples."""
    return len(labels.shape) == 4 and (
        len(volume.shape) == 5 or (labels.shape[0] == volume.shape[0] > 1)
    )


def check_labels(
    folder: Path,
    files: Sequence[str],
    labels: Sequence[ArrayAt],
    extents: tuple[int, ...],
    rows: Sequence[int | None],
) -> None:
    """Compare labels with the extents (D, H, W) of volumes; ``rows``: of the array of each file.

    Raises:
        DataError: names the file.
    """
    for file, array, count in zip(files, labels, rows, strict=True):
        wanted = extents if count is None else (count, *extents)
        shape = array.shape
        if count is None and len(shape) == 4 and shape[0] == 1:
            shape = shape[1:]  # one channel of labels
        if shape != wanted or np.dtype(array.dtype).kind not in "iub":
            raise DataError(
                f"{folder / file}: the labels {array.key!r} are {array.dtype} {array.shape}; needs "
                f"whole numbers {wanted}, one for each voxel of the volume ({OWN_DATA}, keys)"
            )


def as_labels(labels: Array, count: int, where: str) -> Array:
    """Whole numbers of any type as uint8.

    Raises:
        DataError: one is none of ``count`` classes, so that uint8 might make another of it.
    """
    if labels.size and labels.dtype.kind != "b":
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= count:
            wrong = low if low < 0 else high
            raise DataError(
                f"{where} holds the label {wrong}, but data.classes names {count}: 0 to {count - 1}"
            )
    return labels.astype(np.uint8)
