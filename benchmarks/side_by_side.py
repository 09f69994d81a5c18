"""Epochs read by one thread of a rank and by several, in turn, from files of each format."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nibabel
import numpy as np
from clock import summary
from volumes import drop, make, warm

import hyperslab as hs
from hyperslab.data import open_dataset
from hyperslab.formats.convert import Request, convert

SAMPLES = 8
FORMATS = {
    "HDF5": ("hdf5", "none"),
    "npy": ("npy", "none"),
    "TFRecord": ("tfrecord", "none"),
    "TFRecord, gzip": ("tfrecord", "gzip"),
    "Zarr": ("zarr", "none"),
    "Zarr, gzip": ("zarr", "gzip"),
    "NIfTI, gzip": ("nifti", "gzip"),
}


def side_by_side(folder: Path, side: int, turns: int, threads: Sequence[int]) -> dict[str, Any]:
    """GB/s of an epoch that nothing is done with, by format, cache and threads; in one process."""
    universes = make(folder, side, "chunked", SAMPLES)
    rows: dict[str, Any] = {}
    for name, (form, packing) in FORMATS.items():
        within = folder / f"{side}-{form}-{packing}"
        if form == "nifti":
            _scans(within, side)
        else:
            convert(universes, within, Request(form, compression=packing))
        paths = [path for path in within.rglob("*") if path.is_file()]
        rows[name] = {}
        for cache, prepare in (("cold", drop), ("warm", warm)):
            found: dict[int, list[float]] = {count: [] for count in threads}
            for _ in range(1 + turns):
                for count in threads:
                    prepare(paths)
                    found[count].append(_epoch(within, count))
            first, *others = (times[1:] for times in found.values())
            rows[name][cache] = {
                "speed": {str(count): summary(times[1:]) for count, times in found.items()},
                "ratio": {
                    str(count): summary([b / a for a, b in zip(first, times, strict=True)])
                    for count, times in zip(threads[1:], others, strict=True)
                },
            }
    return rows


def _epoch(folder: Path, threads: int) -> float:
    """The speed [GB/s] of one epoch, by the bytes of its boxes."""
    with (
        patch.object(open_dataset, "MOST_READING", threads),
        hs.open(folder, hs.Grid(), batch_size=1, split="all", transform=None) as data,
    ):
        begin = time.perf_counter()
        for _ in data.epoch(0):
            pass
        return data.bytes_read / (time.perf_counter() - begin) / 1e9


def _scans(folder: Path, side: int) -> None:
    """Scans with labels, their values like those of a CT; those that are there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(SAMPLES):
        random = np.random.default_rng(number)
        values = random.normal(0, 30, (side, side, side)).astype(np.int16)
        classes = np.zeros(values.shape, np.uint8)
        classes[: side // 2] = 1
        for stem, array in (("volume", values), ("segmentation", classes)):
            path = folder / f"{stem}-{number}.nii.gz"
            if not path.exists():
                nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), path)


def print_side_by_side(side: int, rows: dict[str, Any]) -> None:
    for cache in ("cold", "warm"):
        print(f"\n{SAMPLES} samples of {side}^3, one process, {cache} page cache: GB/s by threads")
        for name, row in rows.items():
            speeds = "".join(
                f"{count:>4}: {speed['median']:6.2f}"
                for count, speed in row[cache]["speed"].items()
            )
            ratios = "".join(
                f"  {count} / 1: {ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"
                for count, ratio in row[cache]["ratio"].items()
            )
            print(f"{name:16}{speeds}{ratios}")
