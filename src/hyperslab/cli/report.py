"""Runs `hyperslab report`: shows a run, or several of them, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperslab.util.optional_libraries import importing_figures

if TYPE_CHECKING:
    from hyperslab.studies.report import FigureFormat


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of training runs, or of a sweep of them.")
    ],
    control: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FOLDER: something else that predicts the test split, in the files of an "
            "evaluation; may be repeated."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The page of a comparison. Default: where the runs are.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers of a comparison to this file.")
    ] = None,
    figures: Annotated[
        str,
        typer.Option(
            help="Write the figures as files for a paper, too: pdf, png or pdf,png. They come into "
            "the folder report-figures beside the page."
        ),
    ] = "",
) -> None:
    """Write the figures and tables of a run as one page that needs nothing else.

    Of several runs, or of a sweep, the page compares them: test losses by epoch and by time, true
    against predicted, errors with intervals. Runs that differ by their seed alone are one
    configuration. Of two runs it is the page of the first, with both timelines on one scale.
    """
    with importing_figures():  # other commands need not wait for it
        from hyperslab.studies.report import figures_beside, write_comparison, write_report

    formats = _formats(figures)
    controls = [_control(words) for words in control or []]
    compares = len(runs) > 2 or any((run / "sweep.json").is_file() for run in runs)
    if compares or controls or output is not None or json_path is not None:
        page = write_comparison(runs, controls, output=output, numbers=json_path, figures=formats)
    else:
        page = write_report(*runs, figures=formats)
    typer.echo(f"{page}")
    if formats:
        folder = figures_beside(page)
        names = sorted({file.stem for file in folder.iterdir() if file.suffix[1:] in formats})
        typer.echo(f"{len(names)} figures in {folder}, each as {' and '.join(formats)}:")
        typer.echo(", ".join(names))


def _formats(words: str) -> list[FigureFormat]:
    from hyperslab.studies.report.canvas import FigureFormat

    try:
        return [FigureFormat(word.strip()) for word in words.split(",") if word.strip()]
    except ValueError:
        known = ", ".join(FigureFormat)
        raise typer.BadParameter(f"--figures {words}: choose from {known}") from None


def _control(words: str) -> tuple[str, Path]:
    name, equals, folder = words.partition("=")
    if not name or not equals or not folder:
        raise typer.BadParameter(f"--control {words}: give NAME=FOLDER, such as ridge=ridge/whole")
    return name, Path(folder)
