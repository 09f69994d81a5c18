"""Reports a run, or several, as one HTML page that needs nothing else: no server, no network.

`CHAPTERS` has the chapters of a run's page in their order; a new one is a function and a line here.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hyperslab.errors import DataError, system_errors_as
from hyperslab.studies import check_distinct
from hyperslab.studies.configurations import ClassComparison, Comparison, NamedRuns, read_compared
from hyperslab.studies.report.accuracy import accuracy
from hyperslab.studies.report.canvas import FigureFormat, figures_beside, write_figures
from hyperslab.studies.report.chapters import key_numbers, lede, losses, provenance, speed
from hyperslab.studies.report.comparison import (
    class_chapter,
    comparison_chapters,
    comparison_numbers,
    two_runs,
    what_differs,
)
from hyperslab.studies.report.html import Chapter, Page, render_page
from hyperslab.studies.report.timelines import timelines
from hyperslab.studies.report.volumes import volumes
from hyperslab.studies.run_folder import Run, folder_names, read_run
from hyperslab.util.atomic_files import check_links, write_json, write_text

CHAPTERS: tuple[Callable[[Run], Chapter], ...] = (
    accuracy,
    losses,
    volumes,
    speed,
    timelines,
    provenance,
)


__all__ = ["FigureFormat", "figures_beside", "write_comparison", "write_report"]


def write_report(
    of: str | Path | Run,
    beside: str | Path | Run | None = None,
    *,
    figures: Sequence[FigureFormat] = (),
) -> Path:
    """Writes ``report.html`` into the folder ``of`` a run, read already or not; returns its path.

    With ``beside``, another run, the timelines of both are shown on one scale, and
    their errors are compared if both are evaluated on the same volumes.

    A run that is not finished or not evaluated gives a page that says what is missing and
    which command makes it. In the formats ``figures`` all figures of the page are written, too, as
    `figures_beside` says.

    Raises:
        DataError: not a run's folder, the same one twice, a broken file in it, or a folder that
            cannot be written.
    """
    run = of if isinstance(of, Run) else read_run(of)
    if beside is not None:
        other = beside if isinstance(beside, Run) else read_run(beside)
        check_distinct([run.path, other.path])
        run = replace(run, beside=other)
    page = page_of(run)
    target = run.path / "report.html"
    with system_errors_as(DataError, f"{target} cannot be written", named=False):
        write_text(target, render_page(page), concurrent=True)
    check_links(run.path, figures_beside(target).name)
    write_figures(page.pictures, figures_beside(target), figures)
    return target


def page_of(run: Run) -> Page:
    """Composes the page of a run as values."""
    return Page(
        title=run.path.resolve().name,
        lede=lede(run),
        tiles=list(key_numbers(run)),
        chapters=[*(chapter(run) for chapter in CHAPTERS), *_compared(run)],
        made=_made(),
    )


def _made() -> str:
    return f"Made by hyperslab on {datetime.datetime.now():%Y-%m-%d %H:%M}."


def _compared(run: Run) -> list[Chapter]:
    if run.beside is None:
        return []
    try:
        compared = read_compared([run.path, run.beside.path])
    except DataError as error:  # networks of another kind, or not evaluated: losses and timelines
        return [two_runs(run, run.beside, str(error))]
    return [two_runs(run, run.beside), *_chapters(compared)]


def _chapters(compared: Comparison | ClassComparison) -> list[Chapter]:
    if isinstance(compared, ClassComparison):
        return [class_chapter(compared)]
    return comparison_chapters(compared)


def write_comparison(
    paths: Sequence[Path],
    compared: Comparison | ClassComparison | None = None,
    *,
    output: Path | None = None,
    numbers: Path | None = None,
    figures: Sequence[FigureFormat] = (),
) -> Path:
    """Writes one page on several runs, or on sweeps, and returns its path.

    ``compared`` is what `read_compared` gives of the ``paths``, where they are read already. By
    default the page is ``report.html`` in the folder of a sweep, or ``comparison.html`` in the
    folder that all runs are in. ``numbers``: a JSON file for the numbers of its tables.
    ``figures``: the formats in which its figures are written, too, as `figures_beside` says.

    Raises:
        DataError: as `read_compared`, or a file cannot be written.
    """
    compared = compared or read_compared(paths)
    of_numbers = compared if isinstance(compared, Comparison) else None
    if of_numbers is None and numbers is not None:
        raise DataError("--json is for predicted numbers; these runs give classes")
    if output is None and len(paths) == 1:
        output = paths[0] / "report.html"
    elif output is None:
        output = Path(os.path.commonpath([path.absolute() for path in paths])) / "comparison.html"
    page = Page(
        title=output.resolve().parent.name,
        lede=_comparison_lede(of_numbers) if of_numbers is not None else "",
        chapters=[*_recipes(compared.named), *_chapters(compared)],
        made=_made(),
        kind="comparison of runs",
    )
    with system_errors_as(DataError, "the comparison cannot be written"):
        write_text(output, render_page(page), concurrent=True)
        if numbers is not None and of_numbers is not None:
            write_json(numbers, comparison_numbers(of_numbers))
    write_figures(page.pictures, figures_beside(output), figures)
    return output


def _recipes(named: Sequence[NamedRuns]) -> list[Chapter]:
    """Shows what differs in configurations that are called by their folders."""
    folders = folder_names([runs[0].path for _, runs in named]) if named else []
    if len(named) < 2 or [name for name, _ in named] != folders:
        return []
    table = what_differs([runs[0] for _, runs in named], folders)
    return [Chapter("recipes", "Recipes", [table])]


def _comparison_lede(comparison: Comparison) -> str:
    runs = sum(len(one.runs) for one in comparison.configurations)
    names = ", ".join(one.name for one in comparison.configurations)
    volumes = len(comparison.reference.volumes)
    return f"{runs} runs of {names}; {volumes} test volumes"
