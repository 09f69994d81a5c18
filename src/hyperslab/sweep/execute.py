"""Do one run of a sweep: train it, or go on with it, and evaluate it."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

from hyperslab.checkpoint.retention import folder_of
from hyperslab.errors import RecipeError, reason
from hyperslab.launch.launcher import launch
from hyperslab.recipe.compare import differences, settings_of
from hyperslab.recipe.load import load_recipe, save_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.sweep.load import NO_MATTER, SweepRun
from hyperslab.sweep.result import RunResult, collect_result, read_result
from hyperslab.train.run import RECIPE
from hyperslab.train.run_lock import hold

log = logging.getLogger("hyperslab")

ASK_AGAIN = 0.5
"""After [s], whether a run's folder is free."""


def finished(run: SweepRun) -> RunResult | None:
    """What came of a run, if it is done.

    Raises:
        RecipeError: the folder holds another run; names the keys.
        DataError: what was kept of it is broken.
    """
    if not (run.folder / RECIPE).exists():
        return None
    there = settings_of(load_recipe(run.folder / RECIPE), but=NO_MATTER)
    others = differences(there, settings_of(run.recipe, but=NO_MATTER))
    if others:
        raise RecipeError(
            f"{run.folder} holds a run of another recipe: {', '.join(others)} differ\n"
            "    choose another --output, or remove it"
        )
    return read_result(run.folder)


def do_run(run: SweepRun, ranks: int) -> RunResult:
    """Train to the end, from the newest checkpoint on if there is one; then evaluate.

    What a run says goes to ``logs`` in its folder. A run that chooses a rate is not evaluated and
    keeps no checkpoint; another one keeps its best.

    Raises:
        Stopped: by a signal; the run can be gone on with.
        RecipeError: the folder holds another run, or cannot be written.
        HyperslabError: what ended the run.
    """
    folder = run.folder
    file = folder / RECIPE
    finished(run)  # is it this run's?
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _await_lock(folder)
        save_recipe(run.recipe, file)
        automatic = ["grid=auto"] if run.recipe.grid.auto else []
        train = ["train", str(file), "--resume", "--output", str(folder), *automatic]
        _launch(run.recipe, ranks, train, folder)
        if not run.chooses:
            calibrate = ["--calibrate"] if run.recipe.segments is False else []
            _launch(run.recipe, ranks, ["evaluate", str(folder), *calibrate], folder)
        result = collect_result(folder, epochs=run.recipe.epochs, evaluated=not run.chooses)
        remove_checkpoints(folder, keep_best=not run.chooses)
    except OSError as error:
        raise RecipeError(f"cannot write into {folder}: {reason(error)}") from None
    return result


def remove_checkpoints(folder: Path, *, keep_best: bool) -> None:
    """Remove what only a run that goes on would need."""
    checkpoints = folder_of(folder)
    best = checkpoints / "best"
    kept = best.resolve().name if keep_best else None
    if not keep_best:
        best.unlink(missing_ok=True)
    for path in [*checkpoints.glob("step-*"), *checkpoints.glob(".step-*")]:
        if path.name != kept:
            shutil.rmtree(path)


def _await_lock(folder: Path) -> None:
    """Wait for ranks whose launcher was killed: they write a checkpoint and end."""
    told = False
    while True:
        try:
            with hold(folder):
                return
        except RecipeError:
            if not told:
                log.info("waiting: ranks of an earlier start still work in %s", folder)
            told = True
            time.sleep(ASK_AGAIN)


def _launch(recipe: Recipe, ranks: int, arguments: list[str], folder: Path) -> None:
    command = ["-m", "hyperslab", *arguments]
    seconds = recipe.timeout
    launch(ranks, command, folder / "logs", limit=seconds, patience=seconds, silent=True)
