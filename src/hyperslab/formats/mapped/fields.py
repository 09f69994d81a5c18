"""Fields of one data set as channels: arrays of several files, or under several keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hyperslab.errors import DataError, printable
from hyperslab.formats.mapped.scan import ARRAY_SUFFIXES
from hyperslab.formats.shared.data_map import OWN_DATA
from hyperslab.formats.source import Array, Source
from hyperslab.geometry import Box


class Fields(Source):
    """The samples of several sources, which have one field each: their channels, one after another.

    Raises:
        DataError: the sources differ in samples, extents or targets.
    """

    targets_apart = True

    def __init__(self, sources: Sequence[Source], titles: Sequence[str]) -> None:
        self.sources = tuple(sources)
        self.titles = tuple(titles)
        first = self.sources[0]
        for source, title in zip(self.sources[1:], self.titles[1:], strict=True):
            _check_alike(first, source, self.titles[0], title)
        self.counts = tuple(source.shape[0] for source in self.sources)
        self.names = first.names
        self.shape = (sum(self.counts), *first.shape[1:])
        self.dtype = np.result_type(*(source.dtype for source in self.sources))
        self.parameters = first.parameters
        self.classes = first.classes
        self.label_bytes = first.label_bytes
        if set(self.counts) == {1}:
            self.channel_names = self.titles
        self.remark = f"{first.remark}; channels: {', '.join(map(printable, self.titles))}"

    def read(self, sample: int, box: Box) -> Array:
        parts = []
        begin = 0
        for source, count in zip(self.sources, self.counts, strict=True):
            lo, hi = max(box.lo[0], begin), min(box.hi[0], begin + count)
            if lo < hi:
                inner = Box((lo - begin, *box.lo[1:]), (hi - begin, *box.hi[1:]))
                parts.append(source.read(sample, inner).astype(self.dtype, copy=False))
            begin += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def target(self, sample: int) -> Array:
        return self.sources[0].target(sample)

    def labels(self, sample: int, box: Box) -> Array:
        return self.sources[0].labels(sample, box)

    def where(self, sample: int) -> str:
        return self.sources[0].where(sample)

    def files(self, sample: int) -> tuple[Path, ...]:
        return tuple(path for source in self.sources for path in source.files(sample))

    def alone(self, sample: int) -> Fields:
        return Fields([source.alone(sample) for source in self.sources], self.titles)

    def close(self) -> None:
        for source in self.sources:
            source.close()


def _check_alike(first: Source, other: Source, title: str, its: str) -> None:
    if len(first.names) != len(other.names) or first.shape[1:] != other.shape[1:]:
        raise DataError(
            f"{printable(title)} has {len(first.names)} volumes of {first.shape[1:]} voxels but "
            f"{printable(its)} has {len(other.names)} of {other.shape[1:]}; fields that become "
            f"channels need as many volumes, of one size ({OWN_DATA}, channels)"
        )
    for sample, (name, twin) in enumerate(zip(first.names, other.names, strict=True)):
        if first.classes or not len(first.parameters.names):
            alike = numbers_of_volume(name, title) == numbers_of_volume(twin, its)
        else:
            alike = np.array_equal(first.target(sample), other.target(sample))
        if not alike:
            raise DataError(
                f"{printable(name)!r} and {printable(twin)!r} are not two fields of one volume: "
                f"they belong to other rows ({OWN_DATA}, channels)"
            )


def numbers_of_volume(name: str, pattern: str) -> list[str]:
    """The numbers in a file's name that tell one volume from another; with or without suffix.

    Those of the ``pattern`` that found it are the field's: *z0/\\** and *z1/\\** are two of them.

    >>> numbers_of_volume("z1/run3_0007.npy", "z1/run*_*.npy")
    ['3', '0007']
    """
    suffix = next((suffix for suffix in ARRAY_SUFFIXES if pattern.endswith(suffix)), "")
    bare = pattern.removesuffix(suffix)
    for said in (bare, bare.rpartition("/")[2]):  # names may be those of files in a folder
        free = re.split(r"\*|\?|\[!?\]?[^]]*\]", said)
        found = re.match("(.*)".join(map(re.escape, free)), name)
        if found is not None:
            return re.findall(r"\d+", " ".join((*found.groups(), name[found.end() :])))
    return re.findall(r"\d+", name)
