"""Sweeps that are run, killed and gone on with (tiers: one process, forks; the command line)."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.errors import CommError, DataError, DivergedError, RecipeError, Stopped
from hyperslab.launch.restarts import LaunchSlot
from hyperslab.recipe.load import save_recipe
from hyperslab.studies.sweep.results import RunResult, finished_result, read_result
from hyperslab.studies.sweep.run import RunSteps, SweepProgress, run_sweep
from hyperslab.studies.sweep.schema import SweepRun, load_sweep
from hyperslab.train.run import lock_run
from tests.planner.traces import traced_once
from tests.selection import in_gate
from tests.studies.sweep.sweeps import killed_sweep, sweep_here, table_of, way, write_sweep

__all__ = ["traced_once"]

pytestmark = pytest.mark.usefixtures("forked", "traced_once")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep file of a sweep that nobody disturbed."""
    path = write_sweep(tmp_path_factory.mktemp("done"))
    sweep_here(path)
    return path


def losses(folder: Path) -> list[float]:
    rows = csv.DictReader((folder / "epochs.csv").read_text().splitlines())
    return [float(row["validation_loss"]) for row in rows]


def test_the_table_is_what_the_runs_recorded(done: Path) -> None:
    out = done.parent / "out"
    table = {row["name"]: row for row in table_of(out)["variants"]}
    for name, seeds in (("plain", [0, 1]), ("no norm", [5])):
        row = table[name]
        tried = {}
        for rate in (1e-3, 1e-2):
            found = losses(out / name / f"choose-rate-{rate:g}-seed-{seeds[0]}")
            assert len(found) == 1, "a third of three epochs"
            tried[rate] = min(found)
        assert {one["rate"]: one["validation_loss"] for one in row["tried"]} == tried
        best = min(tried, key=tried.__getitem__)
        assert row["rate"] == best
        folders = [out / name / f"rate-{best:g}-seed-{seed}" for seed in seeds]
        assert [out / path for path in row["paths"]] == folders
        found = [min(losses(folder)) for folder in folders]
        assert row["validation_loss"]["median"] == np.median(found)
        assert row["validation_loss"]["least"] == min(found)
        metrics = [json.loads((f / "evaluation" / "metrics.json").read_text()) for f in folders]
        ratios = [one["parameters"]["y2"]["ratio"] for one in metrics]
        assert row["test"]["y2"]["median"] == pytest.approx(np.median(ratios))
        assert row["test"]["y2"]["largest"] == pytest.approx(max(ratios))
        means = [one["mean"]["ratio"] for one in metrics]
        assert row["test_mean"]["median"] == pytest.approx(np.median(means))
        assert (folders[0] / "evaluation" / "validation.csv").exists()
    rows = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
    assert [row["variant"] for row in rows] == ["plain", "no norm"]
    assert float(rows[0]["y2"]) == pytest.approx(table["plain"]["test"]["y2"]["median"])


def test_only_the_best_checkpoints_of_seeds_are_kept(done: Path) -> None:
    out = done.parent / "out"
    assert not list(out.glob("*/choose-*/checkpoints/step-*"))
    for folder in out.glob("*/rate-*"):
        (kept,) = (folder / "checkpoints").glob("step-*")
        assert os.readlink(folder / "checkpoints" / "best") == kept.name


def never(run: SweepRun, ranks: int) -> RunSteps:
    raise AssertionError(run)


