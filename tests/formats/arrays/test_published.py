"""CAMELS and Quijote as published, and folders that are not quite so (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.data.assemble import Reader
from hyperslab.data.transforms import transform_of
from hyperslab.errors import DataError
from hyperslab.formats import DataMap, MappedFolder
from hyperslab.formats.registry import find_format
from hyperslab.geometry import Box
from tests.formats.arrays.published import WIDTH, camels, quijote
from tests.formats.opening import source_of

WHOLE = Box((0, 0, 0, 0), (1, WIDTH, WIDTH, WIDTH))


def opened(path: Path, mapping: DataMap | None = None) -> MappedFolder:
    source = source_of(path, hs.Grid(), mapping=mapping)
    assert isinstance(source, MappedFolder)
    return source


@pytest.mark.parametrize("whole_folder", [True, False])
def test_camels_opens_by_its_path_alone(tmp_path: Path, whole_folder: bool) -> None:
    grids = camels(tmp_path)
    table = np.loadtxt(tmp_path / "params_LH_IllustrisTNG.txt")
    path = tmp_path if whole_folder else tmp_path / "Grids_Mcdm_IllustrisTNG_LH_128_z=0.0.npy"
    source = opened(path)
    assert source.shape == (1, WIDTH, WIDTH, WIDTH)
    assert source.dtype == np.float32
    assert list(source.names[:2]) == ["00", "01"]
    assert source.parameters.names == ("Omega_m", "sigma_8", "A_SN1", "A_AGN1", "A_SN2", "A_AGN2")
    assert source.parameters.ranges["A_SN1"] == pytest.approx((0.25, 4))
    box = Box((0, 3, 0, 8), (1, 9, 16, 16))
    for sample in (0, 7, 11):
        assert np.array_equal(source.read(sample, box)[0], grids[sample, 3:9, :, 8:])
        assert source.parameters.physical(source.target(sample)) == pytest.approx(table[sample])
    assert find_format(path)[0].name == "arrays"


def test_a_rank_reads_its_box_and_no_more(tmp_path: Path) -> None:
    camels(tmp_path)
    reader = Reader(opened(tmp_path), transform_of((), "log1p", None))
    before = hs.data.os_bytes_read()
    reader.read(5, Box((0, 8, 0, 0), (1, 16, WIDTH, WIDTH)))
    assert reader.bytes_read == 4 * 8 * WIDTH**2
    read = hs.data.os_bytes_read() - before
    assert reader.bytes_read < read < reader.bytes_read + 16384, "of 192 KiB in the file"


def test_one_of_several_fields_is_chosen(tmp_path: Path) -> None:
    grids = camels(tmp_path, fields=("Mcdm", "Mgas"))
    with pytest.raises(DataError, match=r"CAMELS with 2 kinds of files: .*\n.*data\.files="):
        opened(tmp_path)
    source = opened(tmp_path, DataMap(files="Grids_Mgas_*"))
    assert np.array_equal(source.read(3, WHOLE)[0], 2 * grids[3])
    assert source.parameters.names[0] == "Omega_m"


def test_gravity_only_simulations_have_two_parameters(tmp_path: Path) -> None:
    camels(tmp_path)
    (tmp_path / "params_LH_IllustrisTNG.txt").rename(tmp_path / "params_LH_Nbody.txt")
    old = tmp_path / "Grids_Mcdm_IllustrisTNG_LH_128_z=0.0.npy"
    old.rename(tmp_path / "Grids_Mtot_Nbody_IllustrisTNG_LH_128_z=0.0.npy")
    assert opened(tmp_path).parameters.names == ("Omega_m", "sigma_8")


def test_a_set_of_one_cosmology_is_scaled_by_the_prior(tmp_path: Path) -> None:
    camels(tmp_path)
    np.savetxt(tmp_path / "params_LH_IllustrisTNG.txt", [[0.3, 0.8, 1, 1, 1, 1]] * 12)
    source = opened(tmp_path)
    assert source.target(4)[:2] == pytest.approx([0, 0], abs=1e-12)
    assert source.parameters.ranges["sigma_8"] == pytest.approx((0.6, 1.0))


@pytest.mark.parametrize("at", ["", "latin_hypercube"])
def test_quijote_opens_by_its_path_alone(tmp_path: Path, at: str) -> None:
    table = quijote(tmp_path)
    folder = tmp_path / "latin_hypercube"
    if not at:  # the table lies above the realisations, as in a clone of the repository
        (folder / "latin_hypercube_params.txt").rename(tmp_path / "latin_hypercube_params.txt")
    source = opened(folder)
    assert source.names[2] == "2/df_m_128_z=0", "not 10, which sorts before 2"
    assert source.parameters.names == ("Omega_m", "Omega_b", "h", "n_s", "sigma_8")
    assert source.parameters.ranges["h"] == pytest.approx((0.5, 0.9))
    for sample in (0, 2, 10):
        stored = np.load(folder / str(sample) / "df_m_128_z=0.npy")
        assert np.array_equal(source.read(sample, WHOLE)[0], stored)
        assert source.parameters.physical(source.target(sample)) == pytest.approx(table[sample])


def test_some_realisations_have_the_rows_of_their_numbers(tmp_path: Path) -> None:
    table = quijote(tmp_path)
    folder = tmp_path / "latin_hypercube"
    for number in (0, 1, 2, 5):
        (folder / str(number) / "df_m_128_z=0.npy").unlink()
    source = opened(folder)
    assert source.names[0] == "3/df_m_128_z=0"
    assert source.parameters.physical(source.target(0)) == pytest.approx(table[3])


def test_two_kinds_of_realisations_are_told_apart(tmp_path: Path) -> None:
    quijote(tmp_path)
    folder = tmp_path / "latin_hypercube"
    for number in range(3):
        (folder / f"NCV_{number}").mkdir()
        np.save(folder / f"NCV_{number}" / "df_m_128_z=0.npy", np.ones([WIDTH] * 3, np.float32))
    with pytest.raises(DataError, match=r"which of its 12 rows .*\n.*data\.files"):
        opened(folder)
    assert len(opened(folder, DataMap(files="NCV_*/*")).names) == 3


@pytest.mark.parametrize(
    ("rows", "words"),
    [(1, "has 1 rows"), (11, "has 11 rows"), (13, "has 13 rows"), (0, "has no row of numbers")],
)
def test_rows_are_counted(tmp_path: Path, rows: int, words: str) -> None:
    camels(tmp_path)
    table = tmp_path / "params_LH_IllustrisTNG.txt"
    table.write_text("0.3 0.8 1 1 1 1\n" * rows)
    with pytest.raises(DataError, match=words) as caught:
        opened(tmp_path)
    assert str(table) in str(caught.value)
    assert "docs/own-data.md" in str(caught.value)


def test_a_realisation_without_a_row_is_named(tmp_path: Path) -> None:
    quijote(tmp_path)
    table = tmp_path / "latin_hypercube" / "latin_hypercube_params.txt"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(DataError, match=r"rows 0 to 10, but sample '11/df_m_128_z=0' would have"):
        opened(tmp_path / "latin_hypercube")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    camels(tmp_path)
    path = tmp_path / "Grids_Mcdm_IllustrisTNG_LH_128_z=0.0.npy"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(DataError, match=r"Grids_Mcdm.* cannot be read as npy, perhaps truncated"):
        opened(tmp_path)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    camels(tmp_path)
    source = opened(tmp_path)
    path = tmp_path / "Grids_Mcdm_IllustrisTNG_LH_128_z=0.0.npy"
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(DataError, match=r"sample '03' has changed since"):
        source.read(3, WHOLE)
