"""`hyperslab scale`: the same training on more and more ranks."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hyperslab.cli.rank import exit_when_stopped, is_started
from hyperslab.comm.grid import AXES
from hyperslab.errors import LayoutError
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import GridSection, Recipe
from hyperslab.scaling.points import (
    ScalingKind,
    ScalingPoint,
    own_points,
    strong_points,
    weak_points,
)


def scale_command(
    kind: Annotated[
        ScalingKind,
        typer.Argument(help="strong: the mini-batch stays; weak: it grows with the ranks."),
    ],
    recipe: Annotated[Path, typer.Argument(help="A YAML file; recipes/ has some.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as data.batch_size=16.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="How many, each a point, such as 1,2,4.")] = "",
    axis: Annotated[
        str | None,
        typer.Option(help=f"What grows in strong scaling: {', '.join(AXES)}. Default: depth."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="A point of your own, such as depth=2,height=2; may be repeated."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=2, help="Of each run; the first is left out.")] = 4,
    output: Annotated[
        Path | None, typer.Option(help="For runs, tables, figure. Default: beside the recipe's.")
    ] = None,
) -> None:
    """Measure how training scales, as Oyama et al. 2020: throughput, speed-up, efficiency.

    Every point is a training of 4 epochs on this machine, into a folder of its own; the median step
    counts, without the first epoch. A point that is there already is not run again. study.csv,
    study.json and study.png show all of them. Synthetic data (data.path=null
    data.synthetic.width=128) take no files.
    """
    from hyperslab.scaling.run import StudyRequest, run_study
    from hyperslab.scaling.tables import remarks, short_table

    if is_started():
        raise LayoutError(
            "hyperslab scale starts its ranks itself, on this machine: do not start it on several, "
            "by torchrun, mpirun or srun"
        )
    config = load_recipe(recipe, overrides or [])
    points = points_of(kind, config, ranks=ranks, axis=axis, grids=grid or [])
    request = StudyRequest(
        kind=kind,
        name=recipe.stem,
        recipe=config,
        points=tuple(points),
        output=output or config.output.with_name(f"{config.output.name}-{kind}"),
        epochs=epochs,
    )
    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.INFO)
    with exit_when_stopped():
        study = run_study(request, None)
    console = Console(soft_wrap=True)
    console.print(short_table(study))
    for words in remarks(study):
        console.print(words, highlight=False)
    console.print(f"all numbers are in {request.output}: study.csv, study.json, study.png")


def points_of(
    kind: ScalingKind, recipe: Recipe, *, ranks: str, axis: str | None, grids: list[str]
) -> list[ScalingPoint]:
    """The points that the options ask for, by ranks; a grid that is given comes before the rule."""
    if axis is not None and (kind is ScalingKind.WEAK or axis not in AXES):
        raise typer.BadParameter(f"--axis {axis}: give strong, and one of {', '.join(AXES)}")
    points = own_points(kind, recipe, [parse_grid(words) for words in grids])
    counts = parse_ranks(ranks) if ranks or not grids else []
    rest = [count for count in counts if count not in {point.ranks for point in points}]
    if kind is ScalingKind.STRONG:
        points += strong_points(recipe, rest, axis or "depth")
    elif rest:
        points += weak_points(recipe, rest)
    return sorted(points, key=lambda point: point.ranks)


def parse_ranks(words: str) -> list[int]:
    """``1,2,4`` as numbers, the smallest first."""
    try:
        counts = [int(word) for word in words.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
        raise typer.BadParameter(
            f"--ranks {words}: give different numbers from 1 on, such as 1,2,4"
        )
    return sorted(counts)


def parse_grid(words: str) -> GridSection:
    """``depth=2,height=2`` as a grid."""
    try:
        pairs = [(axis, int(extent)) for axis, extent in (w.split("=") for w in words.split(","))]
    except ValueError:
        pairs = []
    extents = dict(pairs)
    if not pairs or len(extents) < len(pairs) or {*extents} - {*AXES} or min(extents.values()) < 1:
        raise typer.BadParameter(
            f"--grid {words}: give AXIS=N, AXIS one of {', '.join(AXES)}, such as depth=2,height=2"
        )
    return GridSection.model_validate(extents)
