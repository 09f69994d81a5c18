"""Runs a sweep: rates are chosen, then the seeds are run; stopped anywhere, it goes on there.

In reading order: what came of a run; one run, trained (or gone on with) and evaluated; the table
with a row for each variant, medians and ranges over seeds; the progress of all runs; the whole
sweep; `forecast_table`, what a sweep will take by the times that the planner predicts.
"""

from __future__ import annotations

import logging
import shutil
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import TypeAdapter, ValidationError
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hyperslab import errors
from hyperslab.checkpoint import folder_of
from hyperslab.formats.views import selected
from hyperslab.launch.restarts import StartTraining, launch_training
from hyperslab.planner.auto import machine_for
from hyperslab.planner.job import job_of, source_of
from hyperslab.planner.summary import time_text
from hyperslab.recipe.compare import differences, value_at
from hyperslab.recipe.load import options_of_trust, read_yaml, save_recipe
from hyperslab.recipe.schema import Recipe, planned_device
from hyperslab.studies.run_folder import NEEDED_OF_EPOCHS, check_recipe, read_evaluation, read_table
from hyperslab.studies.scaling.study import Predictor
from hyperslab.studies.sweep.schema import IRRELEVANT_SECTIONS, Sweep, SweepRun, SweepVariant
from hyperslab.studies.table import Table, TableRow
from hyperslab.train.run import RECIPE, await_run, lock_run
from hyperslab.util.atomic_files import check_links, write_csv, write_json, write_text
from hyperslab.util.documents import read_json

log = logging.getLogger("hyperslab")

RESULT_FILE = "result.json"


@dataclass(frozen=True, slots=True)
class RunResult:
    """Holds a finished run: its epochs, and the least validation loss with its epoch, from 1.

    ``seconds`` [s] it trained. ``test`` are the scores of its best checkpoint on the test split by
    parameter or class, and ``test_mean`` of all together: squared errors over those of predicting
    the mean, or Dice; ``recalibrated`` those of recalibrated averages over volumes. They are empty
    where the run only chose a rate.
    """

    epochs: int
    validation_loss: float
    best_epoch: int
    seconds: float
    test: dict[str, float | None]
    test_mean: float | None = None
    recalibrated: dict[str, float | None] | None = None

    @property
    def words(self) -> str:
        loss = f"validation loss {self.validation_loss:.4g}"
        return f"{loss} in epoch {self.best_epoch} of {self.epochs}, {self.seconds:.0f} s"


_RESULT = TypeAdapter(RunResult)


def read_result(folder: Path) -> RunResult | None:
    """Reads what was kept of a run that is done (`DataError`); None where it is not."""
    path = folder / RESULT_FILE
    try:
        return _RESULT.validate_python(read_json(path))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise errors.DataError(
            f"{path} is not a result of a run: {where}: {first['msg']}; remove it"
        ) from None
    except (OSError, ValueError) as error:
        raise errors.DataError(f"{path} is not a result of a run: {error!r}; remove it") from None


def collect_result(folder: Path, *, epochs: int, evaluated: bool) -> RunResult:
    """Collects what came of a run that has just ended, and writes it down (`DataError`)."""
    table = read_table(folder / "epochs.csv", NEEDED_OF_EPOCHS)
    losses = table.get("validation_loss", np.array([]))
    if len(losses) != epochs or not np.isfinite(losses).any():
        raise errors.DataError(f"{folder / 'epochs.csv'} has not the losses of {epochs} epochs")
    best = int(np.nanargmin(losses))
    # A run that chooses a rate must not look at the test split.
    found = read_evaluation(folder / "evaluation" / "metrics.json") if evaluated else {}
    test = _test_scores(found)
    mean = found["mean"]["ratio"] if "mean" in found else None
    known = [score for score in test.values() if score is not None]
    if "classes" in found and known:
        mean = float(np.mean(known))
    result = RunResult(
        epochs=epochs,
        validation_loss=float(losses[best]),
        best_epoch=best + 1,
        seconds=float(np.nansum(table["seconds"])),
        test=test,
        test_mean=mean,
        recalibrated=_test_scores(found["recalibrated"]) if "recalibrated" in found else None,
    )
    write_json(folder / RESULT_FILE, asdict(result))
    return result


def _test_scores(found: dict[str, Any]) -> dict[str, float | None]:
    if "classes" in found:
        return {name: row["dice"] for name, row in found["classes"].items()}
    return {name: row["ratio"] for name, row in found.get("parameters", {}).items()}


