"""numpy's own files, with a table of targets."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.atomic_files import append_whole, write_bytes
from hyperslab.errors import DataError
from hyperslab.formats.npy.source import TABLE, TARGET
from hyperslab.formats.shared.channels import Channels, channel_order
from hyperslab.formats.shared.manifest import Entry
from hyperslab.formats.shared.storage_order import (
    CDHW,
    DHW,
    DHWC,
    StorageOrder,
)
from hyperslab.formats.source import Source
from hyperslab.formats.writer import SampleToWrite, Writer


class NpyWriter(Writer):
    """(C, D, H, W), or (D, H, W) of one channel, and a line of ``targets.csv`` for each."""

    def misfit(self, source: Source) -> str:
        if labels := super().misfit(source):
            return labels
        suffix = TARGET.removesuffix(".npy")
        named = [name for name in source.names if name.endswith(suffix)]
        return f"a volume called {named[0]!r}, which is the name of a target" if named else ""

    def files(self, name: str, compression: str) -> tuple[str, ...]:
        return (f"{name}.npy",)

    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        shape = sample.source.shape
        channels, depth, *plane = shape
        order, _ = order_to_write(shape)
        channels_last = order == DHWC
        # Plain writes: the pages of a mapping would count as this process's memory.
        with (folder / f"{name}.npy").open("xb") as file:
            _write_header(file, order.stored_shape(shape), sample.source.dtype)
            start = file.tell()
            layer = math.prod(plane) * sample.source.dtype.itemsize
            for lo, slab in sample.values():
                if channels_last:
                    file.seek(start + lo * layer * channels)
                    file.write(np.ascontiguousarray(order.from_volume(slab)).data)
                    continue
                for channel, values in enumerate(slab):
                    file.seek(start + (channel * depth + lo) * layer)
                    file.write(np.ascontiguousarray(values).data)
        if not (folder / TABLE).exists():
            self.begin(folder, sample.extras.names, [])
        self.finish(folder, [{"name": name, "target": sample.target.tolist()}])

    def told(self, source: Source) -> Channels | None:
        return order_to_write(source.shape)[1]

    def begin(self, out: Path, parameters: Sequence[str], entries: Sequence[Entry]) -> None:
        """Write the table anew: the last run may have ended within a line, or before a volume."""
        write_bytes(out / TABLE, _line(["name", *parameters]) + _lines(entries))

    def finish(self, out: Path, entries: Sequence[Entry]) -> None:
        append_whole(out / TABLE, _lines(entries))


def order_to_write(shape: tuple[int, ...]) -> tuple[StorageOrder, Channels | None]:
    """How (C, D, H, W) is stored, and what readers have to be told of it.

    Nobody may take another dim for the channels. Where the shape, which is no cube, seems to say
    that they come last, they do; where it says nothing, readers ask.
    """
    if shape[0] == 1:
        return DHW, None
    try:
        seeming = channel_order(Path(), shape)
    except DataError:
        return CDHW, "first"
    return (CDHW, None) if seeming == "first" else (DHWC, "last")


def _lines(entries: Sequence[Entry]) -> bytes:
    return b"".join(_line([entry["name"], *entry["target"]]) for entry in entries)


def _line(fields: list[Any]) -> bytes:
    """A line of a table; numbers so that they are read as the same ones."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue().encode()


def _write_header(file: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
