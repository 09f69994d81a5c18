"""`hyperslab train --resume` of a run that is done (tier: no process)."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.recipe.load import load_recipe
from hyperslab.train.run import is_done, train


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_nothing_is_left_of_a_finished_run(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "data: {synthetic: {width: 16, samples: 10}, batch_size: 2}\nmodel: {variant: lbann}\n"
        f"epochs: 2\ndevice: cpu\noutput: {tmp_path / 'run'}\n"
    )
    assert not is_done(load_recipe(recipe))
    train(load_recipe(recipe, ["epochs=1"]))
    assert not is_done(load_recipe(recipe))
    train(load_recipe(recipe), resume=True)
    assert is_done(load_recipe(recipe))
    assert not is_done(load_recipe(recipe, ["optimizer.learning_rate=0.5"]))
    before = files(tmp_path / "run")
    again = CliRunner().invoke(app, ["train", str(recipe), "--resume"])
    assert again.exit_code == 0, again.exception
    assert f"all 2 epochs of {tmp_path / 'run'} are done: nothing is left" in again.output
    assert files(tmp_path / "run") == before
