"""Files to read, universes in the public layout, made once; and what the disk gave of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np

from hyperslab.formats.storage import default_chunk_side
from hyperslab.simulate.parameters import NAMES
from hyperslab.simulate.universes import universe_path
from hyperslab.util.atomic_files import created_aside

REDSHIFTS = (0.0, 0.5, 1.5, 3.0)
KINDS = ("chunked", "plain")
"""In chunks as `hyperslab simulate` writes them, and in one piece."""


def make(folder: Path, side: int, kind: str, count: int) -> Path:
    """The folder of ``count`` files (side, side, side, 4) int16; those that are there are kept."""
    within = folder / f"{side}-{kind}"
    within.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        path = universe_path(within, index)
        if not path.exists():
            with created_aside(path) as partial:
                _write(Path(partial.name), side, kind == "chunked", index)
    return within


def _write(path: Path, side: int, chunked: bool, index: int) -> None:
    """Poisson counts; each plane is the first one, shifted: cheap, and no two boxes are equal."""
    random = np.random.default_rng(index)
    plane = random.poisson(1.0, (side, side, len(REDSHIFTS))).astype(np.int16)
    thick = default_chunk_side(side)
    with h5py.File(path, "w", locking=False) as file:  # created_aside has locked it
        volume = file.create_dataset(
            "full",
            (side, *plane.shape),
            np.int16,
            chunks=(thick, thick, thick, len(REDSHIFTS)) if chunked else None,
        )
        for first in range(0, side, thick):
            shifts = range(first, first + thick)
            volume[first : first + thick] = np.stack([np.roll(plane, s, axis=0) for s in shifts])
        unit = random.uniform(-1, 1, len(NAMES))
        file["unitPar"] = unit
        file["physPar"] = np.array([0.3, 0.8, 0.96, 70.0]) * (1 + 0.1 * unit)
        file["namePar"] = np.array(NAMES, dtype="S")
        file["redshifts"] = np.array(REDSHIFTS)


def drop(paths: Iterable[Path]) -> None:
    """Take the files out of the page cache (Linux)."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not yet written would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(paths: Iterable[Path]) -> None:
    """Bring the files into the page cache."""
    block = bytearray(2**23)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def disk_bytes() -> int:
    """Bytes that this process has had fetched from a disk so far [B] (Linux)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])
