"""Groups runs into configurations: those that a sweep says, or that differ by their seed alone.

`Scored` is what some network or control predicts of the test volumes, ready to be compared.
Legend: S seeds, V volumes of the test split, N samples, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats.targets import Parameters
from hyperslab.recipe.compare import differences
from hyperslab.studies import check_distinct, run_folder
from hyperslab.train import metrics
from hyperslab.train.metrics import FloatArray, Predictions
from hyperslab.train.uncertainty import levels_of, ranks_of, standard_deviations
from hyperslab.util.documents import read_json

MEAN_CONTROL = "mean"  # in place of a parameter's name: the mean of the errors of all of them
FEWEST_VOLUMES = 5  # with fewer a bootstrap says nothing


NamedRuns = tuple[str, list[run_folder.Run]]
"""Holds the name of a configuration, and its runs."""


@dataclass(frozen=True)
class Scored:
    """Holds what a network, or a control, predicts of the test split, by seed."""

    name: str
    folder: Path  # of the first seed
    seeds: tuple[Predictions, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.seeds[0].names

    @cached_property
    def volumes(self) -> tuple[str, ...]:
        return metrics.volume_indices(self.seeds[0].volumes)[0]

    @property
    def true(self) -> FloatArray:
        """Returns the true values (V, P)."""
        return self.seeds[0].truths

    @cached_property
    def errors(self) -> FloatArray:
        """Computes squared errors (S, V, P), each the mean over the samples of a volume."""
        squares = [((one.predicted - one.true) ** 2, one.volumes) for one in self.seeds]
        return np.stack([metrics.means_of_volumes(*of_seed) for of_seed in squares])

    @cached_property
    def of_mean(self) -> FloatArray:
        """Computes the errors (V, P) of predicting the mean of the training split."""
        return (self.true - self.seeds[0].training_mean) ** 2

    def error(self, parameter: str) -> FloatArray:
        """Returns the errors (S, V) of one parameter, or of `MEAN_CONTROL`."""
        return self._of(self.errors, parameter)

    def ratio(self, parameter: str) -> metrics.ConfidenceInterval:
        """Computes the error over that of predicting the mean, on the mean over seeds."""
        of_mean = self._of(self.of_mean[None], parameter)
        return metrics.ratio_interval(self.error(parameter), of_mean)

    def ratio_to(self, other: Scored, parameter: str) -> metrics.ConfidenceInterval:
        return metrics.ratio_interval(self.error(parameter), other.error(parameter))

    def ratios(self, parameter: str) -> FloatArray:
        """Computes by seed the error over that of predicting the mean (S,)."""
        of_mean = self._of(self.of_mean[None], parameter).mean()
        return self.error(parameter).mean(1) / of_mean

    def coverages(self, level: float) -> FloatArray | None:
        """Computes by seed the share of true values in predicted intervals (S, P); None without."""
        found = [
            levels_of(ranks_of(one.true, one.predicted, standard_deviations(one.covariance)))
            <= level
            for one in self.seeds
            if one.covariance is not None
        ]
        return np.stack([one.mean(0) for one in found]) if found else None

    @property
    def typical(self) -> Predictions:
        """Returns the predictions of the seed with the median error."""
        order = np.argsort(self.error(MEAN_CONTROL).mean(1))
        return self.seeds[int(order[(len(order) - 1) // 2])]

    def _of(self, values: FloatArray, parameter: str) -> FloatArray:
        if parameter == MEAN_CONTROL:
            return values.mean(-1)
        chosen: FloatArray = values[..., self.parameters.index(parameter)]
        return chosen


def read_scored(name: str, folders: Sequence[Path]) -> tuple[Scored, Scored | None]:
    """Reads the evaluations of several seeds: as they are, and averaged and recalibrated.

    The second is there where volumes have several samples and every evaluation has predictions of
    the validation split, to which lines are fitted.

    Raises:
        DataError: an evaluation is missing, broken, of classes, or of other volumes or other true
            values than the first.
    """
    named = [_read_parameters(folder) for folder in folders]
    parameters, mean = named[0]
    for folder, (names, _) in zip(folders, named, strict=True):
        if names != parameters:
            raise DataError(
                f"{folder} predicts {', '.join(names)}, but {folders[0]} other parameters"
            )
    tests = []
    for folder in folders:
        test = _read_split(folder / "predictions.csv", parameters, mean)
        if test is None:
            missing = folder / "predictions.csv"
            raise DataError(f"{missing} is not there: hyperslab evaluate writes it")
        tests.append(test)
        if set(test.volumes) != set(tests[0].volumes):
            raise DataError(
                f"{name}: the test volumes of its runs are not the same: those of {folder} are not "
                f"those of {folders[0]}"
            )
        _check_truths(folder, test.truths, folders[0], tests[0].truths)
    plain = Scored(name, folders[0], tuple(tests))
    found = [_read_split(folder / "validation.csv", parameters, mean) for folder in folders]
    validations = [validation for validation in found if validation is not None]
    if not tests[0].of_parts or len(validations) < len(tests):
        return plain, None
    lines = map(metrics.calibration_of, validations)
    averaged = map(metrics.averaged_over_volumes, tests)
    better = tuple(map(metrics.recalibrated, averaged, lines))
    return plain, Scored(f"{name}, averaged and recalibrated", folders[0], better)


def _check_truths(folder: Path, truths: FloatArray, first: Path, others: FloatArray) -> None:
    """Refuses true values (V, P) that are not those of the first evaluation."""
    if not np.allclose(truths, others, rtol=0, atol=SAME_TRUTH, equal_nan=True):
        raise DataError(
            f"the true values of {folder} are not those of {first}, though their test volumes have "
            "the same names: their data or data.ranges differ\n    give them the same of both"
        )


def _read_parameters(folder: Path) -> tuple[tuple[str, ...], FloatArray]:
    """Reads the names of an evaluation's parameters, and their training mean (P,)."""
    path = folder / "metrics.json"
    evaluation = run_folder.read_evaluation(path)
    run_folder.check_measured_test(folder, evaluation)
    if "parameters" not in evaluation:
        what = "evaluates classes" if evaluation else "is not there"
        raise DataError(
            f"{path} {what}: this page compares predicted numbers\n"
            "    hyperslab evaluate RUN --calibrate"
        )
    names = tuple(evaluation["parameters"])
    means = evaluation.get("training_mean")
    found = [means.get(name) for name in names] if isinstance(means, dict) else [None]
    if not all(isinstance(mean, float | int) and abs(mean) < LARGEST_MEAN for mean in found):
        raise DataError(
            f"{path} lacks the mean of a parameter over the training split\n"
            "    hyperslab evaluate RUN --calibrate"
        )
    return names, np.array(found, float)


