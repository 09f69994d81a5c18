"""What checksums cost a reader, and what it costs to look at a file before it is believed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr
from clock import summary
from volumes import drop, make, warm

import hyperslab as hs
from hyperslab.formats.arrays.writer import SUMMED_LIBVER
from hyperslab.formats.registry import sources_of
from hyperslab.formats.source import ScanOptions
from hyperslab.geometry import Box

SMALL = 16
"""Voxels a side of files that are opened and not read."""

Ways = dict[str, Callable[[], Any]]


def sums(folder: Path, side: int, turns: int) -> dict[str, Any]:
    """A whole volume read by one process, from files of the same chunks without and with sums.

    By hyperslab and by the format's own library, which both have the library compare the sums.
    """
    plain = next(make(folder, side, "chunked", 1).glob("*.hdf5"))
    files = _copies(plain, folder / f"{side}-sums")
    ways: Ways = {}
    for name, path in files.items():
        source = sources_of([path.parent], hs.Grid(), ScanOptions())
        whole = Box.whole(source.shape)
        ways[name] = lambda source=source, whole=whole: source.read(0, whole)
        if path.suffix == ".hdf5":
            ways[f"{name}, h5py alone"] = lambda path=path: _read(path)
    size = plain.stat().st_size
    paths = [path for file in files.values() for path in (file, *file.rglob("*")) if path.is_file()]
    rows = {}
    for cache, prepare in (("cold", drop), ("warm", warm)):
        found = [_turn(ways, lambda prepare=prepare: prepare(paths)) for _ in range(1 + turns)]
        rows[cache] = {name: summary([turn[name] for turn in found[1:]]) for name in ways}
        for name in files:
            if name.endswith("with sums"):
                without = name.replace("with", "without")
                pairs = [turn[name] / turn[without] for turn in found[1:]]
                rows[cache][name]["ratio"] = summary(pairs)
    return {"bytes": size, **rows}


def _copies(plain: Path, folder: Path) -> dict[str, Path]:
    """The same volume in HDF5 and Zarr, each without and with sums, in folders of their own.

    Those that are there are kept.
    """
    found = {}
    for words, summed in (("without sums", False), ("with sums", True)):
        for name, suffix, write in (("HDF5", "hdf5", _write_hdf5), ("Zarr", "zarr", _write_zarr)):
            path = folder / f"{suffix}-{summed}" / f"a.{suffix}"
            found[f"{name} {words}"] = path
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with h5py.File(plain, "r") as file:
                    write(path, file, summed)
    return found


def _write_hdf5(path: Path, values: h5py.File, summed: bool) -> None:
    with h5py.File(path, "w", libver=SUMMED_LIBVER if summed else None) as file:
        for key, dataset in values.items():
            file.create_dataset(
                key, data=dataset[()], chunks=dataset.chunks, fletcher32=summed or None
            )


def _write_zarr(path: Path, values: h5py.File, summed: bool) -> None:
    codecs = [zarr.codecs.Crc32cCodec()] if summed else None
    group = zarr.open_group(path, mode="w", zarr_format=3)
    for key in ("full", "unitPar"):
        chunks = values[key].chunks or values[key].shape
        group.create_array(key, data=values[key][()], chunks=chunks, compressors=codecs)


def _read(path: Path) -> None:
    with h5py.File(path, "r", locking=False) as file:
        file["full"][()]


def opening(folder: Path, counts: Sequence[int], turns: int) -> dict[str, Any]:
    """Folders of so many files, opened and not read: with all checks, and by h5py alone."""
    rows = {}
    for count in counts:
        many = folder / f"opened-{count}"
        _small(many, count)
        paths = sorted(many.glob("*.hdf5"))
        ways: Ways = {
            "h5py alone": lambda paths=paths: [_look(path) for path in paths],
            "hyperslab": lambda many=many: sources_of([many], hs.Grid(), ScanOptions()).close(),
        }
        found = [_turn(ways, lambda paths=paths: warm(paths)) for _ in range(1 + turns)]
        rows[str(count)] = {name: summary([turn[name] for turn in found[1:]]) for name in ways}
    return rows


def _small(folder: Path, count: int) -> None:
    """Files as `hyperslab convert` writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(0).poisson(1.0, (SMALL, SMALL, SMALL, 4)).astype(np.int16)
    for number in range(count):
        path = folder / f"univ_{number:04}.hdf5"
        if not path.exists():
            with h5py.File(path, "w", libver=SUMMED_LIBVER) as file:
                for key, value in (("full", values), ("unitPar", np.zeros(4))):
                    file.create_dataset(key, data=value, chunks=value.shape, fletcher32=True)


def _look(path: Path) -> None:
    """What a program without checks asks for."""
    with h5py.File(path, "r", locking=False) as file:
        volume = file["full"]
        _ = volume.shape, volume.dtype, file["unitPar"][()]


def _turn(ways: Ways, prepare: Callable[[], None]) -> dict[str, float]:
    """The seconds of each way, one after the other."""
    found = {}
    for name, way in ways.items():
        prepare()
        begin = time.perf_counter()
        way()
        found[name] = time.perf_counter() - begin
    return found


def print_sums(side: int, result: dict[str, Any]) -> None:
    size = result["bytes"]
    for cache in ("cold", "warm"):
        print(f"\na volume of {side}^3 x 4 int16, one process, {cache} page cache")
        print(f"{'':36}{'[GB/s] best':>12}{'median':>8}{'with / without':>16}")
        for name, row in result[cache].items():
            speeds = f"{size / row['min'] / 1e9:12.2f}{size / row['median'] / 1e9:8.2f}"
            ratio = f"{row['ratio']['median']:16.2f}" if "ratio" in row else ""
            print(f"{name:36}{speeds}{ratio}")


def print_opening(rows: dict[str, Any]) -> None:
    print("\nopening a folder of HDF5 files, warm page cache [ms]")
    names = [f"{name} {word}" for name in next(iter(rows.values())) for word in ("best", "median")]
    print(f"{'files':>8}" + "".join(f"{name:>20}" for name in names) + f"{'more per file':>16}")
    for count, row in rows.items():
        cells = "".join(f"{1e3 * way[w]:20.1f}" for way in row.values() for w in ("min", "median"))
        plain, checked = (way["median"] for way in row.values())
        print(f"{count:>8}{cells}{1e3 * (checked - plain) / int(count):16.2f}")
