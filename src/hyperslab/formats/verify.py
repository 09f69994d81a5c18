"""Read whole samples, so that every checksum that there is of them is compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyperslab.errors import DataError
from hyperslab.formats import slabs
from hyperslab.formats.shared.manifest import Entry, read_manifest
from hyperslab.formats.source import Source


@dataclass(frozen=True, slots=True)
class Verified:
    """A sample that was read whole; ``problem``: what is wrong with it, empty if nothing is.

    ``recorded``: its values were also compared with the journal of the conversion that made it.
    """

    name: str
    problem: str = ""
    recorded: bool = False


def verify_samples(source: Source, folder: Path | None) -> Iterator[Verified]:
    """Each sample, read whole; sums of chunks, records and gzip are compared by who reads them.

    ``folder``: of the samples, where a conversion may have left their checksums.

    Raises:
        DataError: its journal cannot be read.
    """
    entries = [] if folder is None else read_manifest(folder)[1]
    recorded = {entry["name"]: entry for entry in entries}
    for sample, name in enumerate(source.names):
        entry = recorded.get(name)
        try:
            _verify(source, sample, entry)
        except (DataError, OSError) as error:
            yield Verified(name, str(error))
        else:
            yield Verified(name, recorded=entry is not None and "crc32c" in entry)


def _verify(source: Source, sample: int, entry: Entry | None) -> None:
    # In one slab, where a sum is over all of it.
    shape = source.shape_of(sample)
    thin = slabs.thickness(shape, source.dtype.itemsize)
    step = shape[1] if source.summed_whole else thin
    tally = slabs.Tally()
    slabs.pass_by(slabs.values(source, sample, step, tally))
    found = {"crc32c": str(tally)}
    if source.classes:
        tally = slabs.Tally()
        slabs.pass_by(slabs.labels(source, sample, step, tally))
        found["labels_crc32c"] = str(tally)
    else:
        source.target(sample)
    for key, value in found.items():
        if entry is not None and entry.get(key, value) != value:
            raise DataError(
                f"{source.where(sample)}: is damaged: its values are not those that were converted "
                f"({key} was {entry[key]}, now {value})\n    delete it and convert it again"
            )
