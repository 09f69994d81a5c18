"""`hyperslab train --resume` of a run that is done (tier: no process, and one child process)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyperslab.checkpoint import newest_intact
from hyperslab.cli import app
from hyperslab.recipe.load import load_recipe
from hyperslab.train.run import train
from tests.forked import forked_commands


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_nothing_is_left_of_a_finished_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "data: {synthetic: {width: 16, samples: 10}, batch_size: 2}\n"
        "model: {name: multiscale, channels: [2, 4]}\n"
        f"epochs: 2\ndevice: cpu\noutput: {tmp_path / 'run'}\n"
    )
    again = ["train", str(recipe), "--resume"]
    train(load_recipe(recipe, ["epochs=1"]))
    assert not said_early(again)
    train(load_recipe(recipe), resume=True)
    assert not said_early([*again, "optimizer.learning_rate=0.5"])
    before = files(tmp_path / "run")
    found = CliRunner().invoke(app, again)
    assert found.exit_code == 0, found.exception
    assert f"all 2 epochs of {tmp_path / 'run'} are done: nothing is left" in found.output
    assert files(tmp_path / "run") == before
    found = CliRunner().invoke(app, [*again, "epochs=1"])
    assert f"2 epochs of {tmp_path / 'run'} are done, and epochs=1 asks for no" in found.output
    assert files(tmp_path / "run") == before
    with caplog.at_level("INFO"):  # it changes what may be changed, so ranks look
        train(load_recipe(recipe, ["optimizer.learning_rate=0.5", "epochs=1"]), resume=True)
    assert "and epochs=1 asks for no more: nothing is left to resume" in caplog.messages[-1]
    train(load_recipe(recipe), resume=True)
    newest = newest_intact(tmp_path / "run" / "checkpoints")
    assert newest is not None
    (newest / "state.json").write_text("{}")
    assert not said_early(again)  # the one before is that of the first epoch


class GoesOn(Exception):
    """Raised where a command begins what it does after a look at its words."""


def said_early(words: list[str]) -> bool:
    """Whether a command line is answered before anything is imported for it."""

    def goes_on() -> None:
        raise GoesOn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hyperslab.cli.train.rank.exit_when_stopped", goes_on)
        return "nothing is left" in CliRunner().invoke(app, words).output


SAID_EARLY = """
import sys
import hyperslab.cli
sys.argv[1:] = "train r.yaml --resume".split()
try:
    hyperslab.cli.main()
except SystemExit as end:
    print(end.code, *({"torch", "numpy", "h5py"} & set(sys.modules)))
"""


def test_the_same_command_says_so_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(
        "data: {synthetic: {width: 16, samples: 10}, batch_size: 2}\n"
        "model: {name: multiscale, channels: [2, 4]}\n"
        "epochs: 1\ndevice: cpu\noutput: run\n"
    )
    again = ["train", "r.yaml", "--resume"]
    assert not said_early(again)
    with forked_commands():
        subprocess.run([sys.executable, "-m", "hyperslab", "train", "r.yaml"], check=True)
    done = subprocess.run([sys.executable, "-c", SAID_EARLY], capture_output=True, text=True)
    assert done.stdout == "all 1 epochs of run are done: nothing is left to resume\n0\n", (
        done.stderr
    )
    # However it is said, as long as it is the same training, on whatever grid.
    for same in (
        ["train", "--resume", "r.yaml", "--ranks", "1"],
        ["train", "./r.yaml", "epochs=1", "--resume", "--output", "run"],
        ["train", "r.yaml", "grid.depth=2", "--ranks=2", "--resume", "data.batch_size=2"],
        ["train", "run/recipe.yaml", "--resume"],
        ["train", "run/recipe.yaml", "epochs=1", "--resume", "--ranks", "1", "--restarts", "3"],
        ["train", "run/recipe.yaml", "grid.width=3", "--ranks", "3", "--resume"],
        ["train", "run/recipe.yaml", "memory=auto", "--resume"],
        ["train", "r.yaml", "grid=auto", "--ranks", "1", "--resume"],
    ):
        assert said_early(same), same
        assert not said_early([word for word in same if word != "--resume"])
    # What could make another training of it, or an error, is left to the command.
    assert not said_early([*again, "epochs=2"])
    assert not said_early([*again, "--output", "elsewhere"])
    assert not said_early([*again, "--ranks", "2"])
    assert not said_early(["train", "run/recipe.yaml", "epochs=3", "--resume"])
    assert not said_early(["train", "run/recipe.yaml", "--ranks", "3", "--resume"])
    for changed in ("r.yaml", "run/recipe.yaml"):
        before = Path(changed).read_text()
        Path(changed).write_text(before.replace("epochs: 1", "epochs: 3"))
        assert not said_early(again)
        Path(changed).write_text(before)


def test_ranks_do_not_answer_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("data: {synthetic: {width: 16}, batch_size: 1}\ngrid: {depth: 2}\n")
    monkeypatch.setattr("hyperslab.cli.train.newest_intact", lambda folder: folder)
    monkeypatch.setattr("hyperslab.cli.train._epochs_done", lambda recipe, newest: recipe.epochs)
    assert said_early(["train", str(recipe), "--resume"])
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "9", "MASTER_ADDR": "localhost"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not said_early(["train", str(recipe), "--resume"])


def test_a_pipe_is_read_once() -> None:
    """A second reader would find nothing in it."""
    reader, writer = os.pipe()
    os.write(writer, b"epochs: x\n")
    os.close(writer)
    found = CliRunner().invoke(app, ["train", f"/dev/fd/{reader}", "--resume"])
    os.close(reader)
    assert "'data' is missing" in str(found.exception)
