"""Runs `hyperslab plan`: predicts which grid is best, how long it takes, how much memory."""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hyperslab.cli import options
from hyperslab.cli.rank import exit_when_stopped
from hyperslab.errors import DataError, LayoutError, RecipeError, system_errors_as
from hyperslab.launch.supervisor import cores_here, launch
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import OF_A_STEP, planned_device
from hyperslab.recipe.trust import Trust, trust_of
from hyperslab.util.atomic_files import check_file, write_json
from hyperslab.util.optional_libraries import importing_figures

_WIDTH = 120  # columns where it is no terminal


def plan_command(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, see `hyperslab recipes`.")],
    overrides: options.OverridesArgument = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks. Default: those of the recipe's grid."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory of a rank, such as 16GiB. Default: the machine's.")
    ] = None,
    machine: options.MachineOption = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="First measure the longest operators here, for two minutes, into this machine "
            "file; plan with it."
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Shape C,D,H,W of a volume, if the data are not on this machine."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Trace every grid, not only the promising ones.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the plan into this PNG file.")] = None,
    trust: options.TrustOption = None,
) -> None:
    """Predict the step time and memory of every grid.

    The command runs nothing: it traces a step without memory and computes its cost for the given
    machine. With --calibrate it first makes or completes a machine file of this machine, which
    should be idle meanwhile.
    """
    begin = time.monotonic()
    if figure is not None and figure.suffix.lower() != ".png":
        raise typer.BadParameter(f"--figure {figure}: give a name that ends with .png")
    nbytes = None if memory is None else options.memory_size(memory)
    extents = None if shape is None else options.volume_shape(shape)
    if calibrate is not None and machine is not None:
        raise typer.BadParameter("--calibrate and --machine both name a machine: give one")
    config = load_recipe(recipe, overrides or [], trust=trust_of(recipe, trust or ()))
    if config.grid.auto and ranks is None:
        raise RecipeError("grid=auto needs to know for how many ranks to plan: give --ranks")
    config.check_targets_exist(*OF_A_STEP)
    check_file(json_path, "--json")
    check_file(figure, "--figure")
    options.check_machine(machine)
    options.check_machine_file("--calibrate", calibrate)
    if extents is not None:
        with _naming_shape(shape):
            config.model.check_extents(extents[1:], config.data.where)
    else:
        config.check_extents()
        if config.data.is_here:
            config.data.check_path()
            from hyperslab.train.samples import check_data  # numpy

            check_data(config, "train", "validation", cut=False)
        else:
            _ = config.expected_shape
    count = ranks or config.grid.size
    from rich.console import Console

    from hyperslab.planner import search, summary
    from hyperslab.planner.auto import machine_for
    from hyperslab.planner.job import job_of

    if calibrate is not None:
        words = [str(recipe), *(overrides or [])]
        _calibrate(calibrate, count, planned_device(config), words, trust, begin)
        machine = str(calibrate)
    chosen = machine_for(machine, config)
    # The limit that is asked for, else that of the named machine, else this host's.
    if nbytes is not None or machine:
        bounds = search.machine_bounds(chosen, search.process_bytes(chosen.device))
    else:
        bounds = search.host_bounds(count, chosen.device)
    if nbytes is not None:
        bounds = replace(bounds, nbytes=nbytes, reason="--memory")
    with _naming_shape(shape):
        job = job_of(config, extents)
        plan = search.make_plan(job, chosen, count, replace(bounds, everything=everything))
    found = search.suggested_changes(plan)
    least = search.least_ranks(plan.first, bounds, plan.best)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(summary.plan_opening(plan), markup=False, soft_wrap=True)
    console.print(summary.ranking_table(plan))
    for line in summary.plan_remarks(plan, found, least):
        console.print(line, markup=False, soft_wrap=True)
    with system_errors_as(RecipeError, "cannot write the plan"):
        if json_path is not None:
            write_json(json_path, summary.plan_document(plan, found, least))
        if figure is not None:
            with importing_figures():
                importlib.import_module("matplotlib")
            summary.draw_plan(plan, figure)
    if plan.best is None:
        raise typer.Exit(1)


CALIBRATION_SECONDS = 120.0  # [s] of a calibration for one plan, and of that plan
CALIBRATION_BUDGET = 0.1  # [s] of each of its measurements


def _calibrate(
    out: Path, ranks: int, device: str, recipe: list[str], trust: list[str] | None, begin: float
) -> None:
    """Measure what decides a plan of so many ranks, on as many as this machine has places for.

    The command began at ``begin`` (`time.monotonic`).
    """
    import torch

    places = torch.cuda.device_count() if device == "cuda" else cores_here()
    words = ["--out", str(out), "--planned", str(ranks)]
    left = max(1.0, CALIBRATION_SECONDS - (time.monotonic() - begin))
    words += ["--budget", str(CALIBRATION_BUDGET), "--limit", str(left)]
    words += [*Trust(modules=tuple(trust or ())).options, "--", *recipe]
    with exit_when_stopped(), tempfile.TemporaryDirectory(prefix="hyperslab-plan-") as logs:
        here = max(1, min(ranks, places))
        limit = 2 * CALIBRATION_SECONDS  # the last call may be a long one
        launch(here, ["-m", "hyperslab", "calibrate", *words], Path(logs), limit=limit)


@contextmanager
def _naming_shape(text: str | None) -> Iterator[None]:
    """Name the option in errors about volumes that have their shape from it."""
    try:
        yield
    except (RecipeError, LayoutError, DataError) as error:
        if text is None or "--shape" in str(error):
            raise
        raise type(error)(f"--shape {text}: {error}") from error
