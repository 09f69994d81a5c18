"""From the names in a recipe to loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperslab.train.loggers.background import BackgroundLog
from hyperslab.train.loggers.mlflow import MlflowLog, check_mlflow
from hyperslab.train.loggers.scalar_log import GuardedLog, ScalarLog
from hyperslab.train.loggers.tensorboard import TensorboardLog
from hyperslab.train.loggers.wandb import WandbLog, check_wandb

CHECKS = {"wandb": check_wandb, "mlflow": check_mlflow}


def check_loggers(names: Sequence[str]) -> None:
    """
    Raises:
        RecipeError: the library of one is not installed.
    """
    for name in names:
        if name in CHECKS:
            CHECKS[name]()


def open_loggers(
    names: Sequence[str], run: Path, settings: Mapping[str, Any], step: int
) -> list[GuardedLog]:
    """Those of a run that goes on after ``step`` steps; its CSV files are written anyway.

    ``settings``, nested dictionaries of what JSON can say, are shown beside the numbers.
    """
    return [
        GuardedLog(name, _open(name, run, settings, step))
        for name in dict.fromkeys(names)
        if name != "csv"
    ]


def _open(name: str, run: Path, settings: Mapping[str, Any], step: int) -> ScalarLog:
    match name:
        case "wandb":
            return BackgroundLog(name, lambda: WandbLog(run, settings, step))
        case "mlflow":
            return BackgroundLog(name, lambda: MlflowLog(run, settings, step))
    return TensorboardLog(run, step)
