"""An own network on universes, serial and cut (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.twins import differing_lines, losses, printed
from tests.ranks import run_ranks
from tests.selection import in_gate
from tests.train.universes import write_universes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_universes(tmp_path_factory.mktemp("own") / "universes", 10)


@pytest.fixture(scope="module")
def serial(folder: Path) -> list[float]:
    found = losses(printed("own_network_serial", folder))
    assert len(found) == 3
    assert found[2] < found[0]
    return found


def test_the_twins_differ_by_five_lines() -> None:
    different = differing_lines("own_network_serial", "own_network")
    assert len(different) == 5, different


@pytest.mark.parametrize("ranks", in_gate([1, 2], kept=[2]))
def test_the_losses_are_those_of_plain_torch(folder: Path, serial: list[float], ranks: int) -> None:
    for text in run_ranks(ranks, printed, "own_network", folder, ranks):
        assert losses(text) == pytest.approx(serial, rel=1e-4)
