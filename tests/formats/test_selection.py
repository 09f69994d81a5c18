"""Some redshifts and some targets of every kind of source (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.errors import DataError
from hyperslab.formats.arrays.source import Hdf5Folder, NpyFolder
from hyperslab.formats.source import ScanOptions, Source
from hyperslab.formats.synthetic import SyntheticVolumes
from hyperslab.formats.tfrecord.source import TfRecordFolder
from hyperslab.formats.views import Selected, Subvolumes, selected
from hyperslab.geometry import Box
from tests.formats import scans, universes, writers

WHOLE = Box((0, 0, 0, 0), (4, 7, 7, 7))
REDSHIFTS = [0.0, 0.5, 1.5, 3.0]


def hdf5(folder: Path, **change: object) -> Hdf5Folder:
    for i in range(2):
        volume = universes.counts(i, (7, 7, 7, 4))
        universes.public(folder / f"univ_{i}.hdf5", volume, i, **change)
    return Hdf5Folder.open_folder(folder, ScanOptions())


def all_of(source: Source, sample: int = 1) -> np.ndarray:
    return source.read(sample, Box((0, 0, 0, 0), source.shape))


@pytest.mark.parametrize("wanted", [[0.0], [3.0], [0.5, 1.5], [3, 0], [1.5, 0.5, 0.0]], ids=str)
def test_channels_in_the_order_asked_for(tmp_path: Path, wanted: list[float]) -> None:
    source = hdf5(tmp_path)
    found = Selected(source, redshifts=wanted)
    channels = [REDSHIFTS.index(z) for z in wanted]
    assert found.shape == (len(wanted), 7, 7, 7)
    assert found.whole_shape == found.shape
    assert found.redshifts == tuple(wanted)
    assert found.stored_redshifts == tuple(REDSHIFTS)
    np.testing.assert_array_equal(all_of(found), source.read(1, WHOLE)[channels])
    box = Box((0, 2, 0, 3), (len(wanted), 7, 1, 5))
    expected = source.read(1, Box((0, 2, 0, 3), (4, 7, 1, 5)))[channels]
    np.testing.assert_array_equal(found.read(1, box), expected)
    assert found.dtype == np.int16
    assert list(found.names) == list(source.names)


def test_targets_in_the_order_asked_for(tmp_path: Path) -> None:
    source = hdf5(tmp_path)
    found = Selected(source, targets=["n_s", "Omega_m"])  # the files say N_spec
    assert found.parameters.names == ("N_spec", "Omega_m")
    assert Selected(source, targets="n_s").parameters.names == ("N_spec",)
    np.testing.assert_array_equal(found.target(1), source.target(1)[[2, 0]])
    whole = source.parameters
    assert found.parameters.ranges == {n: whole.ranges[n] for n in ("N_spec", "Omega_m")}
    np.testing.assert_array_equal(all_of(found), source.read(1, WHOLE))
    extras = found.extras(1)
    assert extras.names == found.parameters.names
    np.testing.assert_array_equal(
        extras.arrays["physPar"], source.extras(1).arrays["physPar"][[2, 0]]
    )
    np.testing.assert_array_equal(extras.arrays["redshifts"], REDSHIFTS)


def test_sub_volumes_of_a_selection(tmp_path: Path) -> None:
    for i in range(2):
        universes.public(tmp_path / f"{i}.hdf5", universes.counts(i, (8, 8, 8, 4)), i)
    source = Hdf5Folder.open_folder(tmp_path, ScanOptions())
    parts = Subvolumes(Selected(source, redshifts=[1.5]), 4)
    assert parts.shape == (1, 4, 4, 4)
    assert parts.redshifts == (1.5,)
    assert parts.stored_redshifts == tuple(REDSHIFTS)
    expected = Subvolumes(source, 4).read(13, Box((2, 0, 1, 0), (3, 4, 3, 4)))
    np.testing.assert_array_equal(parts.read(13, Box((0, 0, 1, 0), (1, 4, 3, 4))), expected)


def test_redshifts_of_mlperfs_records_are_the_public_ones(tmp_path: Path) -> None:
    writers.tfrecords(packed=True)(tmp_path)
    source = TfRecordFolder.open_folder(tmp_path, ScanOptions())
    found = Selected(source, redshifts=[0], targets=["sigma_8"])
    np.testing.assert_array_equal(all_of(found, 0), all_of(source, 0)[:1])
    assert found.target(0) == source.target(0)[1]


def test_nothing_asked_for_changes_nothing(tmp_path: Path) -> None:
    source = hdf5(tmp_path)
    assert selected(source, None, None) is source


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    source = hdf5(tmp_path)
    with pytest.raises(DataError, match=r"redshift 1 is not there: .*univ_0.* 0, 0\.5, 1\.5, 3$"):
        Selected(source, redshifts=[0.0, 1.0])
    with pytest.raises(DataError, match="redshift 3 is asked for twice"):
        Selected(source, redshifts=[3.0, 0.0, 3.0])
    with pytest.raises(DataError, match="no redshift is asked for"):
        Selected(source, redshifts=[])
    with pytest.raises(DataError, match=r"'omega_M' is not there, perhaps 'Omega_m'; .*N_spec"):
        Selected(source, targets=["omega_M"])
    with pytest.raises(DataError, match="'N_spec' is asked for twice"):
        Selected(source, targets=["n_s", "N_spec"])
    with pytest.raises(DataError, match="no parameter is asked for"):
        Selected(source, targets=[])


def test_without_redshifts_none_can_be_chosen(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)univ_0.*does not say.*leave data\.redshifts out"):
        Selected(hdf5(tmp_path / "a", redshifts=None), redshifts=[0.0])
    universes.public(tmp_path / "a/z.hdf5", universes.counts(3, (7, 7, 7, 4)), 3)
    mixed = Hdf5Folder.open_folder(tmp_path / "a", ScanOptions())
    with pytest.raises(DataError, match="neither do the other files"):
        Selected(mixed, redshifts=[0.0])
    writers.npy("first")(tmp_path / "b")
    with pytest.raises(DataError, match="does not say"):
        Selected(NpyFolder.open_folder(tmp_path / "b", ScanOptions()), redshifts=[0.0])


def test_scans_have_no_parameters(tmp_path: Path) -> None:
    synthetic = SyntheticVolumes((1, 4, 4, 4), 3, classes=3)
    with pytest.raises(DataError, match="a class for every voxel and no parameters"):
        Selected(synthetic, targets=["sigma_8"])
    scans.folder(tmp_path, 2)
    found = Hdf5Folder.open_folder(tmp_path, ScanOptions())
    with pytest.raises(DataError, match="does not say"):
        Selected(found, redshifts=[0.0])


def test_chosen_channels_keep_their_names(tmp_path: Path) -> None:
    source = hdf5(tmp_path)
    source.channel_names = ("a", "b", "c", "d")
    assert Selected(source, redshifts=[1.5, 0.0]).channel_names == ("c", "a")
    assert Selected(source, targets=["n_s"]).channel_names == source.channel_names
    source.channel_names = ()
    assert Selected(source, redshifts=[1.5, 0.0]).channel_names == ()


def test_what_is_asked_for_may_be_an_array(tmp_path: Path) -> None:
    hdf5(tmp_path)
    seat = universes.Seat()
    wanted = np.array([3.0, 0.0])
    with hs.open(tmp_path, seat, batch_size=1, split="all", redshifts=wanted) as data:
        assert data.shape == (2, 7, 7, 7)
