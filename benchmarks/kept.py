"""Keeps each piece of a long computation in a file; says what pieces cost, and compares afterwards.

The work of a program is a function of a `Kept`, which it asks for every piece. `run_planned` has it
work twice. At first nothing is made: a piece that is missing is tried on a small scale, which says
how long it will take, and something of its shape stands in for it. Then what is missing is made.
Stopped, a program goes on where it was, and a plan says what is left.
"""

from __future__ import annotations

import contextlib
import io
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.formats.files import ANY, naming
from hyperslab.studies.table import duration
from hyperslab.util.atomic_files import created_aside

Arrays = Mapping[str, NDArray[Any]]

SECONDS = "seconds"
"""The array (2,) of a file that says how long its piece was to take, and took."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Says how long a piece will probably take [s]; ``arrays`` of its shapes stand in for it."""

    seconds: float
    arrays: Arrays


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long ``work`` takes [s]."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def extrapolated(work: Callable[[int], object], few: Sequence[int], all_: int) -> float:
    """Return how long ``work`` on all samples will take [s], from two runs on ``few`` of them.

    It is taken for a straight line: some time, and some for each sample.
    """
    small, large = (min(count, all_) for count in few)
    less, more = (seconds_of(partial(work, count)) for count in (small, large))
    each = max(more - less, 0.0) / (large - small) if large > small else 0.0
    return more + each * (all_ - large)


@dataclass(slots=True)
class Row:
    """Holds the pieces of one kind: what is missing, and what is there, expected and taken [s]."""

    missing: dict[str, float] = field(default_factory=dict)
    found: dict[str, tuple[float, float]] = field(default_factory=dict)


class Kept:
    """Gives the pieces that are in a folder, or makes them.

    Args:
        plan: what was said of the pieces that are missing; without it nothing is made.
    """

    def __init__(self, folder: Path, plan: Kept | None = None) -> None:
        self.folder = folder
        self.plan = plan
        self.rows: dict[str, Row] = {}
        self._trials: dict[Hashable, Trial] = {}
        self._asked: Counter[Hashable] = Counter()

    @property
    def missing(self) -> float:
        """Return how long all that is missing will take [s]."""
        return sum(sum(row.missing.values()) for row in self.rows.values())

    def arrays(
        self,
        kind: str,
        name: str,
        make: Callable[[], Arrays],
        trial: Callable[[], Trial],
        alike: Hashable,
    ) -> dict[str, NDArray[Any]]:
        """Return a piece, which is made if it is missing; or what stands in for it.

        Args:
            kind: of pieces, for people.
            name: of this one, and of its file.
            make: makes it.
            trial: tries it on a small scale.
            alike: is equal for pieces of the same shapes and cost, of which one is tried.

        Raises:
            DataError: its file cannot be read.
        """
        row = self.rows.setdefault(kind, Row())
        path = self.folder / f"{name}.npz"
        if not path.exists():
            if self.plan is None:
                if alike not in self._trials:
                    self._trials[alike] = trial()
                if name not in row.missing:
                    self._asked[alike] += 1
                    row.missing[name] = self._trials[alike].seconds
                return dict(self._trials[alike].arrays)
            self._make(path, make, self.plan.expected(alike, self._asked[alike]))
            self._asked[alike] += 1
        with naming(path, "results of a benchmark", ANY), path.open("rb") as file:
            found = dict(np.load(file))
        expected, taken = found.pop(SECONDS, (math.nan, math.nan))
        row.found[name] = float(expected), float(taken)
        return found

    def expected(self, alike: Hashable, before: int) -> float:
        """Return what this plan said of a piece [s] that so many were ``before``, or 0."""
        return self._trials[alike].seconds if before < self._asked[alike] else 0.0

    @staticmethod
    def _make(path: Path, make: Callable[[], Arrays], expected: float) -> None:
        begin = time.perf_counter()
        arrays = make()
        taken = time.perf_counter() - begin
        path.parent.mkdir(parents=True, exist_ok=True)
        with created_aside(path, concurrent=True) as file:  # two programs share a folder
            np.savez(file, **{SECONDS: np.array([expected, taken])}, **arrays)
        print(f"{path} ({duration(taken)})", file=sys.stderr, flush=True)

    def budget(self) -> dict[str, dict[str, float]]:
        """Return by kind how many pieces there are, and what they were to take and took [s].

        Seconds are those of the ``timed`` pieces; of pieces that were made before they were
        written down, nothing is known. ``unforeseen`` are among them: the plan had not asked for
        them, and they were to take nothing.
        """
        found = {}
        for kind, row in self.rows.items():
            timed = [pair for pair in row.found.values() if math.isfinite(pair[1])]
            found[kind] = {
                "pieces": len(row.found),
                "timed": len(timed),
                "unforeseen": sum(expected == 0 for expected, _ in timed),
                "expected_s": sum(expected for expected, _ in timed),
                "taken_s": sum(taken for _, taken in timed),
            }
        return found

    def said(self) -> str:
        """Return a table of what is missing, for people."""
        lines = [f"{'pieces':44}{'there':>8}{'missing':>9}{'will take':>14}"]
        for kind, row in self.rows.items():
            seconds = sum(row.missing.values())
            will = duration(seconds) if row.missing else "-"
            lines.append(f"{kind:44}{len(row.found):8}{len(row.missing):9}{will:>14}")
        return "\n".join([*lines, f"{'all':61}{duration(self.missing):>14}"])

    def compared(self) -> str:
        """Return a table of what pieces were to take and took, for people."""
        lines = [f"{'pieces':44}{'timed':>8}{'unforeseen':>12}{'expected':>14}{'taken':>14}"]
        rows = self.budget()
        keys = ("timed", "unforeseen", "expected_s", "taken_s")
        whole = {key: sum(row[key] for row in rows.values()) for key in keys}
        for kind, row in {**rows, "all": whole}.items():
            times = "".join(f"{duration(row[key]):>14}" for key in ("expected_s", "taken_s"))
            lines.append(f"{kind:44}{row['timed']:8}{row['unforeseen']:12}{times}")
        return "\n".join(lines)


def run_planned(
    folder: Path, work: Callable[[Kept], dict[str, Any]], only_plan: bool
) -> dict[str, Any] | None:
    """Say what ``work`` will take and let it work; return what it gives, and its budget.

    Returns:
        None if this is only a plan.
    """
    kept = Kept(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = work(kept)
    print(kept.said(), flush=True)
    if only_plan:
        return None
    if any(row.missing for row in kept.rows.values()):
        kept = Kept(folder, kept)
        found = work(kept)
    else:
        print(printed.getvalue(), end="")
    print(kept.compared())
    return {**found, "budget": kept.budget()}