def _read_split(path: Path, names: Sequence[str], mean: FloatArray) -> Predictions | None:
    """Reads the predictions of a split; None where there are none."""
    kinds = [f"{kind}_{name}" for kind in ("true", "predicted") for name in names]
    table = run_folder.read_table(path, ["volume", *kinds])
    return predictions_of_table(table, path, names, mean) if table else None


def predictions_of_table(
    table: run_folder.Columns, path: Path, names: Sequence[str], mean: FloatArray
) -> Predictions:
    """Puts the columns of an evaluation's table together; ``mean`` (P,) is of the training split.

    There is a covariance where all deviations are; what else is missing of it is NaN.

    Raises:
        DataError: the file ``path`` does not say of which volumes the samples are.
    """

    def columns(kind: str) -> FloatArray:
        return np.stack([table[f"{kind}_{name}"] for name in names], axis=1)

    covariance = None
    if all(f"std_{name}" in table for name in names):
        covariance = columns("std")[:, :, None] ** 2 * np.eye(len(names))
        missing = np.full(len(covariance), np.nan)
        for i, name in enumerate(names):
            for j, other in enumerate(names[:i]):
                both = table.get(f"covariance_{name}_{other}", missing)
                covariance[:, i, j] = covariance[:, j, i] = both
    volumes = run_folder.read_words(path, "volume")
    return Predictions(
        parameters=Parameters.normalised(names),
        samples=volumes,
        true=columns("true"),
        predicted=columns("predicted"),
        training_mean=mean,
        volumes=volumes,
        covariance=covariance,
    )


UNCOMPARED = ("seed", "output", "timeout", "grid", "memory", "peak")
"""Lists keys of a recipe by which runs of one configuration may differ."""

