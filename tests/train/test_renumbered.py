"""Runs whose launcher deals ranks to nodes in several orders (tier: 4 ranks; 8 in the long run)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.launched import run_launched
from tests.selection import in_gate
from tests.train.universes import losses, run, write_recipe

FEW = ("data.batch_size=2", "data.counts=[4,1,1]")
HIGH = "data.shape=[4,16,64,16]"  # for the placement alone: depth is to lie inside a node


@pytest.mark.parametrize("eight", in_gate([False, True], kept=[False]))
def test_a_run_goes_on_in_another_order(tmp_path: Path, universes: Path, eight: bool) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=2 + eight, timeout=100)
    run(recipe, *FEW, f"output={tmp_path / 'serial'}")
    go_on = partial(run, resume=True)
    four = ("grid.depth=2", "grid.height=2")
    run_launched("abab", run, recipe, *FEW, *four, "epochs=1")
    run_launched("aabb", go_on, recipe, *FEW, *four, HIGH, "epochs=2")
    if eight:
        run_launched("abcdabcd", go_on, recipe, *FEW, *four, "grid.width=2")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "serial"), rel=1e-4)
