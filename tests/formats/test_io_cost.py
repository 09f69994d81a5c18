"""What a box is said to cost, against what the system reads for it (tier: no process)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from hyperslab.data import os_bytes_read
from hyperslab.errors import LayoutError
from hyperslab.formats.storage import read_cost, replica_boxes, storage_advice
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.test_formats import CUTS
from tests.formats.universes import Seat, counts, unit, write
from tests.formats.writers import FORMATS, mlperf, nifti, niftis

SHAPE = (80, 64, 48, 4)


def hdf5(**how: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        write(folder / "u.hdf5", unitPar=unit(0), redshifts=np.zeros(4))
        with h5py.File(folder / "u.hdf5", "a") as file:
            file.create_dataset("full", data=counts(0, SHAPE), **how)

    return make


def zarrs(folder: Path) -> None:
    group = zarr.create_group(folder / "u.zarr", zarr_format=3)
    group.create_array("full", data=counts(0, SHAPE), chunks=(30, 32, 24, 4))
    for key, value in {"unitPar": unit(0), "redshifts": np.zeros(4)}.items():
        group.create_array(key, data=value)


def scan(folder: Path) -> None:
    nifti(folder / "volume-0.nii", counts(0, SHAPE[:3]), np.diag([-1.0, -1, 1, 1]))
    nifti(folder / "segmentation-0.nii", np.zeros(SHAPE[:3], np.uint8), np.diag([-1.0, -1, 1, 1]))


def array(order: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "u.npy", np.asarray(counts(0, (40, 64, 300, 4)), order=order))
        (folder / "targets.csv").write_text("name,a\nu,0.5")

    return make


def record(folder: Path) -> None:
    volume = counts(0, (32, 32, 32, 4)).tobytes()
    mlperf(folder / "u.tfrecord", 0, x=volume)


STORED: dict[str, Callable[[Path], None]] = {
    "one piece": hdf5(),
    "chunks": hdf5(chunks=(16, 16, 16, 4)),
    "chunks that fight": hdf5(chunks=(48, 64, 7, 2)),
    "gzip": hdf5(chunks=(20, 32, 24, 4), compression="gzip"),
    "Zarr": zarrs,
    "NIfTI": scan,
    "npy": array("C"),
    "npy, first dim first": array("F"),
    "TFRecord": record,
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of each kind, which is written once."""

    @functools.cache
    def folder_of(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("stored")
        STORED[kind](folder)
        return folder

    return folder_of


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize(
    "extents", [{"depth": 2}, {"height": 2}, {"depth": 3, "height": 2, "width": 2}], ids=str
)
def test_the_system_reads_what_is_said(
    stored: Callable[[str], Path], kind: str, extents: dict[str, int]
) -> None:
    source = source_of(stored(kind), Seat(), "last" if "npy" in kind else None)
    storage = source.storage(0)
    assert storage is not None
    source.read(0, Box((0, 0, 0, 0), (1, 1, 1, 1)))
    said = read = 0
    for box in replica_boxes(source.shape, extents):
        source.close()  # neither chunks nor rows of the box before are in memory
        expected = read_cost(storage, box)
        assert expected.box == box.size * 2
        before = os_bytes_read()
        source.read(0, box)
        said, read = said + expected.read, read + os_bytes_read() - before
    overhead = 24_000 * len(replica_boxes(source.shape, extents))  # headers and index, opened again
    assert said * 0.95 <= read <= said * 1.1 + overhead


@pytest.mark.parametrize(
    ("extents", "words"),
    [
        ({"depth": 10**15}, f"cannot cut depth 512 into {10**15}; use depth<=512"),
        ({"depth": 512, "height": 512, "width": 512}, f"a replica of {2**27} ranks is too large"),
    ],
)
def test_ranks_that_no_machine_has_are_not_listed(extents: dict[str, int], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        replica_boxes((4, 512, 512, 512), extents)


def test_packed_samples_are_read_whole(tmp_path: Path) -> None:
    mlperf(tmp_path / "u.tfrecord", 0, packed=True)
    source = source_of(tmp_path, Seat())
    storage = source.storage(0)
    assert storage is not None
    ranks = [read_cost(storage, box) for box in replica_boxes(source.shape, {"depth": 3})]
    assert [rank.read for rank in ranks] == [(tmp_path / "u.tfrecord").stat().st_size] * 3
    assert "no random access" in storage_advice(storage, ranks, {"depth": 3})


def test_a_packed_scan_is_read_up_to_the_end_of_the_box(tmp_path: Path) -> None:
    niftis(".nii.gz", False)(tmp_path)
    source = source_of(tmp_path, Seat())
    storage = source.storage(0)
    assert storage is not None
    size = (tmp_path / "volume-0.nii.gz").stat().st_size
    ranks = [read_cost(storage, box) for box in replica_boxes(source.shape, {"depth": 2})]
    assert [rank.read for rank in ranks] == [round(size * 4 / 7), size]
    turned = source.storage(2)  # its outermost axis runs along the patient's, but backwards
    assert turned is not None
    assert (turned.order.dims, turned.order.flipped) == ("HWD", "DH")
    size = (tmp_path / "volume-2.nii.gz").stat().st_size
    ranks = [read_cost(turned, box) for box in replica_boxes(source.shape, {"height": 2})]
    assert [rank.read for rank in ranks] == [size, round(size / 2)]


def test_advice_where_the_cut_fights_the_file(tmp_path: Path) -> None:
    hdf5()(tmp_path / "piece")
    hdf5(chunks=(80, 16, 48, 4))(tmp_path / "chunks")
    found = {}
    for name in ("piece", "chunks"):
        source = source_of(tmp_path / name, Seat())
        storage = source.storage(0)
        assert storage is not None
        for axis in ("depth", "height", "width"):
            ranks = [read_cost(storage, box) for box in replica_boxes(source.shape, {axis: 4})]
            found[name, axis] = storage_advice(storage, ranks, {axis: 4})
    assert found["piece", "depth"] == found["chunks", "height"] == ""
    assert "cut along depth, which is outermost" in found["piece", "width"]
    words = "write chunks whose sides divide the shards: hyperslab convert SRC OUT --cut"
    assert f"{words} 4,1,1" in found["chunks", "depth"]
    assert f"{words} 1,1,4" in found["chunks", "width"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_cost(tmp_path: Path, name: str) -> None:
    volumes = FORMATS[name](tmp_path)
    source = source_of(tmp_path, Seat())
    storage = source.storage(0)
    assert storage is not None
    assert sorted(storage.shape) == sorted(source.shape)[4 - len(storage.shape) :]
    for extents in CUTS:
        ranks = [read_cost(storage, box) for box in replica_boxes(source.shape, extents)]
        assert sum(rank.box for rank in ranks) == volumes[0].nbytes
        assert all(rank.read > 0 and rank.requests > 0 for rank in ranks)


def test_too_many_ranks() -> None:
    with pytest.raises(LayoutError, match="cannot cut width 5 into 6"):
        replica_boxes((1, 7, 6, 5), {"width": 6})
