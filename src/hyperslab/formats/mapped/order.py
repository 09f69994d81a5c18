"""Which dims of stored arrays count samples, channels and voxels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hyperslab.errors import DataError
from hyperslab.formats.mapped.stored import ArrayAt
from hyperslab.formats.mapped.table import TargetTable
from hyperslab.formats.shared.channels import Channels, channel_order
from hyperslab.formats.shared.data_map import OWN_DATA
from hyperslab.formats.shared.storage_order import CDHW, DHW, DHWC, StorageOrder
from hyperslab.formats.source import Array


def order_of_arrays(
    folder: Path,
    files: Sequence[str],
    arrays: Sequence[ArrayAt],
    table: TargetTable | None,
    beside: Sequence[Sequence[Array]],
    channels: Channels | None,
    sure: bool,
    *,
    known_rows: bool,
) -> tuple[bool, StorageOrder]:
    """Whether the first dim counts samples, ``sure`` if it does, and what the others are.

    With ``known_rows`` no table has to say so.

    Raises:
        DataError: the array has another number of dims, or a table another number of rows.
    """
    first = arrays[0]
    path = folder / files[0]
    shape = first.shape
    if len(shape) not in (3, 4, 5) or 0 in shape:
        raise DataError(
            f"{path}: the array is {first.dtype} {shape}; needs (D, H, W), (C, D, H, W), "
            f"(N, D, H, W) or (N, C, D, H, W) ({OWN_DATA}, arrays)"
        )
    count = sum(array.shape[0] for array in arrays)
    rows = len(table.values) if table else sum(len(b[0]) for b in beside if b and b[0].ndim)
    many = len(shape) == 5 or (
        len(shape) == 4
        and (sure or (not known_rows and _is_stack(files, rows, count, table, beside)))
    )
    alone = len(files) == 1 and not known_rows
    if len(shape) == 4 and not many and alone and (rows != 1 or channels is None):
        raise DataError(
            f"{path}: is {first.dtype} {shape}, but {table.path if table else 'targets'} "
            f"{'has' if table else 'have'} {rows} rows: an array of many volumes needs one for "
            f"each ({OWN_DATA}, arrays)"
        )
    one = shape[1:] if many else shape
    if len(one) == 3:
        return many, DHW
    place = channels or channel_order(path, one)
    return many, DHWC if place == "last" else CDHW


def _is_stack(
    files: Sequence[str],
    rows: int,
    count: int,
    table: TargetTable | None,
    beside: Sequence[Sequence[Array]],
) -> bool:
    """Whether the first dim of a four-dimensional array counts samples: there are as many rows."""
    if table is None:
        return bool(beside[0]) and beside[0][0].ndim > 0 and rows == count != len(files)
    return not table.names and rows == count and rows != len(files)
