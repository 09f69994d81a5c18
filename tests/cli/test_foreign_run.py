"""A run's folder from somebody else: no command runs what its files hold, or what lies beside them
(tiers: no process; one command)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hyperslab.checkpoint.retention import folder_of
from hyperslab.cli import app
from hyperslab.errors import HyperslabError, RecipeError
from hyperslab.studies.report.html import Page
from hyperslab.studies.sweep.schema import load_sweep
from hyperslab.train.evaluate import evaluate
from tests.checkpoint.forged import attacking_pickle, write_sums
from tests.selection import by_rotation, in_gate
from tests.train.universes import narrow_network, run, write_recipe, write_universes

COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "predict": lambda home: ["predict", f"{home}/run", f"{home}/data", "--out", f"{home}/out"],
    "evaluate": lambda home: ["evaluate", f"{home}/run"],
    "resume": lambda home: ["train", f"{home}/run/recipe.yaml", "--resume", "epochs=2"],
    "report": lambda home: ["report", f"{home}/run"],
    "inspect": lambda home: ["inspect", f"{home}/run"],
    "inspect a checkpoint": lambda home: ["inspect", f"{folder_of(home / 'run')}/best"],
}
OF_CHECKPOINTS = ("predict", "evaluate", "resume")
OF_OTHERS = ("report", "resume", "inspect")


pytestmark = [
    # The runner's standard error has no descriptor.
    pytest.mark.filterwarnings("ignore:Unable to enable fault handler"),
    pytest.mark.usefixtures("undrawn"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with universes and a run, evaluated; its recipe knows where it is."""
    home = tmp_path_factory.mktemp("foreign") / "home"
    write_universes(home / "data", 13)
    recipe = write_recipe(home / "run.yaml", home / "data", epochs=1, checkpoint={"every": 1})
    with narrow_network():
        run(recipe)
        evaluate(home / "run")
        yield home


@pytest.mark.parametrize("together", in_gate([1, 3], kept=[1]), ids=["in turn", "all commands"])
@pytest.mark.parametrize("rehashed", [False, True], ids=["", "with its checksums"])
def test_no_file_of_a_run_is_executed(trained: Path, rehashed: bool, together: int) -> None:
    """In the gate one command meets each file, in turn."""
    victims = sorted(
        file.relative_to(trained)
        for file in (trained / "run").rglob("*")
        if file.is_file() and "best" not in file.parts
    )
    assert len(victims) > 10
    spare = trained.with_name("spare")
    shutil.copytree(trained, spare, symlinks=True)
    for turn, victim in enumerate(victims):
        of_checkpoint = "checkpoints" in victim.parts
        if rehashed and not of_checkpoint:
            continue
        shutil.rmtree(trained)
        shutil.copytree(spare, trained, symlinks=True)
        (trained / victim).write_bytes(attacking_pickle(trained / "attacked"))
        if rehashed:
            write_sums((trained / victim).parent, format=2)
        commands = OF_CHECKPOINTS if of_checkpoint else OF_OTHERS
        check(trained, (commands * 2)[turn % 3 :][:together])
    shutil.rmtree(trained)
    shutil.move(spare, trained)


def test_no_pickle_beside_a_checkpoint_is_executed(trained: Path) -> None:
    """Its checksums are right."""
    path = (folder_of(trained / "run") / "best").resolve()
    for name in (".metadata", "extra.pt", "__0_0.distcp"):
        (path / name).write_bytes(attacking_pickle(trained / "attacked"))
    write_sums(path)
    check(trained, COMMANDS)
    write_sums(path, format=2)
    check(trained, [*OF_CHECKPOINTS, "inspect a checkpoint"])


def check(home: Path, commands: Iterable[str]) -> None:
    """Run them: they may fail, in words."""
    for command in commands:
        arguments = COMMANDS[command](home)
        result = CliRunner().invoke(app, arguments)
        expected = (
            isinstance(result.exception, (SystemExit, HyperslabError)) or not result.exception
        )
        assert expected, (arguments, result.exception)
        assert not (home / "attacked").exists(), arguments


