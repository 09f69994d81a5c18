"""Runs `hyperslab scale`: repeats a training on more and more ranks."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hyperslab.cli.options import TrustOption
from hyperslab.cli.rank import exit_when_stopped, is_started
from hyperslab.cli.terminal import log_to_stdout
from hyperslab.comm.grid import AXES
from hyperslab.errors import LayoutError
from hyperslab.planner.auto import machine_for
from hyperslab.planner.search import process_bytes
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import GridSection, Recipe, planned_device
from hyperslab.recipe.trust import trust_of
from hyperslab.studies.scaling.study import (
    Predictor,
    RefusedPoint,
    ScalingKind,
    ScalingPoint,
    StudyRequest,
    own_points,
    points_or_refusals,
    run_study,
    strong_points,
    weak_points,
)
from hyperslab.util.atomic_files import check_links
from hyperslab.util.optional_libraries import importing_figures

AUTO = "auto"
"""This axis means that the plan chooses the grids."""


def scale_command(
    kind: Annotated[
        ScalingKind,
        typer.Argument(help="strong: the mini-batch stays; weak: it grows with the ranks."),
    ],
    recipe: Annotated[Path, typer.Argument(help="A YAML file, see `hyperslab recipes`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as data.batch_size=16.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="How many, each a point, such as 1,2,4.")] = "",
    axis: Annotated[
        str | None,
        typer.Option(
            help=f"What grows in strong scaling: {', '.join(AXES)}, or auto for the plan's best "
            "grids. Default: depth, or the recipe's auto."
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="A point of your own, such as depth=2,height=2; may be repeated."),
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Run nothing: the ranks need not be there.")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Whose times are predicted: shipped, or a calibrated file. Default: the usual one."
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(min=2, help="Of each run; the first is left out.")] = 4,
    output: Annotated[
        Path | None, typer.Option(help="For runs, tables, figure. Default: beside the recipe's.")
    ] = None,
    trust: TrustOption = None,
) -> None:
    """Measure or predict how training scales: throughput, speed-up, efficiency.

    As in Oyama et al. 2020 every point is a training of 4 epochs on this machine, into a folder of
    its own; the median step counts, without the first epoch. A point that is there already is not
    run again. With a machine its prediction stands beside each. Synthetic data (data.path=null
    data.synthetic.width=128) take no files.
    """
    with importing_figures():  # --help need not wait for it
        from hyperslab.studies.scaling.summary import short_table, study_remarks, write_study

    if is_started():
        raise LayoutError(
            "hyperslab scale starts its ranks itself, on this machine: do not start it on several, "
            "by torchrun, mpirun or srun"
        )
    config = load_recipe(recipe, overrides or [], trust=trust_of(recipe, trust or ()))
    predictor = _predictor(machine, config) if predict or machine is not None else None
    points, refused = points_of(
        kind, config, ranks=ranks, axis=axis, grids=grid or [], predictor=predictor
    )
    request = StudyRequest(
        kind=kind,
        name=recipe.stem,
        recipe=config,
        points=tuple(points),
        output=output or _default_output(config, kind),
        epochs=epochs,
        trains=not predict,
        refused=tuple(refused),
    )
    log_to_stdout(logging.INFO)
    with exit_when_stopped():
        study = run_study(request, predictor, write_study)
    console = Console(soft_wrap=True)
    console.print(short_table(study))
    for words in study_remarks(study):
        console.print(words, highlight=False)
    console.print(f"all numbers are in {request.output}: study.csv, study.json, study.png")


def _default_output(recipe: Recipe, kind: ScalingKind) -> Path:
    """Return a folder beside the recipe's, or in it where that is a run's."""
    if recipe.trust.own:
        return recipe.output.with_name(f"{recipe.output.name}-{kind}")
    check_links(recipe.output, str(kind))
    return recipe.output / kind


def points_of(
    kind: ScalingKind,
    recipe: Recipe,
    *,
    ranks: str,
    axis: str | None,
    grids: list[str],
    predictor: Predictor | None,
) -> tuple[list[ScalingPoint], list[RefusedPoint]]:
    """Return the points that the options ask for, by ranks, and those that cannot be.

    A grid that is given comes before the rule.

    The plan's grids are those for the predictor's machine, or for the usual one of the device.
    """
    if axis is not None and (kind is ScalingKind.WEAK or axis not in (*AXES, AUTO)):
        raise typer.BadParameter(f"--axis {axis}: give strong, and one of {', '.join(AXES)}, auto")
    points = own_points(kind, recipe, [parse_grid(words) for words in grids])
    counts = parse_ranks(ranks) if ranks or not grids else []
    rest = [count for count in counts if count not in {point.ranks for point in points}]
    chooses = axis == AUTO or (axis is None and recipe.grid.auto)
    if kind is ScalingKind.WEAK:
        rule = partial(weak_points, recipe)
    elif chooses and rest:
        rule = partial((predictor or _predictor(None, recipe)).best_points, recipe)
    else:
        rule = partial(strong_points, recipe, axis=axis or "depth")
    more, refused = points_or_refusals(rest, rule)
    return sorted([*points, *more], key=lambda point: point.ranks), refused


def _predictor(machine: str | None, recipe: Recipe) -> Predictor:
    found = machine_for(machine, planned_device(recipe))
    return Predictor(found, process_bytes() if found.device == "cpu" else 0)


def parse_ranks(words: str) -> list[int]:
    """Read ``1,2,4`` as numbers, the smallest first."""
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
    """Read ``depth=2,height=2`` as a grid."""
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
