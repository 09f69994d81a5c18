"""Which runs are one configuration: those that a sweep says, or that differ by their seed alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.documents import read_json
from hyperslab.errors import DataError
from hyperslab.recipe.compare import differences
from hyperslab.report.comparison.scored import MEAN, Scored, read_scored
from hyperslab.report.run_folder import Run, check_distinct, folder_names, read_run

UNCOMPARED = ("seed", "output", "timeout", "grid", "memory", "peak")
"""Keys of a recipe by which runs of one configuration may differ."""

SAME_TRUTH = 1e-3
"""How far true values, of -1 to 1, may be apart that are the same."""

LONGEST_NAME = 48
"""Of a name that says what differs [letters]; longer ones fit into no figure."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Runs with different seeds; ``averaged``: their sub-volumes together, if they have some."""

    name: str
    runs: tuple[Run, ...]
    scored: Scored
    averaged: Scored | None

    @property
    def of_parts(self) -> bool:
        """Whether the network sees parts of volumes."""
        return self.scored.seeds[0].of_parts


@dataclass(frozen=True, slots=True)
class Comparison:
    """Configurations and controls over the same test volumes."""

    configurations: tuple[Configuration, ...]
    controls: tuple[Scored, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.configurations[0].scored.parameters

    @property
    def rows(self) -> list[Scored]:
        """Everything that is compared, averages behind what they are averages of."""
        found: list[Scored] = []
        for one in self.configurations:
            found += [one.scored, *([one.averaged] if one.averaged is not None else [])]
        return [*found, *self.controls]

    @property
    def reference(self) -> Scored:
        """The others are compared with it: the best network of those that see whole volumes.

        Of all networks where none does.
        """
        whole = [one for one in self.configurations if not one.of_parts]
        scored = [one.scored for one in whole or self.configurations]
        return min(scored, key=_error_of)


def _error_of(scored: Scored) -> float:
    """What is not a number is worse than anything."""
    ratio = float(scored.ratios(MEAN).mean())
    return ratio if math.isfinite(ratio) else math.inf


def read_comparison(paths: Sequence[Path], controls: Sequence[tuple[str, Path]] = ()) -> Comparison:
    """Read runs, or sweeps of them, and controls.

    A control is a folder with the files of an evaluation, such as `benchmarks/ridge.py` writes.

    Raises:
        DataError: there is no such run, one is not evaluated, or test volumes are not the same.
    """
    found = [_configuration(name, runs) for name, runs in named_runs(paths)]
    if not found:
        raise DataError("no run is done yet, so there is nothing to compare")
    others = tuple(read_scored(name, [path])[0] for name, path in controls)
    comparison = Comparison(tuple(found), others)
    names = [one.name for one in comparison.rows]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"two of what is compared are called {twice[0]}; rename the control")
    first = found[0].scored
    for other in comparison.rows:
        if (other.volumes, other.parameters) != (first.volumes, first.parameters):
            raise DataError(
                f"{other.name} was measured on other test volumes or parameters than {first.name}: "
                "nothing can be said of their ratio\n    give them the same data, seed and split"
            )
        if not np.allclose(other.true, first.true, rtol=0, atol=SAME_TRUTH, equal_nan=True):
            raise DataError(
                f"the true values of {other.name} are not those of {first.name}, though their test "
                "volumes have the same names: other data, or other data.ranges\n"
                "    give them the same of both"
            )
    return comparison


def named_runs(paths: Sequence[Path]) -> list[tuple[str, list[Run]]]:
    """Runs, or sweeps of them, by configuration.

    What is called alike in two sweeps has the names of their folders before it.

    Raises:
        DataError: there is no such run, one is given twice, or a sweep's table cannot be read.
    """
    check_distinct(paths)
    sweeps = [path for path in paths if (path / "sweep.json").is_file()]
    grouped = _grouped([read_run(path) for path in paths if path not in sweeps])
    swept = [_of_sweep(path) for path in sweeps]
    names = [name for named in (*swept, grouped) for name, _ in named]
    folders = folder_names(sweeps) if sweeps else []
    found = [
        (name if names.count(name) == 1 else f"{folder}: {name}", runs)
        for folder, named in zip(folders, swept, strict=True)
        for name, runs in named
    ]
    return [*found, *grouped]


def _configuration(name: str, runs: Sequence[Run]) -> Configuration:
    scored, averaged = read_scored(name, [run.path / "evaluation" for run in runs])
    return Configuration(name, tuple(runs), scored, averaged)


def _of_sweep(path: Path) -> list[tuple[str, list[Run]]]:
    try:
        table = read_json(path / "sweep.json")
        rows = [(str(row["name"]), list(row["paths"])) for row in table["variants"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / 'sweep.json'} is no table of a sweep: {error!r}") from None
    return [(name, [read_run(path / run) for run in runs]) for name, runs in rows if runs]


def _grouped(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Runs by all of their recipe but what does not matter, called by what differs.

    Runs of one seed are no two draws of chance, and so not of one configuration. Where names would
    be long, or the same, they are those of the folders.
    """
    groups: list[tuple[dict[str, Any], list[Run]]] = []
    for run in runs:
        settings = {key: value for key, value in run.recipe.items() if key not in UNCOMPARED}
        seed = run.setting("seed")
        fitting = (
            group
            for other, group in groups
            if other == settings and seed not in [one.setting("seed") for one in group]
        )
        same = next(fitting, None)
        if same is None:
            groups.append((settings, [run]))
        else:
            same.append(run)
    keys: list[str] = []
    for settings, _ in groups:
        keys += differences(groups[0][0], settings)
    names = [_name(group[0], list(dict.fromkeys(keys))) for _, group in groups]
    if len(set(names)) < len(names) or max(map(len, names), default=0) > LONGEST_NAME:
        names = folder_names([group[0].path for _, group in groups])
    return [(name, group) for name, (_, group) in zip(names, groups, strict=True)]


def _name(run: Run, keys: Sequence[str]) -> str:
    last = [key.rpartition(".")[2] for key in keys]
    words = [
        f"{word if last.count(word) == 1 else key}={run.setting(key)}"
        for key, word in zip(keys, last, strict=True)
        if run.setting(key) is not None
    ]
    return ", ".join(words) or str(run.setting("model.variant") or run.called("model"))