EVIL = """
import pathlib
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from hyperslab.formats.synthetic import SyntheticVolumes

pathlib.Path({mark!r}).touch()

class Net(nn.Module):
    pass

class Data(SyntheticVolumes):
    pass

class Steps(SGD):
    pass

class Rates(StepLR):
    pass

class Log:
    def __init__(self, run, settings, step):
        pass
    def add(self, values, step):
        pass
    def flush(self):
        pass
    def close(self):
        pass
"""
SECTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "model": lambda evil: {"model": {"target": f"{evil}.Net"}},
    "an argument of the model": lambda evil: {
        "model": {"target": "torch.nn.ModuleList", "modules": [{"target": f"{evil}.Net"}]}
    },
    "a network that a program has made": lambda evil: {
        "model": {"name": "python", "python_class": f"{evil}.Net", "digest": "0"}
    },
    "data": lambda evil: {"data": {"target": f"{evil}.Data", "batch_size": 4}},
    "plugins": lambda evil: {"data+": {"plugins": [evil]}},
    "plugins with a format": lambda evil: {"data+": {"plugins": [evil], "format": "evil"}},
    "loss": lambda evil: {"loss": {"target": f"{evil}.Net"}},
    "an argument of the loss": lambda evil: {
        "loss": {"target": "torch.nn.ModuleList", "modules": {"target": f"{evil}.Net"}}
    },
    "metrics": lambda evil: {"metrics": {"m": {"target": f"{evil}.Net"}}},
    "optimizer": lambda evil: {"optimizer": {"target": f"{evil}.Steps", "lr": 0.1}},
    "schedule": lambda evil: {
        "optimizer": {"name": "adam", "schedule": {"target": f"{evil}.Rates", "step_size": 1}}
    },
    "loggers": lambda evil: {"loggers": ["csv", {"target": f"{evil}.Log"}]},
    "what runs its arguments": lambda evil: {
        "model": {
            "target": "torch.fx.graph_module.reduce_graph_module",
            "body": {"_code": "def forward(self, x): return x\n"},
            "import_block": f"import {evil}\n",
        }
    },
}
UNUSED_BY_PREDICT = {"plugins", "plugins with a format", "loss", "an argument of the loss",
                     "metrics", "optimizer", "schedule", "data", "loggers"}  # fmt: skip
STRANGERS: dict[str, Callable[[Path, Path], list[str]]] = {
    "predict": lambda run, home: ["predict", f"{run}", f"{home}/data", "--out", f"{home}/out"],
    "evaluate": lambda run, home: ["evaluate", f"{run}"],
    "resume": lambda run, home: ["train", f"{run}/recipe.yaml", "--resume", "epochs=3"],
    "train": lambda run, home: ["train", f"{run}/recipe.yaml"],
    "plan": lambda run, home: ["plan", f"{run}/recipe.yaml", "--ranks", "1"],
    "scale": lambda run, home: [
        *("scale", "strong", f"{run}/recipe.yaml", "--ranks", "1", "--predict"),
        *("--output", f"{home}/scaled"),
    ],
    "sweep": lambda run, home: [
        *("sweep", f"{run}/sweep.yaml", "--dry-run", "--output", f"{home}/swept"),
    ],
    "inspect": lambda run, home: ["inspect", f"{run}/recipe.yaml"],
    "report": lambda run, home: ["report", f"{run}"],
}


@pytest.fixture
def stranger(trained: Path) -> Iterator[Path]:
    """The run in a folder of its own, with files beside and above that say if they are run."""
    folder = trained / "theirs" / "stranger"
    folder.parent.mkdir()
    shutil.copytree(trained / "run", folder, symlinks=True)
    for place in (folder, folder.parent, trained):
        (place / "evil.py").write_text(EVIL.format(mark=f"{trained}/attacked"))
    (folder / "sweep.yaml").write_text(
        "recipe: recipe.yaml\nvariants: {a: {}}\nrates: [0.1]\nseeds: [0]\n"
    )
    path = [*sys.path]
    yield folder
    sys.path[:] = path
    shutil.rmtree(folder.parent)
    (trained / "evil.py").unlink()
    for name in [name for name in sys.modules if name.endswith("evil")]:
        del sys.modules[name]


