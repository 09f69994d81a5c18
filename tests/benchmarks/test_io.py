"""A rank reads its box of a sample and not a hundredth more (tier: a few gloo ranks)."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import h5py
import pytest
from checksums import opening, sums
from reading import CUTS, read_bytes
from scattering import step_times
from side_by_side import FORMATS, side_by_side
from volumes import KINDS, make

from tests.ranks import run_ranks
from tests.selection import in_gate

SIDE = 128  # smaller files have relatively more of an index


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("universes")
    for kind in KINDS:
        make(folder, SIDE, kind, 1)
    return folder


@pytest.mark.parametrize(
    ("kind", "cut"),
    in_gate(itertools.product(KINDS, CUTS), kept=[("chunked", CUTS[-1]), ("plain", {"width": 2})]),
    ids=str,
)
def test_a_rank_reads_its_box(folder: Path, kind: str, cut: dict[str, int]) -> None:
    size = SIDE**3 * 4 * 2 // math.prod(cut.values())
    for rank in run_ranks(math.prod(cut.values()), read_bytes, str(folder / f"{SIDE}-{kind}"), cut):
        assert rank["box"] == rank["program"] == size
        over = 2 if kind == "plain" and "width" in cut else 1  # whole rows where nothing is chunked
        assert size <= rank["system"] <= 1.01 * over * size


def test_steps_are_timed_in_each_way(folder: Path) -> None:
    """What two ranks read together of the one sample is all of it, unless it is kept."""
    size = SIDE**3 * 4 * 2
    found = run_ranks(2, step_times, str(folder / f"{SIDE}-plain"), 1)[0]
    read = {name: row["program"]["median"] for name, row in found.items()}
    assert read == {"read": size, "scattered": size, "store": 0, "sample": 0}


def test_sums_and_opened_folders_are_measured(tmp_path: Path) -> None:
    found = sums(tmp_path, 16, 1)
    assert found["warm"]["HDF5 with sums"]["ratio"]["median"] > 0
    assert {"HDF5 with sums, h5py alone", "Zarr with sums"} <= found["cold"].keys()
    summed = h5py.File(tmp_path / "16-sums" / "hdf5-True" / "a.hdf5")["full"]
    plain = h5py.File(tmp_path / "16-sums" / "hdf5-False" / "a.hdf5")["full"]
    assert (summed.fletcher32, plain.fletcher32) == (True, False)
    assert summed.chunks == plain.chunks
    assert (summed[()] == plain[()]).all()
    assert opening(tmp_path, (3,), 1)["3"]["hyperslab"]["median"] > 0


def test_epochs_are_read_by_one_thread_and_by_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FORMATS.keys() - {"TFRecord, gzip", "NIfTI, gzip"}:
        monkeypatch.delitem(FORMATS, name)  # tests of conversion write and read the others
    found = side_by_side(tmp_path, 8, 1, (1, 2))
    assert found.keys() == FORMATS.keys()
    for row in found.values():
        for cache in ("cold", "warm"):
            assert row[cache]["speed"].keys() == {"1", "2"}
            assert row[cache]["ratio"]["2"]["median"] > 0
