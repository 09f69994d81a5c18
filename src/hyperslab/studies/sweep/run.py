"""Runs a sweep: rates are chosen, then the seeds are run; stopped anywhere, it goes on there.

In reading order: one run, trained (or gone on with) and evaluated; the progress of all runs; the
state of a sweep, which it writes; the whole sweep, with as many runs at once as there are ways to
do one, all on one thread.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import yaml
from rich import progress as bars
from rich.console import Console

from hyperslab import errors
from hyperslab.checkpoint import folder_of
from hyperslab.launch.guard import PAUSE
from hyperslab.launch.restarts import StartTraining
from hyperslab.recipe.compare import differences, value_at
from hyperslab.recipe.load import options_of_trust, read_yaml, save_recipe
from hyperslab.studies.run_folder import NEEDED_OF_EPOCHS, read_table
from hyperslab.studies.sweep import results
from hyperslab.studies.sweep.budget import SweepForecast
from hyperslab.studies.sweep.schema import Sweep, SweepRun, check_variant
from hyperslab.train.run import RECIPE, awaiting_run, lock_run
from hyperslab.util.atomic_files import check_links, write_csv, write_json, write_text
from hyperslab.util.signals import StopRequest

log = logging.getLogger("hyperslab")


RunSteps = Generator[None, None, results.RunResult]
"""Yields while a run is under way, and returns what came of it."""


def do_run(
    run: SweepRun, ranks: int, start: StartTraining, stop: StopRequest | None = None
) -> RunSteps:
    """Trains to the end, from the newest checkpoint on if there is one; then evaluates.

    What a run says goes to ``logs`` in its folder. A run that chooses a rate is not evaluated and
    keeps no checkpoint, unless it is only wanted ``until`` some epoch; another one keeps its best.
    ``start`` starts it, and heeds the signals that ``stop`` notes.

    Raises:
        Stopped: by a signal; the run can be gone on with.
        RecipeError: the folder holds another run, or cannot be written.
        HyperslabError: what ended the run.
    """
    folder = run.folder
    file = folder / RECIPE
    results.finished_result(run)  # is it this run's?
    with errors.system_errors_as(errors.RecipeError, f"cannot write into {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        check_links(folder, "logs")  # which is opened before the training looks for others
        # The recipe is written only when nobody reads it any more.
        for _ in awaiting_run(folder):
            if stop is not None:
                stop.check()
            yield
        save_recipe(run.recipe, file)
        automatic = ["grid=auto"] if run.recipe.grid.auto else []
        trust = options_of_trust(run.recipe)
        until = [f"--until={run.until}"] if run.until else []
        commands = [["train", str(file), "--resume", *until, *trust, "--output", str(folder)]]
        commands[0] += automatic
        if not run.chooses:
            calibrate = ["--calibrate"] if run.recipe.segments is False else []
            commands.append(["evaluate", str(folder), *trust, *calibrate])
        for words in commands:
            seconds = run.recipe.timeout
            yield from start(ranks, words, folder / "logs", seconds=seconds, silent=True)
        result = results.collect_result(run)
        if run.until is None:
            remove_checkpoints(folder, keep_best=not run.chooses)
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


class SweepProgress(bars.Progress):
    """Shows how much of all runs is done, and below it each run under way with its last epoch.

    The upper bar counts epochs of all runs together. Nothing is drawn but by `look`: a thread of
    its own would keep the ranks from being forks of this process.
    """

    def __init__(self, sweep: Sweep, console: Console | None = None) -> None:
        console = console or Console()
        super().__init__(
            bars.BarColumn(bar_width=16),
            bars.TaskProgressColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        seeds = [len(variant.seeds) for variant in sweep.variants]
        self.runs = len(sweep.choosing()) + sum(seeds)
        self.numbers: dict[SweepRun, int] = {}
        self.epochs: dict[SweepRun, int] = {}  # that are done
        self.under_way: dict[SweepRun, bars.TaskID] = {}
        self._looked = 0.0
        total = sum(sum(sweep.planned_epochs(variant)) for variant in sweep.variants)
        self.task = self.add_task("all runs", total=total)

    def expect(self, runs: Sequence[SweepRun]) -> None:
        """Counts runs that come on top of those of the sweep."""
        self.runs += len(runs)
        total = self.tasks[self.task].total or 0
        self.update(self.task, total=total + sum(run.epochs for run in runs))

    def begin(self, run: SweepRun) -> None:
        self.numbers.setdefault(run, len(self.numbers) + 1)
        self.under_way[run] = self.add_task(self._words(run), total=run.epochs)

    def end(self, run: SweepRun, words: str) -> None:
        """Reports what came of a run, if there is something to say; others go on."""
        self.remove_task(self.under_way.pop(run))
        self.epochs[run] = run.epochs
        self.update(self.task, completed=sum(self.epochs.values()))
        if words:
            self.say(run, words)

    def say(self, run: SweepRun, words: str) -> None:
        line = f"{self._words(run)}: {words}"
        if self.console.is_terminal:
            self.console.print(
                errors.printable(line), highlight=False, markup=False, soft_wrap=True
            )
        else:
            log.info("%s", line)

    def look(self) -> None:
        """Looks at the runs under way and draws, if that was not done within a second."""
        now = time.monotonic()
        if self.disable or now - self._looked < 1:
            return
        self._looked = now
        for run, bar in self.under_way.items():
            done, loss = _last_epoch(run.folder / "epochs.csv")
            self.epochs[run] = min(done, run.epochs)
            note = f", epoch {done} of {run.recipe.epochs}{loss}" if done else ""
            self.update(bar, completed=done, description=f"{self._words(run)}{note}")
        self.update(self.task, completed=sum(self.epochs.values()))
        self.refresh()

    def _words(self, run: SweepRun) -> str:
        return f"run {self.numbers[run]} of {self.runs}: {run.name}"


def _last_epoch(path: Path) -> tuple[int, str]:
    """Counts the epochs that a run has done, with its validation loss in words."""
    try:
        table = read_table(path, NEEDED_OF_EPOCHS)
    except errors.DataError:  # it is being written
        table = {}
    if not len(table.get("epoch", ())):
        return 0, ""
    return int(table["epoch"][-1]) + 1, f", validation loss {table['validation_loss'][-1]:.4g}"


SWEEP_SETTINGS = "sweep.yaml"

DoRun = Callable[[SweepRun, int], RunSteps]


@dataclass
class SweepState:
    """Holds what there is of a sweep: results, and why others failed, by run."""

    sweep: Sweep
    forecast: SweepForecast | None = None
    outcomes: dict[SweepRun, results.RunResult] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[results.SweepRow]:
        """Makes the table so far."""
        rates = results.best_rates(self.sweep, self.outcomes)
        return [
            results.variant_row(self.sweep, variant, self.outcomes, rates.get(variant.name))
            for variant in self.sweep.variants
        ]

    def records(self) -> list[results.RunRecord]:
        """Lists the runs that have ended, in the sweep's order and not in that of their ends."""
        rates = results.best_rates(self.sweep, self.outcomes)
        known = {run: run for run in self.outcomes}  # with the epoch that halving stopped them at
        records = []
        for run in (*self.sweep.choosing(), *self.sweep.final(rates)):
            of_run = partial(results.RunRecord, run.variant, run.rate, run.seed, run.chooses)
            if run in known:
                found = self.outcomes[run]
                epoch = None if self.forecast is None else self.forecast.epoch_of(run.variant)
                planned = None if epoch is None else epoch * found.epochs
                status = results.halving_words(known[run].until) or "done"
                times = (planned, found.seconds)
                records.append(of_run(status, found.epochs, found.validation_loss, *times))
            elif run.name in self.failures:
                records.append(of_run("failed", run.epochs))
        return records

    def write(self) -> None:
        """Writes ``sweep.json``, ``sweep.csv`` and ``runs.csv``, each whole or not at all."""
        rows, records = self.rows(), self.records()
        content = {
            "variants": [asdict(row) for row in rows],
            "failures": dict(sorted(self.failures.items())),
            "runs": [asdict(record) for record in records],
            "predicted_for": self.forecast and self.forecast.machine,
        }
        write_json(self.sweep.output / "sweep.json", content)
        columns = [each.name for each in fields(results.RunRecord)]
        write_csv(self.sweep.output / "runs.csv", columns, [astuple(one) for one in records])
        write_csv(self.sweep.output / "sweep.csv", *results.csv_table(rows))