@pytest.mark.parametrize(("command", "third"), by_rotation(STRANGERS, "123"))
def test_a_strangers_recipe_runs_nothing_that_lies_there(
    trained: Path, stranger: Path, command: str, third: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every section that may name code, with files inside the folder, beside it and above it.

    In the gate every command meets a third of the sections, and every section three commands.
    """
    recipe = stranger / "recipe.yaml"
    honest = yaml.safe_load(recipe.read_text())
    from_above = {stranger: "evil", stranger.parent: "stranger.evil"}
    from_above[trained] = "theirs.stranger.evil"
    for number, (section, keys) in [*enumerate(SECTIONS.items())][int(third) - 1 :: 3]:
        here = [*from_above][number // 3 % 3]
        evil = from_above[here] if number % 2 else "evil"
        monkeypatch.chdir(here)
        changed = {**honest, "output": str(trained / "planted")}
        for key, value in keys(evil).items():
            changed[key.rstrip("+")] = {**honest["data"], **value} if "+" in key else value
        recipe.write_text(yaml.safe_dump(changed))
        error = CliRunner().invoke(app, STRANGERS[command](stranger, trained)).exception
        assert isinstance(error, (SystemExit, HyperslabError, type(None))), (section, error)
        assert not (trained / "attacked").exists(), (section, evil)
        assert not (trained / "planted").exists(), section
        assert here.as_posix() not in sys.path, section
        if command in ("resume", "train") or (command == "predict" and "model" in section):
            assert isinstance(error, HyperslabError), (section, evil)
        if command == "predict" and section in UNUSED_BY_PREDICT:
            assert error is None, (section, evil, error)


def test_a_sweeps_own_words_are_no_words_of_the_user(
    trained: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are where the sweep and its recipe are the user's own."""
    monkeypatch.chdir(stranger)
    shutil.copy(stranger / "recipe.yaml", trained / "own.yaml")
    words = "variants: {a: {model: {target: evil.Net}}}\nrates: [0.1]\nseeds: [0]\n"
    for folder, recipe in ((stranger, "recipe.yaml"), (trained, "own.yaml")):
        (folder / "sweep.yaml").write_text(f"recipe: {recipe}\n{words}")
        line = ["sweep", f"{folder}/sweep.yaml", "--dry-run", "--output", f"{trained}/swept"]
        CliRunner().invoke(app, line)
        assert (trained / "attacked").exists() == (folder == trained)
    for name in ("attacked", "own.yaml", "sweep.yaml"):
        (trained / name).unlink()


def files_outside(home: Path, folder: Path) -> dict[str, int]:
    """What lies in ``home`` but not in ``folder``, and when it was changed."""
    paths = [path for path in home.rglob("*") if not path.is_relative_to(folder)]
    return {str(path): path.lstat().st_mtime_ns for path in paths if not path.is_dir()}


def test_a_stranger_names_no_place(
    trained: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run's folder asks for is written there, unless the user says where."""
    here = trained / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    recipe = stranger / "recipe.yaml"
    changed = yaml.safe_load(recipe.read_text()) | {"output": "../planted", "loggers": []}
    changed["data"] |= {"staging": str(trained / "planted"), "budget": 1}
    recipe.write_text(yaml.safe_dump(changed))
    sweep = stranger / "sweep.yaml"
    sweep.write_text(f"{sweep.read_text()}output: ../planted\n")
    before = files_outside(trained, stranger)
    steps = len((stranger / "steps.csv").read_text().splitlines())
    scale = [word for word in STRANGERS["scale"](stranger, trained) if "scaled" not in word]
    resume = ["train", str(recipe), "--resume", "epochs=4"]
    for line in (resume, [word for word in scale if word != "--output"]):
        result = CliRunner().invoke(app, line)
        assert result.exception is None, (line, result.exception)
    assert len((stranger / "steps.csv").read_text().splitlines()) > steps
    assert (stranger / "strong" / "study.json").exists()
    assert load_sweep(sweep).output == stranger / "sweep"
    assert load_sweep(sweep, output=here / "mine").output == here / "mine"
    assert files_outside(trained, stranger) == before
    here.rmdir()


LINKED = {
    "checkpoints": ["resume"],
    "logs": ["resume", "evaluate on 2 ranks"],
    "tensorboard": ["resume"],
    "evaluation": ["resume", "evaluate"],
    "sweep": ["sweep"],
    "strong": ["scale"],
    "steps.csv": ["resume"],
    "report-figures": ["figures"],
}


@pytest.mark.parametrize("name", LINKED)
def test_nothing_is_written_through_a_strangers_links(
    trained: Path, stranger: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "precious"
    if (stranger / name).exists():
        (stranger / name).rename(precious)
    elif name != "steps.csv":
        precious.mkdir()
    (stranger / name).symlink_to(precious)
    monkeypatch.setattr("hyperslab.studies.report.page_of", lambda _: Page("", "", [], []))
    before = files_outside(tmp_path, stranger)
    run = str(stranger)
    lines = {
        "resume": ["train", f"{run}/recipe.yaml", "--resume", "epochs=3"],
        "evaluate": ["evaluate", run],
        "evaluate on 2 ranks": ["evaluate", run, "--ranks", "2"],
        "sweep": ["sweep", f"{run}/sweep.yaml"],
        "scale": ["scale", "strong", f"{run}/recipe.yaml", "--ranks", "1", "--predict"],
        "figures": ["report", run, "--figures", "png"],
    }
    for command in LINKED[name]:
        error = CliRunner().invoke(app, lines[command]).exception
        assert isinstance(error, RecipeError), (command, error)
        assert f"{name} leads to {precious}, out of the folder" in str(error), command
    assert files_outside(tmp_path, stranger) == before
    if name == "checkpoints":  # what is only read may lie anywhere
        assert CliRunner().invoke(app, lines["evaluate"]).exception is None


NET = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.mean((2, 3, 4)))

def error(prediction, target):
    return (prediction - target).abs().mean()
"""


def test_the_users_own_run_needs_no_word_in_any_command(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network of one's own in the current folder, and a function that the user has named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_trusted_net.py").write_text(NET)
    write_recipe(
        tmp_path / "mine.yaml",
        trained / "data",
        model={"target": "my_trusted_net.Mine", "outputs": "${data.outputs}"},
        metrics={"error": {"target": "none"}},
        epochs=1,
    )
    named = "metrics.error.target=my_trusted_net.error"
    lines = [
        ["plan", "mine.yaml", "--ranks", "1"],
        ["train", "mine.yaml", named],
        ["evaluate", "mine"],
        ["predict", "mine", f"{trained}/data", "--out", "out"],
        ["train", "mine/recipe.yaml", "--resume", "epochs=2"],
        ["plan", "mine/recipe.yaml", "--ranks", "1"],
        ["inspect", "mine/recipe.yaml"],
        ["report", "mine"],
    ]
    for line in lines:
        sys.path[:] = [place for place in sys.path if place != str(tmp_path)]
        result = CliRunner().invoke(app, [*line, *([named] if line[0] == "plan" else [])])
        assert result.exception is None, (line, result.exception)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user's"))
    lines[4][-1] = "epochs=3"
    for line in lines[2:5]:
        result = CliRunner().invoke(app, line)
        assert "name it on the command line: model.target=my_trusted_net.M" in str(result.exception)
    sys.modules.pop("my_trusted_net")


def test_the_current_folder_is_nowhere_looked_in(tmp_path: Path, trained: Path) -> None:
    """Libraries try to import what may not be there, and read entry points and settings."""
    folder = tmp_path / "stranger"
    shutil.copytree(trained / "run", folder, symlinks=True)
    shutil.rmtree(folder / "evaluation")  # whose figures take seconds to draw
    mark = tmp_path / "attacked"
    attack = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n"
    for name in ("triton", "opt_einsum", "mlflow", "hyperslab", "torch", "evil", "sitecustomize"):
        (folder / f"{name}.py").write_text(attack)
    (folder / "evil-1.dist-info").mkdir()
    (folder / "evil-1.dist-info" / "METADATA").write_text("Name: evil\nVersion: 1\n")
    (folder / "evil-1.dist-info" / "entry_points.txt").write_text(
        "[torch.backends]\nevil = evil:x\n[pydantic]\nevil = evil:x\n"
    )
    (folder / "matplotlibrc").write_text("svg.hashsalt: x\nfigure.dpi: not a number at all\n")
    start = "import sys; sys.path[:0] = [''] if sys.argv[1] else []\n"
    start += "sys.argv = ['hyperslab', 'report', '.']\n"
    start += "from hyperslab.__main__ import main; main()\n"
    (tmp_path / "start.py").write_text(start)
    command = [sys.executable, str(tmp_path / "start.py"), ""]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "figure.dpi" not in done.stderr
    assert not mark.exists()
