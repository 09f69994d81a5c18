"""What commands that take a trained network ask: of which run, and on how many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunArgument = Annotated[Path, typer.Argument(help="The folder of a training run.")]
RanksOption = Annotated[
    int | None,
    typer.Option(min=1, help="How many to start. Default: as many as the grid, or 1."),
]
CheckpointOption = Annotated[
    str, typer.Option(help="best, latest, the name of one of the run's, or a path.")
]
