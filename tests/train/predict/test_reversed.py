"""Parts of LBANN's are predicted along the axes along which they are read in training.

Tier: no process.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hyperslab.checkpoint.run_state import DataCard
from hyperslab.comm import Grid
from hyperslab.data import Parameters
from hyperslab.errors import DataError
from hyperslab.geometry import Box
from hyperslab.recipe.data import DataSection
from hyperslab.train.input_files import InputFile
from hyperslab.train.input_volumes import ArrayVolume, open_volume
from tests.formats.opening import source_of
from tests.formats.universes import Seat, counts, public
from tests.formats.writers import split

SHAPE = (4, 5, 5, 5)
ABOUT = DataCard(SHAPE, SHAPE, (), Parameters.normalised("abcd"))


def opened(path: Path, format: str | None) -> ArrayVolume:
    data = DataSection(path=path.parent, batch_size=1, format=format)
    found = open_volume(InputFile(path, path.stem), ABOUT, data, Grid(), path.parent)
    assert isinstance(found, ArrayVolume)
    return found


@pytest.mark.parametrize("format", [None, "lbann", "hdf5"])
def test_axes_are_those_of_training(tmp_path: Path, format: str | None) -> None:
    split(tmp_path)
    source = source_of(tmp_path, Seat(), format=format)
    file = opened(Path(source.where(1)), format)
    box = Box((1, 0, 2, 1), (3, 4, 5, 3))
    np.testing.assert_array_equal(file.source.read(0, box), source.read(1, box))
    assert file.shape == source.shape


def test_a_public_file_is_not_lbanns(tmp_path: Path) -> None:
    public(tmp_path / "u.hdf5", counts(0, (5, 5, 5, 4)))
    with pytest.raises(DataError, match="stores channels last"):
        opened(tmp_path / "u.hdf5", "lbann")
