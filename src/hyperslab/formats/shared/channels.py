"""Where the channels of a stored volume are, and the types of its values."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from hyperslab.errors import DataError

Channels = Literal["first", "last"]

DTYPES = ("int16", "uint16", "float32")
"""Of stored values."""


def channel_order(path: Path, stored: tuple[int, ...], redshifts: int = -1) -> Channels:
    """From the cube's equal extents, or else from the number of redshifts.

    Raises:
        DataError: neither tells.
    """
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
        f"{path}: shape {stored} does not tell which dim is the channel's; "
        'say channels="first" or channels="last"'
    )
