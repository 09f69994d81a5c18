"""`hyperslab report`: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    beside: Annotated[
        Path | None,
        typer.Argument(help="Another run's: both timelines, one above the other, on one scale."),
    ] = None,
) -> None:
    """Write the figures and tables of a run as one page that needs nothing else."""
    from hyperslab.report import write_report  # matplotlib: no other command has to wait for it

    typer.echo(f"{write_report(run, beside)}")
