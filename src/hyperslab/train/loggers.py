"""Sends the numbers of a run to TensorBoard, Weights & Biases and MLflow, beside its CSV files.

A logger is a `ScalarLog`: one class, and one line of `hyperslab.recipe.schema.LOGGERS`, or
anybody's class that a recipe names: ``loggers: [{target: my.Log}]``. Whatever
it raises switches it off with one warning, and the run goes on; each works on a thread of its own,
so that no step waits for it. Services are configured by their own environment variables
(WANDB_MODE, WANDB_PROJECT; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME) and know a resumed run by a
name that its folder keeps.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hyperslab.errors import RecipeError
from hyperslab.recipe.instantiate import Maker, RightKind
from hyperslab.recipe.schema import LOGGERS
from hyperslab.recipe.section import TargetSection
from hyperslab.util.atomic_files import write_text
from hyperslab.util.documents import read_json
from hyperslab.util.optional_libraries import importing

log = logging.getLogger("hyperslab")


@runtime_checkable
class ScalarLog(Protocol):
    """Takes numbers by name; whatever it raises switches it off."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Take the numbers of a step, counted from 1."""

    def flush(self) -> None:
        """Write what waits, at the end of an epoch."""

    def close(self) -> None:
        """Finish, at the end of the run or of this part of it."""


class LoggerClass(Protocol):
    """Makes the logger of a run that goes on after ``step`` steps; is imported when a run has it.

    ``settings``, nested dictionaries of what JSON can say, are shown beside the numbers.
    """

    library: str | None
    """Names the library that it needs, and the extra that has it; None where all have it."""

    def __call__(self, run: Path, settings: Mapping[str, Any], step: int) -> ScalarLog: ...


CLOSING = 20.0  # [s] that the end of a run waits for what has not been sent yet
LONGEST_QUEUE = 100_000  # steps that wait to be sent; more come together only where one hangs


