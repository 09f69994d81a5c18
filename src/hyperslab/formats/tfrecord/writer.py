"""MLPerf's TFRecords: one `tf.train.Example` a file, see `records`."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import google_crc32c
import numpy as np

from hyperslab.formats.shared.storage_order import DHWC
from hyperslab.formats.source import Array, Source
from hyperslab.formats.tfrecord.records import MESSAGE_LIMIT, masked
from hyperslab.formats.tfrecord.source import CHANNELS
from hyperslab.formats.writer import SampleToWrite, Writer, packed


class TfRecordWriter(Writer):
    """``x``, the bytes of int16 (D, H, W, C), and ``y``, float32.

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
        path = folder / f"{name}.tfrecord"
        size = 2 * math.prod(sample.source.shape)
        x = feature_head(b"x", size, 1)
        y = np.asarray(sample.target, "<f4").tobytes()
        y = feature_head(b"y", len(y), 2) + y
        features = field_head(1, len(x) + size + len(y))  # Example.features
        with packed(path, sample.compression) as file:
            record = FramedRecord(file, len(features) + len(x) + size + len(y))
            record.write(features + x)
            for _, slab in sample.values():
                record.write(np.ascontiguousarray(DHWC.from_volume(slab), "<i2").tobytes())
            record.write(y)
            record.end()


class FramedRecord:
    """TensorFlow's framing of so many bytes."""

    def __init__(self, file: IO[bytes], length: int) -> None:
        self._file = file
        self._sum = 0
        head = struct.pack("<Q", length)
        file.write(head + struct.pack("<I", masked(google_crc32c.value(head))))

    def write(self, data: bytes) -> None:
        self._sum = google_crc32c.extend(self._sum, data)
        self._file.write(data)

    def end(self) -> None:
        self._file.write(struct.pack("<I", masked(self._sum)))


def feature_head(name: bytes, size: int, kind: int) -> bytes:
    """What stands before the ``size`` bytes of a feature: of one string (1) or of floats (2)."""
    head = field_head(1, size)  # the list's values
    head = field_head(kind, len(head) + size) + head  # the list
    head = field_head(1, len(name)) + name + field_head(2, len(head) + size) + head  # key and value
    return field_head(1, len(head) + size) + head  # Features.feature


def field_head(number: int, size: int) -> bytes:
    """The tag of a field of bytes, and how many there are."""
    found = bytes([number << 3 | 2])
    while size > 127:
        found = found + bytes([size & 127 | 128])
        size = size >> 7
    return found + bytes([size])
