"""`hyperslab train`: start the ranks, or be one of them."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from torch.distributed.elastic.multiprocessing.errors import record

from hyperslab.cli.rank import (
    adopt_rank,
    become_rank,
    check_ranks,
    exit_when_stopped,
    is_rank,
    is_started,
    launch_command,
)
from hyperslab.errors import HyperslabError, RecipeError, Stopped, reason
from hyperslab.plan.auto import GridChooser, settled
from hyperslab.plan.predicted import write_prediction
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.train.profile.recorder import ProfilePolicy
from hyperslab.train.run import RECIPE, prepare_folder, train

log = logging.getLogger("hyperslab")


def train_command(
    recipe: Annotated[Path, typer.Argument(help="A YAML file; recipes/ has some.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as grid.depth=2 epochs=10.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes to start; the grid must have as many places."),
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
) -> None:
    """Train a network; also under torchrun and srun, where every rank runs this command."""
    words = list(overrides or [])
    config = load_recipe(recipe, words)
    if output is not None:
        config = config.model_copy(update={"output": output})
    adopt_rank()
    choose = GridChooser(machine)
    if config.grid.auto and not is_started():
        config = _settle(config, ranks, choose)
        words += settled(config)
    if not config.grid.auto:
        check_ranks(config, ranks)
    with exit_when_stopped():
        if is_rank(config):
            policy = ProfilePolicy(steps=profile_steps) if profile else None
            train_as_rank(config, resume=resume, profile=policy, choose=choose)
            if profile and os.environ.get("RANK", "0") == "0":
                _predict(config.output, machine)
            return
        with ExitStack() as stack:  # the ranks hold the folder afterwards
            prepare_folder(config, stack, resume=resume)
        arguments = ["train", str(recipe), *words]
        arguments += ["--output", str(config.output), *(["--resume"] if resume else [])]
        arguments += ["--profile", f"--profile-steps={profile_steps}"] if profile else []
        arguments += ["--machine", machine] if machine else []
        launch_command(config, arguments, config.output / "logs", patience=config.timeout)


def _settle(recipe: Recipe, ranks: int | None, choose: GridChooser) -> Recipe:
    """With the grid that is best for the ranks that are to be started here."""
    if ranks is None:
        raise RecipeError("grid=auto needs to know how many ranks to start: give --ranks")
    _log_to_terminal(is_main=True)
    return choose(recipe, ranks)


@record
def train_as_rank(
    recipe: Recipe, *, resume: bool, profile: ProfilePolicy | None, choose: GridChooser
) -> None:
    """Train as one rank; what goes wrong is also written down for the process that started it."""
    is_main = become_rank()
    _log_to_terminal(is_main=is_main)
    with exit_when_stopped():
        try:
            train(recipe, resume=resume, profile=profile, choose=choose)
        except Stopped as stopped:
            if is_main:
                log.info("%s", stopped)
            raise


def _predict(run: Path, machine: str | None) -> None:
    """Put a prediction beside the profile, if there can be one; the run is done anyway."""
    try:
        write_prediction(load_recipe(run / RECIPE), machine)
    except HyperslabError as error:
        log.warning("the profile has no prediction beside it: %s", error)
    except OSError as error:
        log.warning("the prediction beside the profile cannot be written: %s", reason(error))


def _log_to_terminal(*, is_main: bool) -> None:
    """Once in a process."""
    if not any(isinstance(handler, _Terminal) for handler in log.handlers):
        handler = _Terminal()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO if is_main else logging.WARNING)


class _Terminal(logging.Handler):
    """Writes to what is standard output now: a progress bar may have put itself in front of it.

    A reader that has gone, such as `head`, does not end the training.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stdout, flush=True)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
