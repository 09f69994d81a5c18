"""From every format to every format that can hold it (tier: no process)."""

from __future__ import annotations

import gzip
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperslab.errors import DataError
from hyperslab.formats.convert import Request, convert
from hyperslab.formats.source import Source
from hyperslab.geometry import Box
from tests.formats.arrays.test_hdf5 import assembled
from tests.formats.convert.readers import READERS, tfrecord
from tests.formats.opening import source_of
from tests.formats.scans import labels
from tests.formats.test_formats import assembled_labels
from tests.formats.universes import GRIDS, Seat, counts, unit, write
from tests.formats.writers import FORMATS, N
from tests.selection import in_gate

SLABS = ("hdf5", "lbann", "npy", "zarr")
CUBES = (*SLABS, "tfrecord")
SCANS = ("hdf5", "zarr", "nifti")

HOLD: dict[str, tuple[str, ...]] = {
    "public HDF5": SLABS,
    "benchmark HDF5": CUBES,
    "LBANN split HDF5": CUBES,
    "LBANN LiTS HDF5": ("hdf5", "zarr"),  # two channels
    "TFRecord": CUBES,
    "TFRecord gzip": CUBES,
    "npy first": CUBES,
    "npy last": SLABS,  # float32
    "npy one channel": SLABS,
    "Zarr": SLABS,
    "Zarr scans": SCANS,
    "NIfTI": SCANS,
    "NIfTI gzip": SCANS,
}
"""The formats that can hold what each has."""

PAIRS = [(kind, to) for kind in FORMATS for to in HOLD[kind]]