def finished_result(run: SweepRun) -> RunResult | None:
    """Returns what came of a run, if it is done; raises as `check_recipe` and `read_result`."""
    if not (run.folder / RECIPE).exists():
        return None
    check_recipe(run.folder, run.recipe, "holds a run of", but=IRRELEVANT_SECTIONS)
    return read_result(run.folder)


def do_run(run: SweepRun, ranks: int, start: StartTraining | None = None) -> RunResult:
    """Trains to the end, from the newest checkpoint on if there is one; then evaluates.

    What a run says goes to ``logs`` in its folder. A run that chooses a rate is not evaluated and
    keeps no checkpoint; another one keeps its best. ``start`` starts it, by default here.

    Raises:
        Stopped: by a signal; the run can be gone on with.
        RecipeError: the folder holds another run, or cannot be written.
        HyperslabError: what ended the run.
    """
    folder = run.folder
    file = folder / RECIPE
    finished_result(run)  # is it this run's?
    with errors.system_errors_as(errors.RecipeError, f"cannot write into {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        check_links(folder, "logs")  # which is opened before the training looks for others
        # The recipe is written only when nobody reads it any more.
        await_run(folder)
        save_recipe(run.recipe, file)
        automatic = ["grid=auto"] if run.recipe.grid.auto else []
        trust = options_of_trust(run.recipe)
        commands = [["train", str(file), "--resume", *trust, "--output", str(folder), *automatic]]
        if not run.chooses:
            calibrate = ["--calibrate"] if run.recipe.segments is False else []
            commands.append(["evaluate", str(folder), *trust, *calibrate])
        for words in commands:
            seconds = run.recipe.timeout
            (start or launch_training)(ranks, words, folder / "logs", seconds=seconds, silent=True)
        result = collect_result(folder, epochs=run.recipe.epochs, evaluated=not run.chooses)
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


Outcomes = Mapping[SweepRun, RunResult]  # what came of the runs that are done


@dataclass(frozen=True, slots=True)
class Spread:
    """Holds the median of some runs, and the least and the largest of them."""

    median: float
    least: float
    largest: float


@dataclass(frozen=True, slots=True)
class TriedRate:
    """Holds the median validation loss at a rate, of so many runs of those that choose."""

    rate: float
    validation_loss: float | None
    runs: int


@dataclass(frozen=True, slots=True)
class SweepRow:
    """Holds a variant: the rates that were tried, the best, and what came of the seeds there.

    ``segments``: the test scores are Dice, and not squared errors over those of the mean.
    ``paths`` are the folders of the runs that are done, below the sweep's.
    """

    name: str
    segments: bool
    rate: float | None
    tried: tuple[TriedRate, ...]
    wanted: int
    epochs: int
    paths: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    validation_loss: Spread | None = None
    best_epoch: Spread | None = None
    test_mean: Spread | None = None
    test: dict[str, Spread | None] = field(default_factory=dict)
    recalibrated: dict[str, Spread | None] | None = None
    seconds: Spread | None = None
    total_seconds: float = 0.0

    @property
    def at_the_edge(self) -> bool:
        """Tells if the best rate is the least or the largest of several: others may be better."""
        rates = [one.rate for one in self.tried]
        return len(rates) > 1 and self.rate in (min(rates), max(rates))


def best_rates(sweep: Sweep, outcomes: Outcomes) -> dict[str, float]:
    """Finds by name the rate of each variant with the lowest median validation loss.

    Of those that could be tried; a variant has none where none could. Of equal rates the smaller
    one is taken.
    """
    found = {}
    for variant in sweep.variants:
        tried = rates_tried(variant, outcomes)
        known = [(one.validation_loss, one.rate) for one in tried if one.runs]
        if not variant.choosing_runs:
            found[variant.name] = variant.rates[0]
        elif known:
            found[variant.name] = min(known)[1]
    return found


def rates_tried(variant: SweepVariant, outcomes: Outcomes) -> tuple[TriedRate, ...]:
    """Lists what the runs that choose have found so far."""
    if not variant.choosing_runs:
        return ()
    by_rate: dict[float, list[float]] = {rate: [] for rate in variant.rates}
    for run, result in outcomes.items():
        if run.chooses and run.variant == variant.name:
            by_rate[run.rate].append(result.validation_loss)
    return tuple(
        TriedRate(rate, statistics.median(losses) if losses else None, len(losses))
        for rate, losses in by_rate.items()
    )


def variant_row(
    sweep: Sweep, variant: SweepVariant, outcomes: Outcomes, rate: float | None
) -> SweepRow:
    """Makes the row of a variant; what is not done yet is not in it."""
    own = {run: result for run, result in outcomes.items() if run.variant == variant.name}
    done = {run.seed: run for run in own if not run.chooses and run.rate == rate}
    runs = [done[seed] for seed in variant.seeds if seed in done]
    results = [own[run] for run in runs]
    recalibrated = [result.recalibrated or {} for result in results]
    return SweepRow(
        name=variant.name,
        segments=_predicts_classes(variant.recipe, [run.folder for run in runs]),
        rate=rate,
        tried=rates_tried(variant, outcomes),
        wanted=len(variant.seeds),
        epochs=variant.recipe.epochs,
        paths=tuple(str(run.folder.relative_to(sweep.output)) for run in runs),
        seeds=tuple(run.seed for run in runs),
        validation_loss=_spread(result.validation_loss for result in results),
        best_epoch=_spread(result.best_epoch for result in results),
        test_mean=_spread(result.test_mean for result in results),
        test=_spreads([result.test for result in results]),
        recalibrated=_spreads(recalibrated) if any(recalibrated) else None,
        seconds=_spread(result.seconds for result in results),
        total_seconds=sum(result.seconds for result in own.values()),
    )


def _predicts_classes(recipe: Recipe, folders: Sequence[Path]) -> bool:
    """Tells, by the recipe or else by its first run, if classes are predicted."""
    if recipe.segments is not None or not folders:
        return bool(recipe.segments)
    measured = read_table(folders[0] / "epochs.csv", NEEDED_OF_EPOCHS)
    return any(name.startswith("validation_dice_") for name in measured)


def _spread(values: Iterable[float | None]) -> Spread | None:
    """Spreads values; None where one of them is not known."""
    known = list(values)
    numbers = [float(value) for value in known if value is not None]
    if not numbers or len(numbers) < len(known):
        return None
    return Spread(statistics.median(numbers), min(numbers), max(numbers))


def _spreads(scores: Sequence[Mapping[str, float | None]]) -> dict[str, Spread | None]:
    names = scores[0] if scores else {}
    return {name: _spread(score.get(name) for score in scores) for name in names}


def _csv_cells(row: SweepRow, spreads: Sequence[str]) -> list[object]:
    cells: list[object] = [row.name, row.rate, len(row.seeds), row.wanted, row.epochs]
    for name in spreads:
        found: Spread | None = row.test.get(name) if name in row.test else getattr(row, name, None)
        cells += [None] * 3 if found is None else [found.median, found.least, found.largest]
    return [*cells, row.total_seconds]


def runs_table(rows: Sequence[SweepRow]) -> Table:
    """Shows by variant what was run, and the median time of a training."""
    cells = [
        [
            row.name,
            "none" if row.rate is None else f"{row.rate:g}",
            f"{len(row.seeds)} of {row.wanted}",
            _range_text(row.validation_loss),
            "" if row.best_epoch is None else f"{row.best_epoch.median:g} of {row.epochs}",
            "" if row.seconds is None else f"{row.seconds.median:.0f} s",
            "the best rate is at the edge: choose.widen tries more" if row.at_the_edge else "",
        ]
        for row in rows
    ]
    head = ("variant", "rate", "seeds", "validation loss", "best epoch", "training", "")
    return Table("", head, cells)


def scores_table(rows: Sequence[SweepRow]) -> Table:
    """Shows by variant the scores on the test split, median (least to largest) over seeds."""
    names = list(dict.fromkeys(name for row in rows for name in row.test))
    cells = [
        [row.name, _range_text(row.test_mean), *(_range_text(row.test.get(n)) for n in names)]
        for row in rows
    ]
    segments = any(row.segments for row in rows)
    what = "Dice" if segments else "squared error over that of predicting the mean"
    caption = f"{what}, test split; median (least to largest) over seeds"
    return Table(caption, ["variant", "mean", *names], cells)


def rates_table(rows: Sequence[SweepRow]) -> Table:
    """Shows the median validation loss of each rate that was tried."""
    cells = [
        [
            row.name,
            f"{one.rate:g}",
            "failed" if one.validation_loss is None else f"{one.validation_loss:.4g}",
            "chosen" if one.rate == row.rate else "",
        ]
        for row in rows
        for one in row.tried
    ]
    return Table("", ("variant", "rate tried", "validation loss", ""), cells)


def _range_text(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.3g} ({spread.least:.3g} to {spread.largest:.3g})"


class SweepProgress(Progress):
    """Shows which run of how many is under way, its last epoch, and the share that is done.

    The bar counts epochs of all runs together. It is drawn anew every second, and looks at the
    history of the run under way then.
    """

    def __init__(self, sweep: Sweep, console: Console | None = None) -> None:
        self.under_way: SweepRun | None = None
        console = console or Console()
        super().__init__(
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            refresh_per_second=1,
            disable=not console.is_terminal,
        )
        choosing = sweep.choosing()
        self.runs = len(choosing) + sum(len(variant.seeds) for variant in sweep.variants)
        self.numbers: dict[SweepRun, int] = {}
        self.done = 0
        final = sum(len(variant.seeds) * variant.recipe.epochs for variant in sweep.variants)
        self.task = self.add_task("", total=final + sum(run.recipe.epochs for run in choosing))

    def expect(self, runs: Sequence[SweepRun]) -> None:
        """Counts runs that come on top of those of the sweep."""
        self.runs += len(runs)
        total = self.tasks[self.task].total or 0
        self.update(self.task, total=total + sum(run.recipe.epochs for run in runs))

    def begin(self, run: SweepRun) -> None:
        self.numbers[run] = len(self.numbers) + 1
        self.under_way = run

    def end(self, run: SweepRun, words: str) -> None:
        """Reports what came of a run; others go on."""
        self.under_way = None
        self.done += run.recipe.epochs
        self.update(self.task, completed=self.done)
        line = f"{self._words(run)}: {words}"
        if self.console.is_terminal:
            self.console.print(
                errors.printable(line), highlight=False, markup=False, soft_wrap=True
            )
        else:
            log.info("%s", line)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Looks at the run under way, and draws; rich calls this."""
        if (run := self.under_way) is not None:
            epochs, loss = _last_epoch(run.folder / "epochs.csv")
            note = f", epoch {epochs} of {run.recipe.epochs}{loss}" if epochs else ""
            words = self._words(run) + note
            self.update(self.task, completed=self.done + epochs, description=words)
        return super().get_renderables()

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

DoRun = Callable[[SweepRun, int], RunResult]


@dataclass
class SweepState:
    """Holds what there is of a sweep: results, and why others failed, by run."""

    sweep: Sweep
    outcomes: dict[SweepRun, RunResult] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[SweepRow]:
        """Makes the table so far."""
        rates = best_rates(self.sweep, self.outcomes)
        return [
            variant_row(self.sweep, variant, self.outcomes, rates.get(variant.name))
            for variant in self.sweep.variants
        ]

    def write(self) -> None:
        """Writes ``sweep.json`` and ``sweep.csv``, each whole or not at all."""
        rows = self.rows()
        content = {"variants": [asdict(row) for row in rows], "failures": self.failures}
        write_json(self.sweep.output / "sweep.json", content)
        names = list(dict.fromkeys(name for row in rows for name in row.test))
        spreads = ("validation_loss", "best_epoch", "test_mean", *names, "seconds")
        head = ["variant", "rate", "runs", "wanted", "epochs"]
        head += [f"{name}{end}" for name in spreads for end in ("", "_least", "_largest")]
        head += ["total_seconds"]
        cells = [_csv_cells(row, spreads) for row in rows]
        write_csv(self.sweep.output / "sweep.csv", head, cells)


def run_sweep(
    sweep: Sweep, ranks: int, progress: SweepProgress, do: DoRun | Sequence[DoRun] = do_run
) -> SweepState:
    """Completes a sweep; its table is written after every run.

    A run that fails is named and the others go on; another start tries it again. Several ways to
    ``do`` a run are used at once, each for one run after the other.

    Raises:
        RecipeError: a variant's data are not what it says, the folder holds another sweep or other
            runs, another process works on it, or it cannot be written.
        Stopped: by a signal; the same command goes on.
    """
    state = SweepState(sweep)
    ways = [do] if callable(do) else [*do]
    turn = threading.Lock()

    def do_all(runs: Sequence[SweepRun]) -> None:
        # All are looked at first: a folder with another run ends the sweep before hours of work.
        todo = deque((run, finished_result(run)) for run in runs)
        if len(ways) == 1:  # in this thread, to which signals come
            do_each(ways[0], todo)
            return
        with ThreadPoolExecutor(len(ways)) as pool:
            for work in [pool.submit(do_each, way, todo) for way in ways]:
                work.result()

    def do_each(way: DoRun, todo: deque[tuple[SweepRun, RunResult | None]]) -> None:
        """Does one run after the other, beside others who do the same, until none is left."""
        while True:
            with turn:
                if not todo:
                    return
                run, before = todo.popleft()
                progress.begin(run)
            failure = ""
            try:
                result = before or way(run, ranks)
            except errors.HyperslabError as error:
                if isinstance(error, errors.Stopped):
                    log.info("run the same command to continue with %s", run.name)
                    todo.clear()
                    raise
                failure = str(error)
            with turn:
                if failure:
                    state.failures[run.name] = failure
                    progress.end(run, f"failed: {failure}")
                else:
                    state.outcomes[run] = result
                    words = "" if before is None else ", was done before"
                    progress.end(run, f"{result.words}{words}")
                if before is None:
                    state.write()

    for variant in sweep.variants:
        check_data(variant)
    with errors.system_errors_as(errors.RecipeError, f"cannot write into output {sweep.output}"):
        sweep.output.mkdir(parents=True, exist_ok=True)
        with lock_run(sweep.output):
            _claim(sweep)
            with progress:
                do_all(sweep.choosing())
                rates = best_rates(sweep, state.outcomes)
                while (wider := state.sweep.wider(sweep, rates)) != state.sweep:
                    more = [run for run in wider.choosing() if run not in state.sweep.choosing()]
                    state.sweep = wider
                    progress.expect(more)
                    do_all(more)
                    rates = best_rates(wider, state.outcomes)
                for variant in sweep.variants:
                    if variant.name not in rates:
                        words = "no rate could be tried, so no seed was run"
                        state.failures[variant.name] = words
                do_all(sweep.final(rates))
            state.write()
    return state


def check_data(variant: SweepVariant) -> None:
    """Refuses a variant of other volumes than its data hold, or uncuttable ones (`RecipeError`)."""
    data = variant.recipe.data
    if not data.is_here:
        return  # its runs will say so
    source = source_of(variant.recipe)
    if data.shape and not source.shapes and data.shape[1:] != tuple(source.shape[1:]):
        said, found = (" x ".join(map(str, shape[1:])) for shape in (data.shape, source.shape))
        raise errors.RecipeError(
            f"variant {variant.name!r} expects volumes of {said} voxels (data.shape), but those "
            f"of {data.where} have {found}\n    give such volumes, or set "
            f"data.shape=[{','.join(map(str, source.shape))}]"
        )
    try:
        selected(source, None, None, data.subvolume)
    except errors.LayoutError as error:
        raise errors.RecipeError(f"variant {variant.name!r}: {error}") from None


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
    return "nothing" if found is None else found


def forecast_table(sweep: Sweep, machine: str | None) -> Table:
    """Tables each variant and stage, and their sum; nothing is run.

    Times are those of the training steps, by the plan for a machine; validation, evaluation and
    start-up come on top. Where there is no prediction, the reason stands in its place.

    Raises:
        RecipeError: a folder holds another run, or a variant's data are not what it says.
        MachineError: there is no such machine.
    """
    rows: list[TableRow] = []
    total = 0.0
    known = True
    chosen = machine_for(machine, planned_device(sweep.variants[0].recipe))
    choosing = sweep.choosing()
    for variant in sweep.variants:
        check_data(variant)
        try:
            job = job_of(variant.recipe)
            steps = -(-job.samples // (job.batch * job.accumulated))  # of an epoch
            step = Predictor(chosen).predict(job).seconds
            words = time_text(step)
        except errors.HyperslabError as error:
            steps, step = 0, 0.0
            words = str(error).splitlines()[0]
            known = False
        runs = [run for run in choosing if run.variant == variant.name]
        stages = []
        if runs:
            ready = sum(finished_result(run) is not None for run in runs)
            seeds = _values_text(variant.choosing_seeds)
            rates = _values_text(variant.rates)
            if sweep.widen:
                rates += f" and up to {sweep.widen} decades beyond"
            stages.append(("choose the rate", len(runs), rates, seeds, runs[0].recipe, ready))
        seeds = _values_text(variant.seeds)
        stages.append(("seeds", len(variant.seeds), "the best", seeds, variant.recipe, 0))
        for stage, count, rates, seeds, recipe, ready in stages:
            seconds = step * steps * recipe.epochs * (count - ready)
            total += seconds
            name = f"{variant.name}: {stage}"
            done = "" if stage == "seeds" else str(ready)
            all_of_it = time_text(seconds) if steps else ""
            rows.append(
                [name, str(count), rates, seeds, str(recipe.epochs), done, words, all_of_it]
            )
    words = f"training steps, predicted for {chosen.name}"
    rows.append([words, *[""] * 6, f"{'' if known else 'more than '}{time_text(total)}"])
    head = ("variant", "runs", "rates", "seeds", "epochs", "done", "a step", "all")
    return Table("", head, rows)


def _values_text(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
