"""Runs a sweep: rates are chosen, then the seeds are run; stopped anywhere, it goes on there.

In reading order: one run, trained (or gone on with) and evaluated; the progress of all runs; the
whole sweep; `forecast_table`, what a sweep will take by the times that the planner predicts.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hyperslab.checkpoint.retention import folder_of
from hyperslab.errors import HyperslabError, RecipeError, Stopped, printable, reason
from hyperslab.launch.supervisor import launch
from hyperslab.planner.auto import machine_for
from hyperslab.planner.job import job_of
from hyperslab.planner.machine import Machine
from hyperslab.planner.search import MemoryLimit, PlanBounds, trace_one
from hyperslab.planner.summary import time_text
from hyperslab.recipe.compare import differences, settings_of
from hyperslab.recipe.load import load_recipe, options_of_trust, save_recipe
from hyperslab.recipe.schema import Recipe, planned_device
from hyperslab.studies.sweep.results import (
    RunResult,
    SweepRow,
    best_rates,
    collect_result,
    read_result,
    rows_of,
    write_table,
)
from hyperslab.studies.sweep.schema import IRRELEVANT_SECTIONS, Sweep, SweepRun, SweepVariant
from hyperslab.studies.table import Table, TableRow
from hyperslab.train.run import RECIPE, lock_run
from hyperslab.util.atomic_files import write_text
from hyperslab.util.documents import parse_yaml, read_text

log = logging.getLogger("hyperslab")

ASK_AGAIN = 0.5
"""Waits so long [s] before it tries a run's folder again."""


def finished_result(run: SweepRun) -> RunResult | None:
    """Returns what came of a run, if it is done.

    Raises:
        RecipeError: the folder holds another run; names the keys.
        DataError: what was kept of it is broken.
    """
    if not (run.folder / RECIPE).exists():
        return None
    there = settings_of(load_recipe(run.folder / RECIPE), but=IRRELEVANT_SECTIONS)
    others = differences(there, settings_of(run.recipe, but=IRRELEVANT_SECTIONS))
    if others:
        raise RecipeError(
            f"{run.folder} holds a run of another recipe: {', '.join(others)} differ\n"
            "    choose another --output, or remove it"
        )
    return read_result(run.folder)


def do_run(run: SweepRun, ranks: int) -> RunResult:
    """Trains to the end, from the newest checkpoint on if there is one; then evaluates.

    What a run says goes to ``logs`` in its folder. A run that chooses a rate is not evaluated and
    keeps no checkpoint; another one keeps its best.

    Raises:
        Stopped: by a signal; the run can be gone on with.
        RecipeError: the folder holds another run, or cannot be written.
        HyperslabError: what ended the run.
    """
    folder = run.folder
    file = folder / RECIPE
    finished_result(run)  # is it this run's?
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _await_lock(folder)
        save_recipe(run.recipe, file)
        automatic = ["grid=auto"] if run.recipe.grid.auto else []
        trust = options_of_trust(run.recipe)
        train = ["train", str(file), "--resume", *trust, "--output", str(folder), *automatic]
        _launch(run.recipe, ranks, train, folder)
        if not run.chooses:
            calibrate = ["--calibrate"] if run.recipe.segments is False else []
            _launch(run.recipe, ranks, ["evaluate", str(folder), *trust, *calibrate], folder)
        result = collect_result(folder, epochs=run.recipe.epochs, evaluated=not run.chooses)
        remove_checkpoints(folder, keep_best=not run.chooses)
    except OSError as error:
        raise RecipeError(f"cannot write into {folder}: {reason(error)}") from None
    return result


def remove_checkpoints(folder: Path, *, keep_best: bool) -> None:
    """Removes what only a run that goes on would need."""
    checkpoints = folder_of(folder)
    best = checkpoints / "best"
    kept = best.resolve().name if keep_best else None
    if not keep_best:
        best.unlink(missing_ok=True)
    for path in [*checkpoints.glob("step-*"), *checkpoints.glob(".step-*")]:
        if path.name != kept:
            shutil.rmtree(path)


def _await_lock(folder: Path) -> None:
    """Waits for ranks whose launcher was killed: they write a checkpoint and end."""
    told = False
    while True:
        try:
            with lock_run(folder):
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


LOOK_EVERY = 1.0
"""Waits so many seconds between two looks at the history of the run under way."""


