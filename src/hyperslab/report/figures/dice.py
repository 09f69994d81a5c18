"""The figure that shows how the overlap of masks grew."""

from __future__ import annotations

from hyperslab.report.figures.svg import FIRST, SECOND, THIRD, Canvas, Picture
from hyperslab.report.number_format import number
from hyperslab.report.run_folder import Run

DICE = "validation_dice_"
"""Before a class's name: its column in the history."""


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
