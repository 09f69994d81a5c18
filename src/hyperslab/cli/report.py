"""Runs `hyperslab report`: shows a run, or several of them, as one HTML page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hyperslab.errors import DataError, no_run
from hyperslab.studies import check_distinct
from hyperslab.util.atomic_files import check_file
from hyperslab.util.optional_libraries import importing_figures

FIGURE_FORMATS = ("pdf", "png")


def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or of a sweep.")],
    control: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FOLDER: another prediction of the test split, in the files of an "
            "evaluation; may be repeated."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File of a comparison. Default: beside the runs.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers of a comparison to this file.")
    ] = None,
    figures: Annotated[
        str,
        typer.Option(
            help="Also write the figures as files for a paper (pdf, png or pdf,png) into the "
            "folder report-figures beside the page."
        ),
    ] = "",
) -> None:
    """Write a self-contained page of figures and tables.

    Several runs, or a sweep, are compared: test losses by epoch and by time, true against predicted
    values, errors with intervals. Runs that differ only in their seed form one configuration. Two
    runs give the page of the first one, in its folder, with both timelines on one scale.
    """
    wanted = [word.strip() for word in figures.split(",") if word.strip()]
    if not {*wanted} <= {*FIGURE_FORMATS}:
        known = ", ".join(FIGURE_FORMATS)
        raise typer.BadParameter(f"--figures {figures}: choose from {known}")
    controls = [_control(words) for words in control or []]
    for run in runs:
        if not any(os.path.isfile(run / file) for file in ("recipe.yaml", "sweep.json")):
            raise no_run(run)
    check_distinct(runs)
    for _, folder in controls:
        if not folder.is_dir():
            raise DataError(f"--control: there is no folder {folder}")
    check_file(json_path, "--json")
    check_file(output, "--output")
    compares = len(runs) > 2 or any((run / "sweep.json").is_file() for run in runs)
    compares = compares or bool(controls) or output is not None or json_path is not None
    if compares:
        from hyperslab.studies.configurations import read_compared  # numpy

        compared = read_compared(runs, controls)
    else:
        from hyperslab.studies.run_folder import read_run  # numpy

        read = [read_run(run) for run in runs]
    with importing_figures():
        from hyperslab.studies.report import FigureFormat, write_comparison, write_report
        from hyperslab.studies.report.canvas import figures_beside

    formats = [FigureFormat(word) for word in wanted]
    if compares:
        whose = ""
        page = write_comparison(runs, compared, output=output, numbers=json_path, figures=formats)
    else:
        whose = f" (the page of {runs[0]}, with {runs[1]} beside it)" if len(runs) == 2 else ""
        page = write_report(*read, figures=formats)
    typer.echo(f"{page}{whose}")
    if formats:
        folder = figures_beside(page)
        names = sorted({file.stem for file in folder.iterdir() if file.suffix[1:] in formats})
        typer.echo(f"{len(names)} figures in {folder}, each as {' and '.join(formats)}:")
        typer.echo(", ".join(names))


def _control(words: str) -> tuple[str, Path]:
    name, equals, folder = words.partition("=")
    if not name or not equals or not folder:
        raise typer.BadParameter(f"--control {words}: give NAME=FOLDER, such as ridge=ridge/whole")
    return name, Path(folder)
