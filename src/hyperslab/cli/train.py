"""Runs `hyperslab train`: starts the ranks, or is one of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperslab.checkpoint import check_unused, folder_of, newest_intact, position_in
from hyperslab.checkpoint.files import read_values
from hyperslab.cli import options, rank
from hyperslab.cli.terminal import say
from hyperslab.errors import HyperslabError, RecipeError, Stopped, reason
from hyperslab.launch.restarts import TrainingLaunch, requeue_when_stopped
from hyperslab.recipe.compare import changed_keys, nothing_left
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.trust import RUN_RECIPE, trust_of
from hyperslab.util.logs import show_logs

if TYPE_CHECKING:
    from hyperslab.formats.source import Source

log = logging.getLogger("hyperslab")


def train_command(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, see `hyperslab recipes`.")],
    overrides: options.OverridesArgument = None,
    ranks: options.RanksOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint, on any grid.")
    ] = False,
    until: Annotated[
        int | None,
        typer.Option(min=1, help="End when this many epochs are done; continue with --resume."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: the recipe's.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile a few steps; the report shows them.")
    ] = False,
    profile_steps: Annotated[int, typer.Option(min=1, help="Steps to profile, after warm-up.")] = 3,
    machine: options.MachineOption = None,
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Restart from the newest checkpoint, at most this many times, after a rank has "
            "died; with grid=auto on fewer ranks if one cannot come back.",
        ),
    ] = 0,
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue", help="After SIGUSR1 or SIGUSR2, put the Slurm job back into the queue."
        ),
    ] = False,
    trust: options.TrustOption = None,
) -> None:
    """Train a network.

    Start ranks with --ranks, or run this command on every rank under torchrun or srun.
    """
    words = list(overrides or [])
    rank.adopt_rank()
    if restarts and rank.is_started():
        raise RecipeError(
            "--restarts can restart only ranks that hyperslab has started: omit it here\n"
            "    torchrun has --max-restarts"
        )
    choose = partial(_choose_grid, machine)
    # What is wrong before ranks have met would leave the others waiting: they are told.
    with rank.telling_ranks():
        asked = load_recipe(recipe, words, trust=trust_of(recipe, trust or (), begins=not resume))
        if output is not None:
            asked = asked.model_copy(update={"output": output})
        count = ranks if asked.grid.auto else asked.grid.size
        if count is None and not rank.is_started():
            raise RecipeError("grid=auto needs to know how many ranks to start: give --ranks")
        if not asked.grid.auto:
            rank.check_ranks(asked, ranks)
        if rank.is_main_of_command():
            options.check_machine(machine)
        if not rank.is_started():
            asked.check_targets_exist()
            newest = newest_intact(folder_of(asked.output)) if resume else None
            done = 0 if newest is None else _epochs_done(asked, newest)
            if done >= asked.epochs:
                say(nothing_left(done, asked))
                return
            if not resume:
                check_unused(asked.output)
                asked.data.check_path()
            asked.check_extents()
            asked.check_cuts()
            if asked.data.is_here or not resume:
                from hyperslab.train.samples import check_data  # numpy

                test = ("test",) if asked.follow_test else ()
                source = check_data(asked, "train", "validation", *test)
                if newest is not None and source is not None:
                    _check_position(asked, newest, source)
        config = asked
        # Ranks that something else has started choose together, once they have met.
        if asked.undecided and not rank.is_started() and count is not None:
            show_logs(is_main=True)
            config = choose(asked, count)
    with rank.exit_when_stopped(), requeue_when_stopped(requeue):
        from hyperslab.train.profiler import ProfilePolicy
        from hyperslab.train.run import prepare_folder, train

        # With --restarts even a single rank is a process of its own, which can be started again.
        if rank.is_rank(config) and not restarts:
            policy = ProfilePolicy(steps=profile_steps) if profile else None
            again = rank.is_started_again()
            work = partial(train, config, resume=resume, until=until, started_again=again)
            work = partial(work, profile=policy, choose=choose)
            with _advising(config, machine):
                ended = train_as_rank(work)
            if ended is not None:
                raise ended
            if profile and os.environ.get("RANK", "0") == "0":
                _predict(config, machine)
            return
        show_logs(is_main=True)
        with ExitStack() as stack:  # the ranks hold the folder afterwards
            prepare_folder(config, stack, resume=resume)
        arguments = ["train", str(recipe), *words, "--output", str(config.output)]
        arguments += config.trust.options
        arguments += [f"--until={until}"] if until else []
        arguments += ["--profile", f"--profile-steps={profile_steps}"] if profile else []
        arguments += ["--machine", machine] if machine else []
        training = TrainingLaunch(asked, arguments, choose)
        training.until_done(config, restarts=restarts, resume=resume)


def _epochs_done(recipe: Recipe, newest: Path) -> int:
    """Return how many epochs of the run of a recipe are done, whose newest checkpoint this is.

    On another grid, with less memory, or for fewer epochs it is the same run; where it may be
    another, 0. Raises as `changed_keys`.
    """
    there = recipe.output / RUN_RECIPE
    if not there.is_file():
        return 0
    try:
        before = load_recipe(there)
    except RecipeError:  # the log will say so
        return 0
    changed = changed_keys(before, recipe)
    same = all(key in ("memory", "epochs") or key.startswith("grid.") for key in changed)
    return (position_in(newest, "epoch") or 0) if same else 0


def _check_position(recipe: Recipe, newest: Path, source: Source) -> None:
    """Refuse, as ranks would, data among which the position of a run's checkpoint means nothing."""
    from hyperslab.checkpoint.run_state import check_resumes
    from hyperslab.train.samples import training_digest

    state = read_values(newest)["extra"]
    if "batch_size" in state:
        digest = training_digest(recipe, source)
        check_resumes(state, newest, recipe.data.batch_size, digest)


def _choose_grid(machine: str | None, recipe: Recipe, ranks: int) -> Recipe:
    """Return the recipe with the plan's best grid; other trainings need not import the planner."""
    from hyperslab.planner.auto import choose_grid_here

    return choose_grid_here(recipe, ranks, machine)


@contextmanager
def _advising(recipe: Recipe, machine: str | None) -> Iterator[None]:
    """Say, where the device's memory ran out, what the plan expected and what would fit."""
    import torch

    try:
        yield
    except HyperslabError as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError) or recipe.undecided:
            raise
        from hyperslab.planner.auto import advice_for_memory

        try:
            advice = advice_for_memory(recipe, machine)
        except (HyperslabError, OSError) as problem:
            advice = f"the plan cannot say what would fit: {reason(problem)}"
        raise HyperslabError(f"{error}\n    {advice}") from error.__cause__


@rank.as_rank
def train_as_rank(work: Callable[[], None]) -> Stopped | None:
    """Train as one rank, and return the signal that ended it, if one did.

    What goes wrong is also written down for what started this process; a signal is no failure.
    """
    is_main = rank.become_rank()
    show_logs(is_main=is_main)
    try:
        work()
    except Stopped as stopped:
        if is_main:
            log.info("%s", stopped)
        return stopped
    return None


def _predict(recipe: Recipe, machine: str | None) -> None:
    """Put a prediction beside the profile, if there can be one; the run is done anyway."""
    from hyperslab.planner.auto import write_prediction

    try:
        write_prediction(load_recipe(recipe.output / RUN_RECIPE, trust=recipe.trust), machine)
    except HyperslabError as error:
        log.warning("the profile has no prediction beside it: %s", error)
    except OSError as error:
        log.warning("the prediction beside the profile cannot be written: %s", reason(error))
