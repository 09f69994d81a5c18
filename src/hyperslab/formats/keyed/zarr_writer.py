"""Zarr v3 groups with the keys of the HDF5 files (the extra `zarr`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.formats.keyed.writer import KeyedWriter
from hyperslab.formats.shared import optional
from hyperslab.formats.shared.chunking import Sides
from hyperslab.formats.source import Array

ALL_CHUNKS = {"write_empty_chunks": True}


class ZarrWriter(KeyedWriter):
    """Each chunk is a file. Those of zeros are written, too, so that one that is lost is missed.

    Each has a CRC32C, which Zarr compares when it reads it.
    """

    suffix = ".zarr"
    compressions = ("none", "gzip", "zstd")

    @contextmanager
    def _created(self, path: Path) -> Iterator[Any]:
        yield optional.zarr().create_group(path, zarr_format=3)

    def _create(
        self,
        file: Any,
        key: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        chunks: Sides,
        compression: str,
    ) -> Any:
        codecs = optional.zarr().codecs
        kinds = {"none": None, "gzip": codecs.GzipCodec, "zstd": codecs.ZstdCodec}
        codec = kinds[compression]
        return file.create_array(
            key,
            shape=shape,
            dtype=dtype,
            chunks=chunks,
            compressors=[*([codec()] if codec else []), codecs.Crc32cCodec()],
            config=ALL_CHUNKS,
        )

    def _put(self, file: Any, key: str, array: Array | None) -> None:
        sums = optional.zarr().codecs.Crc32cCodec()
        file.create_array(key, data=np.asarray(array), compressors=[sums], config=ALL_CHUNKS)

    def _put_names(self, file: Any, key: str, names: tuple[str, ...]) -> None:
        sums = optional.zarr().codecs.Crc32cCodec()
        stored = file.create_array(key, shape=(len(names),), dtype=str, compressors=[sums])
        stored[:] = np.array(names, object)

    def _describe(self, file: Any, attributes: Mapping[str, Any]) -> None:
        file.attrs.update({key: _plain(value) for key, value in attributes.items()})


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
