"""Which runs are one configuration: those that a sweep says, or that differ by their seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperslab.documents import read_json
from hyperslab.errors import DataError
from hyperslab.recipe.compare import differences
from hyperslab.report.comparison.scored import MEAN, Scored, read_scored
from hyperslab.report.run_folder import Run, read_run

UNCOMPARED = ("seed", "output", "timeout", "grid", "memory", "peak")
"""Keys of a recipe by which runs of one configuration may differ."""


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
        return min(scored, key=lambda one: one.ratios(MEAN).mean())


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
    first = found[0].scored
    for other in comparison.rows:
        if (other.volumes, other.parameters) != (first.volumes, first.parameters):
            raise DataError(
                f"{other.name} was measured on other test volumes or parameters than {first.name}: "
                "nothing can be said of their ratio\n    give them the same data, seed and split"
            )
    return comparison


def named_runs(paths: Sequence[Path]) -> list[tuple[str, list[Run]]]:
    """Runs, or sweeps of them, by configuration.

    Raises:
        DataError: there is no such run, or a sweep's table cannot be read.
    """
    named: list[tuple[str, list[Run]]] = []
    alone: list[Run] = []
    for path in paths:
        if (path / "sweep.json").is_file():
            named += _of_sweep(path)
        else:
            alone.append(read_run(path))
    return [*named, *_grouped(alone)]


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
    """Runs by all of their recipe but what does not matter, called by what differs."""
    groups: list[tuple[dict[str, Any], list[Run]]] = []
    for run in runs:
        settings = {key: value for key, value in run.recipe.items() if key not in UNCOMPARED}
        same = next((group for other, group in groups if other == settings), None)
        if same is None:
            groups.append((settings, [run]))
        else:
            same.append(run)
    keys: list[str] = []
    for settings, _ in groups:
        keys += differences(groups[0][0], settings)
    return [(_name(group[0], list(dict.fromkeys(keys))), group) for _, group in groups]


def _name(run: Run, keys: Sequence[str]) -> str:
    words = [f"{key.rpartition('.')[2]}={run.setting(key)}" for key in keys]
    return ", ".join(words) or str(run.setting("model.variant") or run.called("model"))
