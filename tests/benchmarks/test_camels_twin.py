"""Universes in the layout of CAMELS' 3D grids (tier: no process)."""

from __future__ import annotations

import sys
from pathlib import Path

import camels_twin
import h5py
import numpy as np
import pytest

import hyperslab as hs
from hyperslab.formats import DataMap
from tests.train.universes import write_universes

REDSHIFTS = ("0.0", "0.5", "1.5", "3.0")


def test_it_opens_as_camels_does(tmp_path: Path) -> None:
    universes = write_universes(tmp_path / "universes", 5, width=8)
    camels_twin.write_twin(universes, tmp_path / "CMD")
    said = DataMap(fields=tuple(f"Grids_*_z={redshift}.npy" for redshift in REDSHIFTS))
    with (
        hs.open(universes, hs.Grid(), batch_size=5, split="all", transform=None) as old,
        hs.open(
            tmp_path / "CMD", hs.Grid(), batch_size=5, split="all", transform=None, mapping=said
        ) as new,
    ):
        assert new.source.parameters.names == old.source.parameters.names
        assert new.shape == (4, 8, 8, 8)
        whole = hs.geometry.Box((0,) * 4, new.shape)
        for sample in range(5):
            counts = np.asarray(old.source.read(sample, whole), np.float64)
            density = new.source.read(sample, whole)
            physical = old.source.parameters.physical(old.source.target(sample))
            assert new.source.parameters.physical(new.source.target(sample)) == pytest.approx(
                physical
            )
            contrast = counts / counts.mean((1, 2, 3), keepdims=True)
            assert density == pytest.approx(physical[0] * 2.775e11 * contrast, rel=1e-3)


def test_summed_voxels_have_the_particles_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    universes = write_universes(tmp_path / "universes", 3, width=8)
    words = [str(universes), str(tmp_path / "CMD"), "--sum", "2", "--count", "2"]
    monkeypatch.setattr(sys, "argv", ["camels_twin.py", *words])
    camels_twin.main()
    grids = np.load(tmp_path / "CMD" / "Grids_Mtot_Twin_LH_4_z=0.5.npy")
    assert grids.shape == (2, 4, 4, 4)
    with h5py.File(universes / "univ_ics_001.hdf5") as file:
        counts = file["full"][..., 1].astype(float)
    eight = counts[2:4, 4:6, 6:8].sum() / (8 * counts.mean())
    assert grids[1, 1, 2, 3] / grids[1].mean() == pytest.approx(eight, rel=1e-5)
    assert len(np.loadtxt(tmp_path / "CMD" / "params_LH_Twin.txt")) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"count": 4}, "has 3 universes, not 4"),
        ({"summed": 3}, r"--sum 3 does not divide \[8, 8, 8\]"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, options: dict[str, int], words: str) -> None:
    universes = write_universes(tmp_path / "universes", 3, width=8)
    with pytest.raises(hs.DataError, match=words):
        camels_twin.write_twin(universes, tmp_path / "CMD", **options)
    assert not (tmp_path / "CMD").exists()