def run_sweep(
    sweep: Sweep,
    ranks: int,
    progress: SweepProgress,
    ways: Sequence[DoRun],
    forecast: SweepForecast | None = None,
) -> SweepState:
    """Completes a sweep; its table is written after every run.

    A run that fails is named and the others go on; another start tries it again. All ``ways`` to do
    a run are used at once, each for one run after the other.

    Raises:
        RecipeError: a variant's data are not what it says, the folder holds another sweep or other
            runs, another process works on it, or it cannot be written.
        Stopped: by a signal; the same command goes on.
    """
    state = SweepState(sweep, forecast)

    def do_all(runs: Sequence[SweepRun], outcomes: dict[SweepRun, results.RunResult]) -> None:
        # All are looked at first: a folder with another run ends the sweep before hours of work.
        todo = deque((run, results.finished_result(run)) for run in runs)
        free = [*ways]
        under_way: dict[SweepRun, tuple[DoRun, RunSteps]] = {}
        stopped: errors.Stopped | None = None
        with ExitStack() as stack:  # what goes wrong here ends all that are under way
            while todo or under_way:
                while todo and free:
                    run, before = todo.popleft()
                    progress.begin(run)
                    if before is None:
                        way = free.pop(0)
                        steps = stack.enter_context(closing(way(run, ranks)))
                        under_way[run] = (way, steps)
                    else:
                        outcomes[run] = before
                        progress.end(run, "" if run.until else f"{before.words}, was done before")
                for run, (way, steps) in [*under_way.items()]:
                    try:
                        next(steps)
                        continue
                    except StopIteration as end:
                        outcomes[run] = end.value
                        pause = f"paused in epoch {run.until}, " if run.until else ""
                        progress.end(run, f"{pause}{end.value.words}")
                    except errors.Stopped as error:
                        log.info("run the same command to continue with %s", run.name)
                        todo.clear()
                        stopped = error
                    except errors.HyperslabError as error:
                        state.failures[run.name] = str(error)
                        progress.end(run, f"failed: {error}")
                    free.append(way)
                    del under_way[run]
                    state.write()
                if under_way:
                    progress.look()
                    time.sleep(PAUSE)
        if stopped is not None:
            raise stopped

    def do_choosing() -> None:
        """Does the runs that choose the given rates, of which halving may stop some."""
        left = sweep.choosing()
        rungs = {
            (variant.name, epochs)
            for variant in sweep.variants
            if variant.choosing_runs
            for epochs, _ in sweep.rungs(variant)[:-1]
        }
        for until in sorted({epochs for _, epochs in rungs}):
            here = [replace(run, until=until) for run in left if (run.variant, until) in rungs]
            reached: dict[SweepRun, results.RunResult] = {}
            do_all(here, reached)
            gone = {run for run in here if run not in reached}
            for variant in sweep.variants:
                own = [run for run in here if run.variant == variant.name]
                for run in results.worse_half(own, reached):
                    gone.add(run)
                    if run in reached:
                        state.outcomes[run] = reached[run]
                        progress.say(run, results.halving_words(until))
                        remove_checkpoints(run.folder, keep_best=False)
            left = [run for run in left if run not in gone]
        do_all(left, state.outcomes)

    for variant in sweep.variants:
        check_variant(variant)
    with errors.system_errors_as(errors.RecipeError, f"cannot write into output {sweep.output}"):
        sweep.output.mkdir(parents=True, exist_ok=True)
        with lock_run(sweep.output):
            _claim(sweep)
            with progress:
                do_choosing()
                rates = results.best_rates(sweep, state.outcomes)
                while (wider := state.sweep.wider(sweep, rates)) != state.sweep:
                    more = [run for run in wider.choosing() if run not in state.sweep.choosing()]
                    state.sweep = wider
                    progress.expect(more)
                    do_all(more, state.outcomes)
                    rates = results.best_rates(wider, state.outcomes)
                for variant in sweep.variants:
                    if variant.name not in rates:
                        words = "no rate could be tried, so no seed was run"
                        state.failures[variant.name] = words
                do_all(sweep.final(rates), state.outcomes)
            state.write()
    return state


def _claim(sweep: Sweep) -> None:
    """Writes down what is swept; refuses the folder of another sweep (`RecipeError`)."""
    path = sweep.output / SWEEP_SETTINGS
    settings = yaml.safe_load(yaml.safe_dump(sweep.settings()))
    if not path.exists():
        write_text(path, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        return
    before = read_yaml(path, "sweep")
    if others := differences(before, settings):
        lines = "".join(
            f"\n    {key}: {_said(before, key)} there, {_said(settings, key)} now" for key in others
        )
        raise errors.RecipeError(
            f"{sweep.output} holds another sweep:{lines}\n"
            f"    choose another --output; or remove {path}: runs that are wanted by both stay, "
            "and one of another recipe is refused"
        )


def _said(values: object, key: str) -> object:
    found = value_at(values, key)
    if isinstance(found, dict):
        return f"a section of {len(found)} keys"
    return "nothing" if found is None else found
