"""The chapter on two runs: what differs in their recipes, and their losses on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyperslab.recipe.compare import differences
from hyperslab.report.figures.learning import log_if_wide, whole_numbers
from hyperslab.report.figures.svg import FIRST, SECOND, Canvas, Picture
from hyperslab.report.number_format import DASH, number
from hyperslab.report.page.blocks import Block, CellTable, Chapter, Figures, Paragraph
from hyperslab.report.run_folder import Run, folder_names

UNTOLD = ("output",)
"""Keys of recipes that always differ."""

MINUTES_FROM = 120.0
"""Times above this [s] are given in minutes."""


def two_runs(run: Run, other: Run, problem: str = "") -> Chapter:
    """``problem`` says why the errors of the two cannot be compared."""
    names = folder_names([run.path, other.path])
    blocks: list[Block] = [what_differs([run, other], names)]
    blocks += _loss_blocks([run, other], names)
    if problem:
        blocks.append(Paragraph(f"Their errors are not compared: {problem}"))
    return Chapter("two-runs", f"{names[0]} and {names[1]}", blocks)


def what_differs(runs: Sequence[Run], names: Sequence[str]) -> Block:
    """A table of the keys whose values are not the same in all recipes."""
    found = [key for other in runs[1:] for key in differences(runs[0].recipe, other.recipe)]
    keys = [key for key in dict.fromkeys(found) if key not in UNTOLD]
    if not keys:
        return Paragraph("Their recipes are the same.")
    rows = [[key, *(_value(run, key) for run in runs)] for key in keys]
    return CellTable("What differs in their recipes", ["key", *names], rows)


def _loss_blocks(runs: Sequence[Run], names: Sequence[str]) -> list[Block]:
    """The losses on one scale; of different losses each on its own."""
    drawn = [
        Drawn(run, name, *style)
        for run, name, style in zip(runs, names, ((FIRST, "-"), (SECOND, "--")), strict=True)
    ]
    empty = [one.name for one in drawn if not one.run.epochs]
    if empty:
        words = " and ".join(empty)
        return [Paragraph(f"Losses are not compared: no epoch of {words} is done.")]
    losses = [one.run.setting("loss") for one in drawn]
    if losses[0] == losses[1]:
        return [Figures([_losses(drawn, timed) for timed in (False, True)])]
    kinds = " and ".join(str(one.run.called("loss")) for one in drawn)
    return [
        Paragraph(
            f"They were trained on different losses, {kinds}, which are not to be compared: each "
            "has a scale of its own."
        ),
        Figures([_losses([one], timed) for one in drawn for timed in (False, True)]),
    ]


def _value(run: Run, key: str) -> str:
    value = run.setting(key)
    return DASH if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A run with the name, the colour and the style of its curves."""

    run: Run
    name: str
    colour: str
    style: str


def _losses(drawn: Sequence[Drawn], timed: bool) -> Picture:
    """Thick: validation, thin: training; by epoch or by the time that training took."""
    key = "time" if timed else "epoch"
    alone = len(drawn) == 1
    canvas = Canvas(f"two-runs-{key}" + (f"-{drawn[0].colour[-1]}" if alone else ""))
    ends = [float(np.nansum(one.run.epochs["seconds"])) for one in drawn]
    unit, word = (60.0, "min") if max(ends) > MINUTES_FROM else (1.0, "s")
    for one in drawn:
        epochs = one.run.epochs
        x = epochs["epoch"] + 1
        if timed:
            x = np.cumsum(epochs["seconds"]) / unit
        marker = "o" if len(x) < 20 else ""
        canvas.axes.plot(
            x, epochs["validation_loss"], one.style, color=one.colour, linewidth=2, marker=marker,
            markersize=4, label=one.name,
        )  # fmt: skip
        canvas.axes.plot(
            x, epochs["train_loss"], one.style, color=one.colour, linewidth=1, alpha=0.6,
            marker=marker, markersize=2,
        )  # fmt: skip
    columns = ("train_loss", "validation_loss")
    log_if_wide(canvas, *(one.run.epochs[column] for one in drawn for column in columns))
    if timed:
        canvas.axes.set(xlabel=f"training time [{word}]", ylabel="loss")
    else:
        whole_numbers(canvas)
        canvas.axes.set(xlabel="epoch", ylabel="loss")
    canvas.legend()
    least = [
        f"{one.name} {number(float(np.nanmin(one.run.epochs['validation_loss'], initial=np.inf)))}"
        for one in drawn
    ]
    told = f"least validation loss: {', '.join(least)}"
    return canvas.picture(
        title=f"Losses by {key}" + (f", {drawn[0].name}" if alone else ""),
        alt=f"Validation and training losses by {key}; {told}.",
        caption=f"Thick: validation, thin: training; {told}.",
    )
