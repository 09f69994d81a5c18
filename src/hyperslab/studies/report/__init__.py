"""Reports a run as one HTML page that needs nothing else: no server, no network, no scripts.

`CHAPTERS` has the chapters of the page in their order; a new one is a function and a line here.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hyperslab.errors import DataError
from hyperslab.studies.report.canvas import FigureFormat, figures_beside, write_figures
from hyperslab.studies.report.chapters import accuracy, key_numbers, lede, losses, provenance, speed
from hyperslab.studies.report.comparison import (
    class_chapter,
    comparison_chapters,
    two_runs,
    write_comparison,
)
from hyperslab.studies.report.configurations import read_comparison
from hyperslab.studies.report.html import Chapter, Page, render_page
from hyperslab.studies.report.segmentation import volumes
from hyperslab.studies.report.timelines import timelines
from hyperslab.studies.run_folder import Run, check_distinct, read_run
from hyperslab.util.atomic_files import write_text

CHAPTERS: tuple[Callable[[Run], Chapter], ...] = (
    accuracy,
    losses,
    volumes,
    speed,
    timelines,
    provenance,
)


__all__ = ["FigureFormat", "figures_beside", "render", "write_comparison", "write_report"]


def write_report(
    path: str | Path,
    beside: str | Path | None = None,
    *,
    figures: Sequence[FigureFormat] = (),
) -> Path:
    """Writes ``report.html`` into a run's folder and returns its path.

    With ``beside``, the folder of another run, the timelines of both are shown on one scale, and
    their errors are compared if both are evaluated on the same volumes.

    A run that is not finished or not evaluated gives a page that says what is missing and
    which command makes it. In the formats ``figures`` all figures of the page are written, too, as
    `figures_beside` says.

    Raises:
        DataError: not a run's folder, the same one twice, a broken file in it, or a folder that
            cannot be written.
    """
    run = read_run(path)
    if beside is not None:
        check_distinct([Path(path), Path(beside)])
        run = replace(run, beside=read_run(beside))
    page = page_of(run)
    target = run.path / "report.html"
    try:
        write_text(target, render_page(page), concurrent=True)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror}") from error
    write_figures(page.pictures, figures_beside(target), figures)
    return target


def _compared(run: Run) -> list[Chapter]:
    if run.beside is None:
        return []
    try:
        of_classes = class_chapter([run.path, run.beside.path])
        if of_classes is not None:
            return [two_runs(run, run.beside), of_classes]
        comparison = read_comparison([run.path, run.beside.path])
    except DataError as error:  # networks of another kind, or not evaluated: losses and timelines
        return [two_runs(run, run.beside, str(error))]
    return [two_runs(run, run.beside), *comparison_chapters(comparison)]


def render(run: Run) -> str:
    """Renders the page of a run as text."""
    return render_page(page_of(run))


def page_of(run: Run) -> Page:
    """Composes the page of a run as values."""
    made = f"Made by hyperslab on {datetime.datetime.now():%Y-%m-%d %H:%M}."
    return Page(
        title=run.path.resolve().name,
        lede=lede(run),
        tiles=key_numbers(run),
        chapters=[*(chapter(run) for chapter in CHAPTERS), *_compared(run)],
        made=made,
    )
