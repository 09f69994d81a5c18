"""The chapters on a network that gives every voxel its class: scores, curves, masks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hyperslab.errors import HyperslabError
from hyperslab.report.figures.masks import colour, planes
from hyperslab.report.figures.slices import cuts_of
from hyperslab.report.number_format import DASH, number
from hyperslab.report.page.blocks import (
    Block,
    CellTable,
    Chapter,
    Figures,
    Heading,
    Legend,
    Notice,
    Paragraph,
    TableCell,
    TableRow,
    bar,
)
from hyperslab.report.run_folder import Run
from hyperslab.report.samples.scans import scans

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
"""Of voxels; what is a score of a class and not one of these is shown."""


def class_scores(run: Run) -> Chapter:
    """Tables of an evaluation."""
    scores = run.scores
    of = run.evaluation
    about = (
        f"{of.get('samples', DASH)} samples of the {of.get('split', 'test')} split, checkpoint "
        f"{of.get('checkpoint', DASH)}. Scores are of all their voxels together, 1 is perfect; the "
        "mean Dice is of the samples that have the class, each counted alike."
    )
    measured = {**SCORES, **_further(scores)}
    rows: list[TableRow] = [
        [
            name,
            *(_cell(key, row.get(key)) for key in measured),
            f"{_sum(row, 'true_positives', 'false_negatives'):,}",
        ]
        for name, row in scores.items()
    ]
    head = ["class", *measured.values(), "true voxels"]
    table = CellTable("Overlap of predicted and true masks", head, rows)
    parts = [Paragraph(about), table, *_surfaces(run), *_confusion(run)]
    return Chapter("accuracy", "Accuracy", parts)


def masks(run: Run) -> Chapter:
    """A few scans with what is true and what the network says."""
    return Chapter("masks", "Scans, true and predicted", _masks(run))


def _further(scores: Mapping[str, Mapping[str, float | None]]) -> dict[str, str]:
    """Whatever else an evaluation measured of its classes."""
    known = {*SCORES, *SURFACES, *VOXEL_COUNTS}
    keys = dict.fromkeys(key for row in scores.values() for key in row)
    return {key: _words(key) for key in keys if key not in known}


def _surfaces(run: Run) -> list[Block]:
    """How far apart they are, of the classes that have one."""
    rows: list[TableRow] = [
        [name, *(_count_or_number(key, row.get(key)) for key in SURFACES)]
        for name, row in run.scores.items()
        if any(key in row for key in SURFACES)
    ]
    about = run.evaluation.get("surfaces")
    within = about.get("tolerance_mm") if isinstance(about, dict) else None
    caption = "Distances between the surfaces of predicted and true masks"
    if isinstance(within, float | int):
        caption += f"; surface Dice: what lies within {number(within)} mm"
    return [CellTable(caption, ["class", *SURFACES.values()], rows)] if rows else []


def _count_or_number(key: str, value: float | None) -> str:
    whole = key.startswith("samples_") and value is not None and value == value // 1
    return f"{value:,.0f}" if whole else number(value)


def _words(key: str) -> str:
    """``mean_surface_distance_mm`` as ``mean surface distance [mm]``."""
    words, underscore, unit = key.rpartition("_")
    named = f"{words} [{unit}]" if underscore and unit == "mm" else key
    return named.replace("_", " ")


def _confusion(run: Run) -> list[Block]:
    names = list(run.scores)
    try:
        matrix = np.array(run.evaluation.get("confusion", []), np.float64)
    except (ValueError, TypeError):  # ragged, or of words
        return []
    if matrix.shape != (len(names), len(names)):
        return []
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    rows: list[TableRow] = [
        [name, *(bar(share, f"{number(100 * share)} %") for share in row)]
        for name, row in zip(names, shares.tolist(), strict=True)
    ]
    head = ["true class", *(f"as {name}" for name in names)]
    return [CellTable("Where the voxels of each class went [% of the true ones]", head, rows)]


def _masks(run: Run) -> list[Block]:
    try:
        found = scans(run)
    except HyperslabError as error:
        return [Notice(f"No scan of this run can be shown: {error}")]
    if not found:
        command = f"hyperslab evaluate {run.path}"
        return [Notice("The masks are those of an evaluation:", command)]
    window = run.setting("data.window")
    classes = list(run.scores)
    text = (
        "Test samples that the network never saw, on the lattice on which it sees them, in the "
        "planes through the centre of what is not background. Lines: the true mask. Filled: the "
        "predicted one."
    )
    if any(cut.parts > 1 for cut in cuts_of(found[0].shape, run.grid).values()):
        text += " Straight lines: where the grid cuts the volume."
    legend = Legend([(colour(i), name) for i, name in enumerate(classes) if i])
    blocks: list[Block] = [Paragraph(text), legend]
    for place, scan in enumerate(found):
        cuts = cuts_of(scan.shape, run.grid)
        pictures = planes(scan, classes, tuple(window) if window else None, cuts, place)
        blocks += [Heading(scan.sample), Figures(pictures, "medium")]
    return blocks


def _cell(key: str, value: float | None) -> TableCell | str:
    return bar(value, number(value)) if key == "dice" and value is not None else number(value)


def _sum(row: dict[str, float | None], *keys: str) -> int:
    return sum(int(row.get(key) or 0) for key in keys)


def dice_of(scores: dict[str, dict[str, float | None]]) -> list[tuple[str, float]]:
    """Of every class but the background."""
    found = [(name, row.get("dice")) for name, row in list(scores.items())[1:]]
    return [(name, dice) for name, dice in found if dice is not None]
