"""Writes TFRecords: MLPerf's, one `tf.train.Example` a file, or SC18's, many samples a file."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import google_crc32c
import numpy as np

from hyperslab.formats.source import Array, Extras, Source, SourceView
from hyperslab.formats.storage import DHWC
from hyperslab.formats.tfrecord import sc18
from hyperslab.formats.tfrecord.mlperf import CHANNELS
from hyperslab.formats.tfrecord.records import MESSAGE_LIMIT, masked_crc
from hyperslab.formats.writer import SampleToWrite, Writer, open_gzip_writer
from hyperslab.geometry import Box


class TfRecordWriter(Writer):
    """Writes records of ``x``, the bytes of int16 (D, H, W, C), and ``y``, float32.

    Parts are named as by MLPerf's script, which cuts along D, then H, then W, counts the parts and
    puts the name of the cube's own folder before that of the cube: so that all can lie in one.
    [sparticlesteve/cosmoflow-benchmark and mlcommons/hpc, prepare.py: split_universe, process_file]
    """

    compressions = ("none", "gzip")
    named = False

    def misfit(self, source: Source) -> str:
        channels, *extents = source.shape
        if labels := super().misfit(source):
            return labels
        if source.dtype != np.int16:
            return f"{source.dtype.name} (MLPerf's hold int16)"
        if channels != CHANNELS or len(set(extents)) > 1:
            words = " x ".join(map(str, source.shape))
            return f"{words} (C x D x H x W) voxels (MLPerf's are cubes of {CHANNELS} channels)"
        if 2 * math.prod(source.shape) >= MESSAGE_LIMIT:
            return "samples of 2 GiB and more"
        return ""

    def names(self, source: Source, root: str) -> Sequence[str]:
        return [self._name(source, sample, root) for sample in range(len(source.names))]

    @staticmethod
    def _name(source: Source, sample: int, root: str) -> str:
        part = source.part(sample)
        if part is None:
            return source.names[sample]
        *folders, base = [root, *part.volume.split("/")]
        return f"{folders[-1]}_{base}_{part.number:03}"

    def stored_target(self, exact: Array) -> Array:
        return exact.astype(np.float32).astype(np.float64)

    def files(self, name: str, compression: str) -> tuple[str, ...]:
        return (f"{name}.tfrecord",)

    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        size = 2 * math.prod(sample.source.shape)
        target = np.asarray(sample.target, "<f4").tobytes()
        after = feature_head(b"y", len(target), 2) + target
        pieces = (
            np.ascontiguousarray(DHWC.from_volume(slab), "<i2").tobytes()
            for _, slab in sample.values()
        )
        with open_gzip_writer(folder / f"{name}.tfrecord", sample.compression) as file:
            write_example(file, b"", feature_head(b"x", size, 1), size, pieces, after)


def write_example(
    file: IO[bytes], before: bytes, head: bytes, size: int, pieces: Iterable[bytes], after: bytes
) -> None:
    """Writes one example in TensorFlow's framing.

    Its features: ``before``, one of ``size`` bytes, which has a ``head`` and comes in pieces, and
    ``after``.
    """
    rest = len(before) + len(head) + size + len(after)
    features = field_head(1, rest)  # Example.features
    length = struct.pack("<Q", len(features) + rest)
    file.write(length + struct.pack("<I", masked_crc(google_crc32c.value(length))))
    summed = 0
    for piece in itertools.chain([features + before + head], pieces, [after]):
        summed = google_crc32c.extend(summed, piece)
        file.write(piece)
    file.write(struct.pack("<I", masked_crc(summed)))


def feature_head(name: bytes, size: int, kind: int) -> bytes:
    """Encodes what stands before the ``size`` bytes of a feature: one string (1) or floats (2)."""
    head = field_head(1, size)  # the list's values
    head = field_head(kind, len(head) + size) + head  # the list
    head = field_head(1, len(name)) + name + field_head(2, len(head) + size) + head  # key and value
    return field_head(1, len(head) + size) + head  # Features.feature


def field_head(number: int, size: int) -> bytes:
    """Returns the tag of a field of bytes, and how many there are."""
    found = bytes([number << 3 | 2])
    while size > 127:
        found = found + bytes([size & 127 | 128])
        size = size >> 7
    return found + bytes([size])


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
        known = tuple(sc18.SC18_RANGES)
        ours = tuple("n_s" if name == "N_spec" else name for name in names)
        if len(names) < FEWEST_LABELS or ours != known[: len(names)]:
            return (
                f"the parameters {', '.join(names)} (SC18's are {', '.join(known)}: "
                f"--targets {','.join(known)})"
            )
        if all(low == -1 and high == 1 for low, high in source.parameters.ranges.values()):
            return "targets whose physical values are not known"
        return ""

    def view(self, source: Source) -> Source:
        return source if self.misfit(source) else Sc18View(source)

    def files(self, name: str, compression: str) -> tuple[str, ...]:
        return (f"{name}{self.suffix}",)

    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        size = 8 * math.prod(sample.source.shape)
        physical = np.asarray(sample.extras.arrays["physPar"], "<f8").tobytes()
        label = feature_head(sc18.LABEL_KEY.encode(), len(physical), 1) + physical
        head = feature_head(sc18.DATA_KEY.encode(), size, 1)
        pieces = (np.ascontiguousarray(slab, "<f8").tobytes() for _, slab in sample.values())
        with (folder / f"{name}{self.suffix}").open("xb") as file:
            write_example(file, label, head, size, pieces, b"")


class Sc18View(SourceView):
    """A source as the format gives it back: float32 values, targets of the format's own ranges."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.dtype = np.dtype(np.float32)
        self.parameters = sc18.sc18_parameters(len(source.parameters.names))

    def read(self, sample: int, box: Box) -> Array:
        return self.source.read(sample, box).astype(np.float32)

    def target(self, sample: int) -> Array:
        return sc18.sc18_target(self.parameters, self._physical(sample))

    def _physical(self, sample: int) -> Array:
        stored = self.source.extras(sample).arrays.get("physPar")
        if stored is not None:
            return np.asarray(stored, np.float64)
        return self.source.parameters.physical(self.source.target(sample))

    def extras(self, sample: int) -> Extras:
        physical = {"physPar": self._physical(sample)}
        return Extras(names=self.parameters.names, target=self.target(sample), arrays=physical)
