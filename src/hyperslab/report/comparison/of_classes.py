"""Runs that give voxels classes, compared: the Dice of each class, over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.errors import DataError
from hyperslab.report.comparison.configurations import named_runs
from hyperslab.report.number_format import DASH, label, number
from hyperslab.report.page.blocks import CellTable, Chapter, Paragraph
from hyperslab.report.run_folder import Run, read_evaluation, read_words

DICE_WORDS = (
    "Dice of all voxels of the test split together: the median over the seeds, and the least to "
    "the greatest where there are several. The mean is over the classes but the background."
)


def class_chapter(paths: Sequence[Path]) -> Chapter | None:
    """The table of all configurations; None where the first run that is evaluated predicts numbers.

    Raises:
        DataError: a run is not evaluated, has other classes than the first, or other samples.
    """
    named = [(name, runs) for name, runs in named_runs(paths) if runs]
    runs_of_all = [run for _, runs in named for run in runs]
    evaluation = next(filter(None, map(_evaluation, runs_of_all)), {})
    if "classes" not in evaluation:
        return None
    classes = list(evaluation["classes"])
    _check_samples(runs_of_all)
    rows = [[name, str(len(runs)), *_cells(runs, classes)] for name, runs in named]
    head = ["configuration", "seeds", "mean", *map(label, classes)]
    table = CellTable("Dice by class", head, rows)
    return Chapter("comparison", "All configurations", [Paragraph(DICE_WORDS), table])


def _evaluation(run: Run) -> dict[str, Any]:
    return read_evaluation(run.path / "evaluation" / "metrics.json")


def _check_samples(runs: Sequence[Run]) -> None:
    """Refuse scores of other samples; evaluations of earlier versions do not name theirs."""
    files = [run.path / "evaluation" / "samples.csv" for run in runs]
    named = [(path, sorted(read_words(path, "sample"))) for path in files if path.exists()]
    for path, samples in named:
        if samples != named[0][1]:
            raise DataError(
                f"{path}: {len(samples)} samples, which are not the {len(named[0][1])} of "
                f"{named[0][0]}: nothing can be said of their scores\n"
                "    give them the same data, seed and split"
            )


def _cells(runs: Sequence[Run], classes: Sequence[str]) -> list[str]:
    found = []
    for run in runs:
        scores = _evaluation(run).get("classes", {})
        if list(scores) != list(classes):
            raise DataError(
                f"{run.path} is not evaluated for the classes {', '.join(classes)}\n"
                f"    hyperslab evaluate {run.path}"
            )
        dice = [scores[name].get("dice") for name in classes]
        found.append([np.nan if value is None else float(value) for value in dice])
    values = np.array(found)
    means = values[:, 1:].mean(1, keepdims=True)
    return [_spread(column) for column in np.concatenate([means, values], axis=1).T]


def _spread(values: np.ndarray[Any, Any]) -> str:
    if not np.isfinite(values).all():
        return DASH
    middle = number(float(np.median(values)))
    if len(values) == 1:
        return middle
    return f"{middle} ({number(float(values.min()))} to {number(float(values.max()))})"
