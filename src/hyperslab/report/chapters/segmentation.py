"""The chapters on a network that gives every voxel its class: scores, curves, masks."""

from __future__ import annotations

import numpy as np

from hyperslab.errors import HyperslabError
from hyperslab.report.figures.masks import colour, planes
from hyperslab.report.figures.slices import cuts_of
from hyperslab.report.number_format import DASH, number
from hyperslab.report.page import html
from hyperslab.report.page.html import Chapter
from hyperslab.report.run_folder import Run
from hyperslab.report.samples.scans import scans

SCORES = {
    "dice": "Dice",
    "dice_mean": "mean Dice",
    "iou": "IoU",
    "precision": "precision",
    "recall": "recall",
}


def class_scores(run: Run) -> Chapter:
    """Tables of an evaluation."""
    scores = run.scores
    of = run.evaluation
    about = (
        f"{of.get('samples', DASH)} samples of the {of.get('split', 'test')} split, checkpoint "
        f"{of.get('checkpoint', DASH)}. Scores are of all their voxels together, 1 is perfect; the "
        "mean Dice is of the samples that have the class, each counted alike."
    )
    table = html.table(
        "Overlap of predicted and true masks",
        ["class", *SCORES.values(), "true voxels"],
        [
            [
                html.row_name(name, ""),
                *(_cell(key, row.get(key)) for key in SCORES),
                f"{_sum(row, 'true_positives', 'false_negatives'):,}",
            ]
            for name, row in scores.items()
        ],
    )
    return Chapter(
        "accuracy", "Accuracy", "\n".join([html.paragraph(about), table, _confusion(run)])
    )


def masks(run: Run) -> Chapter:
    """A few scans with what is true and what the network says."""
    return Chapter("masks", "Scans, true and predicted", _masks(run))


def _confusion(run: Run) -> str:
    matrix = np.array(run.evaluation.get("confusion", []))
    names = list(run.scores)
    if matrix.shape != (len(names), len(names)):
        return ""
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    return html.table(
        "Where the voxels of each class went [% of the true ones]",
        ["true class", *(f"as {name}" for name in names)],
        [
            [html.row_name(name, ""), *(html.bar(s, f"{number(100 * s)} %") for s in row)]
            for name, row in zip(names, shares.tolist(), strict=True)
        ],
    )


def _masks(run: Run) -> str:
    try:
        found = scans(run)
    except HyperslabError as error:
        return html.missing(f"No scan of this run can be shown: {error}")
    if not found:
        return html.missing(
            "The masks are those of an evaluation:", f"hyperslab evaluate {run.path}"
        )
    window = run.setting("data.window")
    classes = list(run.scores)
    text = (
        "Test samples that the network never saw, on the lattice on which it sees them, in the "
        "planes through the centre of what is not background. Lines: the true mask. Filled: the "
        "predicted one."
    )
    if any(cut.parts > 1 for cut in cuts_of(found[0].shape, run.grid).values()):
        text += " Straight lines: where the grid cuts the volume."
    parts = [html.paragraph(text)]
    parts.append(html.legend((colour(i), name) for i, name in enumerate(classes) if i))
    for place, scan in enumerate(found):
        cuts = cuts_of(scan.shape, run.grid)
        pictures = planes(scan, classes, tuple(window) if window else None, cuts, place)
        parts += [html.heading(scan.sample), html.figures(pictures, size="medium")]
    return "\n".join(parts)


def _cell(key: str, value: float | None) -> str:
    return html.bar(value, number(value)) if key == "dice" and value is not None else number(value)


def _sum(row: dict[str, float | None], *keys: str) -> int:
    return sum(int(row.get(key) or 0) for key in keys)


def dice_of(scores: dict[str, dict[str, float | None]]) -> list[tuple[str, float]]:
    """Of every class but the background."""
    found = [(name, row.get("dice")) for name, row in list(scores.items())[1:]]
    return [(name, dice) for name, dice in found if dice is not None]
