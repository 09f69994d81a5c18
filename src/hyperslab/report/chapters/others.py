"""The other chapters of the page: losses, universe, speed, the run itself."""

from __future__ import annotations

import numpy as np
import yaml

from hyperslab.errors import HyperslabError
from hyperslab.report.chapters.overview import facts
from hyperslab.report.chapters.segmentation import dice_by_epoch
from hyperslab.report.figures import timeline
from hyperslab.report.figures.learning import loss_by_epoch, loss_by_step
from hyperslab.report.figures.slices import cuts_of, halo_words, universe
from hyperslab.report.number_format import product
from hyperslab.report.page import html
from hyperslab.report.page.html import Section
from hyperslab.report.run_folder import Run
from hyperslab.report.samples.universe import first_window, middle_planes

MEASURES = {
    "mse": "mean squared error",
    "l1": "mean absolute error",
    "cross_entropy": "cross-entropy",
    "dice": "Dice loss",
    "generalised_dice": "generalised Dice loss",
    "focal": "focal loss",
    "dice_cross_entropy": "Dice loss + cross-entropy",
}


def losses(run: Run) -> Section:
    """Loss curves, and what is left to train."""
    parts = []
    wanted, done = run.epochs_wanted, len(run.epochs.get("epoch", ()))
    if wanted is not None and done < wanted:
        parts.append(
            html.notice(
                f"This run is not finished: {done} of {wanted} epochs are done. To go on:",
                f"hyperslab train {run.path / 'recipe.yaml'} --resume --output {run.path}",
            )
        )
    pictures = []
    measure = MEASURES.get(str(run.setting("loss")), "loss")
    if run.epochs:
        pictures.append(loss_by_epoch(run.epochs, measure=measure, of_mean=_of_mean(run)))
        pictures += dice_by_epoch(run)
    if run.steps:
        pictures.append(loss_by_step(run.steps, measure=measure))
    parts.append(html.figures(pictures) if pictures else html.paragraph("No step is done yet."))
    return Section("losses", "Losses", "\n".join(parts))


def _of_mean(run: Run) -> float | None:
    """The squared error of predicting the training mean, where the loss is one too."""
    found = [row.get("mse_of_mean") for row in run.errors.values()]
    values = [value for value in found if value is not None]
    return float(np.mean(values)) if values and run.setting("loss") == "mse" else None


def slices(run: Run) -> Section:
    """The middle planes of one universe with the cuts of the grid."""
    return Section("universe", "A universe, and how it is cut", _slices(run))


def _slices(run: Run) -> str:
    try:
        planes = middle_planes(run)
    except HyperslabError as error:
        return html.notice(f"No universe of this run can be shown: {error}")
    window = first_window(run, planes.shape)
    cuts = cuts_of(planes.shape, run.grid)
    text = (
        f"{planes.sample}, log(1 + count) of the first channel. Every sample of "
        f"{product(planes.shape)} voxels "
    )
    if all(cut.parts == 1 for cut in cuts.values()):
        text += "is held whole by one rank."
    else:
        boxes = product(cut.parts for cut in cuts.values())
        text += f"is cut into {boxes} boxes ({product(cuts)}); each rank reads, keeps and computes "
        text += "its own."
    if window is not None and (halo := halo_words(cuts, window)):
        text += f" For the first convolution neighbours exchange a halo of {halo} (shaded)."
    pictures = universe(planes, cuts, window)
    return html.paragraph(text) + html.figures(pictures, size="small")


def speed(run: Run) -> Section:
    """Throughput, memory and waiting, by step."""
    if not run.steps:
        body = html.paragraph("No step is done yet, so nothing has been measured.")
        return Section("speed", "Speed and memory", body)
    pictures = [timeline.throughput(run.steps)]
    if np.isfinite(run.steps.get("memory_bytes", np.array([]))).any():
        pictures.append(timeline.memory(run.steps))
    pictures.append(timeline.waiting(run.steps))
    return Section("speed", "Speed and memory", html.figures(pictures, size="medium"))


def about(run: Run) -> Section:
    """What was run, on what, and the whole recipe."""
    recipe = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)
    body = html.facts(facts(run)) + html.details("The whole recipe", recipe)
    return Section("run", "The run", body)
