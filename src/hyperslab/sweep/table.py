"""The table of a sweep: one row a variant, by medians and ranges over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hyperslab.atomic_files import write_csv, write_json
from hyperslab.recipe.schema import Recipe
from hyperslab.report.run_folder import NEEDED_OF_EPOCHS, read_table
from hyperslab.sweep.load import Sweep, SweepRun, SweepVariant
from hyperslab.sweep.result import RunResult

Outcomes = Mapping[SweepRun, RunResult]
"""What came of the runs that are done."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some runs, and the least and the largest of them."""

    median: float
    least: float
    largest: float


@dataclass(frozen=True, slots=True)
class TriedRate:
    """The median validation loss at a rate, of so many runs of those that choose."""

    rate: float
    validation_loss: float | None
    runs: int


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A variant: the rates that were tried, the best, and what came of the seeds there.

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
        """Whether the best rate is the least or the largest of several: others may be better."""
        rates = [one.rate for one in self.tried]
        return len(rates) > 1 and self.rate in (min(rates), max(rates))


def best_rates(sweep: Sweep, outcomes: Outcomes, *, given_up: bool = False) -> dict[str, float]:
    """The rate of each variant with the lowest median validation loss, by its name.

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
    """What the runs that choose have found so far."""
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
    """One row a variant; what is not done yet is not in it."""
    return [_row(sweep, variant, outcomes, rates.get(variant.name)) for variant in sweep.variants]


def _segments(recipe: Recipe, folders: Sequence[Path]) -> bool:
    """As the recipe says, or where it does not, as what its first run has measured says."""
    if recipe.segments is not None or not folders:
        return bool(recipe.segments)
    measured = read_table(folders[0] / "epochs.csv", NEEDED_OF_EPOCHS)
    return any(name.startswith("validation_dice_") for name in measured)


def _row(sweep: Sweep, variant: SweepVariant, outcomes: Outcomes, rate: float | None) -> SweepRow:
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
        segments=_segments(variant.recipe, [done[seed][0].folder for seed in seeds]),
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
    """None where one of them is not known."""
    known = list(values)
    numbers = [float(value) for value in known if value is not None]
    if not numbers or len(numbers) < len(known):
        return None
    return Spread(statistics.median(numbers), min(numbers), max(numbers))


def write_table(sweep: Sweep, rows: Sequence[SweepRow], failures: Mapping[str, str]) -> None:
    """``sweep.json`` and ``sweep.csv``, each whole or not at all.

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
    write_csv(sweep.output / "sweep.csv", head, [_cells(row, spreads) for row in rows])


def _cells(row: SweepRow, spreads: Sequence[str]) -> list[object]:
    cells: list[object] = [row.name, row.rate, len(row.seeds), row.wanted, row.epochs]
    for name in spreads:
        found: Spread | None = row.test.get(name) if name in row.test else getattr(row, name, None)
        cells += [None] * 3 if found is None else [found.median, found.least, found.largest]
    return [*cells, row.total_seconds]