SAME_TRUTH = 1e-3  # how far true values, of -1 to 1, that are the same may be apart
LARGEST_MEAN = 1e6  # of normalised targets, most of which are between -1 and 1
LONGEST_NAME = 48  # [letters] of a name that says what differs; longer ones fit into no figure


@dataclass(frozen=True, slots=True)
class Configuration:
    """Groups runs of different seeds; ``averaged``: their sub-volumes together, if any."""

    name: str
    runs: tuple[run_folder.Run, ...]
    scored: Scored
    averaged: Scored | None

    @property
    def of_parts(self) -> bool:
        """Tells if the network sees parts of volumes."""
        return self.scored.seeds[0].of_parts


@dataclass(frozen=True, slots=True)
class Comparison:
    """Holds configurations and controls over the same test volumes."""

    configurations: tuple[Configuration, ...]
    controls: tuple[Scored, ...]

    @property
    def named(self) -> list[NamedRuns]:
        return [(one.name, [*one.runs]) for one in self.configurations]

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.configurations[0].scored.parameters

    @property
    def rows(self) -> list[Scored]:
        """Lists everything that is compared, averages behind what they are averages of."""
        found: list[Scored] = []
        for one in self.configurations:
            found += [one.scored, *([one.averaged] if one.averaged is not None else [])]
        return [*found, *self.controls]

    @property
    def reference(self) -> Scored:
        """Returns what all are compared with: the best network of those that see whole volumes.

        Of all networks where none does.
        """
        whole = [one for one in self.configurations if not one.of_parts]
        scored = [one.scored for one in whole or self.configurations]
        return min(scored, key=_error_of)


@dataclass(frozen=True, slots=True)
class ClassComparison:
    """Holds the ``dice`` (S, C) of each configuration's runs, on the same test samples."""

    classes: tuple[str, ...]
    named: list[NamedRuns]
    dice: list[FloatArray]


def _error_of(scored: Scored) -> float:
    """Ranks a result; what is not a number is worse than anything."""
    ratio = float(scored.ratios(MEAN_CONTROL).mean())
    return ratio if math.isfinite(ratio) else math.inf


def read_compared(
    paths: Sequence[Path], controls: Sequence[tuple[str, Path]] = ()
) -> Comparison | ClassComparison:
    """Reads runs, or sweeps of them, and controls, which go with predicted numbers.

    A control is a folder with the files of an evaluation, such as `benchmarks/ridge.py` writes.

    Raises:
        DataError: there is no such run, one is not evaluated, or test volumes are not the same.
    """
    named = [(name, runs) for name, runs in named_runs(paths) if runs]
    runs_of_all = [run for _, runs in named for run in runs]
    evaluation = next((run.evaluation for run in runs_of_all if run.evaluation), {})
    if "classes" not in evaluation:
        return _comparison_of(named, controls)
    if controls:
        raise DataError("controls go with predicted numbers; these runs give classes")
    classes = tuple(evaluation["classes"])
    _check_samples(runs_of_all)
    dice = [np.array([_dice_of_run(run, classes) for run in runs]) for _, runs in named]
    return ClassComparison(classes, named, dice)


def _check_samples(runs: Sequence[run_folder.Run]) -> None:
    """Refuses scores of another split or other samples; earlier versions do not name theirs."""
    files = [run.path / "evaluation" / "samples.csv" for run in runs]
    named = [
        (path, sorted(run_folder.read_words(path, "sample"))) for path in files if path.exists()
    ]
    for run in runs:
        run_folder.check_measured_test(run.path / "evaluation", run.evaluation)
    for path, samples in named:
        if samples != named[0][1]:
            raise DataError(
                f"{path}: {len(samples)} samples, which are not the {len(named[0][1])} of "
                f"{named[0][0]}: their scores cannot be compared\n"
                "    give them the same data, seed and split"
            )


def _dice_of_run(run: run_folder.Run, classes: Sequence[str]) -> list[float]:
    """Returns the Dice of each class; NaN where it is not defined."""
    scores = run.evaluation.get("classes", {})
    if list(scores) != list(classes):
        raise DataError(
            f"{run.path} is not evaluated for the classes {', '.join(classes)}\n"
            f"    hyperslab evaluate {quote(str(run.path))}"
        )
    dice = [scores[name].get("dice") for name in classes]
    return [np.nan if value is None else float(value) for value in dice]


