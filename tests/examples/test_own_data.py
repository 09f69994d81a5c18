"""Own files, data set and network, serial and cut (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.examples.twins import differing_lines, losses, printed
from tests.ranks import run_ranks
from tests.selection import in_gate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("universes")
    random = np.random.default_rng(0)
    table = random.random((12, 2))
    for i, (spread, _) in enumerate(table):
        field = random.lognormal(0, 0.2 + spread, (32, 32, 32))
        np.save(folder / f"delta_{i}.npy", (field / field.mean() - 1).astype(np.float32))
    np.savetxt(folder / "parameters.txt", table)
    return folder


@pytest.fixture(scope="module")
def serial(folder: Path) -> list[float]:
    found = losses(printed("own_data_serial", folder))
    assert len(found) == 3
    return found


def test_the_twins_differ_by_five_lines() -> None:
    different = differing_lines("own_data_serial", "own_data")
    assert len(different) == 5, different


@pytest.mark.parametrize("ranks", in_gate([1, 2], kept=[2]))
def test_the_losses_are_those_of_plain_torch(folder: Path, serial: list[float], ranks: int) -> None:
    for text in run_ranks(ranks, printed, "own_data", folder, ranks):
        assert losses(text) == pytest.approx(serial, rel=1e-4)
