"""Small sweeps, run in this process: no start-up of ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hyperslab.errors import HyperslabError
from hyperslab.recipe.load import load_recipe
from hyperslab.studies.sweep.results import RunResult
from hyperslab.studies.sweep.run import (
    DoRun,
    RunSteps,
    SweepProgress,
    SweepState,
    do_run,
    run_sweep,
)
from hyperslab.studies.sweep.schema import SweepRun, load_sweep
from hyperslab.train.evaluate import evaluate
from hyperslab.train.run import train
from tests.train.universes import narrow_network

ROOT = Path(__file__).parents[3]
TIMES = ("seconds", "total_seconds")


def write_sweep(folder: Path, **keys: Any) -> Path:
    """Two variants, two rates, two seeds: four runs that choose and four at the best rates."""
    recipe = {
        "model": keys.pop("model", {"variant": "lbann", "batch_norm": True}),
        "data": {"synthetic": {"width": 16, "samples": 20}, "batch_size": 4},
        "optimizer": {"eps": 1e-3, "schedule": {"epochs": 2}},
        "epochs": 3,
        "device": "cpu",
        "timeout": 60,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    values = {
        "recipe": "recipe.yaml",
        "variants": {"plain": {}, "no norm": {"model.batch_norm": False, "seeds": [5]}},
        "rates": [1e-3, 1e-2],
        "seeds": [0, 1],
        "choose": {"epochs": 0.34},
        "output": str(folder / "out"),
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({**values, **keys}, sort_keys=False))
    return path


def launch_here(
    ranks: int, words: Sequence[str], logs: Path, *, seconds: float, silent: bool = False
) -> Iterator[None]:
    """Does what the command does, in this process."""
    assert (ranks, silent) == (1, True)
    yield
    match words:
        case ["train", file, "--resume", *until, "--output", folder]:
            recipe = load_recipe(file)
            assert recipe.output == Path(folder)
            epochs = int(until[0].removeprefix("--until=")) if until else None
            train(recipe, resume=True, until=epochs)
        case ["evaluate", folder, "--calibrate"]:
            evaluate(folder, calibrate=True)
        case _:
            raise AssertionError(words)


def sweep_here(path: Path, *overrides: str, at_once: int = 1) -> SweepState:
    """Run a sweep in this process, with a narrow network; its runs take turns."""
    sweep = load_sweep(path, overrides)
    ways = [partial(do_run, start=launch_here)] * at_once
    with narrow_network():
        return run_sweep(sweep, 1, SweepProgress(sweep), ways)


def way(function: Callable[[SweepRun, int], RunResult]) -> DoRun:
    """Make a way to do runs of a function."""

    def steps(run: SweepRun, ranks: int) -> RunSteps:
        yield
        return function(run, ranks)

    return steps


def table_of(output: Path) -> Any:
    """``sweep.json`` without times."""
    return without_times(json.loads((output / "sweep.json").read_text()))


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key not in TIMES}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def killed_sweep(path: Path, *, kills: int, at_once: int = 1) -> None:
    """Complete a sweep that is killed so often, at random moments."""
    moments = random.Random(4)
    seconds = [f"{moments.uniform(0.05, 1.5):.2f}" for _ in range(kills)]
    program = "from tests.studies.sweep.sweeps import main; main()"
    command = [sys.executable, "-c", program, str(path), str(at_once), *seconds]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[-1]) >= 3, "killed too late"


def main() -> None:
    """Run a sweep in forks of this process, each killed after so many seconds, until one is done.

    Prints how many were killed. To start a process of its own each time would take seconds. The
    signal is one that nobody handles, so it ends a process as SIGKILL does.
    """
    path = Path(sys.argv[1])
    killed = 0
    for seconds in [*map(float, sys.argv[3:]), 0.0]:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                sweep_here(path, at_once=int(sys.argv[2]))
                code = 0
            except HyperslabError as error:
                print(error, file=sys.stderr)
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        killed += code == -signal.SIGALRM
        assert code in (0, -signal.SIGALRM), code
    print(killed)
