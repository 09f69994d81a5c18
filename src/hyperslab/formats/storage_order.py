"""Says which of the dims C, D, H, W each dim of a stored array is, and where its channels are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from numpy.typing import NDArray

from hyperslab.errors import DataError
from hyperslab.geometry import Box

Channels = Literal["first", "last"]

DTYPES = ("int16", "uint16", "float32")
"""Types of stored values."""


def channel_order(path: Path, stored: tuple[int, ...], redshifts: int = -1) -> Channels:
    """Finds the channels by the cube's equal extents, or else by the number of redshifts."""
    cube = {
        "last": stored[0] == stored[1] == stored[2],
        "first": stored[1] == stored[2] == stored[3],
    }
    count = {"last": stored[-1] == redshifts, "first": stored[0] == redshifts}
    for evidence in (cube, count):
        found = [order for order in get_args(Channels) if evidence[order]]
        if len(found) == 1:
            return found[0]
    raise DataError(
        f"{path}: shape {stored} does not tell which dim is the channel's; set data.channels to "
        'first or last (channels="first" or "last" in a program)'
    )


VOLUME = "CDHW"
"""The dims of a volume, as everything but a file has them."""


@dataclass(frozen=True, slots=True)
class StorageOrder:
    """The dims of a stored array, outermost first; along those ``flipped`` it runs backwards.

    The files of CosmoFlow have the channels last:

    >>> channels_last = StorageOrder("DHWC")
    >>> channels_last.volume_shape((8, 6, 5, 4))
    (4, 8, 6, 5)
    >>> channels_last.to_file(Box((0, 4, 0, 0), (4, 8, 6, 5)))
    Box(lo=(4, 0, 0, 0), hi=(8, 6, 5, 4))

    LBANN's splitter reverses the spatial dims, so that what is deepest in the volume is last in
    the file, and a cut along the depth takes a short piece of every row:

    >>> import numpy as np
    >>> lbann = StorageOrder("CWHD")
    >>> lbann.to_file(Box((0, 4, 0, 0), (4, 8, 6, 5)))
    Box(lo=(0, 0, 0, 4), hi=(4, 5, 6, 8))
    >>> lbann.to_volume(np.zeros((4, 5, 6, 8))).shape
    (4, 8, 6, 5)

    A file without a dim for channels has one:

    >>> StorageOrder("DHW").to_volume(np.zeros((8, 6, 5))).shape
    (1, 8, 6, 5)

    Of a flipped dim the last voxel is stored first, so the extents have to be known:

    >>> StorageOrder("WHD", flipped="W").to_file(Box((0, 0, 0, 1), (1, 8, 6, 2)), (5, 6, 8))
    Box(lo=(3, 0, 0), hi=(4, 6, 8))

    Raises:
        ValueError: ``dims`` are not D, H and W, each once, with or without C.
    """

    dims: str
    flipped: str = ""

    def __post_init__(self) -> None:
        if sorted(self.dims) not in (sorted("DHW"), sorted(VOLUME)):
            raise ValueError(f"dims {self.dims!r} are not D, H, W, with or without C")
        if not set(self.flipped) <= set(self.dims):
            raise ValueError(f"{self.flipped!r} are flipped, but the dims are {self.dims!r}")

    @property
    def reversed(self) -> StorageOrder:
        """Returns the order of the same array for an index in reverse, as Fortran's."""
        return StorageOrder(self.dims[::-1], self.flipped)

    def volume_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape (C, D, H, W) of the volume in an array of the shape ``stored``."""
        extents = dict(zip(self.dims, stored, strict=True))
        return tuple([extents.get(dim, 1) for dim in VOLUME])

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the stored array of a volume of ``shape`` (C, D, H, W)."""
        return tuple([shape[VOLUME.index(dim)] for dim in self.dims])

    def to_file(self, box: Box, stored: Sequence[int] = ()) -> Box:
        """Maps ``box`` (C, d, h, w) of the volume to its place in the array.

        ``stored`` is the array's shape, which is needed where a dim is flipped.
        """
        lo = self.stored_shape(box.lo)
        hi = self.stored_shape(box.hi)
        if not self.flipped:
            return Box(lo, hi)
        intervals = list(zip(lo, hi, strict=True))
        for place, extent in enumerate(stored):
            if self.dims[place] in self.flipped:
                first, end = intervals[place]
                intervals[place] = (extent - end, extent - first)
        return Box.of(intervals)

    def to_volume(self, array: NDArray[Any]) -> NDArray[Any]:
        """Views what was read of a box as (C, d, h, w)."""
        if self.flipped:
            steps = [slice(None, None, -1 if dim in self.flipped else 1) for dim in self.dims]
            array = array[tuple(steps)]
        array = array.transpose([self.dims.index(dim) for dim in VOLUME if dim in self.dims])
        return array if "C" in self.dims else array[None]

    def from_volume(self, values: NDArray[Any]) -> NDArray[Any]:
        """Views the values (C, d, h, w) of a box as they are stored: the inverse of `to_volume`."""
        if "C" not in self.dims:
            (values,) = values
        dims = [dim for dim in VOLUME if dim in self.dims]
        array = values.transpose([dims.index(dim) for dim in self.dims])
        steps = [slice(None, None, -1 if dim in self.flipped else 1) for dim in self.dims]
        return array[tuple(steps)] if self.flipped else array

    def __str__(self) -> str:
        return " x ".join(self.dims)


CDHW = StorageOrder(VOLUME)
DHWC = StorageOrder("DHWC")
LBANN_ORDER = StorageOrder("CWHD")
"""The order of LBANN's splitter: channels first, the spatial dims reversed."""

DHW = StorageOrder("DHW")
