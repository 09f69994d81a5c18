"""`hyperslab report`: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyperslab.report import write_report


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
) -> None:
    """Write the figures and tables of a run as one page that needs nothing else."""
    typer.echo(f"{write_report(run)}")