class SweepProgress:
    """Shows which run of how many is under way, its last epoch, and the share that is done.

    The bar counts epochs of all runs together.
    """

    def __init__(self, sweep: Sweep, console: Console | None = None) -> None:
        self.console = console or Console()
        choosing = sweep.choosing()
        self.runs = len(choosing) + sum(len(variant.seeds) for variant in sweep.variants)
        self.number = 0
        self.done = 0
        final = sum(len(variant.seeds) * variant.recipe.epochs for variant in sweep.variants)
        columns = (BarColumn(bar_width=16), TaskProgressColumn(), TimeRemainingColumn())
        self.bar = Progress(
            *columns,
            TextColumn("{task.description}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        total = final + sum(run.recipe.epochs for run in choosing)
        self.task = self.bar.add_task("", total=total)
        self.under_way: SweepRun | None = None
        self.ended = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.bar.start()
        if self.console.is_terminal:
            self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.bar.stop()

    def begin(self, run: SweepRun) -> None:
        """Begins to show the next run."""
        self.number += 1
        self.under_way = run
        self.bar.update(self.task, description=self._words(run), completed=self.done)

    def end(self, run: SweepRun, result: RunResult, *, again: bool) -> None:
        """Reports that a run is done; ``again``: it was done only now."""
        self._finish(run)
        words = (
            f"validation loss {result.validation_loss:.4g} in epoch {result.best_epoch} of "
            f"{result.epochs}, {result.seconds:.0f} s"
        )
        self._say(f"{self._words(run)}: {words}{'' if again else ', was done before'}")

    def fail(self, run: SweepRun, error: Exception) -> None:
        """Reports that a run failed; others go on."""
        self._finish(run)
        self._say(f"{self._words(run)}: failed: {error}")

    def _finish(self, run: SweepRun) -> None:
        self.under_way = None
        self.done += run.recipe.epochs
        self.bar.update(self.task, completed=self.done)

    def _words(self, run: SweepRun) -> str:
        return f"run {self.number} of {self.runs}: {run.name}"

    def _say(self, line: str) -> None:
        if self.console.is_terminal:
            self.bar.console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
        else:
            log.info("%s", line)

    def _watch(self) -> None:
        while not self.ended.wait(LOOK_EVERY):
            run = self.under_way
            if run is not None:
                epochs, loss = _last_epoch(run.folder / "epochs.csv")
                note = f", epoch {epochs} of {run.recipe.epochs}{loss}" if epochs else ""
                self.bar.update(
                    self.task, completed=self.done + epochs, description=self._words(run) + note
                )


def _last_epoch(path: Path) -> tuple[int, str]:
    """Counts the epochs that a run has done, with its validation loss in words."""
    try:
        head, *rows = path.read_text().rpartition("\n")[0].splitlines()
        row = dict(zip(head.split(","), rows[-1].split(","), strict=True))
        loss = float(row["validation_loss"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0, ""
    return int(row["epoch"]) + 1, f", validation loss {loss:.4g}"


SWEEP_SETTINGS = "sweep.yaml"

DoRun = Callable[[SweepRun, int], RunResult]


@dataclass
class SweepState:
    """Holds what there is of a sweep: results, and why others failed, by run."""

    sweep: Sweep
    outcomes: dict[SweepRun, RunResult] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def rates(self) -> dict[str, float]:
        """Returns the best of the rates that could be tried."""
        return best_rates(self.sweep, self.outcomes, given_up=True)

    def rows(self) -> list[SweepRow]:
        """Makes the table so far."""
        return rows_of(self.sweep, self.outcomes, self.rates())

    def write(self) -> None:
        """Writes the table's files."""
        write_table(self.sweep, self.rows(), self.failures)


def run_sweep(sweep: Sweep, ranks: int, progress: SweepProgress, do: DoRun = do_run) -> SweepState:
    """Does what is left of a sweep; its table is written after every run.

    A run that fails is named and the others go on; another start tries it again.

    Raises:
        RecipeError: the folder holds another sweep or other runs, another process works on it, or
            it cannot be written.
        Stopped: by a signal; the same command goes on.
    """
    state = SweepState(sweep)
    try:
        with ExitStack() as stack:
            sweep.output.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_run(sweep.output))
            _claim(sweep)
            stack.enter_context(progress)
            choosing = sweep.choosing()
            _do_all(choosing, state, ranks, progress, do)
            rates = state.rates()
            for variant in sweep.variants:
                if variant.name not in rates:
                    words = "no rate could be tried, so no seed was run"
                    state.failures[variant.name] = words
            _do_all(sweep.final(rates), state, ranks, progress, do)
            state.write()
    except OSError as error:
        raise RecipeError(f"cannot write into output {sweep.output}: {reason(error)}") from None
    return state


def _do_all(
    runs: Sequence[SweepRun],
    state: SweepState,
    ranks: int,
    progress: SweepProgress,
    do: DoRun,
) -> None:
    there = {run: result for run in runs if (result := finished_result(run)) is not None}
    for run in runs:
        progress.begin(run)
        if run in there:
            state.outcomes[run] = there[run]
            progress.end(run, there[run], again=False)
            continue
        try:
            state.outcomes[run] = do(run, ranks)
        except Stopped:
            log.warning("the same command goes on with %s", run.name)
            raise
        except HyperslabError as error:
            state.failures[run.name] = str(error)
            progress.fail(run, error)
        else:
            progress.end(run, state.outcomes[run], again=True)
        state.write()


def _claim(sweep: Sweep) -> None:
    """Writes down what is swept, or compares it with what was.

    Raises:
        RecipeError: it is another sweep; names the keys with both values.
    """
    path = sweep.output / SWEEP_SETTINGS
    settings = yaml.safe_load(yaml.safe_dump(sweep.settings()))
    if not path.exists():
        write_text(path, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        return
    try:
        before = parse_yaml(read_text(path))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} is no YAML: {error}") from None
    others = differences(before, settings)
    if others:
        lines = "".join(
            f"\n    {key}: {_at(before, key)} there, {_at(settings, key)} now" for key in others
        )
        raise RecipeError(
            f"{sweep.output} holds another sweep:{lines}\n"
            f"    choose another --output; or remove {path}: runs that are wanted by both stay, "
            "and one of another recipe is refused"
        )


def _at(values: object, key: str) -> object:
    """Looks up a dotted key; names of variants may have dots, too."""
    if not key:
        return values
    if not isinstance(values, Mapping):
        return "nothing"
    for name in values:
        if key == name or key.startswith(f"{name}."):
            return _at(values[name], key[len(name) + 1 :])
    return "nothing"


def forecast_table(sweep: Sweep, machine: str | None) -> Table:
    """Tables each variant and stage, and their sum; nothing is run.

    Times are those of the training steps, by the plan for a machine; validation, evaluation and
    start-up come on top. Where there is no prediction, the reason stands in its place.

    Raises:
        RecipeError: a folder holds another run.
        MachineError: there is no such machine.
    """
    rows: list[TableRow] = []
    total = 0.0
    known = True
    device = planned_device(sweep.variants[0].recipe)
    chosen = machine_for(machine, device)
    choosing = sweep.choosing()
    for variant in sweep.variants:
        step, steps, words = _predicted_step(variant, chosen)
        runs = [run for run in choosing if run.variant == variant.name]
        done = sum(finished_result(run) is not None for run in runs)
        stages = [("choose the rate", len(runs), done, runs[0].recipe.epochs)] if runs else []
        stages += [("seeds", len(variant.seeds), 0, variant.recipe.epochs)]
        for stage, count, ready, epochs in stages:
            seconds = None if step is None else step * steps * epochs * (count - ready)
            total += seconds or 0.0
            known = known and seconds is not None
            cells = [
                f"{variant.name}: {stage}",
                str(count),
                _values_text(variant.rates) if stage != "seeds" else "the best",
                _values_text(variant.seeds if stage == "seeds" else variant.choosing_seeds),
                str(epochs),
                str(ready) if stage != "seeds" else "",
                words if step is None else time_text(step),
                "" if seconds is None else time_text(seconds),
            ]
            rows.append(cells)
    words = f"training steps, predicted for {chosen.name}"
    rows.append([words, *[""] * 6, f"{'' if known else 'more than '}{time_text(total)}"])
    head = ("variant", "runs", "rates", "seeds", "epochs", "done", "a step", "all")
    return Table("", head, rows)


def _predicted_step(variant: SweepVariant, machine: Machine) -> tuple[float | None, int, str]:
    """Predicts a step [s]; also the steps of an epoch, and why there is no prediction."""
    recipe = variant.recipe
    try:
        job = job_of(recipe)
        steps = -(-job.samples // (job.batch * job.accumulated))
        found = trace_one(job, recipe.grid, machine, PlanBounds(MemoryLimit(machine.memory, "")))
    except HyperslabError as error:
        return None, 0, str(error).splitlines()[0]
    return found.seconds.total, steps, ""


def _values_text(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