class BackgroundLog:
    """Opens a logger by ``open_log`` on a thread of its own, and hands on what comes, in order.

    If it fails, or cannot keep up, one warning is logged and the rest is dropped; the run goes on.
    """

    def __init__(self, name: str, open_log: Callable[[], ScalarLog]) -> None:
        self.name = name
        self._off = False
        self._waiting: queue.SimpleQueue[Callable[[ScalarLog], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(open_log,), name=f"logger {name}", daemon=True
        )
        self._thread.start()

    def add(self, values: Mapping[str, float], step: int) -> None:
        kept = dict(values)
        self._call(lambda log: log.add(kept, step))

    def flush(self) -> None:
        self._call(lambda log: log.flush())

    def close(self) -> None:
        """Wait for the rest, but not for ever."""
        if self._off:
            return
        self._waiting.put(None)
        self._thread.join(CLOSING)
        if self._thread.is_alive():
            self._fail(TimeoutError(f"it did not take all that it was sent within {CLOSING:g} s"))

    def _call(self, work: Callable[[ScalarLog], None]) -> None:
        if self._waiting.qsize() >= LONGEST_QUEUE:
            self._fail(RuntimeError(f"{LONGEST_QUEUE} steps wait to be sent"))
        if not self._off:
            self._waiting.put(work)

    def _run(self, open_log: Callable[[], ScalarLog]) -> None:
        try:
            opened = open_log()
            while (work := self._waiting.get()) is not None and not self._off:
                work(opened)
            opened.close()
        except Exception as error:  # whatever a logger raises
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Say once why the logger gets nothing more."""
        if self._off:
            return
        words = next(iter(str(error).strip().splitlines()), "") or "no reason given"
        log.warning(
            "logger %s failed and is off from here on (%s: %s); steps.csv and epochs.csv go on",
            *(self.name, type(error).__name__, words),
        )
        self._off = True  # last: who sees it need not wait for the words


IDENTITIES = "loggers.json"


def run_identity(run: Path, service: str, *, new: bool, make: Callable[[], str]) -> str:
    """Read the run's name from its folder; a ``new`` run, or one without, gets one by ``make``."""
    path = run / IDENTITIES
    try:
        known = read_json(path)
    except (OSError, ValueError):
        known = {}
    if not isinstance(known, dict):
        known = {}
    if new or not isinstance(known.get(service), str):
        known[service] = make()
        write_text(path, json.dumps(known))
    return str(known[service])


class TensorboardLog:
    """Writes into ``run / "tensorboard"``; what is there of later steps is hidden."""

    library = "tensorboard"

    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def flush(self) -> None:
        self.board.flush()

    def close(self) -> None:
        self.board.close()


WANDB_PROJECT = "hyperslab"  # where WANDB_PROJECT names none


class WandbLog:
    """One run there for each run's folder: a run that is resumed goes on in it."""

    library = "wandb"

    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        import wandb

        self._run = wandb.init(
            dir=str(run),
            project=os.environ.get("WANDB_PROJECT", WANDB_PROJECT),
            name=run.name,
            id=run_identity(run, "wandb", new=step == 0, make=lambda: secrets.token_hex(4)),
            resume="allow",
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """It sends by itself."""

    def close(self) -> None:
        self._run.finish()


MLFLOW_EXPERIMENT = "hyperslab"  # where MLFLOW_EXPERIMENT_NAME names none
MLFLOW_BATCH = 500  # MLflow gets so many numbers at once; it takes a thousand
MLFLOW_LONGEST_SETTING = 500  # characters of a setting


class MlflowLog:
    """One run there for each run's folder: a run that is resumed goes on in it."""

    library = "mlflow"

    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient()
        self._waiting: list[Any] = []

        def begin() -> str:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", MLFLOW_EXPERIMENT)
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            begun: str = self._client.create_run(experiment, run_name=run.name).info.run_id
            for name, value in _flat_settings(settings).items():
                self._client.log_param(begun, name, value[:MLFLOW_LONGEST_SETTING])
            return begun

        self.id = run_identity(run, "mlflow", new=step == 0, make=begin)
        self._client.update_run(self.id, status="RUNNING")

    def add(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        self._waiting += [self._metric(name, value, now, step) for name, value in values.items()]
        if len(self._waiting) >= MLFLOW_BATCH:
            self.flush()

    def flush(self) -> None:
        self._client.log_batch(self.id, metrics=self._waiting)
        self._waiting = []

    def close(self) -> None:
        self.flush()
        self._client.set_terminated(self.id)


def _flat_settings(settings: Mapping[str, Any], key: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= _flat_settings(value, f"{key}{name}.")
        else:
            found[f"{key}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return found


A_LOGGER = RightKind(
    "a logger: a class with add(values, step), flush() and close()", (f"{__name__}.ScalarLog",)
)
"""Is called with the run's folder, its settings and the steps done, and the recipe's arguments."""

Loggers = Sequence[str | TargetSection]  # names and targets, as a recipe has them


def check_loggers(loggers: Loggers) -> None:
    """Import the libraries and classes of loggers, before anything begins.

    Raises:
        RecipeError: the library of one is not installed; a target is no logger.
    """
    for number, logger in enumerate(loggers):
        if isinstance(logger, TargetSection):
            _maker(number).check(logger)
        elif (kind := _class_of(logger)) is not None and kind.library is not None:
            with importing(kind.library, f"loggers: {logger}", RecipeError):
                importlib.import_module(kind.library)


def open_loggers(
    loggers: Loggers, run: Path, settings: Mapping[str, Any], step: int
) -> list[BackgroundLog]:
    """Open the loggers of a run, beside its CSV files; arguments as in `LoggerClass`."""
    made: list[BackgroundLog] = []
    for number, logger in enumerate(loggers):
        if isinstance(logger, TargetSection):
            opening = functools.partial(_maker(number, run, settings, step), logger)
            made.append(BackgroundLog(str(logger.target), opening))
        elif (kind := _class_of(logger)) is not None:
            made.append(BackgroundLog(logger, functools.partial(kind, run, settings, step)))
    return made


def _maker(number: int, *given: Any) -> Maker:
    """``given`` is not known when a recipe is only checked."""
    return Maker(f"loggers.{number}", A_LOGGER, given or (Path(), {}, 0))


def _class_of(name: str) -> LoggerClass | None:
    """Import the class of a logger; the CSV files are nobody's."""
    if name == "csv":
        return None
    module, _, kind = LOGGERS[name].rpartition(".")
    found: LoggerClass = getattr(importlib.import_module(module), kind)
    return found
