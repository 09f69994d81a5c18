"""What a sweep is said to take, before and afterwards (tier: no process; the command line)."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.launch import restarts
from hyperslab.launch.restarts import LaunchSlot
from hyperslab.planner.cost import Breakdown
from hyperslab.planner.job import job_of
from hyperslab.studies.scaling.study import PredictedStep
from hyperslab.studies.sweep import budget
from hyperslab.studies.sweep.budget import Forecast, SweepForecast, forecast_sweep, runs_at_once
from hyperslab.studies.sweep.results import RunResult
from hyperslab.studies.sweep.run import RunSteps, SweepProgress, run_sweep
from hyperslab.studies.sweep.schema import SweepRun, load_sweep
from hyperslab.studies.table import duration
from hyperslab.util.signals import StopRequest
from tests.planner.traces import traced_once
from tests.studies.sweep.sweeps import way, write_sweep

__all__ = ["traced_once"]

pytestmark = pytest.mark.usefixtures("traced_once")


def forecast_of(folder: Path, *, device: str = "cpu", memory: int = 10) -> SweepForecast:
    sweep = load_sweep(write_sweep(folder))
    variants = {"plain": Forecast(1.0, 10.0, memory), "no norm": Forecast(unknown="no data")}
    return SweepForecast(sweep, "a machine", device, variants)


@pytest.mark.parametrize(
    ("cores", "threads", "ranks", "count"),
    [
        (2, "1", 1, 2),
        (2, None, 1, 1),  # one run has both cores
        (8, "2", 1, 4),
        (8, "2,1", 2, 2),
        (8, None, 3, 1),
        (2, "4", 1, 1),
    ],
)
def test_so_many_runs_that_no_core_is_idle(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    cores: int,
    threads: str | None,
    ranks: int,
    count: int,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(budget, "cores_here", lambda: cores)
    assert runs_at_once(forecast_of(tmp_path), ranks, None) == count
    assert runs_at_once(forecast_of(tmp_path, device="cuda"), ranks, None) == 1
    assert runs_at_once(forecast_of(tmp_path, device="cuda"), ranks, 3) == 3


def test_runs_that_do_not_fit_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(budget, "cores_here", lambda: 16)
    monkeypatch.setattr(budget, "free_memory", lambda: 7 << 30)
    forecast = forecast_of(tmp_path, memory=1 << 30)
    assert runs_at_once(forecast, 2, None) == 3
    assert runs_at_once(forecast, 8, None) == 1
    assert caplog.text == ""
    assert runs_at_once(forecast, 2, 4) == 4
    assert "4 runs at once are predicted to need 8.00 GiB, and 7.00 GiB" in caplog.text


def test_runs_beside_each_other_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(
        restarts, "launching", lambda *_, environ, **__: found.append(environ) or iter(())
    )
    monkeypatch.setattr(restarts, "cores_here", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    stop = StopRequest()
    for slot in (LaunchSlot(stop, 1, 3), LaunchSlot(stop)):
        list(slot.start_training(2, ["train"], tmp_path, seconds=1))
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    list(LaunchSlot(stop, 1, 3).start_training(2, ["train"], tmp_path, seconds=1))
    assert [environ.get("OMP_NUM_THREADS") for environ in found] == ["2", None, "5"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c,d,e,f,g,h")
    for slots in (3, 5):
        list(LaunchSlot(stop, slots - 1, slots).start_training(2, ["train"], tmp_path, seconds=1))
    shown = [environ["CUDA_VISIBLE_DEVICES"] for environ in found[3:]]
    assert shown == ["e,f", os.environ["CUDA_VISIBLE_DEVICES"]], "five of two do not fit"


@pytest.mark.parametrize("best", [0.0, math.inf])
def test_no_sweep_has_more_rates_than_the_widest(tmp_path: Path, best: float) -> None:
    choose = {"epochs": 0.34, "widen": 2}
    sweep = load_sweep(write_sweep(tmp_path, rates=[1e-3, 3e-3], choose=choose))

    def do(run: SweepRun, ranks: int) -> RunResult:
        return RunResult(run.epochs, abs(min(best, 1e9) - run.rate), 1, 1.0, {})

    state = run_sweep(sweep, 1, SweepProgress(sweep), [way(do)])
    for variant, widest in zip(state.sweep.variants, sweep.widest().variants, strict=True):
        assert len(variant.rates) == len(widest.rates) == 6


def test_a_dry_run_says_what_widening_may_add_and_what_halving_saves(tmp_path: Path) -> None:
    choose = {"epochs": 1, "widen": 1, "halve": 1}
    path = write_sweep(tmp_path, variants={"plain": {}}, choose=choose)
    ended = CliRunner().invoke(app, ["sweep", str(path), "--dry-run"])
    assert ended.exit_code == 0, ended.output
    (of,) = forecast_sweep(load_sweep(path)).variants.values()
    rows = {line[:30].strip(): line.split()[-2:] for line in ended.output.splitlines()}
    # Two rates of three epochs, of which one is stopped after one; one rate more; two seeds.
    for name, epochs in {
        "plain: choose the rate": 4,
        "plain: wider rates, at most": 3,
        "plain: seeds": 6,
        "saved by halving already": 2,
        "without wider rates": 10,
        "all, one run at a time": 13,
    }.items():
        assert rows[name] == duration(epochs * of.epoch).split(), name


def test_what_no_machine_has_measured_has_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half precision, as the usual machine's file has operators of float32 alone."""
    monkeypatch.setattr("hyperslab.planner.summary.processor_name", lambda: "another one")
    path = write_sweep(tmp_path, variants={"plain": {}, "half": {"precision": "bf16"}})
    ended = CliRunner().invoke(app, ["sweep", str(path), "--dry-run"])
    assert ended.exit_code == 0, ended.output
    rows = {line[:24].strip(): line.split() for line in ended.output.splitlines()}
    assert rows["half: seeds"][-1] == rows["half: choose the rate"][-1] == "unknown"
    assert "more than" in " ".join(rows["all, one run at a time"])
    words = " ".join(ended.output.split())
    assert "half: the time is not known: laptop-2core has measured nothing like 50% and" in words
    assert "`hyperslab calibrate RECIPE --out FILE` measures this one, for --machine FILE" in words
    assert "and this is another one" in words
    variants = forecast_sweep(load_sweep(path)).variants
    assert variants["half"].unknown
    assert variants["half"].memory > 0


