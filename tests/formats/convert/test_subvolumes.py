"""Cubes cut as the public scripts cut them (tier: no process)."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from hyperslab.data import Subvolumes, open
from hyperslab.errors import DataError, LayoutError
from hyperslab.formats.convert import Request, convert
from hyperslab.geometry import Box
from tests.formats import scans
from tests.formats.convert.readers import tfrecord
from tests.formats.opening import source_of
from tests.formats.universes import NAMES, Seat, counts, public, unit
from tests.selection import in_gate

WIDE, WIDTH = 10, 5
NUMBER = WIDE // WIDTH

Parts = Iterator[tuple[str, NDArray[Any]]]


@pytest.fixture(scope="module")
def cubes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same name in two sub-folders, as the public data set has it."""
    path = tmp_path_factory.mktemp("cubes")
    for i, folder in enumerate("ab"):
        public(path / folder / "univ_ics_a1.hdf5", cube(i), i)
    return path


def cube(seed: int) -> NDArray[Any]:
    return counts(seed, (WIDE, WIDE, WIDE, 4))


def lbann_splitter(full: NDArray[Any], base: str) -> Parts:
    """What split_cosmoflow_sample.py does with a cube."""
    turned = full.transpose()
    for ix, iy, iz in product(range(NUMBER), repeat=3):
        x, y, z = (slice(i * WIDTH, (i + 1) * WIDTH) for i in (ix, iy, iz))
        yield f"{base}_{ix}_{iy}_{iz}", turned[:, x, y, z]


def prepare(full: NDArray[Any], base: str, folder: str) -> Parts:
    """What prepare.py does: it splits along one axis after the other, and counts."""
    number = 0
    for slab in np.split(full, NUMBER, axis=0):
        for bar in np.split(slab, NUMBER, axis=1):
            for part in np.split(bar, NUMBER, axis=2):
                yield f"{folder}_{base}_{number:03d}", part
                number += 1


def split(path: Path, out: Path, format: str, **how: Any) -> list[str]:
    outcomes = convert(path, out, Request(format, width=WIDTH, **how))  # type: ignore[arg-type]
    assert {outcome.state for outcome in outcomes} == {"converted"}
    return sorted(p.relative_to(out).as_posix() for p in out.rglob("*.*") if p.suffix != ".jsonl")


def test_lbanns_parts(cubes: Path, tmp_path: Path) -> None:
    files = split(cubes, tmp_path / "out", "lbann", cut=(2, 1, 1))
    expected = []
    for i, folder in enumerate("ab"):
        for name, part in lbann_splitter(cube(i), "univ_ics_a1"):
            expected.append(f"{folder}/{name}.hdf5")
            with h5py.File(tmp_path / "out" / expected[-1]) as file:
                assert file["full"].dtype == np.int16
                assert file["full"].chunks == (4, 5, 5, 3)
                np.testing.assert_array_equal(file["full"], part)
                np.testing.assert_array_equal(file["unitPar"], unit(i))
    assert files == sorted(expected)


def test_mlperfs_parts(cubes: Path, tmp_path: Path) -> None:
    files = split(cubes, tmp_path / "out", "tfrecord")
    expected = []
    for i, folder in enumerate("ab"):
        for name, part in prepare(cube(i), "univ_ics_a1", folder):
            expected.append(f"{name}.tfrecord")
            data = tfrecord(np.moveaxis(part, -1, 0), unit(i))
            assert (tmp_path / "out" / expected[-1]).read_bytes() == data
    assert files == sorted(expected)


def test_mlperfs_parts_of_a_folder_without_sub_folders(cubes: Path, tmp_path: Path) -> None:
    """The name of the folder itself comes first, as the script has it."""
    files = split(cubes / "b", tmp_path / "out", "tfrecord")
    assert files[0] == "b_univ_ics_a1_000.tfrecord"
    assert files[-1] == "b_univ_ics_a1_007.tfrecord"


def test_mlperfs_names_have_no_room_for_folders_of_one_name(tmp_path: Path) -> None:
    for folder in ("one/a", "two/a"):
        public(tmp_path / "src" / folder / "u.hdf5", cube(0))
    with pytest.raises(DataError, match="2 samples would be 'a_u_000' as tfrecord"):
        split(tmp_path / "src", tmp_path / "out", "tfrecord")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["hdf5", "zarr", "npy", "lbann", "tfrecord"])