def test_what_is_done_is_not_done_again(done: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = table_of(done.parent / "out")
    sweep = load_sweep(done)
    with caplog.at_level("INFO", "hyperslab"):
        run_sweep(sweep, 1, SweepProgress(sweep), [never])
    assert table_of(done.parent / "out") == before
    assert caplog.text.count("was done before") == 7


@pytest.mark.parametrize("kills", in_gate([6, 11], kept=[6]))
def test_a_sweep_killed_at_random_moments_ends_with_the_same_table(
    done: Path, tmp_path: Path, kills: int
) -> None:
    """Before, within and after runs, checkpoints and evaluations."""
    killed_sweep(write_sweep(tmp_path), kills=kills)
    assert table_of(tmp_path / "out") == table_of(done.parent / "out")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"seeds": [0, 1, 2]}, r"variants.plain.seeds: \[0, 1\] there, \[0, 1, 2\] now"),
        ({"choose": {"epochs": 0.5}}, r"choose.epochs: 0.34 there, 0.5 now"),
        (
            {"variants": {"plain": {"data.batch_size": 5}, "no norm": {}}},
            r"variants.no norm.recipe.model.batch_norm: False there, True now",
        ),
    ],
)
def test_another_sweep_is_refused_with_the_difference(
    done: Path, tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    path = write_sweep(tmp_path, **{"output": str(done.parent / "out"), **keys})
    before = sorted((done.parent / "out").rglob("*"))
    with pytest.raises(RecipeError, match=words) as caught:
        sweep_here(path)
    assert "holds another sweep" in str(caught.value)
    assert sorted((done.parent / "out").rglob("*")) == before


def test_settings_that_were_damaged_are_another_sweep(done: Path, tmp_path: Path) -> None:
    """A key may be any value of YAML, so names and numbers stand side by side."""
    out = tmp_path / "out"
    out.mkdir()
    text = (done.parent / "out" / "sweep.yaml").read_text()
    (out / "sweep.yaml").write_text(text.replace("  plain:\n", "  1:\n"))
    with pytest.raises(RecipeError, match=r"holds another sweep:(.*\n)*.*variants\.plain:"):
        sweep_here(write_sweep(tmp_path, output=str(out)))


@pytest.mark.parametrize(
    ("key", "value"), [("seconds", "'long'"), ("validation_loss", None), ("test", [1]), ("test", 3)]
)
def test_a_result_of_other_types_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    values = {**asdict(result(0.5)), key: value}
    (tmp_path / "result.json").write_text(json.dumps(values))
    words = rf"result\.json is not a result of a run: {key}.*\n    remove it"
    with pytest.raises(DataError, match=words):
        read_result(tmp_path)


def test_a_run_of_another_recipe_is_refused_too(done: Path, tmp_path: Path) -> None:
    path = write_sweep(tmp_path, output=str(done.parent / "out"))
    run = load_sweep(path, ["optimizer.eps=1"]).choosing()[0]
    with pytest.raises(RecipeError, match=r"another recipe: optimizer\.eps differ"):
        finished_result(run)
    grid = load_sweep(path, ["grid.depth=2", "timeout=5"]).choosing()[0]
    assert finished_result(grid) is not None, "the result does not depend on it"


def result(loss: float) -> RunResult:
    return RunResult(3, loss, 1, 1.0, {"a": loss}, loss)


@pytest.mark.parametrize(
    ("best", "decades", "tried", "edge"),
    [
        (2e-4, 2, [1e-5, 1e-4, 1e-3, 1e-2], False),
        (2e-4, 1, [1e-4, 1e-3, 1e-2], True),
        (1.0, 3, [1e-3, 1e-2, 1e-1, 1.0, 10.0], False),
        (2e-4, 0, [1e-3, 1e-2], True),
    ],
)
def test_rates_beyond_the_edge_are_tried_until_the_best_is_inside(
    tmp_path: Path, best: float, decades: int, tried: list[float], edge: bool
) -> None:
    """And all of it is there when the same sweep is started again."""
    sweep = load_sweep(write_sweep(tmp_path, choose={"epochs": 0.34, "widen": decades}))

    def do(run: SweepRun, ranks: int) -> RunResult:
        run.folder.mkdir(parents=True)
        save_recipe(run.recipe, run.folder / "recipe.yaml")
        found = result(abs(float(np.log(run.rate / best))))
        (run.folder / "result.json").write_text(json.dumps(asdict(found)))
        return found

    progress = SweepProgress(sweep)
    rows = run_sweep(sweep, 1, progress, [way(do)]).rows()
    for row in rows:
        assert [one.rate for one in row.tried] == tried
        losses = [abs(np.log(rate / best)) for rate in tried]
        assert (row.rate, row.at_the_edge) == (tried[int(np.argmin(losses))], edge)
        assert len(row.seeds) == row.wanted
    assert progress.runs == len(progress.numbers) == 2 * len(tried) + 3
    again = run_sweep(sweep, 1, SweepProgress(sweep), [never])
    assert again.rows() == rows, "no folder is made again"


def test_a_failed_run_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    sweep = load_sweep(write_sweep(tmp_path))
    started: list[str] = []

    def do(run: SweepRun, ranks: int) -> RunResult:
        started.append(run.folder.name)
        if run.rate == 1e-2 and run.variant == "plain":
            raise DivergedError("the loss is not a finite number")
        if run.seed == 1:
            raise CommError("rank 0 was killed by SIGKILL")
        return result(run.rate)

    state = run_sweep(sweep, 1, SweepProgress(sweep), [way(do)])
    assert len(started) == 7
    assert state.failures == {
        "plain, rate 0.01, seed 0 (choosing the rate)": "the loss is not a finite number",
        "plain, rate 0.001, seed 1": "rank 0 was killed by SIGKILL",
    }
    plain, other = state.rows()
    assert (plain.rate, plain.seeds, plain.wanted) == (1e-3, (0,), 2)
    assert (other.rate, other.seeds, other.at_the_edge) == (1e-3, (5,), True)
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["failures"] == state.failures


def test_runs_are_dealt_to_all_who_do_some(tmp_path: Path) -> None:
    """Two do a run each at once: neither ends before the other has begun."""
    sweep = load_sweep(write_sweep(tmp_path, variants={"plain": {}}))
    by: dict[str, list[str]] = {"a": [], "b": []}

    def do(name: str, run: SweepRun, ranks: int) -> RunSteps:
        by[name].append(run.name)
        while len(by["a"]) != len(by["b"]):
            yield
        if run.rate == 1e-2:
            raise DivergedError("the loss is not a finite number")
        return result(run.rate)

    state = run_sweep(sweep, 1, SweepProgress(sweep), [partial(do, name) for name in by])
    assert len(by["a"]) == len(by["b"]) == 2, "one that chooses a rate, and one at the best"
    assert [*state.failures] == ["plain, rate 0.01, seed 0 (choosing the rate)"]
    assert len({*by["a"], *by["b"]}) == 4
    assert [row.seeds for row in state.rows()] == [(0, 1)]


def test_a_variant_without_any_rate_is_named(tmp_path: Path) -> None:
    sweep = load_sweep(write_sweep(tmp_path))

    def do(run: SweepRun, ranks: int) -> RunResult:
        if run.variant == "plain":
            raise DivergedError("the loss is not a finite number")
        return result(run.rate)

    state = run_sweep(sweep, 1, SweepProgress(sweep), [way(do)])
    assert state.failures["plain"] == "no rate could be tried, so no seed was run"
    assert [row.seeds for row in state.rows()] == [(), (5,)]


def test_a_signal_ends_the_sweep_and_says_how_to_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = load_sweep(write_sweep(tmp_path))

    def do(run: SweepRun, ranks: int) -> RunResult:
        raise Stopped(signal.SIGINT, "stopped by SIGINT")

    caplog.set_level("INFO")
    with pytest.raises(Stopped):
        run_sweep(sweep, 1, SweepProgress(sweep), [way(do)])
    assert "run the same command to continue with plain, rate 0.001, seed 0" in caplog.text


def test_failures_end_the_command_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CommError("rank 0 was killed by SIGKILL")

    monkeypatch.setattr(LaunchSlot, "start_training", fail)
    ended = CliRunner().invoke(app, ["sweep", str(write_sweep(tmp_path))])
    assert ended.exit_code == 1
    assert "failed: no norm: no rate could be tried" in ended.output


def test_a_dry_run_lists_and_predicts_and_runs_nothing(tmp_path: Path) -> None:
    path = write_sweep(tmp_path)
    ended = CliRunner().invoke(app, ["sweep", str(path), "--dry-run"])
    assert ended.exit_code == 0, ended.output
    assert "plain: choose the rate" in ended.output
    assert "predicted for laptop-2core" in ended.output
    assert not (tmp_path / "out").exists()
    ended = CliRunner().invoke(app, ["sweep", str(path), "--dry-run", "--ranks", "2"])
    assert ended.exit_code == 0, ended.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "3", "grid.depth=2"], "--ranks is 3, and the variants' grids have 2 places"),
        (["grid=auto"], "give --ranks"),
    ],
)
def test_ranks_and_grids_that_do_not_match(tmp_path: Path, options: list[str], words: str) -> None:
    ended = CliRunner().invoke(app, ["sweep", str(write_sweep(tmp_path)), *options])
    assert words in str(ended.exception)


