"""What Weights & Biases, offline, and MLflow, with files, have is what was logged.

Tier: no process but wandb's own.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hyperslab.recipe.load import load_recipe
from hyperslab.train.history import STEP_COLUMNS, Reporter
from hyperslab.train.run import train

SETTINGS = {"optimizer": {"learning_rate": 0.5}, "epochs": 2}


def log_steps(run: Path, name: str, first: int, last: int) -> None:
    """As a run that is resumed at ``first``."""
    reporter = Reporter(
        run,
        measures=("validation_loss",),
        step=first - 1,
        epoch=0,
        total_steps=last,
        loggers=["csv", name],
        settings=SETTINGS,
    )
    for step in range(first, last + 1):
        row: dict[str, float | None] = dict.fromkeys(STEP_COLUMNS, 1.0)
        reporter.step({**row, "step": step, "loss": step / 4, "peak_share": None})
    cells = {"epoch": 0, "train_loss": 0.5, "validation_loss": None}
    reporter.epoch({**cells, "learning_rate": 0.1, "seconds": 1.0}, last)
    reporter.close()


BLOCK, HEADER = 32768, 7  # [B] of LevelDB's logs, which wandb's files are


def wandb_records(run: Path) -> Iterator[Any]:
    """What wandb has written, in order; it must fit into the first block of a file."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        data = path.read_bytes()
        assert len(data) < BLOCK
        at = HEADER
        while at + HEADER < len(data):
            _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
            if kind != 1 or at + HEADER + size > len(data):  # not whole yet
                break
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data[at + HEADER : at + HEADER + size])
            at += HEADER + size
            yield record


def finished_records(run: Path, *, runs: int) -> list[Any]:
    """All of so many ended runs: wandb's process writes a moment longer than we wait for."""
    end = time.monotonic() + 60
    while True:
        records = [*wandb_records(run)]
        if sum(record.HasField("exit") for record in records) == runs:
            return records
        assert time.monotonic() < end, records
        time.sleep(0.1)


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_steps(tmp_path, "wandb", 1, 2)
    log_steps(tmp_path, "wandb", 3, 4)
    losses, runs = [], set()
    for record in finished_records(tmp_path, runs=2):
        if record.HasField("run"):
            runs.add((record.run.run_id, record.run.project))
        items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
        if "step/loss" in items:
            assert "step/peak_share" not in items
            losses.append((int(items["_step"]), json.loads(items["step/loss"])))
    assert losses == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert {project for _, project in runs} == {"hyperslab"}
    assert len(runs) == 1  # resumed, it is the same one


def mlflow_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (folder / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    return MlflowClient()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the store with files
def test_mlflow_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = mlflow_store(tmp_path, monkeypatch)
    run = tmp_path / "fields"
    run.mkdir()
    log_steps(run, "mlflow", 1, 2)
    log_steps(run, "mlflow", 3, 4)
    (found,) = client.search_runs([client.get_experiment_by_name("hyperslab").experiment_id])
    assert found.info.run_name == "fields"
    assert found.info.status == "FINISHED"
    assert found.data.params == {"optimizer.learning_rate": "0.5", "epochs": "2"}
    assert "step/peak_share" not in found.data.metrics
    losses = client.get_metric_history(found.info.run_id, "step/loss")
    assert [(m.step, m.value) for m in losses] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    epochs = client.get_metric_history(found.info.run_id, "epoch/train_loss")
    assert [(m.step, m.value) for m in epochs] == [(2, 0.5), (4, 0.5)]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_recipe_names_its_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = mlflow_store(tmp_path, monkeypatch)
    recipe, run = tmp_path / "run.yaml", tmp_path / "run"
    recipe.write_text(
        "data: {synthetic: {width: 16, samples: 10}, batch_size: 2}\n"
        "model: {name: multiscale, channels: [2, 4]}\n"
        f"device: cpu\nepochs: 1\nloggers: [csv, mlflow]\noutput: {run}\n"
    )
    train(load_recipe(recipe))
    assert not (run / "tensorboard").exists()
    steps = len((run / "steps.csv").read_text().splitlines()) - 1
    (found,) = client.search_runs([client.get_experiment_by_name("hyperslab").experiment_id])
    assert found.data.params["data.synthetic.width"] == "16"
    assert len(client.get_metric_history(found.info.run_id, "step/loss")) == steps > 0
