"""TFRecords of Mathuriya et al. 2018, as `sc18` reads them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from hyperslab.formats.extras import Extras
from hyperslab.formats.source import Array, Source
from hyperslab.formats.tfrecord.records import MESSAGE_LIMIT
from hyperslab.formats.tfrecord.sc18 import (
    DATA_KEY,
    LABEL_KEY,
    SC18_RANGES,
    sc18_parameters,
    sc18_target,
)
from hyperslab.formats.tfrecord.writer import FramedRecord, feature_head, field_head
from hyperslab.formats.writer import SampleToWrite, Writer
from hyperslab.geometry import Box

FEWEST_LABELS = 2
"""Labels: their first data set had two."""


class Sc18Writer(Writer):
    """``data_raw`` and ``label_raw``, float64 as the public code reads them; 64 samples a file.

    Cubes of one channel. Labels are physical values, of the first two or three of `SC18_RANGES`.
    """

    per_file = 64
    suffix = ".tfrecord"

    def misfit(self, source: Source) -> str:
        if labels := super().misfit(source):
            return labels
        channels, *extents = source.shape
        if channels != 1:
            return f"{channels} channels (SC18's files hold one redshift: --redshifts 0)"
        if len(set(extents)) > 1:
            return f"{' x '.join(map(str, extents))} voxels (SC18's are cubes)"
        if 8 * math.prod(extents) >= MESSAGE_LIMIT:
            return "samples of 2 GiB and more"
        names = source.parameters.names
        known = tuple(SC18_RANGES)
        ours = tuple("n_s" if name == "N_spec" else name for name in names)
        if len(names) < FEWEST_LABELS or ours != known[: len(names)]:
            return (
                f"the parameters {', '.join(names)} (SC18's are {', '.join(known)}: "
                f"--targets {','.join(known)})"
            )
        if all(low == -1 and high == 1 for low, high in source.parameters.ranges.values()):
            return "targets of which the physical values are not known"
        return ""

    def view(self, source: Source) -> Source:
        return source if self.misfit(source) else Sc18View(source)

    def files(self, name: str, compression: str) -> tuple[str, ...]:
        return (f"{name}{self.suffix}",)

    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        size = 8 * math.prod(sample.source.shape)
        physical = np.asarray(sample.extras.arrays["physPar"], "<f8").tobytes()
        label = feature_head(LABEL_KEY.encode(), len(physical), 1) + physical
        data = feature_head(DATA_KEY.encode(), size, 1)
        features = field_head(1, len(label) + len(data) + size)  # Example.features
        with (folder / f"{name}{self.suffix}").open("xb") as file:
            record = FramedRecord(file, len(features) + len(label) + len(data) + size)
            record.write(features + label + data)
            for _, slab in sample.values():
                record.write(np.ascontiguousarray(slab, "<f8").tobytes())
            record.end()


class Sc18View(Source):
    """A source as the format gives it back: float32 values, targets of the format's own ranges."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.names = source.names
        self.shape = source.shape
        self.dtype = np.dtype(np.float32)
        self.parameters = sc18_parameters(len(source.parameters.names))
        self.redshifts = source.redshifts

    def read(self, sample: int, box: Box) -> Array:
        return self.source.read(sample, box).astype(np.float32)

    def target(self, sample: int) -> Array:
        return sc18_target(self.parameters, self._physical(sample))

    def _physical(self, sample: int) -> Array:
        stored = self.source.extras(sample).arrays.get("physPar")
        if stored is not None:
            return np.asarray(stored, np.float64)
        return self.source.parameters.physical(self.source.target(sample))

    def extras(self, sample: int) -> Extras:
        physical = {"physPar": self._physical(sample)}
        return Extras(names=self.parameters.names, target=self.target(sample), arrays=physical)

    def volume(self, sample: int) -> str:
        return self.source.volume(sample)

    def where(self, sample: int) -> str:
        return self.source.where(sample)

    def close(self) -> None:
        self.source.close()
