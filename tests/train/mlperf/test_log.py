"""MLPerf's log and quality target, on its own records (tiers: one process; a few gloo ranks)."""

from __future__ import annotations

import functools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperslab.errors import DataError, HyperslabError, RecipeError
from hyperslab.recipe.load import load_recipe
from hyperslab.train.evaluate import evaluate
from hyperslab.train.mlperf import MLPERF_LOG
from hyperslab.train.run import train
from tests.formats.writers import example, record
from tests.ranks import run_ranks
from tests.train.universes import losses

pytest.importorskip("mlperf_logging", reason="the extra `mlperf` is not installed")

from mlperf_logging.compliance_checker.mlp_compliance import ComplianceChecker

RECIPE = Path(__file__).parents[3] / "recipes" / "mlperf.yaml"
S = 32  # the least of the network
COUNTS = {"train": 6, "validation": 2}
LEARNS: dict[str, Any] = {
    "model.dropout": 0.0,
    "optimizer.learning_rate": 0.01,
    "optimizer.schedule.warmup": 0,
    "epochs": 8,
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The benchmark's layout: its two folders, a record a file."""
    folder = tmp_path_factory.mktemp("records")
    random = np.random.default_rng(2)
    for split, count in COUNTS.items():
        (folder / split).mkdir()
        for i in range(count):
            x = random.poisson(1.0, (S, S, S, 4)).astype("<i2").tobytes()
            y = random.uniform(-0.1, 0.1, 4).astype("<f4")
            path = folder / split / f"univ_{i:03}.tfrecord"
            path.write_bytes(record(example(x=x, y=y)))
    return folder


def overrides(records: Path, run: Path, **keys: Any) -> list[str]:
    values = {
        "data.path": str(records),
        "data.batch_size": 2,
        "model.width": S,
        "grid.data": 1,
        "device": "cpu",
        "timeout": 60,
        "epochs": 3,
        "checkpoint.every": 10,
        "output": str(run),
        **keys,
    }
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def run(records: Path, folder: Path, *, resume: bool = False, **keys: Any) -> None:
    train(load_recipe(RECIPE, overrides(records, folder, **keys)), resume=resume)


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / MLPERF_LOG).read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in text)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in text]


def keys_of(folder: Path) -> list[str]:
    return [line["key"] for line in lines(folder)]


def value(folder: Path, key: str) -> Any:
    (found,) = [line["value"] for line in lines(folder) if line["key"] == key]
    return found