def test_one_sweep_at_a_time(done: Path) -> None:
    with (
        lock_run(done.parent / "out"),
        pytest.raises(RecipeError, match="another run is under way"),
    ):
        sweep_here(done)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums depend on the number of threads in their last bits; those of commands have one here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_runs_at_once_are_stopped_together_and_end_as_one_after_the_other(tmp_path: Path) -> None:
    """Each on a rank of its own; SIGTERM comes when two are under way. One is halved later."""
    keys: dict[str, Any] = {"variants": {"plain": {"epochs": 6, "checkpoint.every": 6}}}
    keys |= {"seeds": [0], "choose": {"epochs": 1, "halve": 4}}
    keys["model"] = {"name": "multiscale", "channels": [2, 4]}  # a command's cannot be narrowed
    path = write_sweep(tmp_path / "killed", **keys)
    command = [sys.executable, "-m", "hyperslab", "sweep", str(path), "--at-once", "2"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    folders = [path.parent / "out" / "plain" / f"choose-rate-{r}-seed-0" for r in ("0.001", "0.01")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    deadline = time.monotonic() + 200
    while not all((folder / "epochs.csv").exists() for folder in folders):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 128 + signal.SIGTERM
    for rate in ("0.001", "0.01"):
        words = f"continue with plain, rate {rate}, seed 0 (choosing the rate)"
        assert said.count(words) == 1
    for folder in folders:
        assert list((folder / "checkpoints").glob("step-*")), "it was told, and not killed"
        with lock_run(folder):
            pass  # nobody works there any more
    again = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    assert again.returncode == 0, again.stderr
    sweep_here(write_sweep(tmp_path / "plain", **keys))
    out, plain = path.parent / "out", tmp_path / "plain" / "out"
    assert without_plan(table_of(out)) == without_plan(table_of(plain))
    assert "plain, rate 0.001, seed 0, choosing" in again.stdout, "planned and taken times"


def without_plan(table: Any) -> Any:
    for run in table["runs"]:
        del run["planned_seconds"]
    return {key: value for key, value in table.items() if key != "predicted_for"}


@pytest.mark.long
def test_the_table_does_not_depend_on_how_many_runs_go_at_once(done: Path, tmp_path: Path) -> None:
    sweep_here(write_sweep(tmp_path), at_once=3)
    assert table_of(tmp_path / "out") == table_of(done.parent / "out")


@pytest.mark.long
def test_the_command_killed_with_its_ranks_or_before_them_goes_on(tmp_path: Path) -> None:
    """Two ranks: one of them is killed, then the launcher; a third start ends as it would."""
    keys: dict[str, Any] = {"variants": {"plain": {"epochs": 6}}, "rates": [1e-3], "seeds": [0]}
    command = [sys.executable, "-m", "hyperslab", "sweep"]
    options = ["--ranks", "2", "grid.depth=2", "kernels=fixed"]
    out = {name: tmp_path / name / "out" for name in ("killed", "plain")}
    paths = {name: str(write_sweep(tmp_path / name, **keys)) for name in out}

    def begin() -> subprocess.Popen[str]:
        epochs = out["killed"] / "plain" / "rate-0.001-seed-0" / "epochs.csv"
        before = epochs.read_text() if epochs.exists() else ""
        process = subprocess.Popen(
            [*command, paths["killed"], *options], stdout=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 200
        while not epochs.exists() or epochs.read_text() == before:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    first = begin()
    rank = int(Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()[-1])
    os.kill(rank, signal.SIGKILL)
    said = first.communicate(timeout=200)[0]
    assert first.returncode == 1
    assert "failed: plain, rate 0.001, seed 0: rank" in said
    second = begin()
    second.kill()
    second.communicate(timeout=200)
    ended = subprocess.run(
        [*command, paths["killed"], *options], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    subprocess.run([*command, paths["plain"], *options], check=True, timeout=300)
    assert table_of(out["killed"]) == table_of(out["plain"])


def test_variants_that_the_data_cannot_make_are_refused(tmp_path: Path) -> None:
    """A "32" of volumes of 16 would be trained on whole ones of 16, and be called "32"."""
    of_files = {"data.synthetic.width": 16, "data.shape": [4, 32, 32, 32]}
    path = write_sweep(tmp_path / "shape", variants={"whole": {}, "32": of_files})
    with pytest.raises(RecipeError, match=r"'32' expects volumes of 32 x 32 x 32 .* have 16 x"):
        sweep_here(path)
    dry = CliRunner().invoke(app, ["sweep", str(path), "--dry-run"])
    assert isinstance(dry.exception, RecipeError)
    assert "data.shape=[4,16,16,16]" in str(dry.exception)
    path = write_sweep(tmp_path / "made", variants={"whole": {}, "12": {"data.subvolume": 12}})
    with pytest.raises(RecipeError, match=r"variant '12': .*subvolume=12 does not divide"):
        sweep_here(path)
    np.save(tmp_path / "24.npy", np.zeros((24, 24, 24), np.int16))
    (tmp_path / "targets.txt").write_text("0.1 0.2\n")
    stored = {"data.synthetic": None, "data.path": str(tmp_path), "data.subvolume": 16}
    stored |= {"data.files": "*.npy", "data.table": "targets.txt"}
    path = write_sweep(tmp_path / "stored", variants={"16": stored})
    with pytest.raises(RecipeError, match=r"variant '16': cannot cut .* into sub-volumes of 16"):
        sweep_here(path)
    assert not (tmp_path / "shape" / "out").exists()
