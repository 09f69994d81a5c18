"""What is not stored, where a user says that it may be missing (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

import hyperslab as hs
from hyperslab.cli import app
from hyperslab.errors import DataError
from tests.formats.arrays.test_storage import NOT_THERE, targets

STORED = {
    "late": 0,
    "no chunk": 0,
    "some chunks": 4 * 8 * 8 * 4,
    "early": 0,
    "early, chunked": 0,
    "virtual, half of it": None,
}
"""How many values are there; as it comes, where the case says it itself."""


def make(folder: Path, case: str) -> Path:
    """A file in which something is not there."""
    with h5py.File(folder / "a.hdf5", "w") as file:
        targets(file)
        NOT_THERE[case][0](file, folder)
    return folder / "a.hdf5"


def opened(folder: Path, **how: bool) -> hs.data.Dataset:
    return hs.open(
        folder, hs.Grid(), batch_size=1, split="all", channels="last", transform=None, **how
    )


@pytest.mark.parametrize("case", STORED)
def test_fill_values_are_read_where_they_are_meant(tmp_path: Path, case: str) -> None:
    file = make(tmp_path, case)
    with pytest.raises(DataError, match="missing_chunks=True"):
        opened(tmp_path)
    with opened(tmp_path, missing_chunks=True) as data:
        ((x, _),) = data.epoch(0)
    with h5py.File(file) as there:
        wanted = np.moveaxis(there["full"][...], -1, 0)
    np.testing.assert_array_equal(x.local[0].numpy(), wanted)
    if STORED[case] is not None:
        assert np.count_nonzero(wanted) == STORED[case]


@pytest.mark.parametrize("case", ["virtual, source missing", "external, missing"])
def test_files_that_are_gone_stay_refused(tmp_path: Path, case: str) -> None:
    make(tmp_path, case)
    with pytest.raises(DataError, match=NOT_THERE[case][1]):
        opened(tmp_path, missing_chunks=True)


def test_commands_take_it(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder, "some chunks")
    command = ["inspect", str(folder), "--channels", "last"]
    assert "--missing-chunks" in str(CliRunner().invoke(app, command).exception)
    found = CliRunner().invoke(app, [*command, "--missing-chunks"])
    assert found.exit_code == 0, found.output
    assert "1 samples" in found.output
