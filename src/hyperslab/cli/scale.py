"""Runs `hyperslab scale`: repeats a training on more and more ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hyperslab.cli import options
from hyperslab.cli.rank import adopt_rank, exit_when_stopped, is_started
from hyperslab.cli.terminal import log_to_stdout
from hyperslab.comm import AXES
from hyperslab.errors import LayoutError
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import OF_A_STEP, GridSection, Recipe
from hyperslab.recipe.trust import trust_of
from hyperslab.studies.scaling import points as scaling_points
from hyperslab.util.atomic_files import check_links, check_output
from hyperslab.util.optional_libraries import importing_figures

if TYPE_CHECKING:
    from hyperslab.launch.crew import Crew
    from hyperslab.studies.scaling import study as scaling

AUTO = "auto"  # this axis means that the plan chooses the grids


def scale_command(
    kind: Annotated[
        Literal["strong", "weak"],
        typer.Argument(help="strong: the mini-batch stays; weak: it grows with the ranks."),
    ],
    recipe: Annotated[Path, typer.Argument(help="A YAML file, see `hyperslab recipes`.")],
    overrides: options.OverridesArgument = None,
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks, one for each point, such as 1,2,4.")
    ] = "",
    axis: Annotated[
        str | None,
        typer.Option(
            help=f"Axis that grows in strong scaling: {', '.join(AXES)}, or auto for the plan's "
            "best grids. Default: depth, or the recipe's auto."
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="Grid of an additional point, such as depth=2,height=2; may be repeated."
        ),
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Run nothing and predict; the ranks need not exist.")
    ] = False,
    machine: options.MachineOption = None,
    epochs: Annotated[
        int, typer.Option(min=2, help="Epochs of each run; the first does not count.")
    ] = 4,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of runs, tables and figure. Default: beside the recipe's."),
    ] = None,
    trust: options.TrustOption = None,
) -> None:
    """Measure or predict how training scales.

    As in Oyama et al. 2020, every point is a training of 4 epochs on this machine, in its own
    folder; the result is the median step without the first epoch. Finished points do not run
    again. --machine adds a prediction to each measurement. Synthetic data (data.path=null
    data.synthetic.width=128) need no files. Under srun, jsrun and torchrun the points run on the
    ranks of the job.
    """
    adopt_rank()
    if axis is not None and (kind == "weak" or axis not in (*AXES, AUTO)):
        raise typer.BadParameter(f"--axis {axis}: give strong, and one of {', '.join(AXES)}, auto")
    grids = [parse_grid(words) for words in grid or []]
    counts = options.rank_counts(ranks) if ranks or not grids else []
    config = load_recipe(recipe, overrides or [], trust=trust_of(recipe, trust or ()))
    config.check_targets_exist(*(OF_A_STEP if predict else ()))
    config.check_extents()
    if not (predict or config.data.is_here):
        raise scaling_points.not_here(config, "; or --predict")
    options.check_machine(machine)
    if output is not None:
        check_output(output, "--output")
    which = scaling_points.ScalingKind(kind)
    predictor_of = partial(_predictor, machine, config)
    points, refused = points_of(
        which, config, counts, axis=axis, grids=grids, predictor_of=predictor_of
    )
    if not points:
        raise refused[0].error
    if config.data.is_here and not is_started():
        from hyperslab.train.samples import check_data  # numpy

        check_data(config, "train", "validation", cut=False)
    with importing_figures():
        from hyperslab.studies.scaling.summary import short_table, study_remarks, write_study
    from rich.console import Console

    from hyperslab.launch.crew import with_crew
    from hyperslab.studies.scaling import study as scaling

    predictor = predictor_of() if predict or machine is not None else None
    request = scaling.StudyRequest(
        kind=which,
        name=recipe.stem,
        recipe=config,
        points=tuple(points),
        output=output or _default_output(config, kind),
        epochs=epochs,
        trains=not predict,
        refused=tuple(refused),
    )
    log_to_stdout(logging.INFO)

    def run(crew: Crew | None = None) -> scaling.Study:
        asked = request
        if crew is not None and request.trains:
            most = max(point.ranks for point in points)
            if most > crew.size:
                raise LayoutError(
                    f"a point has {most} ranks, and {crew.size} were started\n    start {most} "
                    "tasks, or leave the point out of --ranks"
                )
            (team,) = crew.teams(crew.size)
            asked = replace(request, start=team.start_training)
        return scaling.run_study(asked, predictor, write_study)

    with exit_when_stopped():
        study = with_crew(run, request.output) if is_started() else run()
    if study is None:
        return  # this rank is not the main one
    console = Console(soft_wrap=True, markup=False)
    console.print(short_table(study))
    for words in study_remarks(study):
        console.print(words, highlight=False)
    console.print(f"all numbers are in {request.output}: study.csv, study.json, study.png")


def _default_output(recipe: Recipe, kind: str) -> Path:
    """Return a folder beside the recipe's, or in it where that is a run's."""
    if recipe.trust.own:
        return recipe.output.with_name(f"{recipe.output.name}-{kind}")
    check_links(recipe.output, kind)
    return recipe.output / kind


def points_of(
    kind: scaling_points.ScalingKind,
    recipe: Recipe,
    counts: list[int],
    *,
    axis: str | None,
    grids: list[GridSection],
    predictor_of: Callable[[], scaling.Predictor],
) -> tuple[list[scaling_points.ScalingPoint], list[scaling_points.RefusedPoint]]:
    """Return the points that the options ask for, by ranks, and those that cannot be.

    A grid that is given comes before the rule. The predictor chooses the plan's grids.
    """
    points = scaling_points.own_points(kind, recipe, grids)
    rest = [count for count in counts if count not in {point.ranks for point in points}]
    # Weak scaling has its rule already: more replicas.
    chooses = axis == AUTO or (axis is None and recipe.grid.auto)
    weak = kind is scaling_points.ScalingKind.WEAK
    if chooses and rest and not weak:
        rule = partial(predictor_of().best_points, recipe)
    else:
        grows = "data" if weak else axis or "depth"
        rule = partial(scaling_points.grown_points, kind, recipe, axis=grows)
    more, refused = scaling_points.points_or_refusals(recipe, rest, rule)
    return sorted([*points, *more], key=lambda point: point.ranks), refused


def _predictor(machine: str | None, recipe: Recipe) -> scaling.Predictor:
    from hyperslab.planner.auto import machine_for
    from hyperslab.planner.search import process_bytes
    from hyperslab.studies.scaling import study as scaling

    found = machine_for(machine, recipe)
    return scaling.Predictor(found, process_bytes(found.device))


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
