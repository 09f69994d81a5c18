"""Loggers that fail, hang or are not installed (tier: no process)."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from hyperslab.errors import RecipeError
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.trust import Trust
from hyperslab.train import loggers
from hyperslab.train.history import STEP_COLUMNS, Reporter
from hyperslab.train.loggers import BackgroundLog, run_identity
from hyperslab.train.run import train
from tests.train.universes import narrow_network, write_recipe

WORDS = (
    "logger own failed and is off from here on (OSError: no space); steps.csv and epochs.csv go on"
)


class Failing:
    """Takes so many steps and fails at the next one."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.taken: list[int] = []

    def add(self, values: Mapping[str, float], step: int) -> None:
        if len(self.taken) == self.left:
            raise OSError("no space\nat all")
        self.taken.append(step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        raise AssertionError("it is off")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_one_warning_and_the_rest_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(2)
    logger = BackgroundLog("own", lambda: failing)
    for step in range(1, 6):
        logger.add({"loss": 1.0}, step)
        logger.flush()
    logger.close()
    assert failing.taken == [1, 2]
    assert warnings_of(caplog) == [WORDS]


def test_one_that_cannot_be_opened_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def open_log() -> Failing:
        raise ConnectionError("nobody there")

    logger = BackgroundLog("own", open_log)
    logger.add({"loss": 1.0}, 1)
    logger.close()
    assert [words.partition(";")[0] for words in warnings_of(caplog)] == [
        "logger own failed and is off from here on (ConnectionError: nobody there)"
    ]


def test_nobody_waits_for_one_that_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "CLOSING", 0.2)
    go_on = threading.Event()

    def open_log() -> Failing:
        go_on.wait(60)
        return Failing(0)

    logger = BackgroundLog("own", open_log)
    logger.add({"loss": 1.0}, 1)
    logger.close()
    go_on.set()
    assert [words.partition(";")[0] for words in warnings_of(caplog)] == [
        "logger own failed and is off from here on (TimeoutError: it did not take all that it was "
        "sent within 0.2 s)"
    ]


def test_the_history_goes_on_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter(tmp_path, measures=(), step=0, epoch=0, total_steps=4, loggers=["csv"])
    assert reporter.loggers == []
    reporter.loggers.append(BackgroundLog("own", lambda: Failing(1)))
    for step in range(1, 4):
        reporter.step({**dict.fromkeys(STEP_COLUMNS, 1.0), "step": step})
    reporter.close()
    lines = (tmp_path / "steps.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines[1:]] == ["1", "2", "3"]
    assert warnings_of(caplog) == [WORDS]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_library_that_is_missing_is_named_before_the_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        "data: {synthetic: {width: 16, samples: 10}, batch_size: 2}\nmodel: {variant: lbann}\n"
        f"device: cpu\nloggers: [{name}]\noutput: {tmp_path / 'run'}\n"
    )
    with pytest.raises(
        RecipeError, match=rf'loggers: {name} .*(pip install "{name}.*"|extra \[{name}\])'
    ):
        train(load_recipe(recipe))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_logger_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text("data: {path: x}\nloggers: [csv, comet]\noutput: run\n")
    with pytest.raises(RecipeError, match="loggers"):
        load_recipe(recipe)


def test_a_run_keeps_its_name_until_it_begins_anew(tmp_path: Path) -> None:
    names = iter("abcd")

    def of(*, new: bool, service: str = "one") -> str:
        return run_identity(tmp_path, service, new=new, make=lambda: next(names))

    assert [of(new=True), of(new=False), of(new=False, service="two")] == ["a", "a", "b"]
    assert [of(new=True), of(new=False, service="two")] == ["c", "b"]
    (tmp_path / "loggers.json").write_text('["damaged"')
    assert of(new=False) == "d"


class OwnLog:
    """A logger of anybody's, as a recipe may name it."""

    made: list[OwnLog] = []  # noqa: RUF012 - the test looks there

    def __init__(
        self, run: Path, settings: Mapping[str, object], step: int, prefix: str = ""
    ) -> None:
        self.about = (run.name, settings["epochs"], step, prefix)
        self.taken: dict[str, float] = {}
        self.closed = False
        OwnLog.made.append(self)

    def add(self, values: Mapping[str, float], step: int) -> None:
        self.taken.update(values)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_a_recipe_may_name_a_logger_of_anybodys(
    tmp_path: Path, universes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = {"target": "own_log_module.OwnLog", "prefix": "a"}
    monkeypatch.setitem(sys.modules, "own_log_module", sys.modules[__name__])
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=1, loggers=["csv", target])
    with narrow_network():
        train(load_recipe(recipe, trust=Trust(own=True, named=frozenset({target["target"]}))))
    (made,) = OwnLog.made
    assert made.about == ("run", 1, 0, "a")
    assert made.closed
    assert "step/loss" in made.taken
    assert load_recipe(tmp_path / "run" / "recipe.yaml").loggers[0] == "csv"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"target": "collections.OrderedDict"}, "not a logger: a class with add"),
        ({"target": "hyperslab.train.loggers.TensorboardLog", "other": 1}, "no argument 'other'"),
    ],
)
def test_a_target_that_is_no_logger_is_refused(
    target: dict[str, object], words: str, tmp_path: Path, universes: Path
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=1, loggers=[target])
    trust = Trust(own=True, named=frozenset({str(target["target"])}))
    with narrow_network(), pytest.raises(RecipeError, match=words):
        train(load_recipe(recipe, trust=trust))
