"""A whole sweep: rates are chosen, then the seeds are run; stopped anywhere, it goes on there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import yaml

from hyperslab.atomic_files import write_text
from hyperslab.documents import parse_yaml, read_text
from hyperslab.errors import HyperslabError, RecipeError, Stopped, reason
from hyperslab.recipe.compare import differences
from hyperslab.sweep.execute import do_run, finished
from hyperslab.sweep.load import Sweep, SweepRun
from hyperslab.sweep.progress import SweepProgress
from hyperslab.sweep.result import RunResult
from hyperslab.sweep.table import SweepRow, best_rates, rows_of, write_table
from hyperslab.train.run_lock import hold

log = logging.getLogger("hyperslab")

SWEEP_SETTINGS = "sweep.yaml"

DoRun = Callable[[SweepRun, int], RunResult]


@dataclass
class SweepState:
    """What there is of a sweep: results, and why others failed, by run."""

    sweep: Sweep
    outcomes: dict[SweepRun, RunResult] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def rates(self) -> dict[str, float]:
        """The best of those that could be tried."""
        return best_rates(self.sweep, self.outcomes, given_up=True)

    def rows(self) -> list[SweepRow]:
        """The table so far."""
        return rows_of(self.sweep, self.outcomes, self.rates())

    def write(self) -> None:
        """The table's files."""
        write_table(self.sweep, self.rows(), self.failures)


def run_sweep(sweep: Sweep, ranks: int, progress: SweepProgress, do: DoRun = do_run) -> SweepState:
    """Do what is left of a sweep; its table is written after every run.

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
            stack.enter_context(hold(sweep.output))
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
    there = {run: result for run in runs if (result := finished(run)) is not None}
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
    """Write down what is swept, or compare it with what was.

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
    """What is at a dotted key; names of variants may have dots, too."""
    if not key:
        return values
    if not isinstance(values, Mapping):
        return "nothing"
    for name in values:
        if key == name or key.startswith(f"{name}."):
            return _at(values[name], key[len(name) + 1 :])
    return "nothing"
