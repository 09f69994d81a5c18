"""A folder of HDF5 volumes from NIfTI files: what is missing is made, what is there is kept."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyperslab.ct import scan_file
from hyperslab.errors import DataError
from hyperslab.formats.nifti import image
from hyperslab.formats.nifti.pairs import Pair
from hyperslab.formats.shared import optional
from hyperslab.formats.shared.filled_folder import filling
from hyperslab.formats.shared.labels import LIVER
from hyperslab.worker_pool import each


@dataclass(frozen=True, slots=True)
class ScanOutcome:
    """What became of a pair; ``reason`` names the file and what is wrong with it."""

    pair: Pair
    state: Literal["converted", "kept", "skipped"]
    reason: str = ""


def convert_scans(
    pairs: Sequence[Pair],
    folder: Path,
    *,
    shape: scan_file.Shape,
    workers: int = 1,
    done: Callable[[ScanOutcome], None] = lambda outcome: None,
) -> list[ScanOutcome]:
    """Convert each pair to ``{name}.hdf5`` in ``folder``, on a lattice of ``shape`` (D, H, W).

    A volume that is not what it should be is skipped and the others go on. Files that are there
    already are kept. ``done`` is called for each pair, kept ones first, the others as they end. A
    worker holds one volume at a time.

    Raises:
        DataError: if ``shape`` or ``workers`` is not positive, if a file in the folder is not the
            volume that it would be (before anything is converted), if another conversion fills
            the folder, or if it cannot be written.
        HyperslabError: if the extra ``medical`` is not installed, or a worker process dies.
    """
    optional.nibabel()
    if min(shape) < 1 or workers < 1:
        raise DataError(f"size {shape}, {workers} workers: need at least 1")
    scan_file.make_folder(folder)
    outcomes = []
    with (
        filling(folder, "conversion"),
        closing(_each(pairs, folder, shape, workers)) as results,
    ):
        for outcome in results:
            outcomes.append(outcome)
            done(outcome)
    return outcomes


def _each(
    pairs: Sequence[Pair], folder: Path, shape: scan_file.Shape, workers: int
) -> Generator[ScanOutcome, None, None]:
    there = [pair for pair in pairs if _path(folder, pair).exists() and not pair.problem]
    for pair in there:
        scan_file.check_scan(_path(folder, pair), pair, shape)
    yield from (ScanOutcome(pair, "kept") for pair in there)
    todo = [pair for pair in pairs if pair not in there]
    yield from each(_convert, [(pair, folder, shape) for pair in todo], workers)


def _convert(pair: Pair, folder: Path, shape: scan_file.Shape) -> ScanOutcome:
    if pair.problem:
        return ScanOutcome(pair, "skipped", pair.problem)
    try:
        scan = image.read(pair.image)
        labels = image.read_labels(pair.labels, scan, len(LIVER))
    except DataError as error:
        return ScanOutcome(pair, "skipped", str(error))
    scan_file.write(_path(folder, pair), pair, scan, labels, shape)
    return ScanOutcome(pair, "converted")


def _path(folder: Path, pair: Pair) -> Path:
    return folder / f"{pair.name}.hdf5"
