"""The chapters on a network that gives every voxel its class: scores, curves, masks."""

from __future__ import annotations

import numpy as np

from hyperslab.errors import HyperslabError
from hyperslab.report.figures.masks import colour, planes
from hyperslab.report.figures.slices import cuts_of
from hyperslab.report.figures.svg import FIRST, SECOND, THIRD, Canvas, Picture
from hyperslab.report.number_format import DASH, number
from hyperslab.report.page import html
from hyperslab.report.page.html import Section
from hyperslab.report.run_folder import Run
from hyperslab.report.samples.scans import scans

SCORES = {
    "dice": "Dice",
    "dice_mean": "mean Dice",
    "iou": "IoU",
    "precision": "precision",
    "recall": "recall",
}
DICE = "validation_dice_"


def accuracy(run: Run) -> Section:
    """Tables of an evaluation."""
    scores, of = run.scores, run.evaluation
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
                html.named(name, ""),
                *(_cell(key, row.get(key)) for key in SCORES),
                f"{_sum(row, 'true_positives', 'false_negatives'):,}",
            ]
            for name, row in scores.items()
        ],
    )
    return Section(
        "accuracy", "Accuracy", "\n".join([html.paragraph(about), table, _confusion(run)])
    )


def masks(run: Run) -> Section:
    """A few scans with what is true and what the network says."""
    return Section("masks", "Scans, true and predicted", _masks(run))


def dice_by_epoch(run: Run) -> list[Picture]:
    """Dice of the validation split by epoch, a line for each class but the background."""
    names = [name.removeprefix(DICE) for name in run.epochs if name.startswith(DICE)][1:]
    if not names:
        return []
    canvas = Canvas("dice-epoch")
    epoch = run.epochs["epoch"] + 1
    marker = "o" if len(epoch) < 20 else ""
    for i, name in enumerate(names):
        canvas.axes.plot(
            epoch,
            run.epochs[DICE + name],
            ("-", "--", ":", "-.")[i % 4],
            color=(FIRST, SECOND, THIRD)[i % 3],
            label=name,
            marker=marker,
            markersize=4,
        )
    canvas.axes.set(xlabel="epoch", ylabel="Dice", ylim=(-0.02, 1.02))
    canvas.axes.locator_params(axis="x", integer=True, nbins=6)
    canvas.legend()
    ends = ", ".join(f"{name} {number(run.epochs[DICE + name][-1])}" for name in names)
    return [
        canvas.picture(
            title="Dice by epoch",
            alt=f"Dice of the validation split over {len(epoch)} epochs, in the end: {ends}.",
            caption=f"All voxels of the validation split together; in the end: {ends}.",
        )
    ]


def _confusion(run: Run) -> str:
    matrix, names = np.array(run.evaluation.get("confusion", [])), list(run.scores)
    if matrix.shape != (len(names), len(names)):
        return ""
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    return html.table(
        "Where the voxels of each class went [% of the true ones]",
        ["true class", *(f"as {name}" for name in names)],
        [
            [html.named(name, ""), *(html.bar(s, f"{number(100 * s)} %") for s in row)]
            for name, row in zip(names, shares.tolist(), strict=True)
        ],
    )


def _masks(run: Run) -> str:
    try:
        found = scans(run)
    except HyperslabError as error:
        return html.notice(f"No scan of this run can be shown: {error}")
    if not found:
        return html.notice(
            "The masks are those of an evaluation:", f"hyperslab evaluate {run.path}"
        )
    window, classes = run.setting("data.window"), list(run.scores)
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
