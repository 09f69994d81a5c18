"""Runs whose checkpoints are written behind the steps (tiers: one process; a few gloo ranks)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperslab.checkpoint.retention import latest
from tests.ranks import run_ranks
from tests.selection import in_gate
from tests.train.universes import run, write_recipe


@pytest.mark.parametrize("ranks", in_gate([1, 2], kept=[2]))
def test_checkpoints_behind_the_steps_are_the_same(
    tmp_path: Path, universes: Path, ranks: int
) -> None:
    read = []
    for name, background in (("with", "true"), ("without", "false")):
        recipe = write_recipe(tmp_path / f"{name}.yaml", universes, epochs=1)
        words = ["checkpoint.every_steps=1", f"checkpoint.background={background}"]
        if ranks == 1:
            run(recipe, *words)
        else:
            run_ranks(ranks, run, recipe, *words, "grid.depth=2")
        newest = latest(tmp_path / name)
        assert newest is not None
        assert newest.name == "step-00000003"
        files = [*newest.glob("*.safetensors")]
        assert files
        read.append({file.name: file.read_bytes() for file in files})
    assert read[0] == read[1]