def test_what_is_read_is_what_subvolumes_gives(cubes: Path, tmp_path: Path, format: str) -> None:
    """Names, bytes, targets, and all parts of a cube in one split: the split of the cube."""
    split(cubes, tmp_path / "out", format)
    parts = source_of(tmp_path / "out", Seat())
    sent = pickle.loads(pickle.dumps(parts))  # as the ranks that do not scan get it
    expected = Subvolumes(source_of(cubes, Seat()), WIDTH)
    if format in ("hdf5", "zarr", "npy"):
        assert list(parts.names) == list(expected.names)
    assert len(parts.names) == len(expected.names) == 2 * NUMBER**3
    twin = list(range(len(parts.names)))
    if format == "lbann":  # which counts from the last axis on
        places = list(np.ndindex(NUMBER, NUMBER, NUMBER))
        turned = [places.index(place[::-1]) for place in places]
        twin = [cube * NUMBER**3 + i for cube in range(2) for i in turned]
    whole = Box.whole(parts.shape)
    for sample, other in enumerate(twin):
        assert parts.volume(sample) == sent.volume(sample) == expected.volume(other)
        assert parts.read(sample, whole).tobytes() == expected.read(other, whole).tobytes()
        exact = expected.target(other)
        exact = np.float32(exact).astype(float) if format == "tfrecord" else exact
        assert parts.target(sample).tolist() == exact.tolist()
    for seed in range(4):
        names = [
            {source.volume(i) for i in data.schedule.samples}
            for source in (parts, expected)
            for data in [open(source, Seat(), batch_size=1, fractions=(0.5, 0.5, 0), seed=seed)]
        ]
        assert names[0] == names[1]
        assert len(names[0]) == 1


@pytest.mark.parametrize("format", in_gate(["hdf5", "zarr", "lbann"], kept=["hdf5", "lbann"]))
def test_parts_know_what_the_cube_knows(cubes: Path, tmp_path: Path, format: str) -> None:
    split(cubes, tmp_path / "out", format)
    parts, whole = source_of(tmp_path / "out", Seat()), source_of(cubes, Seat())
    assert parts.parameters.names == NAMES
    assert parts.parameters.ranges.keys() == whole.parameters.ranges.keys()
    for name, ends in whole.parameters.ranges.items():
        assert parts.parameters.ranges[name] == pytest.approx(ends)
    if format == "hdf5":
        with h5py.File(tmp_path / "out/a/univ_ics_a1_0_0_0.hdf5") as file:
            assert file["redshifts"][:].tolist() == [0.0, 0.5, 1.5, 3.0]
            assert file["physPar"].dtype == np.float64


def test_scans(tmp_path: Path) -> None:
    scans.folder(tmp_path / "src", 1, (2, 10, 5, 15))
    split(tmp_path / "src", tmp_path / "out", "zarr")
    parts = source_of(tmp_path / "out", Seat())
    expected = Subvolumes(source_of(tmp_path / "src", Seat()), WIDTH)
    assert list(parts.names) == list(expected.names)
    assert parts.classes == scans.CLASSES
    for sample in range(6):
        box = Box.whole(parts.shape)
        assert parts.read(sample, box).tobytes() == expected.read(sample, box).tobytes()
        box = Box.whole(parts.shape[1:])
        assert parts.labels(sample, box).tobytes() == expected.labels(sample, box).tobytes()


def test_parts_that_are_converted_again_stay_together(cubes: Path, tmp_path: Path) -> None:
    split(cubes, tmp_path / "a", "tfrecord")
    convert(tmp_path / "a", tmp_path / "b", Request("hdf5"))
    one, other = (source_of(tmp_path / name, Seat()) for name in "ab")
    assert list(one.names) == list(other.names)
    for sample in range(2 * NUMBER**3):
        cube = "ab"[sample // NUMBER**3]
        assert one.volume(sample) == other.volume(sample) == f"{cube}/univ_ics_a1"


def test_no_multiple(cubes: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"univ_ics_a1.hdf5 of 10 x 10 x 10 .* sub-volumes of 4"):
        convert(cubes, tmp_path / "out", Request("hdf5", width=4))
    assert not (tmp_path / "out").exists()
