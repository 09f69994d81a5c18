"""Says what a sweep takes: before, by the times that the planner predicts, and afterwards.

In reading order: `Forecast`, what is predicted of a variant; how many runs go beside each other on
this machine; the table of a sweep that is not run; the table of planned and taken times.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hyperslab import errors
from hyperslab.launch.supervisor import cores_here
from hyperslab.planner.auto import machine_for
from hyperslab.planner.job import job_of
from hyperslab.planner.search import process_bytes
from hyperslab.planner.summary import other_processor, time_text
from hyperslab.studies.run_folder import NEEDED_OF_EPOCHS, read_table
from hyperslab.studies.scaling.study import Predictor
from hyperslab.studies.sweep.results import RunRecord, finished_result
from hyperslab.studies.sweep.schema import Sweep, SweepRun
from hyperslab.studies.table import Table, counted, duration, number, size
from hyperslab.util.free_memory import free_memory

log = logging.getLogger("hyperslab")

MEASURE = "`hyperslab calibrate RECIPE --out FILE` measures this one, for --machine FILE"


@dataclass(frozen=True, slots=True)
class Forecast:
    """Holds what is predicted of a variant: a ``step``, an ``epoch`` with its validation [s].

    ``memory`` is what a rank takes of its device [B]; ``unknown`` says why no time is known. Times
    are a lower bound then, or 0.
    """

    step: float = 0.0
    epoch: float = 0.0
    memory: int = 0
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class SweepForecast:
    """Holds what is predicted of the variants of a sweep, for a ``machine``.

    ``doubt`` says that this is another one.
    """

    sweep: Sweep
    machine: str
    device: str
    variants: Mapping[str, Forecast]
    doubt: str = ""

    def epoch_of(self, variant: str) -> float | None:
        return None if (of := self.variants[variant]).unknown else of.epoch


def forecast_sweep(sweep: Sweep, machine: str | None = None) -> SweepForecast:
    """Predicts epochs of all variants; nothing is run.

    An epoch has its training steps and the forward passes of its validation; the evaluation at the
    end and what a start takes come on top.

    Raises:
        MachineError: there is no such machine.
    """
    chosen = machine_for(machine, sweep.variants[0].recipe)
    linux = sys.platform == "linux"  # others do not say what a process takes
    predictor = Predictor(chosen, process_bytes(chosen.device) if linux else 0)
    found = {}
    for variant in sweep.variants:
        try:
            job = job_of(variant.recipe)
            step = predictor.predict(job)
        except errors.HyperslabError as error:
            found[variant.name] = Forecast(unknown=str(error).splitlines()[0])
            continue
        forward = step.parts.forward / job.accumulated
        validation = -(-job.validated // job.batch) * forward
        epoch = job.steps * step.seconds + validation
        why = step.unknown and f"{step.unknown}; {MEASURE}"
        found[variant.name] = Forecast(step.seconds, epoch, step.memory, why)
    return SweepForecast(sweep, chosen.name, chosen.device, found, other_processor(chosen))


def runs_at_once(forecast: SweepForecast, ranks: int, asked: int | None) -> int:
    """Chooses how many runs of so many ranks go beside each other on this machine.

    As many as are ``asked`` for; or else on CPUs so many that no core is idle and all fit into the
    memory that is free, and on GPUs one. More than fit are warned of, where that is known.
    """
    if forecast.device != "cpu":
        return asked or 1
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    cores = cores_here()
    each = ranks * (int(threads) if threads else max(1, cores // ranks))
    count = asked or max(1, cores // each)
    memory = ranks * max(one.memory for one in forecast.variants.values())
    free = free_memory() if sys.platform == "linux" else 0
    if not memory or not free or count == 1 or count * memory <= free:
        return count
    if asked is None:
        return max(1, free // memory)
    log.warning(
        "%s at once are predicted to need %s, and %s of this machine are free",
        *(counted(count, "run"), size(count * memory), size(free)),
    )
    return count


def forecast_table(forecast: SweepForecast) -> Table:
    """Tables each variant and stage, and their sum, with what is still to be run.

    Where there is no prediction, the caption has the reason.

    Raises:
        RecipeError: a folder holds another run.
    """
    sweep = forecast.sweep
    rows: list[list[str]] = []
    total = saved = wider = 0.0
    for variant, widest in zip(sweep.variants, sweep.widest().variants, strict=True):
        of = forecast.variants[variant.name]
        to_choose, to_train = sweep.planned_epochs(variant)
        runs = [run for run in sweep.choosing() if run.variant == variant.name]
        stages = []
        if runs:
            ready, done = _done(runs)
            every = runs[0].epochs
            saved += of.epoch * (every * len(runs) - to_choose)
            seeds = variant.choosing_seeds
            of_them = (len(runs), _values_text(variant.rates), seeds, every)
            stages.append(("choose the rate", *of_them, ready, max(0, to_choose - done)))
            if more := sorted({*widest.rates} - {*variant.rates}):
                count = len(more) * len(seeds)
                of_them = (count, _values_text(more), seeds, every)
                stages.append(("wider rates, at most", *of_them, 0, count * every))
                wider += of.epoch * count * every
        # Those of one rate: it is not known yet which is chosen.
        ready, done = max(_done(sweep.final({variant.name: rate})) for rate in widest.rates)
        of_them = (len(variant.seeds), "the best", variant.seeds, variant.recipe.epochs)
        stages.append(("seeds", *of_them, ready, to_train - done))
        for stage, count, rates, seeds, epochs, ready, left in stages:
            times = [time_text(of.step), duration(of.epoch * epochs), duration(of.epoch * left)]
            total += of.epoch * left
            cells = [f"{variant.name}: {stage}", count, rates, _values_text(seeds), epochs, ready]
            rows.append([*map(str, cells), *(["unknown", "", ""] if of.unknown else times)])
    more_than = "more than " if any(one.unknown for one in forecast.variants.values()) else ""
    blank = [""] * 7
    if sweep.halve:
        rows.append(["saved by halving already", *blank, duration(saved)])
    if wider:
        rows.append(["without wider rates", *blank, f"{more_than}{duration(total - wider)}"])
    rows.append(["all, one run at a time", *blank, f"{more_than}{duration(total)}"])
    head = ("variant", "runs", "rates", "seeds", "epochs", "done", "a step", "a run", "all")
    caption = [f"training and validation, predicted for {forecast.machine}"]
    if forecast.doubt:
        caption.append(f"{forecast.doubt}; {MEASURE}")
    for why in dict.fromkeys(one.unknown for one in forecast.variants.values() if one.unknown):
        names = [name for name, one in forecast.variants.items() if one.unknown == why]
        caption.append(f"{', '.join(names)}: {why}")
    return Table("\n".join(caption), head, rows)


def _done(runs: Sequence[SweepRun]) -> tuple[int, int]:
    """Counts the runs that are done, and the epochs of all (`RecipeError`)."""
    results = [finished_result(run) for run in runs]
    tables = [read_table(run.folder / "epochs.csv", NEEDED_OF_EPOCHS) for run in runs]
    epochs = sum(len(table.get("epoch", ())) for table in tables)
    return sum(result is not None for result in results), epochs


def budget_table(records: Sequence[RunRecord], forecast: SweepForecast | None) -> Table:
    """Compares the times of all runs that have ended with those that were predicted."""
    rows = [
        [
            f"{one.variant}, rate {one.rate:g}, seed {one.seed}{', choosing' * one.chooses}",
            str(one.epochs),
            *_compared(one.planned_seconds, one.seconds),
            "" if one.status == "done" else one.status,
        ]
        for one in records
    ]
    known = [one for one in records if one.planned_seconds is not None]
    planned = sum(one.planned_seconds or 0.0 for one in known) if known else None
    taken = sum(one.seconds or 0.0 for one in known or records)
    rows.append(["all that were planned" if known else "all", "", *_compared(planned, taken), ""])
    caption = "training and validation; evaluation and start-up come on top"
    if known and forecast is not None:
        caption = f"{caption}; predicted for {forecast.machine}, one run at a time"
    return Table(caption, ("run", "epochs", "planned", "taken", "taken / planned", ""), rows)


def _compared(planned: float | None, taken: float | None) -> list[str]:
    times = ["" if seconds is None else duration(seconds) for seconds in (planned, taken)]
    return [*times, number(taken / planned) if planned and taken is not None else ""]


def _values_text(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
