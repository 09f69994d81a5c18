"""What is asked of a conversion, and what became of each volume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hyperslab.convert.targets import TARGETS
from hyperslab.errors import DataError
from hyperslab.formats.registry import Format
from hyperslab.formats.writer import Target


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a volume; ``reason`` names the file and what is wrong with it."""

    state: Literal["converted", "kept", "failed"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    ``cut``: into how many parts grids will cut depth, height and width; chunks are made for it.
    ``width``: of the sub-volumes that are made of each volume.

    Raises:
        DataError: something asked for does not exist.
    """

    format: Format
    cut: tuple[int, ...] | None = None
    width: int | None = None
    compression: str = "none"

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise DataError(f"format {self.format!r}: choose from {', '.join(get_args(Format))}")
        if self.compression not in self.target.compressions:
            known = ", ".join(self.target.compressions)
            raise DataError(f"compression of {self.format}: {known}, not {self.compression}")
        if self.cut is not None and not self.target.chunked:
            raise DataError(f"{self.format} files have no chunks; leave out the cut")
        if self.cut is not None and (len(self.cut) != 3 or min(self.cut) < 1):
            raise DataError(f"cut {self.cut}: needs three numbers of parts, of at least 1")

    @property
    def target(self) -> Target:
        return TARGETS[self.format]
