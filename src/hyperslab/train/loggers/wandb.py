"""Weights & Biases, online or not, as its environment variables say (WANDB_MODE, WANDB_PROJECT)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperslab.errors import RecipeError
from hyperslab.optional_libraries import importing
from hyperslab.train.loggers.identity import run_identity

PROJECT = "hyperslab"
"""Where WANDB_PROJECT names none."""


class WandbLog:
    """One run there for each run's folder: a run that is resumed goes on in it."""

    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        import wandb

        self._run = wandb.init(
            dir=str(run),
            project=os.environ.get("WANDB_PROJECT", PROJECT),
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


def check_wandb() -> None:
    """
    Raises:
        RecipeError: the library is not installed.
    """
    with importing("wandb", "loggers: wandb", RecipeError):
        import wandb  # noqa: F401
