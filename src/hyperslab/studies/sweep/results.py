"""Says what came of a sweep's runs: results, rates and halves of them, and the tables of variants.

In reading order: what came of a run; the rates that were tried, the best of them and the worse
half; the row of a variant, medians and ranges over seeds; a record of every run; the tables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from hyperslab import errors
from hyperslab.recipe.schema import Recipe
from hyperslab.studies.run_folder import NEEDED_OF_EPOCHS, check_recipe, read_evaluation, read_table
from hyperslab.studies.sweep.schema import IRRELEVANT_SECTIONS, Sweep, SweepRun, SweepVariant
from hyperslab.studies.table import Table
from hyperslab.train.profile import read_document
from hyperslab.train.run import RECIPE
from hyperslab.util.atomic_files import write_json

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
    return read_document(path, _RESULT, "a result of a run", "") if path.exists() else None


def collect_result(run: SweepRun) -> RunResult:
    """Collects what came of a run that has just ended, or paused there (`DataError`).

    One that has ended is written down.
    """
    folder, epochs, evaluated = run.folder, run.epochs, not run.chooses
    table = read_table(folder / "epochs.csv", NEEDED_OF_EPOCHS)
    losses = table.get("validation_loss", np.array([]))[:epochs]
    if len(losses) < epochs or not np.isfinite(losses).any():
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
        seconds=float(np.nansum(table["seconds"][:epochs])),
        test=test,
        test_mean=mean,
        recalibrated=_test_scores(found["recalibrated"]) if "recalibrated" in found else None,
    )
    if run.until is None:
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
    if run.until is None:
        return read_result(run.folder)
    try:
        return collect_result(run)
    except errors.DataError:  # it is not so far yet
        return None


Outcomes = Mapping[SweepRun, RunResult]
"""Maps the runs that are done to what came of them; halving stopped those with an ``until``."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Holds the median of some runs, and the least and the largest of them."""

    median: float
    least: float
    largest: float


@dataclass(frozen=True, slots=True)
class TriedRate:
    """Holds the median validation loss at a rate, of so many runs of those that choose.

    ``stopped`` is the epoch after which halving stopped them, with the loss by then.
    """

    rate: float
    validation_loss: float | None
    runs: int
    stopped: int | None = None


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


def halving_words(epoch: int | None) -> str:
    return f"stopped at epoch {epoch} by halving" if epoch else ""


def best_rates(sweep: Sweep, outcomes: Outcomes) -> dict[str, float]:
    """Finds by name the rate of each variant with the lowest median validation loss.

    Of those that could be tried; a variant has none where none could. Of equal rates the smaller
    one is taken, and one that halving stopped only where no other is left.
    """
    found = {}
    for variant in sweep.variants:
        tried = rates_tried(variant, outcomes)
        known = [
            (one.stopped is not None, one.validation_loss, one.rate) for one in tried if one.runs
        ]
        if not variant.choosing_runs:
            found[variant.name] = variant.rates[0]
        elif known:
            found[variant.name] = min(known)[2]
    return found


def worse_half(runs: Iterable[SweepRun], outcomes: Outcomes) -> list[SweepRun]:
    """Lists those of a variant's runs at the worse half of their rates, by the median loss.

    Of an odd number of rates the larger part stays. A rate of which no run has an outcome is worse
    than any that has one.
    """
    by_rate: dict[float, list[SweepRun]] = {}
    for run in runs:
        by_rate.setdefault(run.rate, []).append(run)

    def order(rate: float) -> tuple[float, float]:
        losses = [outcomes[run].validation_loss for run in by_rate[rate] if run in outcomes]
        return statistics.median(losses) if losses else math.inf, rate

    worse = sorted(by_rate, key=order)[-(-len(by_rate) // 2) :]
    return [run for rate in worse for run in by_rate[rate]]


def rates_tried(variant: SweepVariant, outcomes: Outcomes) -> tuple[TriedRate, ...]:
    """Lists what the runs that choose have found so far."""
    if not variant.choosing_runs:
        return ()
    by_rate: dict[float, list[float]] = {rate: [] for rate in variant.rates}
    stopped = {}
    for run, result in outcomes.items():
        if run.chooses and run.variant == variant.name:
            by_rate[run.rate].append(result.validation_loss)
            stopped[run.rate] = run.until
    return tuple(
        TriedRate(
            *(rate, statistics.median(losses) if losses else None, len(losses)),
            stopped=stopped.get(rate),
        )
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


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Holds what is kept of one run in the sweep's own files.

    ``status`` is done, failed, or where halving stopped it; ``planned_seconds`` were predicted for
    ``epochs``, and ``seconds`` were taken by them [s].
    """

    variant: str
    rate: float
    seed: int
    chooses: bool
    status: str
    epochs: int
    validation_loss: float | None = None
    planned_seconds: float | None = None
    seconds: float | None = None


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


def csv_table(rows: Sequence[SweepRow]) -> tuple[list[str], list[list[object]]]:
    """Makes the head and the rows of ``sweep.csv``."""
    names = list(dict.fromkeys(name for row in rows for name in row.test))
    spreads = ("validation_loss", "best_epoch", "test_mean", *names, "seconds")
    head = ["variant", "rate", "runs", "wanted", "epochs"]
    head += [f"{name}{end}" for name in spreads for end in ("", "_least", "_largest")]
    table: list[list[object]] = []
    for row in rows:
        found = {**{name: getattr(row, name, None) for name in spreads}, **row.test}
        cells = [astuple(one) if one else [None] * 3 for one in map(found.get, spreads)]
        first = [row.name, row.rate, len(row.seeds), row.wanted, row.epochs]
        table.append([*first, *chain.from_iterable(cells), row.total_seconds])
    return [*head, "total_seconds"], table


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
            "chosen" if one.rate == row.rate else halving_words(one.stopped),
        ]
        for row in rows
        for one in row.tried
    ]
    return Table("", ("variant", "rate tried", "validation loss", ""), cells)


def _range_text(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.3g} ({spread.least:.3g} to {spread.largest:.3g})"
