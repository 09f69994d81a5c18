"""Collects the results of a sweep's runs, and makes its table of medians and ranges over seeds.

A result is read from what a run recorded and kept beside it when the run is done; the table has
one row for each variant.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from hyperslab.errors import DataError
from hyperslab.recipe.schema import Recipe
from hyperslab.studies.run_folder import NEEDED_OF_EPOCHS, read_evaluation, read_table
from hyperslab.studies.sweep.schema import Sweep, SweepRun, SweepVariant
from hyperslab.studies.table import Table
from hyperslab.util.atomic_files import write_csv, write_json
from hyperslab.util.documents import read_json

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


_RESULT = TypeAdapter(RunResult)


def read_result(folder: Path) -> RunResult | None:
    """Reads what was kept of a run that is done; None where it is not.

    Raises:
        DataError: the file is broken.
    """
    path = folder / RESULT_FILE
    try:
        return _RESULT.validate_python(read_json(path))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(
            f"{path} is no result of a run: {where}: {first['msg']}; remove it"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no result of a run: {error!r}; remove it") from None


def collect_result(folder: Path, *, epochs: int, evaluated: bool) -> RunResult:
    """Collects what came of a run that has just ended, and writes it down.

    Raises:
        DataError: a file of the run is broken or shorter than it should be.
    """
    table = read_table(folder / "epochs.csv", NEEDED_OF_EPOCHS)
    losses = table.get("validation_loss", np.array([]))
    if len(losses) != epochs or not np.isfinite(losses).any():
        raise DataError(f"{folder / 'epochs.csv'} has not the losses of {epochs} epochs")
    best = int(np.nanargmin(losses))
    found = read_evaluation(folder / "evaluation" / "metrics.json") if evaluated else {}
    result = RunResult(
        epochs=epochs,
        validation_loss=float(losses[best]),
        best_epoch=best + 1,
        seconds=float(np.nansum(table["seconds"])),
        test=_test_scores(found),
        test_mean=_test_mean(found),
        recalibrated=_test_scores(found["recalibrated"]) if "recalibrated" in found else None,
    )
    write_json(folder / RESULT_FILE, asdict(result))
    return result


def _test_scores(found: dict[str, Any]) -> dict[str, float | None]:
    if "classes" in found:
        return {name: row["dice"] for name, row in found["classes"].items()}
    return {name: row["ratio"] for name, row in found.get("parameters", {}).items()}


def _test_mean(found: dict[str, Any]) -> float | None:
    if "classes" in found:
        known = [dice for dice in _test_scores(found).values() if dice is not None]
        return float(np.mean(known)) if known else None
    return found["mean"]["ratio"] if "mean" in found else None


Outcomes = Mapping[SweepRun, RunResult]
"""Maps runs that are done to what came of them."""


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


def best_rates(sweep: Sweep, outcomes: Outcomes, *, given_up: bool = False) -> dict[str, float]:
    """Finds the rate of each variant with the lowest median validation loss, by its name.

    A variant whose rates are not all tried has none yet, or, if those are ``given_up``, the best
    of the others. Of equal rates the smaller one is taken.
    """
    found = {}
    for variant in sweep.variants:
        tried = rates_tried(variant, outcomes)
        if not variant.choosing_runs:
            found[variant.name] = variant.rates[0]
            continue
        losses = [(one.validation_loss, one.rate) for one in tried]
        known = [(loss, rate) for loss, rate in losses if loss is not None]
        done = sum(one.runs for one in tried) == variant.choosing_runs
        if known and (done or given_up):
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


def rows_of(sweep: Sweep, outcomes: Outcomes, rates: Mapping[str, float]) -> list[SweepRow]:
    """Makes one row a variant; what is not done yet is not in it."""
    return [
        _variant_row(sweep, variant, outcomes, rates.get(variant.name))
        for variant in sweep.variants
    ]


def _predicts_classes(recipe: Recipe, folders: Sequence[Path]) -> bool:
    """Tells, by the recipe or else by its first run, if classes are predicted."""
    if recipe.segments is not None or not folders:
        return bool(recipe.segments)
    measured = read_table(folders[0] / "epochs.csv", NEEDED_OF_EPOCHS)
    return any(name.startswith("validation_dice_") for name in measured)


def _variant_row(
    sweep: Sweep, variant: SweepVariant, outcomes: Outcomes, rate: float | None
) -> SweepRow:
    own = {run: result for run, result in outcomes.items() if run.variant == variant.name}
    done = {
        run.seed: (run, result)
        for run, result in own.items()
        if not run.chooses and run.rate == rate
    }
    seeds = tuple(seed for seed in variant.seeds if seed in done)
    results = [done[seed][1] for seed in seeds]
    recalibrated = [result.recalibrated or {} for result in results]
    return SweepRow(
        name=variant.name,
        segments=_predicts_classes(variant.recipe, [done[seed][0].folder for seed in seeds]),
        rate=rate,
        tried=rates_tried(variant, outcomes),
        wanted=len(variant.seeds),
        epochs=variant.recipe.epochs,
        paths=tuple(str(done[seed][0].folder.relative_to(sweep.output)) for seed in seeds),
        seeds=seeds,
        validation_loss=_spread(results, lambda result: result.validation_loss),
        best_epoch=_spread(results, lambda result: result.best_epoch),
        test_mean=_spread(results, lambda result: result.test_mean),
        test=_spreads([result.test for result in results]),
        recalibrated=_spreads(recalibrated) if any(recalibrated) else None,
        seconds=_spread(results, lambda result: result.seconds),
        total_seconds=sum(result.seconds for result in own.values()),
    )


def _spread(
    results: Sequence[RunResult], value: Callable[[RunResult], float | None]
) -> Spread | None:
    return _of(map(value, results))


def _spreads(scores: Sequence[Mapping[str, float | None]]) -> dict[str, Spread | None]:
    names = scores[0] if scores else {}
    return {name: _of(score.get(name) for score in scores) for name in names}


def _of(values: Iterable[float | None]) -> Spread | None:
    """Spreads values; None where one of them is not known."""
    known = list(values)
    numbers = [float(value) for value in known if value is not None]
    if not numbers or len(numbers) < len(known):
        return None
    return Spread(statistics.median(numbers), min(numbers), max(numbers))


def write_table(sweep: Sweep, rows: Sequence[SweepRow], failures: Mapping[str, str]) -> None:
    """Writes ``sweep.json`` and ``sweep.csv``, each whole or not at all.

    Raises:
        OSError: they cannot be written.
    """
    content: dict[str, Any] = {
        "variants": [asdict(row) for row in rows],
        "failures": dict(failures),
    }
    write_json(sweep.output / "sweep.json", content)
    names = list(dict.fromkeys(name for row in rows for name in row.test))
    spreads = ("validation_loss", "best_epoch", "test_mean", *names, "seconds")
    head = ["variant", "rate", "runs", "wanted", "epochs"]
    head += [f"{name}{end}" for name in spreads for end in ("", "_least", "_largest")]
    head += ["total_seconds"]
    write_csv(sweep.output / "sweep.csv", head, [_csv_cells(row, spreads) for row in rows])


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
            "the best rate is at the edge of what was tried" if row.at_the_edge else "",
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
