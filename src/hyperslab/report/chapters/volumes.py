"""The chapter that shows volumes: a universe and how it is cut, or scans and their masks."""

from __future__ import annotations

from hyperslab.errors import HyperslabError
from hyperslab.geometry import Window
from hyperslab.models.cosmoflow_variants import variant_of
from hyperslab.report.chapters import segmentation
from hyperslab.report.figures.slices import cuts_of, halo_words, universe
from hyperslab.report.number_format import times
from hyperslab.report.page.blocks import Block, Chapter, Figures, Notice, Paragraph
from hyperslab.report.run_folder import Run
from hyperslab.report.samples.universe import middle_planes


def volumes(run: Run) -> Chapter:
    """Scans with their masks, or the middle planes of one universe with the cuts of the grid."""
    if run.segments:
        return segmentation.masks(run)
    return Chapter("universe", "A universe, and how it is cut", _slices(run))


def _slices(run: Run) -> list[Block]:
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
    pictures = universe(planes, cuts, window)
    return [Paragraph(text), Figures(pictures, "medium")]


def first_window(run: Run, shape: tuple[int, int, int]) -> Window | None:
    """What the first convolution reads; None for a network that is not one of ours."""
    if run.segments:
        return Window(3, before=1, after=1)
    try:
        first = variant_of(str(run.setting("model.variant")), shape[0]).convolutions[0]
    except ValueError:
        return None
    return Window(first.kernel, stride=first.stride, before=first.padding, after=first.padding)
