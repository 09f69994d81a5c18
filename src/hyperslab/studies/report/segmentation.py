"""Writes the chapters on volumes: scores of classes, scans with masks, a universe and its cuts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hyperslab.errors import HyperslabError
from hyperslab.geometry import Window
from hyperslab.models.cosmoflow import variant_of
from hyperslab.studies.number_format import DASH, number, times
from hyperslab.studies.report.html import (
    Block,
    Chapter,
    Figures,
    Heading,
    Legend,
    Notice,
    Paragraph,
)
from hyperslab.studies.report.samples import middle_planes, scans
from hyperslab.studies.report.slices import (
    class_colour,
    cuts_of,
    halo_words,
    scan_slices,
    universe_slices,
)
from hyperslab.studies.run_folder import Run
from hyperslab.studies.table import Table, TableCell, TableRow, bar_cell

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


def class_scores(run: Run) -> Chapter:
    """Writes the chapter of an evaluation's tables by class."""
    scores = run.scores
    of = run.evaluation
    about = (
        f"{of.get('samples', DASH)} samples of the {of.get('split', 'test')} split, checkpoint "
        f"{of.get('checkpoint', DASH)}. Scores are of all their voxels together, 1 is perfect; the "
        "mean Dice is of the samples that have the class, each counted alike."
    )
    measured = {**SCORES, **_further_scores(scores)}
    rows: list[TableRow] = [
        [
            name,
            *(_score_cell(key, row.get(key)) for key in measured),
            f"{_sum_of_counts(row, 'true_positives', 'false_negatives'):,}",
        ]
        for name, row in scores.items()
    ]
    head = ["class", *measured.values(), "true voxels"]
    table = Table("Overlap of predicted and true masks", head, rows)
    parts = [Paragraph(about), table, *_surfaces(run), *_confusion(run)]
    return Chapter("accuracy", "Accuracy", parts)


def masks_chapter(run: Run) -> Chapter:
    """Writes the chapter of a few scans with what is true and what the network says."""
    return Chapter("masks", "Scans, true and predicted", _mask_blocks(run))


def _further_scores(scores: Mapping[str, Mapping[str, float | None]]) -> dict[str, str]:
    """Lists whatever else an evaluation measured of its classes."""
    known = {*SCORES, *SURFACES, *VOXEL_COUNTS}
    keys = dict.fromkeys(key for row in scores.values() for key in row)
    return {key: _measure_label(key) for key in keys if key not in known}


def _surfaces(run: Run) -> list[Block]:
    """Tables distances between surfaces, of the classes that have one."""
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
    return [Table(caption, ["class", *SURFACES.values()], rows)] if rows else []


def _count_or_number(key: str, value: float | None) -> str:
    whole = key.startswith("samples_") and value is not None and value == value // 1
    return f"{value:,.0f}" if whole else number(value)


def _measure_label(key: str) -> str:
    """Writes ``mean_surface_distance_mm`` as ``mean surface distance [mm]``."""
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
        [name, *(bar_cell(share, f"{number(100 * share)} %") for share in row)]
        for name, row in zip(names, shares.tolist(), strict=True)
    ]
    head = ["true class", *(f"as {name}" for name in names)]
    return [Table("Where the voxels of each class went [% of the true ones]", head, rows)]


def _mask_blocks(run: Run) -> list[Block]:
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
    legend = Legend([(class_colour(i), name) for i, name in enumerate(classes) if i])
    blocks: list[Block] = [Paragraph(text), legend]
    for place, scan in enumerate(found):
        cuts = cuts_of(scan.shape, run.grid)
        pictures = scan_slices(scan, classes, tuple(window) if window else None, cuts, place)
        blocks += [Heading(scan.sample), Figures(pictures, "medium")]
    return blocks


def _score_cell(key: str, value: float | None) -> TableCell | str:
    return bar_cell(value, number(value)) if key == "dice" and value is not None else number(value)


def _sum_of_counts(row: dict[str, float | None], *keys: str) -> int:
    return sum(int(row.get(key) or 0) for key in keys)


def dice_of(scores: dict[str, dict[str, float | None]]) -> list[tuple[str, float]]:
    """Lists the Dice of every class but the background."""
    found = [(name, row.get("dice")) for name, row in list(scores.items())[1:]]
    return [(name, dice) for name, dice in found if dice is not None]


def volumes(run: Run) -> Chapter:
    """Shows scans with their masks, or the planes of one universe with the grid's cuts."""
    if run.segments:
        return masks_chapter(run)
    return Chapter("universe", "A universe, and how it is cut", _universe_blocks(run))


def _universe_blocks(run: Run) -> list[Block]:
    try:
        planes = middle_planes(run)
    except HyperslabError as error:
        return [Notice(f"No universe of this run can be shown: {error}")]
    window = first_window(run, planes.shape)
    cuts = cuts_of(planes.shape, run.grid)
    text = (
        f"{planes.sample}, {planes.quantity} of the first channel. Every sample of "
        f"{times(planes.shape)} voxels "
    )
    if all(cut.parts == 1 for cut in cuts.values()):
        text += "is held whole by one rank."
    else:
        boxes = times(cut.parts for cut in cuts.values())
        text += f"is cut into {boxes} boxes ({times(cuts)}); each rank reads, keeps and computes "
        text += "its own."
    if window is not None and (halo := halo_words(cuts, window)):
        text += f" For the first convolution neighbours exchange a halo of {halo} (shaded)."
    pictures = universe_slices(planes, cuts, window)
    return [Paragraph(text), Figures(pictures, "medium")]


def first_window(run: Run, shape: tuple[int, int, int]) -> Window | None:
    """Returns the first convolution's window; None for a network that is not one of ours."""
    if run.segments:
        return Window(3, before=1, after=1)
    try:
        first = variant_of(str(run.setting("model.variant")), shape[0]).convolutions[0]
    except ValueError:
        return None
    return Window(first.kernel, stride=first.stride, before=first.padding, after=first.padding)
