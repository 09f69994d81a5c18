"""The chapter on the losses, and on what is left to train."""

from __future__ import annotations

import numpy as np

from hyperslab.report.figures.dice import dice_by_epoch
from hyperslab.report.figures.learning import MEASURES, loss_by_epoch, loss_by_step
from hyperslab.report.number_format import counted
from hyperslab.report.page.blocks import Block, Chapter, Figures, Notice, Paragraph
from hyperslab.report.run_folder import Run


def losses(run: Run) -> Chapter:
    """Loss curves, and what is left to train."""
    blocks: list[Block] = []
    wanted = run.epochs_wanted
    done = len(run.epochs.get("epoch", ()))
    if wanted is not None and done < wanted:
        blocks.append(
            Notice(
                f"This run is not finished: {done} of {wanted} epochs are done. To go on:",
                f"hyperslab train {run.path / 'recipe.yaml'} --resume --output {run.path}",
            )
        )
    blocks += _not_finite(run)
    pictures = []
    measure = MEASURES.get(str(run.setting("loss")), "loss")
    if run.epochs:
        pictures.append(loss_by_epoch(run.epochs, measure=measure, of_mean=_of_mean(run)))
        pictures += dice_by_epoch(run)
    if run.steps:
        pictures.append(loss_by_step(run.steps, measure=measure))
    blocks.append(Figures(pictures) if pictures else Paragraph("No step is done yet."))
    return Chapter("losses", "Losses", blocks)


def _not_finite(run: Run) -> list[Block]:
    """What figures leave out: losses that are NaN or infinite."""
    found: list[Block] = []
    for table, column, what in (
        (run.steps, "step", "loss"),
        (run.epochs, "epoch", "train_loss"),
    ):
        bad = np.flatnonzero(~np.isfinite(table.get(what, np.array([]))))
        if not len(bad):
            continue
        first = int(table[column][bad[0]]) + (column == "epoch")
        found.append(
            Notice(
                f"The training loss of {len(bad)} of {counted(len(table[column]), column)} is not "
                f"a finite number, first in {column} {first}; the figures leave them out."
            )
        )
    return found


def _of_mean(run: Run) -> float | None:
    """The squared error of predicting the training mean, where the loss is one too."""
    found = [row.get("mse_of_mean") for row in run.errors.values()]
    values = [value for value in found if value is not None]
    return float(np.mean(values)) if values and run.setting("loss") == "mse" else None
