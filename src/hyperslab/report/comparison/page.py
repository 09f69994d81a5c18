"""The page of a comparison, and its numbers as JSON."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

from hyperslab.atomic_files import write_json, write_text
from hyperslab.errors import DataError, reason
from hyperslab.report.comparison.chapters import comparison_chapters
from hyperslab.report.comparison.configurations import (
    Comparison,
    named_runs,
    read_comparison,
)
from hyperslab.report.comparison.of_classes import class_chapter
from hyperslab.report.comparison.tables import comparison_numbers
from hyperslab.report.comparison.two_runs import what_differs
from hyperslab.report.figures.paper import FigureFormat, figures_beside, write_figures
from hyperslab.report.page.blocks import Chapter, Page
from hyperslab.report.page.render import render_page
from hyperslab.report.run_folder import folder_names


def write_comparison(
    paths: Sequence[Path],
    controls: Sequence[tuple[str, Path]] = (),
    *,
    output: Path | None = None,
    numbers: Path | None = None,
    figures: Sequence[FigureFormat] = (),
) -> Path:
    """Write one page on several runs, or on sweeps, and return its path.

    By default it is ``report.html`` in the folder of a sweep, or ``comparison.html`` in the folder
    that all runs are in. ``numbers``: a JSON file for the numbers of its tables. ``figures``: the
    formats in which its figures are written, too, as `figures_beside` says.

    Raises:
        DataError: as `read_comparison`, or a file cannot be written.
    """
    of_classes = class_chapter(paths)
    if of_classes is not None and (controls or numbers is not None):
        raise DataError("controls and --numbers go with predicted numbers; these runs give classes")
    comparison = None if of_classes is not None else read_comparison(paths, controls)
    chapters = _by_folders(paths) if of_classes is None else [*_by_folders(paths), of_classes]
    if output is None and len(paths) == 1:
        output = paths[0] / "report.html"
    elif output is None:
        output = Path(os.path.commonpath([path.absolute() for path in paths])) / "comparison.html"
    page = Page(
        title=output.resolve().parent.name,
        lede=_lede(comparison) if comparison else "",
        chapters=[*chapters, *(comparison_chapters(comparison) if comparison else ())],
        made=f"Made by hyperslab on {datetime.datetime.now():%Y-%m-%d %H:%M}.",
        kind="comparison of runs",
    )
    try:
        write_text(output, render_page(page), concurrent=True)
        if numbers is not None and comparison is not None:
            write_json(numbers, comparison_numbers(comparison))
    except OSError as error:
        raise DataError(f"the comparison cannot be written: {reason(error)}") from error
    write_figures(page.pictures, figures_beside(output), figures)
    return output


def _by_folders(paths: Sequence[Path]) -> list[Chapter]:
    """Of configurations that are called by their folders: what differs in them."""
    named = named_runs(paths)
    folders = folder_names([runs[0].path for _, runs in named]) if named else []
    if len(named) < 2 or [name for name, _ in named] != folders:
        return []
    table = what_differs([runs[0] for _, runs in named], folders)
    return [Chapter("recipes", "Recipes", [table])]


def _lede(comparison: Comparison) -> str:
    runs = sum(len(one.runs) for one in comparison.configurations)
    names = ", ".join(one.name for one in comparison.configurations)
    volumes = len(comparison.reference.volumes)
    return f"{runs} runs of {names}; {volumes} test volumes"
