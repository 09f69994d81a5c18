"""Runs whose checkpoints are written behind the steps (tiers: one process; a few gloo ranks)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hyperslab.checkpoint import snapshot
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


def test_averages_take_the_place_of_weights_that_are_copied(
    tmp_path: Path, universes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = snapshot.SnapshotMemory.finish

    def slowly(memory: snapshot.SnapshotMemory) -> None:
        time.sleep(0.3)  # meanwhile a validation would begin
        finish(memory)

    monkeypatch.setattr(snapshot, "SMALLEST_LATE", 1)
    monkeypatch.setattr(snapshot.SnapshotMemory, "finish", slowly)
    read = []
    for name, background in (("with", "true"), ("without", "false")):
        recipe = write_recipe(tmp_path / f"{name}.yaml", universes, epochs=1)
        run(recipe, "ema=0.5", "checkpoint.every_steps=1", f"checkpoint.background={background}")
        newest = latest(tmp_path / name)
        assert newest is not None
        read.append({file.name: file.read_bytes() for file in newest.glob("*.safetensors")})
    assert read[0] == read[1]
