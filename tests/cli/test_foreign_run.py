"""A run's folder from somebody else: no command runs what its files hold (tier: no process)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyperslab.checkpoint.retention import folder_of
from hyperslab.cli import app
from hyperslab.errors import HyperslabError
from hyperslab.train.evaluate import evaluate
from tests.checkpoint.old import attacking_pickle, write_sums
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


# The runner's standard error has no descriptor.
pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")


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


@pytest.mark.parametrize("rehashed", [False, True], ids=["", "with its checksums"])
def test_no_file_of_a_run_is_executed(trained: Path, rehashed: bool) -> None:
    victims = sorted(
        file.relative_to(trained)
        for file in (trained / "run").rglob("*")
        if file.is_file() and "best" not in file.parts
    )
    assert len(victims) > 10
    spare = trained.with_name("spare")
    shutil.copytree(trained, spare, symlinks=True)
    for victim in victims:
        of_checkpoint = "checkpoints" in victim.parts
        if rehashed and not of_checkpoint:
            continue
        shutil.rmtree(trained)
        shutil.copytree(spare, trained, symlinks=True)
        (trained / victim).write_bytes(attacking_pickle(trained / "attacked"))
        if rehashed:
            write_sums((trained / victim).parent, format=2)
        check(trained, OF_CHECKPOINTS if of_checkpoint else OF_OTHERS)
    shutil.rmtree(trained)
    shutil.move(spare, trained)


def test_no_pickle_of_an_old_checkpoint_is_executed(trained: Path) -> None:
    """It has the files that earlier versions read, and its checksums are right."""
    path = (folder_of(trained / "run") / "best").resolve()
    for name in (".metadata", "extra.pt", "__0_0.distcp"):
        (path / name).write_bytes(attacking_pickle(trained / "attacked"))
    write_sums(path)
    check(trained, COMMANDS)
    write_sums(path, format=2)
    check(trained, COMMANDS)


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
