"""Tables the scores of an evaluation alike for the page of a run and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hyperslab.studies.table import (
    DASH,
    MINUS,
    UNITS,
    Table,
    TableCell,
    TableRow,
    label,
    number,
)
from hyperslab.train.uncertainty import LEVELS

NORMALISED_ERRORS = {
    "ratio": "ratio",
    "mse": "MSE",
    "mse_of_mean": "MSE of the mean",
    "mae": "MAE",
    "rmse": "RMSE",
    "bias": "bias",
    "r2": "R²",
    "correlation": "correlation",
}
PHYSICAL_ERRORS = {"mae_physical": "MAE", "rmse_physical": "RMSE", "bias_physical": "bias"}
RELATIVE_ERRORS = {
    "relative_error": "relative error",
    "relative_error_sc18": "by SC18's formula",
    "relative_error_sc18_of_mean": "of the mean",
}
"""Heads the relative errors; Mathuriya et al. 2018, section VII-A, divide by the prediction."""

SCORES = {
    "dice": "Dice",
    "dice_mean": "mean Dice",
    "iou": "IoU",
    "precision": "precision",
    "recall": "recall",
}
SURFACES = {
    "hausdorff_95_mm": "Hausdorff 95 % [mm]",
    "average_surface_distance_mm": "average [mm]",
    "surface_dice": "surface Dice",
    "samples_both": "samples with both",
    "samples_missed": "missed",
    "samples_invented": "invented",
}
VOXEL_COUNTS = ("true_positives", "false_positives", "false_negatives")
"""Lists the scores that count voxels; all other scores of a class are shown."""

ScoresByName = Mapping[str, Mapping[str, float | None]]
"""Maps each parameter, or class, the background's first, to its scores; None: not defined."""


def number_tables(errors: ScoresByName) -> Iterator[Table]:
    """Lists the errors of predicted numbers, normalised and in their own units."""
    normalised: list[TableRow] = []
    physical: list[TableRow] = []
    for name, row in errors.items():
        title = TableCell(label(name), name if label(name) != name else "")
        normalised.append([title, *(score_cell(key, row, "ratio") for key in NORMALISED_ERRORS)])
        title = TableCell(label(name), f"[{UNITS[name]}]" if name in UNITS else "")
        shares = (_percent(row.get(key)) for key in RELATIVE_ERRORS)
        physical.append([title, *(number(row.get(key)) for key in PHYSICAL_ERRORS), *shares])
    head = ["parameter", *NORMALISED_ERRORS.values()]
    yield Table(f"Normalised parameters, in [{MINUS}1, 1]", head, normalised)
    head = ["parameter", *PHYSICAL_ERRORS.values(), *RELATIVE_ERRORS.values()]
    yield Table("Physical parameters, each in its own unit", head, physical)


JOINT = "all together"


def coverage_table(each: Mapping[str, Mapping[str, Any]], joint: Mapping[str, Any]) -> Table:
    """Tables how often predicted intervals hold the true values, as `RankStatistics.facts` says.

    Those of ``each`` parameter come first, those of all together last.
    """
    rows: list[TableRow] = []
    for name, found in [*each.items(), (JOINT, joint)]:
        cells = []
        for level in LEVELS:
            ends = (number(100 * end) for end in found[f"coverage_{level}_interval"])
            share = f"{number(100 * found[f'coverage_{level}'])} %"
            cells.append(TableCell(share, below=f" {DASH} ".join(ends)))
        tested = (number(found[key]) for key in ("mean_squared_residual", "ks_probability"))
        rows.append([label(name), *cells, *tested])
    head = ["parameter", *(f"in {level} % intervals" for level in LEVELS)]
    caption = "Share of true values in predicted intervals, mean squared residual, probability"
    return Table(f"{caption} of the ranks", [*head, "residual²", "probability"], rows)


def _percent(value: float | None) -> str:
    return number(None) if value is None else f"{number(100 * value)} %"


def class_tables(scores: ScoresByName, evaluation: Mapping[str, Any]) -> Iterator[Table]:
    """Tables the overlap of masks, distances between surfaces, and where voxels went.

    ``evaluation`` is what ``metrics.json`` says besides.
    """
    known = {*SCORES, *SURFACES, *VOXEL_COUNTS}
    further = dict.fromkeys(key for row in scores.values() for key in row if key not in known)
    measured = {**SCORES, **{key: _measure_label(key) for key in further}}
    rows: list[TableRow] = []
    for name, row in scores.items():
        voxels = int(row.get("true_positives") or 0) + int(row.get("false_negatives") or 0)
        rows.append([name, *(score_cell(key, row, "dice") for key in measured), f"{voxels:,}"])
    head = ["class", *measured.values(), "true voxels"]
    yield Table("Overlap of predicted and true masks", head, rows)
    yield from _surfaces(scores, evaluation.get("surfaces"))
    yield from _confusion(list(scores), evaluation.get("confusion", []))


def score_cell(key: str, row: Mapping[str, float | None], barred: str) -> TableCell:
    """Makes a cell of a number, with a bar behind that of the key ``barred``."""
    value = row.get(key)
    return TableCell(number(value), share=value if key == barred else None)


def _measure_label(key: str) -> str:
    """Writes ``mean_surface_distance_mm`` as ``mean surface distance [mm]``."""
    named = f"{key.removesuffix('_mm')} [mm]" if key.endswith("_mm") else key
    return named.replace("_", " ")


def _surfaces(scores: ScoresByName, about: Any) -> Iterator[Table]:
    """Tables distances between surfaces, of the classes that have one."""
    rows: list[TableRow] = [
        [name, *(_count_or_number(key, row.get(key)) for key in SURFACES)]
        for name, row in scores.items()
        if any(key in row for key in SURFACES)
    ]
    within = about.get("tolerance_mm") if isinstance(about, dict) else None
    caption = "Distances between the surfaces of predicted and true masks"
    if isinstance(within, float | int):
        caption += f"; surface Dice: the share within {number(within)} mm"
    if rows:
        yield Table(caption, ["class", *SURFACES.values()], rows)


def _count_or_number(key: str, value: float | None) -> str:
    whole = key.startswith("samples_") and value is not None and value == value // 1
    return f"{value:,.0f}" if whole else number(value)


def _confusion(names: Sequence[str], confusion: Any) -> Iterator[Table]:
    try:
        matrix = np.array(confusion, np.float64)
    except (ValueError, TypeError):  # ragged, or of words
        return
    if matrix.shape != (len(names), len(names)):
        return
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    rows: list[TableRow] = [
        [name, *(TableCell(f"{number(100 * share)} %", share=share) for share in row)]
        for name, row in zip(names, shares.tolist(), strict=True)
    ]
    head = ["true class", *(f"as {name}" for name in names)]
    yield Table("Where the voxels of each class went [% of the true ones]", head, rows)