def compliant(folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[bool, str]:
    """What the checker of the benchmark's third version says, and why."""
    caplog.clear()
    checker = ComplianceChecker("hpc", "3.0.0", False, False)
    with caplog.at_level(logging.WARNING):
        good = checker.check_file(str(folder / MLPERF_LOG), "hpc_3.0.0/common.yaml")
    return good, caplog.text


@pytest.fixture(scope="module")
def learnt(records: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A serial run; the targets lie within 0.1 of 0, which a network learns in a few epochs."""
    folder = tmp_path_factory.mktemp("learnt")
    run(records, folder, **LEARNS)
    return folder


def test_the_benchmarks_own_checker_accepts_a_run_that_reaches_the_target(
    learnt: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, why = compliant(learnt, caplog)
    assert good, why
    errors = [row["value"] for row in lines(learnt) if row["key"] == "eval_error"]
    assert errors[-1] <= 0.124 < min(errors[:-1], default=1)
    keys = keys_of(learnt)
    assert keys[:2] == ["cache_clear", "init_start"]
    assert keys.index("init_stop") < keys.index("run_start") < keys.index("train_samples")
    order = ["epoch_start", "eval_start", "eval_stop", "eval_error", "epoch_stop"]
    assert [key for key in keys if key in order] == order * len(errors)
    assert keys[-1] == "run_stop"
    assert value(learnt, "train_samples") == COUNTS["train"]
    assert value(learnt, "eval_samples") == COUNTS["validation"]
    assert value(learnt, "global_batch_size") == 2
    assert value(learnt, "opt_name") == "sgd"
    assert value(learnt, "opt_learning_rate_decay_boundary_epochs") == [32, 64]
    assert value(learnt, "dropout") == 0
    (stop,) = [row for row in lines(learnt) if row["key"] == "run_stop"]
    assert stop["metadata"]["status"] == "success"
    assert len(losses(learnt)) == 3 * len(errors) < 3 * LEARNS["epochs"]  # it ended there
    times = [row["time_ms"] for row in lines(learnt)]
    assert times == sorted(times)


def test_a_run_that_does_not_reach_it_is_none(
    records: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(records, tmp_path, **{"stop_at.validation_mae": 1e-9, "epochs": 2})
    assert keys_of(tmp_path).count("epoch_start") == 2
    (stop,) = [row for row in lines(tmp_path) if row["key"] == "run_stop"]
    assert stop["metadata"]["status"] == "aborted"
    numbers = [row["metadata"].get("epoch_num") for row in lines(tmp_path)]
    assert [number for number in numbers if number] == [1] * 5 + [2] * 5


def test_the_logged_error_is_that_of_the_evaluation(records: Path, tmp_path: Path) -> None:
    run(records, tmp_path, **{"epochs": 1})
    result = evaluate(tmp_path, split="validation")
    expected = result.facts["mean"]["mae"]
    assert value(tmp_path, "eval_error") == pytest.approx(expected, rel=1e-5)


def test_on_ranks_one_of_them_writes(records: Path, learnt: Path, tmp_path: Path) -> None:
    """And all of them stop, with what they have read ahead for the next epoch."""
    grid = {"grid.data": 2, "grid.depth": 2}
    run_ranks(4, functools.partial(run, **LEARNS, **grid), records, tmp_path / "cut")
    cut, serial = lines(tmp_path / "cut"), lines(learnt)
    assert [row["key"] for row in cut] == [row["key"] for row in serial]
    for one, other in zip(cut, serial, strict=True):
        if one["key"] == "eval_error":
            assert one["value"] == pytest.approx(other["value"], rel=1e-3)
    assert losses(tmp_path / "cut") == pytest.approx(losses(learnt), rel=1e-3)


def test_a_run_that_goes_on_goes_on_with_its_log(
    records: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is to be there once is; a run that has reached its target has nothing left to do."""
    never = {"stop_at.validation_mae": 1e-9}
    run(records, tmp_path, epochs=1, **never)
    again = {"stop_at.validation_mae": 5.0}
    log = tmp_path / MLPERF_LOG
    kept = [text for text in log.read_text().splitlines() if '"run_stop"' not in text]
    log.write_text("\n".join(kept) + "\n")  # as if it had been killed
    run(records, tmp_path, resume=True, epochs=3, **never)
    keys = keys_of(tmp_path)
    for key in ("init_start", "run_start", "train_samples", "submission_org"):
        assert keys.count(key) == 1
    assert keys.count("epoch_start") == 3
    run(records, tmp_path, resume=True, epochs=9, **again)
    assert len(losses(tmp_path)) == 9  # it was good enough: not a step more
    ends = keys_of(tmp_path).count("run_stop")
    run(records, tmp_path, resume=True, epochs=9, **again)
    assert keys_of(tmp_path).count("run_stop") == ends


def test_the_benchmarks_folders_are_its_splits(records: Path, tmp_path: Path) -> None:
    run(records, tmp_path, mlperf=None, epochs=1)
    assert not (tmp_path / MLPERF_LOG).exists()
    found = evaluate(tmp_path, split="validation")
    assert set(found.predictions.samples) == {"validation/univ_000", "validation/univ_001"}
    with pytest.raises(DataError, match=r"'test'.*sub-folder test, but there are: train, valid"):
        evaluate(tmp_path)


def test_without_its_package_the_remedy_is_named(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_logging.mllog.mllog", None)
    with pytest.raises(HyperslabError, match=r'pip install "mlperf-logging.*"\n.*mlperf=null'):
        run(records, tmp_path)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["stop_at={}"], "stop_at needs validation_loss or validation_mae"),
        (["stop_at.validation_mae=0"], "'stop_at.validation_mae'"),
        (["mlperf.division=half"], "'mlperf.division': it should be one of closed, open"),
        (["mlperf.org=''"], "'mlperf.org'"),
        (["mlperf={org: a}"], "'mlperf.platform' is missing"),
        (
            ["model={name: unet3d}", "loss=dice"],
            "stop_at.validation_mae does not go with model.name=unet3d",
        ),
        (
            ["model={name: unet3d}", "loss=dice", "stop_at=null"],
            "mlperf does not go with model.name=unet3d",
        ),
        (
            ["data.path=null", "data.synthetic={width: 32}"],
            "data.splits=folders describes files",
        ),
        (["data.splits=half"], "'data.splits': it should be one of drawn, folders"),
    ],
    ids=str,
)
def test_bad_keys_are_named(keys: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(RECIPE, keys)
