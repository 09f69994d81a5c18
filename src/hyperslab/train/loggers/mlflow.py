"""MLflow, at the place that its environment variables say (MLFLOW_TRACKING_URI)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperslab.errors import RecipeError
from hyperslab.optional_libraries import importing
from hyperslab.train.loggers.identity import run_identity

EXPERIMENT = "hyperslab"
"""Where MLFLOW_EXPERIMENT_NAME names none."""

SENT_AT_ONCE = 500
"""Numbers that are sent at once; MLflow takes a thousand."""

LONGEST_SETTING = 500
"""Characters of a setting."""


class MlflowLog:
    """One run there for each run's folder: a run that is resumed goes on in it."""

    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient()
        self._waiting: list[Any] = []

        def begin() -> str:
            experiment = self._experiment()
            begun: str = self._client.create_run(experiment, run_name=run.name).info.run_id
            for name, value in _flat(settings).items():
                self._client.log_param(begun, name, value[:LONGEST_SETTING])
            return begun

        self.id = run_identity(run, "mlflow", new=step == 0, make=begin)
        self._client.update_run(self.id, status="RUNNING")

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        made: str = found.experiment_id if found else self._client.create_experiment(name)
        return made

    def add(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        self._waiting += [self._metric(name, value, now, step) for name, value in values.items()]
        if len(self._waiting) >= SENT_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        self._client.log_batch(self.id, metrics=self._waiting)
        self._waiting = []

    def close(self) -> None:
        self.flush()
        self._client.set_terminated(self.id)


def check_mlflow() -> None:
    """
    Raises:
        RecipeError: the library is not installed.
    """
    with importing("mlflow", "loggers: mlflow", RecipeError):
        import mlflow  # noqa: F401


def _flat(settings: Mapping[str, Any], key: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{key}{name}.")
        else:
            found[f"{key}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return found
