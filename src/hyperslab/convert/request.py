"""What is asked of a conversion, and what became of each volume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hyperslab.errors import DataError
from hyperslab.formats import registry
from hyperslab.formats.selection import selected
from hyperslab.formats.source import Source
from hyperslab.formats.subvolumes import Subvolumes
from hyperslab.formats.writer import Writer


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a volume; ``reason`` names the file and what is wrong with it."""

    state: Literal["converted", "kept", "failed"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    ``cut``: into how many parts grids will cut depth, height and width; chunks are made for it.
    ``width``: of the sub-volumes that are made of each volume. ``redshifts``, ``targets``: those
    that go along; ``None`` takes all.

    Raises:
        DataError: something asked for does not exist.
    """

    format: str
    cut: tuple[int, ...] | None = None
    width: int | None = None
    compression: str = "none"
    redshifts: tuple[float, ...] | None = None
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        known = [one.name for one in registry.formats() if one.writer is not None]
        if self.format not in known:
            raise DataError(f"format {self.format!r}: choose from {', '.join(known)}")
        if self.compression not in self.writer.compressions:
            has = ", ".join(self.writer.compressions)
            raise DataError(f"compression of {self.format}: {has}, not {self.compression}")
        if self.cut is not None and not self.writer.chunked:
            raise DataError(f"{self.format} files have no chunks; leave out the cut")
        if self.cut is not None and (len(self.cut) != 3 or min(self.cut) < 1):
            raise DataError(f"cut {self.cut}: needs three numbers of parts, of at least 1")

    def samples(self, volumes: Source) -> Source:
        """What is to be written of volumes, as the format will give it back.

        Raises:
            DataError: a redshift or a parameter is not there.
            LayoutError: the extents are no multiple of the sub-volumes' width.
        """
        source = selected(volumes, self.redshifts, self.targets)
        if self.width is not None:
            source = Subvolumes(source, self.width)
        return self.writer.view(source)

    @property
    def writer(self) -> Writer:
        """Of the format."""
        writer = registry.named(self.format).writer
        assert writer is not None, "it was looked up when the request was made"
        return writer
