"""A run of an earlier version, with pickles, goes on where it is told to (tier: one process)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hyperslab.checkpoint.retention import latest
from hyperslab.checkpoint.run_state import RunState
from hyperslab.checkpoint.save_load import load, read_extra
from hyperslab.errors import CheckpointError
from hyperslab.train.trainer import Progress
from tests.checkpoint.old import save_pickled
from tests.train.universes import losses, run, write_recipe


def test_it_goes_on_as_if_it_had_none(
    tmp_path: Path, universes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[RunState] = []
    original = Progress.finish_epoch

    def note(self: Progress, *args: object) -> None:
        states.append(self.state)
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Progress, "finish_epoch", note)
    whole = write_recipe(tmp_path / "whole.yaml", universes, epochs=2)
    run(whole)
    states.clear()
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=1), tmp_path / "run"
    run(recipe)
    newest = latest(out)
    assert newest is not None
    model, optimizer = states[0].model, states[0].optimizer
    load(newest, model, optimizer)
    extra = read_extra(newest)
    shutil.rmtree(newest)
    save_pickled(newest, model, optimizer, **extra)
    with pytest.raises(CheckpointError, match=r"checkpoint\.trust_pickle=true"):
        run(recipe, "epochs=2", resume=True)
    run(recipe, "epochs=2", "checkpoint.trust_pickle=true", resume=True)
    assert losses(out) == losses(tmp_path / "whole")
    assert "trust_pickle" not in (out / "recipe.yaml").read_text()
    run(recipe, "epochs=2", resume=True)  # today's form
