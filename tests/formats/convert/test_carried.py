"""What files hold beside their voxels goes with them (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from hyperslab.errors import DataError
from hyperslab.formats.convert import Request, convert
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.scans import CLASSES, scan
from tests.formats.universes import CENTRE, NAMES, Seat, counts, public, unit
from tests.formats.writers import FORMATS

ATTRIBUTES = {"seed": 7, "box_size": 128.5, "words": "of a run", "list": np.array([1, 2, 3])}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    text = h5py.string_dtype()
    for i in range(2):
        path = tmp_path / f"src/u{i}.hdf5"
        names = np.array(NAMES, "S20") if i else np.array(NAMES, dtype=text)
        public(path, counts(i, (6, 5, 4, 4)), i, namePar=names)
        with h5py.File(path, "a") as file:
            file.attrs.update(ATTRIBUTES, numbers=np.float32([0.5, 1]))
            file.attrs["list of words"] = np.array(["one", "two"], dtype=text)
    return tmp_path / "src"


def opened(path: Path) -> Any:
    return (
        zarr.open_group(path, mode="r")
        if path.suffix == ".zarr"
        else h5py.File(path, locking=False)
    )


def run(source: Path, out: Path, format: str) -> Path:
    outcomes = convert(source, out, Request(format))  # type: ignore[arg-type]
    assert {outcome.state for outcome in outcomes} == {"converted"}
    return out


@pytest.mark.parametrize(
    "way", [("hdf5",), ("zarr",), ("lbann",), ("zarr", "hdf5"), ("hdf5", "zarr")]
)
def test_keys_and_attributes(source: Path, tmp_path: Path, way: tuple[str, ...]) -> None:
    path = source
    for i, format in enumerate(way):
        path = run(path, tmp_path / str(i), format)
    suffix = ".zarr" if way[-1] == "zarr" else ".hdf5"
    for i, file in enumerate(sorted(path.glob(f"*{suffix}"))):
        stored = opened(file)
        assert stored["unitPar"][:].tolist() == unit(i).tolist()
        assert stored["physPar"][:].tolist() == (CENTRE * (1 + 0.1 * unit(i))).tolist()
        assert stored["redshifts"][:].tolist() == [0.0, 0.5, 1.5, 3.0]
        names = [n.decode() if isinstance(n, bytes) else n for n in stored["namePar"][:]]
        assert names == list(NAMES)
        found = dict(stored.attrs)
        assert (found["seed"], found["box_size"], found["words"]) == (7, 128.5, "of a run")
        assert list(found["list"]) == [1, 2, 3]
        assert list(found["numbers"]) == [0.5, 1]
        words = [w.decode() if isinstance(w, bytes) else w for w in found["list of words"]]
        assert words == ["one", "two"]
        assert found["channels"] == ("first" if way[-1] == "lbann" else "last")
    one, other = source_of(source, Seat()), source_of(path, Seat())
    assert one.parameters == other.parameters


def test_the_benchmarks_keys_stay(tmp_path: Path) -> None:
    FORMATS["benchmark HDF5"](tmp_path / "src")
    before = source_of(tmp_path / "src", Seat()).parameters
    for format in ("hdf5", "zarr"):
        out = run(tmp_path / "src", tmp_path / format, format)
        stored = opened(next(p for p in sorted(out.iterdir()) if p.suffix == f".{format}"))
        assert sorted(stored) == ["namePar", "x", "y"]
        assert stored["y"].dtype == np.float32
        assert source_of(out, Seat()).parameters == before
    run(tmp_path / "src", tmp_path / "lbann", "lbann")
    assert source_of(tmp_path / "lbann", Seat()).parameters == before


def test_names_of_other_letters(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    np.save(tmp_path / "src/v.npy", counts(0, (4, 5, 5, 5)))
    (tmp_path / "src/targets.csv").write_text('name,Ω_m,"a, b"\nv,0.1,1e-300\n')
    path = tmp_path / "src"
    for format in ("hdf5", "zarr", "npy"):
        path = run(path, tmp_path / format, format)
        source = source_of(path, Seat())
        assert source.parameters.names == ("Ω_m", "a, b")
        assert source.target(0).tolist() == [0.1, 1e-300]


@pytest.mark.parametrize("way", [("hdf5", "hdf5"), ("zarr", "hdf5")])
def test_scans_keep_classes_and_lattice(tmp_path: Path, way: tuple[str, ...]) -> None:
    scan(tmp_path / "src/volume-0.hdf5")
    affine = np.array([[0, 0, 0.7, 3], [0, 0.8, 0, -2], [2.5, 0, 0, 1], [0, 0, 0, 1]])
    with h5py.File(tmp_path / "src/volume-0.hdf5", "a") as file:
        file.attrs.update(affine=affine, source="volume-0.nii")
    path = tmp_path / "src"
    for i, format in enumerate(way):
        path = run(path, tmp_path / str(i), format)
    with h5py.File(path / "volume-0.hdf5") as file:
        assert [name.decode() for name in file.attrs["classes"]] == list(CLASSES)
        np.testing.assert_array_equal(file.attrs["affine"], affine)
        assert file.attrs["source"] == "volume-0.nii"
        assert "channels" not in file.attrs


def test_the_channels_of_what_is_no_cube(tmp_path: Path) -> None:
    """Which no shape tells; a shape that seems to tell the wrong thing is never written."""
    for shape, kept in (((3, 5, 6, 7), "first"), ((7, 7, 7, 5), "last"), ((5, 5, 5, 5), "first")):
        source = tmp_path / str(shape)
        source.mkdir()
        np.save(source / "v.npy", counts(0, shape))
        np.save(source / "v.target.npy", np.zeros(1))
        volume = counts(0, shape)
        for format in ("hdf5", "zarr", "lbann", "npy"):
            said: list[str] = []
            outcomes = convert(
                source,
                tmp_path / f"{shape} {format}",
                Request(format),  # type: ignore[arg-type]
                channels="first",
                begun=lambda count, notices, said=said: said.extend(notices),  # type: ignore[misc]
            )
            assert [o.reason for o in outcomes] == [""]
            told = kept if format == "npy" else None
            assert said == ([] if told is None else [said[0]])
            assert told is None or f'channels="{told}"' in said[0]
            found = source_of(tmp_path / f"{shape} {format}", Seat(), told)  # type: ignore[arg-type]
            assert found.shape == shape
            assert found.read(0, Box.whole(shape)).tobytes() == volume.tobytes()
    for format, wrong in (("hdf5", "first"), ("zarr", "first"), ("lbann", "last")):
        with pytest.raises(DataError, match=f"its channels come .*, not {wrong}: use channels="):
            source_of(tmp_path / f"(3, 5, 6, 7) {format}", Seat(), wrong)  # type: ignore[arg-type]