def test_an_epoch_that_shows_samples_again_takes_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 samples 14 are trained on, 3 validated and 3 tested, by four."""
    step = PredictedStep(Breakdown(forward=1.0, backward_data=9.0), memory=1, limit=2)
    monkeypatch.setattr(budget.Predictor, "predict", lambda *_: step)
    variants = {
        "once": {},
        "thrice": {"data.repeat": 3, "follow_test": True},
        "few": {"data.repeat": 3, "data.counts": [3, 4, 4]},
    }
    words = ["data.fractions=[0.7,0.15,0.15]"]
    sweep = load_sweep(write_sweep(tmp_path, variants=variants), words)
    found = forecast_sweep(sweep).variants
    assert {name: one.epoch for name, one in found.items()} == {
        "once": 4 * 10 + 1,
        "thrice": 11 * 10 + 1,
        "few": 3 * 10 + 1,
    }
    jobs = [job_of(variant.recipe) for variant in sweep.variants]
    assert [(job.batch, job.shown) for job in jobs] == [(4, 17), (4, 20), (4, 7)]


def test_planned_and_taken_times_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command, whose runs are pretended; the plan of one of its variants is not known."""

    def do(run: SweepRun, ranks: int, **_: object) -> RunSteps:
        yield
        return RunResult(run.epochs, run.rate, 1, 3.0 * run.epochs, {})

    monkeypatch.setattr("hyperslab.studies.sweep.run.do_run", do)
    monkeypatch.setattr(budget, "forecast_sweep", lambda *_: forecast_of(tmp_path))
    out = tmp_path / "[a] out"
    ended = CliRunner().invoke(app, ["sweep", str(write_sweep(tmp_path)), "--output", str(out)])
    assert ended.exit_code == 0, ended.output
    assert f"all numbers are in {out}: " in ended.output
    table = json.loads((out / "sweep.json").read_text())
    assert table["predicted_for"] == "a machine"
    found = {(run["variant"], run["chooses"]): run for run in table["runs"]}
    assert found["plain", True]["planned_seconds"] == 10.0
    assert found["plain", False]["planned_seconds"] == 30.0
    assert found["no norm", False]["planned_seconds"] is None
    lines = [" ".join(line.split()) for line in ended.output.splitlines()]
    assert "plain, rate 0.001, seed 1 3 30.0 s 9.00 s 0.300" in lines
    # Two runs that choose, of one epoch, and two seeds of three.
    assert "all that were planned 1 min 20 s 24.0 s 0.300" in lines
