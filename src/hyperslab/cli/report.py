"""`hyperslab report`: a run, or several of them, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
) -> None:
    """Write the figures and tables of a run as one page that needs nothing else.

    Of several runs, or of a sweep, the page compares them: test losses by epoch and by time, true
    against predicted, errors with intervals. Runs that differ by their seed alone are one
    configuration. Of two runs it is the page of the first, with both timelines on one scale.
    """
    from hyperslab.report import write_comparison, write_report  # matplotlib: others need not wait

    controls = [_control(words) for words in control or []]
    compares = len(runs) > 2 or any((run / "sweep.json").is_file() for run in runs)
    if compares or controls or output is not None or json_path is not None:
        page = write_comparison(runs, controls, output=output, numbers=json_path)
    else:
        page = write_report(*runs)
    typer.echo(f"{page}")


def _control(words: str) -> tuple[str, Path]:
    name, equals, folder = words.partition("=")
    if not name or not equals or not folder:
        raise typer.BadParameter(f"--control {words}: give NAME=FOLDER, such as ridge=ridge/whole")
    return name, Path(folder)
