"""The chapters of the page, in their order; a new one is a function and a line here.

Each takes the run and gives its chapter; where something is missing it says which command makes it.
"""

from collections.abc import Callable

from hyperslab.report.chapters.accuracy import accuracy
from hyperslab.report.chapters.losses import losses
from hyperslab.report.chapters.provenance import provenance
from hyperslab.report.chapters.speed import speed
from hyperslab.report.chapters.timelines import timelines
from hyperslab.report.chapters.volumes import volumes
from hyperslab.report.page.blocks import Chapter
from hyperslab.report.run_folder import Run

CHAPTERS: tuple[Callable[[Run], Chapter], ...] = (
    accuracy,
    losses,
    volumes,
    speed,
    timelines,
    provenance,
)