IN_TURN = {
    *((kind, HOLD[kind][turn % len(HOLD[kind])]) for turn, kind in enumerate(FORMATS)),
    *(("npy first", "tfrecord"), ("Zarr", "npy"), ("Zarr scans", "nifti")),
}
"""One format for each, and every format written of several."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for kind, make in FORMATS.items():
        path = tmp_path_factory.mktemp("source")
        found[kind] = path, make(path)
    return found


def converted(path: Path, out: Path, format: str, **how: Any) -> list[str]:
    """Convert, with chunks for a grid where there are some."""
    if format in ("hdf5", "zarr", "lbann"):
        how.setdefault("cut", (2, 1, 2))
    outcomes = convert(path, out, Request(format, **how))  # type: ignore[arg-type]
    assert [outcome.reason for outcome in outcomes] == [""] * len(outcomes)
    return [outcome.state for outcome in outcomes]


def opened(out: Path, format: str, shape: tuple[int, ...]) -> Source:
    """As users do: only of .npy that is no cube the channels have to be named."""
    told = "first" if format == "npy" and shape[0] > 1 and len(set(shape[1:])) > 1 else None
    return source_of(out, Seat(), told)  # type: ignore[arg-type]


def test_every_format_is_covered() -> None:
    assert HOLD.keys() == FORMATS.keys()
    written = Counter(to for _, to in IN_TURN)
    assert written.keys() == {to for _, to in PAIRS}
    assert min(written.values()) > 1


@pytest.mark.parametrize(("kind", "to"), in_gate(PAIRS, kept=IN_TURN))
def test_the_same_bytes_on_every_grid_and_in_other_libraries(
    written: Any, tmp_path: Path, kind: str, to: str
) -> None:
    path, volumes = written[kind]
    assert converted(path, tmp_path / "out", to) == ["converted"] * len(volumes)
    before = source_of(path, Seat())
    source = opened(tmp_path / "out", to, before.shape)
    assert (source.shape, source.dtype) == (volumes[0].shape, volumes[0].dtype)
    suffix = "_0_0_0" if to == "lbann" and kind != "LBANN split HDF5" else ""
    assert list(source.names) == [name + suffix for name in before.names]
    if to != "tfrecord":
        assert source.parameters.names == before.parameters.names
    for sample, volume in enumerate(volumes):
        expected = np.ascontiguousarray(volume).tobytes()
        assert source.read(sample, Box.whole(source.shape)).tobytes() == expected
        for grid in GRIDS if sample == 0 else GRIDS[:1]:
            assert assembled(source, sample, grid).tobytes() == expected
        assert source.volume(sample) == before.volume(sample)
        check_targets(before, source, sample, to, len(volumes))
    source.close()
    for sample, volume in enumerate(volumes):
        check_independently(tmp_path / "out", source, sample, to, volume)


def check_targets(before: Source, source: Source, sample: int, to: str, count: int) -> None:
    if source.classes:
        assert source.classes == before.classes
        expected = labels(sample, (1, *source.shape[1:]), 3)[0]
        for grid in GRIDS if sample == 0 else GRIDS[:1]:
            np.testing.assert_array_equal(assembled_labels(source, sample, grid), expected)
        return
    exact = before.target(sample)
    np.testing.assert_array_equal(np.float32(exact), np.float32(unit(sample if count == N else 0)))
    if to == "tfrecord":
        exact = np.float32(exact).astype(float)
    assert source.target(sample).tolist() == exact.tolist()


def check_independently(out: Path, source: Source, sample: int, to: str, volume: Any) -> None:
    name = source.names[sample]
    if to == "tfrecord":
        data = (out / f"{name}.tfrecord").read_bytes()
        assert data == tfrecord(volume, source.target(sample))
        return
    found, beside = READERS[to](out, name)
    assert found.dtype == volume.dtype
    assert found.tobytes() == np.ascontiguousarray(volume).tobytes()
    if source.classes:
        np.testing.assert_array_equal(beside, labels(sample, (1, *source.shape[1:]), 3)[0])
    else:
        assert beside.astype(float).tolist() == source.target(sample).tolist()


REFUSED = [(kind, to) for kind in FORMATS for to in (*CUBES, "nifti") if to not in HOLD[kind]]

WORDS = {
    "public HDF5": {"tfrecord": r"4 x 7 x 6 x 5 .* voxels .*; hdf5, lbann, npy, zarr can"},
    "npy last": {"tfrecord": r"float32 \(MLPerf's hold int16\); hdf5, lbann, npy, zarr can"},
    "npy one channel": {"tfrecord": "1 x 7 x 6 x 5"},
    "Zarr": {"tfrecord": "4 x 7 x 6 x 5"},
    "LBANN LiTS HDF5": {"nifti": "2 channels; hdf5, zarr can"},
}


@pytest.mark.parametrize(("kind", "to"), REFUSED)
def test_what_a_format_cannot_hold_is_refused(
    written: Any, tmp_path: Path, kind: str, to: str
) -> None:
    path, _ = written[kind]
    scan = "hdf5" in HOLD[kind] and "lbann" not in HOLD[kind]
    words = WORDS.get(kind, {}).get(to, "labels; hdf5, zarr" if scan else "targets; hdf5, lbann")
    with pytest.raises(DataError, match=f"(?s){path}.*: {to} cannot hold {words}"):
        convert(path, tmp_path / "out", Request(to))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["int16", "uint16", "float32", ">i2", ">f4"])
def test_storage_types(tmp_path: Path, dtype: str) -> None:
    """They are kept, in the byte order of the machine."""
    volume = counts(0, (2, 5, 5, 5), dtype)
    write(tmp_path / "src/u.h5", full=volume, unitPar=np.float32([0.1, -1]))
    for to in SLABS:
        converted(tmp_path / "src", tmp_path / to, to)
        name = "u_0_0_0" if to == "lbann" else "u"
        found, target = READERS[to](tmp_path / to, name)
        assert found.dtype == volume.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, volume)
        assert target.tolist() == np.float32([0.1, -1]).tolist()


PACKED = {
    "hdf5": ("benchmark HDF5", "gzip"),
    "lbann": ("LBANN split HDF5", "gzip"),
    "tfrecord": ("TFRecord", "gzip"),
    "zarr": ("Zarr", "zstd"),
    "nifti": ("NIfTI", "gzip"),
}


@pytest.mark.parametrize("to", [*PACKED, "zarr gzip"])
def test_packed(written: Any, tmp_path: Path, to: str) -> None:
    to, _, packing = to.partition(" ")
    kind, compression = PACKED[to]
    path, volumes = written[kind]
    out = tmp_path / "out"
    converted(path, out, to, compression=packing or compression)
    source = source_of(out, Seat())
    for sample, volume in enumerate(volumes):
        assert source.read(sample, Box.whole(source.shape)).tobytes() == volume.tobytes()
    file = Path(source.where(0))
    if to in ("tfrecord", "nifti"):
        assert file.read_bytes()[:2] == b"\x1f\x8b"
        assert file.name == {"tfrecord": "univ_0.tfrecord", "nifti": "volume-0.nii.gz"}[to]
    if to == "tfrecord":
        assert gzip.decompress(file.read_bytes()) == tfrecord(volumes[0], source.target(0))
    source.close()
    again = tmp_path / "again"
    converted(path, again, to, compression=packing or compression)
    if file.is_file():  # what is written does not depend on when
        assert (again / file.name).read_bytes() == file.read_bytes()


def test_there_and_back(written: Any, tmp_path: Path) -> None:
    """Through every format of universes, and back to the first."""
    path, volumes = written["npy first"]
    for step, to in enumerate(["hdf5", "zarr", "lbann", "npy", "tfrecord", "zarr", "hdf5", "npy"]):
        converted(path, tmp_path / str(step), to)
        path = tmp_path / str(step)
    source = source_of(path, Seat())
    assert [n.removesuffix("_0_0_0") for n in source.names] == ["v0", "v1", "v2"]
    for sample, volume in enumerate(volumes):
        assert source.read(sample, Box.whole(source.shape)).tobytes() == volume.tobytes()
        exact = np.float32(unit(sample)).astype(float)  # by way of the TFRecords
        assert source.target(sample).tolist() == exact.tolist()


def test_a_scan_keeps_its_place_by_way_of_hdf5(written: Any, tmp_path: Path) -> None:
    import nibabel

    path, _ = written["NIfTI"]
    converted(path, tmp_path / "a", "hdf5")
    converted(tmp_path / "a", tmp_path / "b", "zarr")
    converted(tmp_path / "b", tmp_path / "c", "nifti")
    for i in range(N):
        one = nibabel.as_closest_canonical(nibabel.load(path / f"volume-{i}.nii"))
        other = nibabel.load(tmp_path / f"c/volume-{i}.nii")
        np.testing.assert_allclose(other.affine, one.affine)
        np.testing.assert_array_equal(np.asarray(other.dataobj), np.asarray(one.dataobj))
        np.testing.assert_allclose(other.header.get_zooms(), one.header.get_zooms())


def test_the_decathlons_names(tmp_path: Path) -> None:
    from tests.formats.writers import niftis

    niftis(".nii", True)(tmp_path / "msd")
    converted(tmp_path / "msd", tmp_path / "a", "hdf5")
    converted(tmp_path / "a", tmp_path / "b", "nifti", compression="gzip")
    assert sorted(p.name for p in (tmp_path / "b/labelsTr").iterdir()) == [
        f"liver_{i}.nii.gz" for i in range(N)
    ]
    assert list(source_of(tmp_path / "b", Seat()).names) == [f"liver_{i}" for i in range(N)]
    shutil.move(tmp_path / "a/liver_0.hdf5", tmp_path / "a/patient.hdf5")
    with pytest.raises(DataError, match=r"cannot hold the name 'patient': .* volume-N or liver_N"):
        convert(tmp_path / "a", tmp_path / "c", Request("nifti"))
