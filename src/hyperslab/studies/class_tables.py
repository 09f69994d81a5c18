"""Tables the scores of classes alike for the page of a run and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hyperslab.studies.table import Table, TableCell, TableRow, number

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

ClassScores = Mapping[str, Mapping[str, float | None]]
"""Maps each class, the background's first, to its scores; None where one is not defined."""


def class_tables(scores: ClassScores, evaluation: Mapping[str, Any]) -> Iterator[Table]:
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


def _surfaces(scores: ClassScores, about: Any) -> Iterator[Table]:
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
