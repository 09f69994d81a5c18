"""Boxes of files, against the array that was written (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hyperslab.data import Subvolumes, os_bytes_read
from hyperslab.errors import DataError, LayoutError
from hyperslab.formats.arrays.open import MOST_OPEN_FILES
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.universes import CENTRE, GRIDS, NAMES, Seat, counts, folder, public, unit, write

SHAPE = (7, 6, 5, 4)  # awkward, channel last


def opened(path: Path, channels: Any = None) -> Any:
    return source_of(path, Seat(), channels)


def assembled(source: Any, sample: int, extents: dict[str, int]) -> Any:
    """The whole volume from the boxes of all ranks."""
    whole = np.full(source.shape, 99, source.dtype)
    for seat in Seat.all(**extents):
        box = seat.partition((2, *source.shape)).box(seat.coords)
        box = Box(box.lo[1:], box.hi[1:])
        whole[box.slices()] = source.read(sample, box)
    return whole


@pytest.mark.parametrize("extents", GRIDS, ids=str)
@pytest.mark.parametrize("chunks", [None, (4, 4, 2, 4), (3, 5, 5, 1)], ids=str)
def test_boxes_make_up_the_volume(tmp_path: Path, extents: dict[str, int], chunks: Any) -> None:
    volume = counts(0, SHAPE)
    write(tmp_path / "u.hdf5", unitPar=unit(0), redshifts=np.zeros(4))
    with h5py.File(tmp_path / "u.hdf5", "a") as file:
        file.create_dataset("full", data=volume, chunks=chunks)
    source = opened(tmp_path)
    whole = assembled(source, 0, extents)
    assert source.shape == (4, 7, 6, 5)
    assert whole.tobytes() == np.moveaxis(volume, -1, 0).tobytes()


@pytest.mark.parametrize("dtype", ["int16", "uint16", "float32", ">i2"])
@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("keys", [("full", "unitPar"), ("x", "y")])
def test_every_layout(tmp_path: Path, dtype: str, order: str, keys: tuple[str, str]) -> None:
    volume = counts(0, (2, 5, 5, 5), dtype)
    stored = volume if order == "first" else np.moveaxis(volume, 0, -1)
    write(tmp_path / "a.h5", **{keys[0]: stored, keys[1]: np.float32([0.5, -1])})
    source = opened(tmp_path)
    assert source.dtype.isnative
    assert source.target(0).tolist() == [0.5, -1]
    np.testing.assert_array_equal(source.read(0, Box.whole(source.shape)), volume, strict=False)


def test_names_of_parameters(tmp_path: Path) -> None:
    text = h5py.string_dtype()
    for i, names in enumerate([np.array(NAMES, "S12"), np.array(NAMES, dtype=text), None]):
        public(tmp_path / str(i) / "u.hdf5", counts(i, (4, 4, 4, 2)), i, namePar=names)
    assert opened(tmp_path / "0").parameters.names == NAMES
    assert opened(tmp_path / "1").parameters.names == NAMES
    assert opened(tmp_path / "2").parameters.names == ("Omega_m", "sigma_8", "n_s", "H_0")


def test_physical_values_come_from_the_files(tmp_path: Path) -> None:
    folder(tmp_path, 5)
    parameters = opened(tmp_path).parameters
    shown = np.array([[0.3, -0.2, 1, 0], [-1, 0, 0.5, 0.25]])
    np.testing.assert_allclose(parameters.physical(shown), CENTRE * (1 + 0.1 * shown), rtol=1e-12)
    assert parameters.ranges["H_0"] == pytest.approx((63, 77))
    assert parameters.misfit < 1e-12


def test_a_constant_parameter_and_missing_physical_values(tmp_path: Path) -> None:
    for i in range(3):
        shown = np.array([0.1 * i, 0.7])
        public(
            tmp_path / f"{i}.h5",
            counts(i, (4, 4, 4, 2)),
            unitPar=shown,
            physPar=shown + 1,
            namePar=None,
        )
    physical = opened(tmp_path).parameters.physical(np.array([9.0, 9.0]))
    np.testing.assert_allclose(physical, [10.0, 1.7], rtol=1e-12)
    public(tmp_path / "3.h5", counts(3, (4, 4, 4, 2)), unitPar=shown, physPar=None, namePar=None)
    assert opened(tmp_path).parameters.physical(np.array([9.0, 8.0])).tolist() == [9.0, 8.0]


def test_the_channel_order_is_asked_for_where_it_is_not_clear(tmp_path: Path) -> None:
    volume = counts(0, (4, 4, 4, 4))
    public(tmp_path / "u.hdf5", volume)
    with pytest.raises(DataError, match=r'\(4, 4, 4, 4\).*data\.channels.*channels="first"'):
        opened(tmp_path)
    whole = Box.whole(volume.shape)
    np.testing.assert_array_equal(opened(tmp_path, "first").read(0, whole), volume)
    np.testing.assert_array_equal(
        opened(tmp_path, "last").read(0, whole), np.moveaxis(volume, -1, 0)
    )
    public(tmp_path / "u.hdf5", counts(0, (5, 6, 7, 8)))  # no cube, and not four channels
    with pytest.raises(DataError, match="does not tell"):
        opened(tmp_path)


def test_channels_that_the_redshifts_contradict(tmp_path: Path) -> None:
    """Else an axis of space would be the channels of a network, without a word."""
    public(tmp_path / "u.hdf5", counts(0, (6, 6, 6, 4)))
    with pytest.raises(DataError, match=r"4 redshifts and is \(6, 6, 6, 4\), .* not come first"):
        opened(tmp_path, "first")
    assert opened(tmp_path, "last").shape == opened(tmp_path).shape == (4, 6, 6, 6)
    public(tmp_path / "u.hdf5", counts(0, (6, 6, 6, 3)))  # whose redshifts are of other channels
    assert opened(tmp_path, "first").shape == (6, 6, 6, 3)


def test_few_handles_stay_open(tmp_path: Path) -> None:
    volumes = folder(tmp_path, MOST_OPEN_FILES + 3)
    source = opened(tmp_path)
    for _ in range(2):
        for i, volume in enumerate(volumes):
            box = Box((1, 2, 3, 0), (3, 4, 7, 6))
            np.testing.assert_array_equal(source.read(i, box), volume[box.slices()])
    opener: Any = source.reader
    assert len(opener._open) == MOST_OPEN_FILES
    source.close()
    assert not opener._open
    np.testing.assert_array_equal(source.read(0, box), volumes[0][box.slices()])


@pytest.mark.parametrize(
    ("chunks", "lo"),
    [(None, (0, 48, 0, 0)), ((16, 16, 16, 4), (0, 0, 0, 32)), ((16, 16, 16, 4), (0, 48, 32, 0))],
    ids=str,
)
def test_the_system_reads_the_box_and_little_more(tmp_path: Path, chunks: Any, lo: Any) -> None:
    write(tmp_path / "u.hdf5", unitPar=unit(0))
    with h5py.File(tmp_path / "u.hdf5", "a") as file:
        file.create_dataset("full", data=counts(0, (96, 64, 64, 4)), chunks=chunks)
    source = opened(tmp_path, "last")
    box = Box(lo, source.shape)
    before = os_bytes_read()
    assert source.read(0, box).nbytes == box.size * 2
    assert 1 <= (os_bytes_read() - before) / (box.size * 2) < 1.03  # the file's own index


def test_subvolumes_tile_the_volume_in_the_documented_order(tmp_path: Path) -> None:
    volumes = folder(tmp_path, 2, (6, 6, 6, 4))
    cut = Subvolumes(opened(tmp_path), 2)
    assert len(cut.names) == 54
    assert cut.names[:4] == [f"a/univ_000_0_0_{i}" for i in range(3)] + ["a/univ_000_0_1_0"]
    index = cut.names.index("b/univ_000_2_0_1")
    np.testing.assert_array_equal(assembled(cut, index, {"height": 2}), volumes[1][:, 4:, :2, 2:4])
    np.testing.assert_array_equal(cut.target(index), unit(1))
    assert cut.volume(index) == "b/univ_000"
    with pytest.raises(LayoutError, match=r"univ_000.*6 x 6 x 6 .*sub-volumes of 4"):
        Subvolumes(cut.source, 4)


def truncated(path: Path) -> None:
    public(path, counts(0, (7, 7, 7, 4)))
    path.write_bytes(path.read_bytes()[:1000])


BAD: dict[str, tuple[Any, str]] = {
    "truncated": (truncated, "truncated"),
    "text": (lambda p: p.write_text("no HDF5"), "another format"),
    "empty": (lambda p: p.write_bytes(b""), "cannot be read"),
    "foreign": (lambda p: write(p, image=np.zeros(3)), r"not a known layout.*\['image'\]"),
    "no target": (
        lambda p: public(p, counts(0, (7, 7, 7, 4)), unitPar=None),
        "no data set 'unitPar'",
    ),
    "no y": (lambda p: write(p, x=counts(0, (7, 7, 7, 4))), "no data set 'y'"),
    "three dims": (lambda p: public(p, counts(0, (7, 7, 4))), r"shape \(7, 7, 4\)"),
    "no voxels": (lambda p: public(p, counts(0, (0, 7, 7, 4))), r"shape \(0, 7, 7, 4\)"),
    "dtype": (lambda p: public(p, counts(0, (7, 7, 7, 4), "float64")), "float64.*needs one of"),
    "other shape": (lambda p: public(p, counts(0, (8, 8, 8, 4))), r"stored is \(8, 8, 8, 4\) but"),
    "other dtype": (lambda p: public(p, counts(0, (7, 7, 7, 4), "uint16")), "dtype is uint16 but"),
    "other names": (
        lambda p: public(p, counts(0, (7, 7, 7, 4)), namePar=np.array(NAMES[::-1], "S9")),
        "names is .*all files of a data set are stored alike",
    ),
    "other order of channels": (
        lambda p: public(p, counts(0, (7, 7, 7, 4)), redshifts=np.array([3.0, 1.5, 0.5, 0.0])),
        r"redshifts \[3.0, 1.5, 0.5, 0.0\], those of a/univ_000.hdf5 \[0.0.*stored alike",
    ),
    "targets": (
        lambda p: public(p, counts(0, (7, 7, 7, 4)), unitPar=np.array([0, 0, np.nan, 0])),
        "unitPar.*finite",
    ),
    "target shape": (
        lambda p: public(p, counts(0, (7, 7, 7, 4)), unitPar=np.zeros((2, 2))),
        "'unitPar'.*needs a vector",
    ),
    "physical": (
        lambda p: public(p, counts(0, (7, 7, 7, 4)), physPar=np.zeros(3)),
        "'physPar' has 3 values",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_named(tmp_path: Path, kind: str) -> None:
    make, message = BAD[kind]
    folder(tmp_path, 2)
    (tmp_path / "z").mkdir()
    make(tmp_path / "z" / "bad.hdf5")
    with pytest.raises(DataError, match=f"(?s)z/bad.hdf5.*{message}"):
        opened(tmp_path)


def test_a_bad_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden/u.hdf5").touch()
    (tmp_path / "u.hdf5.partial").touch()
    with pytest.raises(DataError, match=r"no file \*\.hdf5 or \*\.h5"):
        source_of(tmp_path, Seat(), format="hdf5")
    with pytest.raises(DataError, match="nowhere: does not exist"):
        opened(tmp_path / "nowhere")
    with pytest.raises(DataError, match="file: is not a folder"):
        opened(tmp_path / "file")


def test_a_file_that_changes_or_goes_is_an_error(tmp_path: Path) -> None:
    folder(tmp_path, 2)
    source = opened(tmp_path)
    public(tmp_path / "a/univ_000.hdf5", counts(0, (8, 8, 8, 4)))
    (tmp_path / "b/univ_000.hdf5").unlink()
    with pytest.raises(DataError, match=r"a/univ_000\.hdf5.*has changed since"):
        source.read(0, Box.whole(source.shape))
    with pytest.raises(DataError, match=r"b/univ_000\.hdf5"):
        source.read(1, Box.whole(source.shape))
