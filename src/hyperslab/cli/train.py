"""Runs `hyperslab train`: starts the ranks, or is one of them."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hyperslab.cli.options import TrustOption
from hyperslab.cli.rank import (
    adopt_rank,
    as_rank,
    become_rank,
    check_ranks,
    exit_when_stopped,
    is_rank,
    is_started,
    is_started_again,
    telling_ranks,
)
from hyperslab.cli.terminal import say
from hyperslab.errors import HyperslabError, RecipeError, Stopped, reason
from hyperslab.launch.restarts import TrainingLaunch, requeue_when_stopped
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.trust import trust_of
from hyperslab.train.profiler import ProfilePolicy
from hyperslab.train.run import RECIPE, GridChoice, is_done, prepare_folder, train
from hyperslab.util.logs import show_logs

log = logging.getLogger("hyperslab")


def train_command(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, see `hyperslab recipes`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as grid.depth=2 epochs=10.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="How many to start; the grid must have as many places."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, on any grid.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="The run's folder. Default: the recipe's.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Take down what some steps do; the report shows it.")
    ] = False,
    profile_steps: Annotated[
        int, typer.Option(min=1, help="How many steps, after warm-up, with --profile.")
    ] = ProfilePolicy().steps,
    machine: Annotated[
        str | None,
        typer.Option(help="For grid=auto and for what a profile is compared with."),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Start again after a rank has died, so often, from the newest checkpoint; with "
            "grid=auto on fewer ranks where one cannot come back.",
        ),
    ] = 0,
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue", help="After SIGUSR1 or SIGUSR2 put the Slurm job into the queue again."
        ),
    ] = False,
    trust: TrustOption = None,
) -> None:
    """Train a network; also under torchrun and srun, where every rank runs this command."""
    words = list(overrides or [])
    adopt_rank()
    if restarts and is_started():
        raise RecipeError(
            "--restarts starts ranks again, but these were started by something else: omit it\n"
            "    torchrun has --max-restarts"
        )
    choose = partial(_choose_grid, machine)
    with telling_ranks():
        asked = load_recipe(recipe, words, trust=trust_of(recipe, trust or (), begins=not resume))
        if output is not None:
            asked = asked.model_copy(update={"output": output})
        config = asked
        if asked.undecided and not is_started():
            config = _settle(asked, ranks if asked.grid.auto else asked.grid.size, choose)
        if not config.grid.auto:
            check_ranks(config, ranks)
    if resume and not is_started() and is_done(config):
        say(f"all {config.epochs} epochs of {config.output} are done: nothing is left to resume")
        return
    with exit_when_stopped(), requeue_when_stopped(requeue):
        if is_rank(config) and not restarts:
            policy = ProfilePolicy(steps=profile_steps) if profile else None
            train_as_rank(config, resume=resume, profile=policy, choose=choose)
            if profile and os.environ.get("RANK", "0") == "0":
                _predict(config, machine)
            return
        show_logs(is_main=True)
        with ExitStack() as stack:  # the ranks hold the folder afterwards
            prepare_folder(config, stack, resume=resume)
        arguments = ["train", str(recipe), *words, "--output", str(config.output)]
        arguments += config.trust.options
        arguments += ["--profile", f"--profile-steps={profile_steps}"] if profile else []
        arguments += ["--machine", machine] if machine else []
        training = TrainingLaunch(asked, arguments, choose)
        training.until_done(config, restarts=restarts, resume=resume)


def _choose_grid(machine: str | None, recipe: Recipe, ranks: int) -> Recipe:
    """Return the recipe with the plan's best grid; other trainings need not import the planner."""
    from hyperslab.planner.auto import GridChooser

    return GridChooser(machine)(recipe, ranks)


def _settle(recipe: Recipe, ranks: int | None, choose: GridChoice) -> Recipe:
    """Return the recipe with the grid that is best for the ranks to be started here."""
    if ranks is None:
        raise RecipeError("grid=auto needs to know how many ranks to start: give --ranks")
    show_logs(is_main=True)
    return choose(recipe, ranks)


def train_as_rank(
    recipe: Recipe, *, resume: bool, profile: ProfilePolicy | None, choose: GridChoice
) -> None:
    """Train as one rank; what goes wrong is also written down for the process that started it."""
    ended = _train(recipe, resume=resume, profile=profile, choose=choose)
    if ended is not None:  # not inside: torch would take it for a failure
        raise ended


@as_rank
def _train(
    recipe: Recipe, *, resume: bool, profile: ProfilePolicy | None, choose: GridChoice
) -> Stopped | None:
    """Train, and return the signal that ended it, if one did."""
    is_main = become_rank()
    show_logs(is_main=is_main)
    try:
        train(
            recipe,
            resume=resume,
            started_again=is_started_again(),
            profile=profile,
            choose=choose,
        )
    except Stopped as stopped:
        if is_main:
            log.info("%s", stopped)
        return stopped
    return None


def _predict(recipe: Recipe, machine: str | None) -> None:
    """Put a prediction beside the profile, if there can be one; the run is done anyway."""
    from hyperslab.planner.auto import write_prediction

    try:
        write_prediction(load_recipe(recipe.output / RECIPE, trust=recipe.trust), machine)
    except HyperslabError as error:
        log.warning("the profile has no prediction beside it: %s", error)
    except OSError as error:
        log.warning("the prediction beside the profile cannot be written: %s", reason(error))