def read_comparison(paths: Sequence[Path], controls: Sequence[tuple[str, Path]] = ()) -> Comparison:
    """Reads those that predict numbers; raises as `read_compared`."""
    return _comparison_of(named_runs(paths), controls)


def _comparison_of(named: Sequence[NamedRuns], controls: Sequence[tuple[str, Path]]) -> Comparison:
    found = []
    for name, runs in named:
        scored = read_scored(name, [run.path / "evaluation" for run in runs])
        found.append(Configuration(name, tuple(runs), *scored))
    if not found:
        raise DataError("no run is done yet, so there is nothing to compare")
    others = tuple(read_scored(name, [path])[0] for name, path in controls)
    comparison = Comparison(tuple(found), others)
    names = [one.name for one in comparison.rows]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"two runs or controls are called {twice[0]}; rename the control")
    first = found[0].scored
    for other in comparison.rows:
        if (other.volumes, other.parameters) != (first.volumes, first.parameters):
            raise DataError(
                f"{other.folder} was measured on other test volumes or parameters than "
                f"{first.folder}: they cannot be compared\n    give them the same data, "
                "seed and split"
            )
        _check_truths(other.folder, other.true, first.folder, first.true)
    return comparison


def named_runs(paths: Sequence[Path]) -> list[NamedRuns]:
    """Groups runs, or sweeps of them, by configuration.

    What is called alike in two sweeps has the names of their folders before it.

    Raises:
        DataError: there is no such run, one is given twice, or a sweep's table cannot be read.
    """
    check_distinct(paths)
    sweeps = [path for path in paths if (path / "sweep.json").is_file()]
    grouped = _grouped_by_recipe(
        [run_folder.read_run(path) for path in paths if path not in sweeps]
    )
    swept = [_of_sweep(path) for path in sweeps]
    names = [name for named in (*swept, grouped) for name, _ in named]
    folders = run_folder.folder_names(sweeps) if sweeps else []
    found = [
        (name if names.count(name) == 1 else f"{folder}: {name}", runs)
        for folder, named in zip(folders, swept, strict=True)
        for name, runs in named
    ]
    return [*found, *grouped]


def _of_sweep(path: Path) -> list[NamedRuns]:
    try:
        table = read_json(path / "sweep.json")
        rows = [
            (str(row["name"]), [path / run for run in row["paths"]]) for row in table["variants"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / 'sweep.json'} is not a table of a sweep: {error!r}") from None
    return [(name, [run_folder.read_run(run) for run in runs]) for name, runs in rows if runs]


def _grouped_by_recipe(runs: Sequence[run_folder.Run]) -> list[NamedRuns]:
    """Groups runs by what matters of their recipes, and calls them by what differs.

    Runs of one seed are no two draws of chance, and so not of one configuration. Where names would
    be long, or the same, they are those of the folders.
    """
    groups: list[tuple[dict[str, Any], list[run_folder.Run]]] = []
    for run in runs:
        settings = {key: value for key, value in run.recipe.items() if key not in UNCOMPARED}
        for other, group in groups:
            seeds = [one.setting("seed") for one in group]
            if other == settings and run.setting("seed") not in seeds:
                group.append(run)
                break
        else:
            groups.append((settings, [run]))
    keys = [key for settings, _ in groups for key in differences(groups[0][0], settings)]
    names = [_name_by_differences(group[0], list(dict.fromkeys(keys))) for _, group in groups]
    if len(set(names)) < len(names) or max(map(len, names), default=0) > LONGEST_NAME:
        names = run_folder.folder_names([group[0].path for _, group in groups])
    return [(name, group) for name, (_, group) in zip(names, groups, strict=True)]


def _name_by_differences(run: run_folder.Run, keys: Sequence[str]) -> str:
    last = [key.rpartition(".")[2] for key in keys]
    words = [
        f"{word if last.count(word) == 1 else key}={run.setting(key)}"
        for key, word in zip(keys, last, strict=True)
        if run.setting(key) is not None
    ]
    return ", ".join(words) or str(run.setting("model.variant") or run.called("model"))
