"""The chapter on two runs: what differs in their recipes, and their losses on one scale."""

from __future__ import annotations

import numpy as np

from hyperslab.recipe.compare import differences
from hyperslab.report.figures.learning import whole_numbers
from hyperslab.report.figures.svg import FIRST, SECOND, Canvas, Picture
from hyperslab.report.number_format import DASH, number
from hyperslab.report.page.blocks import Block, CellTable, Chapter, Figures, Paragraph
from hyperslab.report.run_folder import Run

UNTOLD = ("output",)
"""Keys of recipes that always differ."""

MINUTES_FROM = 120.0
"""Times above this [s] are given in minutes."""


def two_runs(run: Run, other: Run, problem: str = "") -> Chapter:
    """``problem`` says why the errors of the two cannot be compared."""
    names = names_of(run, other)
    blocks: list[Block] = [_recipes(run, other, names)]
    if run.epochs and other.epochs:
        blocks.append(Figures([_losses(run, other, names, timed) for timed in (False, True)]))
    if problem:
        blocks.append(Paragraph(f"Their errors are not compared: {problem}"))
    return Chapter("two-runs", f"{names[0]} and {names[1]}", blocks)


def names_of(run: Run, other: Run) -> tuple[str, str]:
    """Of their folders, with those above where they are alike."""
    first = run.path.resolve()
    second = other.path.resolve()
    if first.name != second.name:
        return first.name, second.name
    return f"{first.parent.name}/{first.name}", f"{second.parent.name}/{second.name}"


def _recipes(run: Run, other: Run, names: tuple[str, str]) -> Block:
    keys = [key for key in differences(run.recipe, other.recipe) if key not in UNTOLD]
    if not keys:
        return Paragraph("The two recipes are the same.")
    rows = [[key, _value(run, key), _value(other, key)] for key in keys]
    return CellTable("What differs in their recipes", ["key", *names], rows)


def _value(run: Run, key: str) -> str:
    value = run.setting(key)
    return DASH if value is None else str(value)


def _losses(run: Run, other: Run, names: tuple[str, str], timed: bool) -> Picture:
    """Thick: validation, thin: training; by epoch or by the time that training took."""
    key = "time" if timed else "epoch"
    canvas = Canvas(f"two-runs-{key}")
    ends = [float(np.nansum(one.epochs["seconds"])) for one in (run, other)]
    unit, word = (60.0, "min") if max(ends) > MINUTES_FROM else (1.0, "s")
    for one, name, colour, style in ((run, names[0], FIRST, "-"), (other, names[1], SECOND, "--")):
        x = one.epochs["epoch"] + 1
        if timed:
            x = np.cumsum(one.epochs["seconds"]) / unit
        marker = "o" if len(x) < 20 else ""
        canvas.axes.plot(
            x, one.epochs["validation_loss"], style, color=colour, linewidth=2, marker=marker,
            markersize=4, label=name,
        )  # fmt: skip
        canvas.axes.plot(x, one.epochs["train_loss"], style, color=colour, linewidth=1, alpha=0.6)
    if timed:
        canvas.axes.set(xlabel=f"training time [{word}]", ylabel="loss")
    else:
        whole_numbers(canvas)
        canvas.axes.set(xlabel="epoch", ylabel="loss")
    canvas.legend()
    least = [
        number(float(np.nanmin(one.epochs["validation_loss"], initial=np.inf)))
        for one in (run, other)
    ]
    told = f"least validation loss: {names[0]} {least[0]}, {names[1]} {least[1]}"
    return canvas.picture(
        title=f"Losses by {key}",
        alt=f"Validation and training losses of two runs by {key}; {told}.",
        caption=f"Thick: validation, thin: training; {told}.",
    )
