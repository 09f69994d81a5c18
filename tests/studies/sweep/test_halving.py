"""Rates that halving stops, and those that go on (tiers: no process; one process, forks)."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection
from pathlib import Path

import pytest

from hyperslab.errors import DivergedError, RecipeError
from hyperslab.studies.sweep.budget import forecast_sweep, forecast_table
from hyperslab.studies.sweep.results import RunResult, rates_table
from hyperslab.studies.sweep.run import RunSteps, SweepProgress, SweepState, run_sweep
from hyperslab.studies.sweep.schema import SweepRun, load_sweep
from tests.studies.sweep.sweeps import killed_sweep, sweep_here, table_of, way, write_sweep

pytestmark = pytest.mark.usefixtures("forked")

COSINE = {
    "optimizer.schedule": {
        "target": "torch.optim.lr_scheduler.CosineAnnealingLR",
        "T_max": "${training.epochs}",
    }
}
VARIANTS = {"linear": {}, "cosine": COSINE}  # one has numbers of its own, one the training's
RATES = [1e-4, 1e-3, 1e-2]


def halved(folder: Path, halve: int = 1) -> Path:
    """Three rates, of which two and then one go on, to three epochs."""
    choose = {"epochs": 1, "halve": halve}
    return write_sweep(folder, variants=VARIANTS, rates=RATES, seeds=[0], choose=choose)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = halved(tmp_path_factory.mktemp("halved"))
    sweep_here(path)
    return path


def rows(folder: Path, file: str) -> list[list[str]]:
    """The rows of a history, without times and memory."""
    kept = ("step", "epoch", "loss", "train_loss", "validation_loss", "learning_rate")
    found = csv.DictReader((folder / file).read_text().splitlines())
    return [[row[name] for name in kept if name in row] for row in found]


@pytest.mark.long
def test_a_survivor_is_what_it_is_in_a_sweep_that_halves_nothing(
    done: Path, tmp_path: Path
) -> None:
    """To the bit: losses, rates of the schedules, and so the weights of the seeds that follow."""
    sweep_here(halved(tmp_path, halve=0))
    plain, out = tmp_path / "out", done.parent / "out"
    lengths = []
    for folder in sorted(out.glob("*/choose-*")):
        whole = plain / folder.relative_to(out)
        for file in ("epochs.csv", "steps.csv"):
            ours, theirs = rows(folder, file), rows(whole, file)
            assert ours
            assert ours == theirs[: len(ours)]
        lengths.append(len(rows(folder, "epochs.csv")))
    assert sorted(lengths) == [1, 1, 2, 2, 3, 3]
    for row, other in zip(table_of(out)["variants"], table_of(plain)["variants"], strict=True):
        best = min(other["tried"], key=lambda one: one["validation_loss"])["rate"]
        survivor = next(one["rate"] for one in row["tried"] if one["stopped"] is None)
        assert row["rate"] == survivor
        if best == survivor:
            assert row["validation_loss"] == other["validation_loss"]


def test_what_was_stopped_is_on_record(done: Path) -> None:
    out = done.parent / "out"
    table = json.loads((out / "sweep.json").read_text())
    for variant in VARIANTS:
        own = [run for run in table["runs"] if run["variant"] == variant and run["chooses"]]
        found = {run["status"]: run["epochs"] for run in own}
        assert found == {
            "stopped at epoch 1 by halving": 1,
            "stopped at epoch 2 by halving": 2,
            "done": 3,
        }
        for run in own:
            folder = out / variant / f"choose-rate-{run['rate']:g}-seed-0"
            with (folder / "epochs.csv").open() as file:
                losses = [float(row["validation_loss"]) for row in csv.DictReader(file)]
            assert run["validation_loss"] == min(losses)
            assert len(losses) == run["epochs"]
            assert not list(folder.glob("checkpoints/step-*"))
    records = list(csv.DictReader((out / "runs.csv").read_text().splitlines()))
    assert [row["status"] for row in records] == [run["status"] for run in table["runs"]]


def test_a_dry_run_afterwards_finds_nothing_to_do(done: Path) -> None:
    """Runs that halving stopped are over, too."""
    rows = forecast_table(forecast_sweep(load_sweep(done))).rows
    assert [(row[0], row[5], row[-1]) for row in rows[:4]] == [
        (f"{variant}: {stage}", "1", "0.00 s")
        for variant in VARIANTS
        for stage in ("choose the rate", "seeds")
    ]
    assert rows[-1][-1] == "0.00 s"


@pytest.mark.long
@pytest.mark.parametrize("at_once", [1, 3])
def test_killed_at_random_moments_it_ends_with_the_same_table(
    done: Path, tmp_path: Path, at_once: int
) -> None:
    path = halved(tmp_path)
    killed_sweep(path, kills=4, at_once=at_once)
    assert table_of(tmp_path / "out") == table_of(done.parent / "out")


def test_another_halving_is_another_sweep(done: Path) -> None:
    path = halved(done.parent, halve=2)
    try:
        with pytest.raises(RecipeError, match=r"choose.halve: 1 there, 2 now"):
            sweep_here(path)
    finally:
        halved(done.parent)


def pretended(
    path: Path,
    losses: dict[float, float],
    fails: Collection[float] = (),
) -> tuple[SweepState, list[tuple[float, int]]]:
    """A sweep whose rates have these losses; and how far which rate was trained, in order."""
    sweep = load_sweep(path)
    done: list[tuple[float, int]] = []

    def do(run: SweepRun, ranks: int) -> RunResult:
        if run.chooses:
            done.append((run.rate, run.epochs))
        if run.rate in fails and run.chooses:
            raise DivergedError("the loss is not a finite number")
        return RunResult(run.epochs, losses[run.rate], 1, 1.0, {})

    state = run_sweep(sweep, 1, SweepProgress(sweep), [way(do)])
    return state, done


def five(folder: Path, **choose: float) -> Path:
    return write_sweep(
        folder,
        variants={"a": {"epochs": 9}},
        rates=[1, 2, 3, 4, 5],
        choose={"epochs": 1, "halve": 2, **choose},
    )


def test_each_rung_has_twice_the_epochs_and_half_the_rates(tmp_path: Path) -> None:
    state, done = pretended(five(tmp_path), {1: 5, 2: 4, 3: 1, 4: 2, 5: 3})
    assert done == [
        *[(rate, 2) for rate in (1, 2, 3, 4, 5)],
        *[(rate, 4) for rate in (3, 4, 5)],
        *[(rate, 8) for rate in (3, 4)],
        (3, 9),
    ]
    (row,) = state.rows()
    assert row.rate == 3
    assert [one.stopped for one in row.tried] == [2, 2, None, 8, 4]
    assert "stopped at epoch 4 by halving" in [cells[3] for cells in rates_table([row]).rows]
    (variant,) = state.sweep.variants
    assert state.sweep.rungs(variant) == [(2, 5), (4, 3), (8, 2), (9, 1)]
    assert state.sweep.planned_epochs(variant) == (2 * 5 + 2 * 3 + 4 * 2 + 1, 18)


def test_a_rate_that_fails_is_of_the_worse_half(tmp_path: Path) -> None:
    losses = {1: 5.0, 2: 4.0, 3: 1.0, 4: 2.0, 5: 3.0}
    state, done = pretended(five(tmp_path), losses, fails={3, 4})
    assert [rate for rate, epochs in done if epochs == 4] == [1, 2, 5]
    assert state.rows()[0].rate == 5
    assert len(state.failures) == 2


def test_where_all_others_fail_a_stopped_rate_is_chosen(tmp_path: Path) -> None:
    sweep = load_sweep(five(tmp_path))

    def do(run: SweepRun, ranks: int) -> RunSteps:
        yield
        if run.chooses and run.epochs == 4:
            raise DivergedError("the loss is not a finite number")
        return RunResult(run.epochs, run.rate, 1, 1.0, {})

    (row,) = run_sweep(sweep, 1, SweepProgress(sweep), [do]).rows()
    assert (row.rate, len(row.seeds)) == (4, 2)


def test_rates_beyond_the_edge_are_trained_to_the_end(tmp_path: Path) -> None:
    path = five(tmp_path, widen=1)
    state, done = pretended(path, {1: 5, 2: 4, 3: 3, 4: 2, 5: 1, 6.25: 3})
    assert done[-1] == (6.25, 9)
    assert state.rows()[0].rate == 5


@pytest.mark.parametrize("keys", [{"halve": 3}, {"epochs": 0.3}])
def test_halving_that_stops_nothing_is_refused(tmp_path: Path, keys: dict[str, float]) -> None:
    choose = {"epochs": 1, "halve": 1, **keys}
    with pytest.raises(RecipeError, match=r"choose\.halve=. stops no run"):
        load_sweep(write_sweep(tmp_path, choose=choose))
