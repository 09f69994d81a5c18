"""Runs `hyperslab plan`: predicts which grid is best, how long it takes, how much memory."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, Field, TypeAdapter, ValidationError
from rich.console import Console

from hyperslab.cli.options import TrustOption
from hyperslab.errors import RecipeError, reason
from hyperslab.planner.auto import machine_for
from hyperslab.planner.job import VolumeShape, job_of
from hyperslab.planner.machine import Machine
from hyperslab.planner.search import (
    MemoryLimit,
    PlanBounds,
    host_limit,
    least_ranks,
    make_plan,
    process_bytes,
    suggested_changes,
)
from hyperslab.planner.summary import (
    draw_plan,
    plan_document,
    plan_opening,
    plan_remarks,
    ranking_table,
)
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import planned_device
from hyperslab.recipe.trust import trust_of
from hyperslab.util.atomic_files import write_text
from hyperslab.util.optional_libraries import importing_figures

_WIDTH = 120
"""The output has so many columns where it is no terminal."""


_Room = Annotated[ByteSize, Field(gt=0)]


def plan_command(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, see `hyperslab recipes`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as data.batch_size=64.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="How many. Default: the recipe's grid's.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="A rank's, such as 16GiB. Default: the machine's.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="Shipped, or a calibrated file. Default: the usual one.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Of a volume, C,D,H,W, where its data are not here.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Trace every grid, not the promising ones alone.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the plan into this PNG.")] = None,
    trust: TrustOption = None,
) -> None:
    """Rank the grids of so many ranks by the time of a step; nothing is run."""
    if figure is not None and figure.suffix.lower() != ".png":
        raise typer.BadParameter(f"--figure {figure}: give a name that ends with .png")
    config = load_recipe(recipe, overrides or [], trust=trust_of(recipe, trust or ()))
    if config.grid.auto and ranks is None:
        raise RecipeError("grid=auto needs to know for how many ranks to plan: give --ranks")
    job = job_of(config, _shape(shape))
    chosen = machine_for(machine, planned_device(config))
    count = ranks or config.grid.size
    process = 0 if chosen.device != "cpu" else process_bytes()
    limit = _limit(memory, chosen if machine else None, count, chosen.device)
    bounds = PlanBounds(limit, process, everything)
    plan = make_plan(job, chosen, count, bounds)
    found = suggested_changes(plan, bounds)
    least = least_ranks(job, chosen, bounds, plan.first, plan.best)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(plan_opening(plan), markup=False, soft_wrap=True)
    console.print(ranking_table(plan))
    for line in plan_remarks(plan, found, least):
        console.print(line, markup=False, soft_wrap=True)
    try:
        if json_path is not None:
            write_text(json_path, json.dumps(plan_document(plan, found, least), indent=1) + "\n")
        if figure is not None:
            with importing_figures():
                importlib.import_module("matplotlib")
            draw_plan(plan, figure)
    except OSError as error:
        raise RecipeError(f"cannot write the plan: {reason(error)}") from None
    if plan.best is None:
        raise typer.Exit(1)


def _shape(text: str | None) -> VolumeShape | None:
    try:
        return None if text is None else tuple(int(word) for word in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--shape {text}: give C,D,H,W, such as 4,512,512,512") from None


def _limit(text: str | None, named: Machine | None, ranks: int, device: str) -> MemoryLimit:
    """Take the limit that is asked for, else that of the named machine, else this host's."""
    if text is not None:
        try:
            return MemoryLimit(TypeAdapter(_Room).validate_python(text), "--memory")
        except ValidationError:
            raise typer.BadParameter(f"--memory {text}: give a size, such as 16GiB") from None
    if named is not None:
        return MemoryLimit(named.memory, f"that of {named.name}")
    return host_limit(ranks, device)
