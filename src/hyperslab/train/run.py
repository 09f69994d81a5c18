"""Trains one network from its recipe, into a run folder.

Everything about a run as a whole: its folder with the recipe and the lock, the objects that a
step needs (made by `builders`, `network`, `objective` and `optimizer`), where a resumed run goes
on from, and how a run may end.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hyperslab.checkpoint import check_unused
from hyperslab.checkpoint.retention import latest, mend_best
from hyperslab.checkpoint.run_state import Position, RunState
from hyperslab.comm import Grid, agreement
from hyperslab.comm.bootstrap import named
from hyperslab.comm.grid import log_nodes
from hyperslab.errors import CheckpointError, HyperslabError, RecipeError, Stopped, reason
from hyperslab.recipe.compare import changed_keys, launch_facts, nothing_left
from hyperslab.recipe.load import load_recipe, remember_code, save_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.train import builders
from hyperslab.train.history import Reporter, record_changes
from hyperslab.train.mlperf import MlperfLog, RunEvents
from hyperslab.train.moving_average import MovingAverage
from hyperslab.train.network import NO_USER_OBJECTS, UserObjects
from hyperslab.train.objective import build_objective, loss_to_device
from hyperslab.train.optimizer import RateSchedule, optimizer_and_schedule
from hyperslab.train.profiler import ProfiledTrainer, ProfilePolicy
from hyperslab.train.samples import training_digest
from hyperslab.train.step import LossScaler, arithmetic
from hyperslab.train.trainer import TEST_LOSS, Progress, Trainer
from hyperslab.util.atomic_files import check_links, open_to_append, try_lock

log = logging.getLogger("hyperslab")

T = TypeVar("T")

LOCK_FILE = ".lock"
RECIPE = "recipe.yaml"

FileIdentity = tuple[int, int]
"""Says which file one is, by its device and its number there, wherever it is moved."""

GridChoice = Callable[[Recipe, int], Recipe]
"""Leads from a recipe with ``grid: auto`` and a number of ranks to one with a grid."""


@contextmanager
def lock_run(run: Path) -> Iterator[FileIdentity]:
    """Keep other runs out of a folder that exists; the system lets go when the process ends.

    Yields which file the lock is, for `check_held`: while it is open no other one is the same.

    Raises:
        RecipeError: another process holds it.
        OSError: the folder cannot be written.
    """
    with os.fdopen(open_to_append(run / LOCK_FILE), "a") as file:
        if not try_lock(file.fileno()):
            raise RecipeError(
                f"another run is under way in output {run}\n"
                "    wait for its end, stop it, or choose another --output"
            )
        yield _identity(os.fstat(file.fileno()))


def _identity(found: os.stat_result) -> FileIdentity:
    return found.st_dev, found.st_ino


def check_held(run: Path, lock: FileIdentity) -> None:
    """Refuse the folder of another run, made after the one that was locked was removed or moved.

    A folder that is not there is no matter of this: nothing can be written into it.

    Raises:
        CheckpointError: names the folder.
    """
    with suppress(FileNotFoundError):
        if _identity(os.stat(run / LOCK_FILE)) != lock:
            raise CheckpointError(
                f"nothing is written into {run}: it is another run's folder by now, and this run's "
                "was removed or moved\n    if it was moved, go on there: --resume --output FOLDER"
            )


def awaiting_run(run: Path) -> Iterator[None]:
    """Yield until ranks whose launcher was killed have ended: they write a checkpoint first."""
    told = False
    while True:
        try:
            with lock_run(run):
                return
        except RecipeError:
            if not told:
                log.info("waiting: ranks of an earlier start still work in %s", run)
            told = True
            yield


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    until: int | None = None,
    started_again: bool = False,
    profile: ProfilePolicy | None = None,
    choose: GridChoice | None = None,
    given: UserObjects = NO_USER_OBJECTS,
) -> None:
    """Train as the recipe says, into its ``output``; every rank calls it.

    With ``resume``, from the newest intact checkpoint there, which any grid may have written; from
    the start if there is none. All do so as well if one of them was ``started_again``: torchrun's
    agents count the restarts of their own nodes, so not all ranks may know. It ends
    when ``until`` epochs are done, with a checkpoint, though the recipe has more. With ``profile``
    some steps are taken down on the way. What is ``auto`` the main rank chooses, by ``choose``, and
    the others get its choice.

    Raises:
        RecipeError: the recipe does not go with the data, or the folder holds another run, or one
            is under way there.
        LayoutError: the grid does not match the ranks or the volumes.
        CommError: another rank died or did not answer in time.
        HyperslabError: whatever else ended it; the checkpoints written so far stay.
    """
    if recipe.undecided and choose is None:
        what, remedy = ("grid", "the axes") if recipe.grid.auto else ("memory", "none or tile")
        raise RecipeError(
            f"{what}=auto: nothing here can choose the {what}\n"
            f"    give {remedy}: `hyperslab plan RECIPE --ranks N` says which are best"
        )
    steps = None if profile is None else profile.steps
    facts = launch_facts(recipe, command="train", resume=resume, until=until, profile=steps)
    started = agreement.start_alike(
        recipe.device, recipe.timeout, facts, builders.numbering_of(recipe)
    )
    try:
        with agreement.failure_broadcast():
            if recipe.undecided and choose is not None:
                ranks = dist.get_world_size() if dist.is_initialized() else 1
                recipe = agreement.broadcast_from_main(partial(choose, recipe, ranks))
            _train(recipe, resume or agreement.any_rank(started_again), until, profile, given)
    except Stopped:
        if started and dist.is_initialized():  # a wait that hung has aborted it
            dist.destroy_process_group()
        raise
    if started:  # after an error the others may be anywhere: do not wait for them
        dist.destroy_process_group()


def _train(
    recipe: Recipe,
    resume: bool,
    until: int | None,
    profile: ProfilePolicy | None,
    given: UserObjects,
) -> None:
    with ExitStack() as stack:
        builders.check_user_objects(recipe, given)
        builders.check_targets(recipe)
        grid = Grid(**recipe.grid.model_dump())
        stack.enter_context(_clear_errors(grid, recipe))
        held = prepare_folder(recipe, stack, resume=resume)
        events = RunEvents()
        if recipe.mlperf is not None:
            events = _on_main(lambda: MlperfLog(recipe, grid)) or events
            stack.callback(events.close)
        trainer = build_trainer(recipe, grid, stack, resume=resume, events=events, given=given)
        # Now, as all of it was allowed and made.
        agreement.broadcast_from_main(lambda: remember_code(recipe))
        trainer.progress.until = until
        trainer.progress.check_folder = partial(check_held, recipe.output, held)
        ended = trainer.progress.finished  # before
        if profile is not None:
            trainer = ProfiledTrainer(trainer, profile)
        trainer.fit()
        if not trainer.progress.finished:
            if grid.is_main:
                epochs = f"{trainer.at.epoch} of {recipe.epochs} epochs are done"
                log.info("%s: continue with --resume", epochs)
            return
        goal = recipe.stop_at is None or trainer.progress.reached
        if not ended:
            events.run_ends(success=goal)
        elif trainer.at.epoch >= recipe.epochs and grid.is_main:
            log.info("%s", nothing_left(trainer.at.epoch, recipe))
        if recipe.stop_at is not None and grid.is_main:
            goals = ", ".join(
                f"stop_at.{name}={most:g}" for name, most in recipe.stop_at.wanted.items()
            )
            words = "reached" if goal else "not reached"
            log.info("%s: %s after epoch %d", goals, words, trainer.at.epoch)


def _on_main(make: Callable[[], T]) -> T | None:
    """Make something on the main rank, where it stays; raises on every rank what went wrong."""
    made: list[T] = []
    agreement.broadcast_from_main(lambda: made.append(make()))
    return made[0] if made else None


def build_trainer(
    recipe: Recipe,
    grid: Grid,
    stack: ExitStack,
    *,
    resume: bool,
    events: RunEvents,
    given: UserObjects,
) -> Trainer:
    """Build everything that a step needs; ``stack`` closes what must be closed."""
    torch.manual_seed(recipe.seed)
    data, validation, *followed = map(
        stack.enter_context, builders.open_training(recipe, grid, given)
    )
    events.data_opened(len(data), len(validation))
    stack.enter_context(arithmetic(recipe, same_shapes=not data.source.shapes))
    about = builders.data_card(data.source)
    model = builders.build_model(recipe, about, grid, given)
    objective = build_objective(recipe, about, given)
    loss_to_device(objective.loss, grid.device)
    steps = -(-data.steps // recipe.optimizer.accumulate)
    optimizer, schedule = optimizer_and_schedule(recipe, model, steps, given)
    state = RunState(
        model,
        optimizer,
        schedule,
        batch_size=recipe.data.batch_size,
        samples=training_digest(recipe, data.source),
        about=about,
        device=grid.device,
        scaler=LossScaler(grid, recipe.precision),
        average=None if recipe.ema is None else MovingAverage(model, recipe.ema),
    )
    path = latest(recipe.output) if resume else None
    at = Position() if path is None else _resume(path, state, recipe)
    log_nodes(grid, data.shape[1:])
    if resume:  # not before: a recipe that does not go with the run must not replace its own
        _write_on_main(recipe, lambda: save_recipe(recipe, recipe.output / RECIPE))
    if grid.is_main:
        where = grid.device.type
        if (where, recipe.precision) != ("cpu", "float32"):  # which has but one meaning there
            where += f" in {recipe.precision}"
        if resume and path is None:
            log.info("nothing to resume in %s: from the start", recipe.output)
        log.info(
            "%s on %s: %d samples of %s to train, %d to validate, %s",
            *(grid, where, len(data), list(data.shape), len(validation)),
            f"going on from {path}" if path else "from the start",
        )
        for override in recipe.trust.left_out:
            log.warning("ignored, because only the run's folder asks for it, not you: %s", override)

    def open_reporter() -> Reporter:
        reporter = Reporter(
            recipe.output,
            measures=(*objective.measures, *([TEST_LOSS] if recipe.follow_test else [])),
            step=at.step,
            epoch=at.epoch,
            total_steps=steps * recipe.epochs,
            loggers=recipe.loggers,
            layers=recipe.layers is not None,
            settings=recipe.model_dump(mode="json"),
        )
        stack.callback(reporter.close)
        return reporter

    reporter = _on_main(open_reporter)
    progress = Progress(recipe, grid, state, at, reporter, events)
    progress.flops.wanted = not data.source.shapes  # those of the first step are not of all
    test = followed[0] if followed else None
    return Trainer(recipe, grid, objective, data, validation, progress, test)


def _resume(path: Path, state: RunState, recipe: Recipe) -> Position:
    """Go back to a checkpoint, with the optimizer's settings of the recipe and not of then."""
    changes = agreement.broadcast_from_main(lambda: _changes(recipe))
    assert isinstance(state.schedule, RateSchedule)
    # The rate goes by another schedule, or by numbers of another training.
    refers = "${training." in str(recipe.optimizer.schedule) and "epochs" in changes
    state.schedule.changed = refers or any(
        f"{key}.".startswith("optimizer.schedule.") for key in changes
    )
    at = state.restore(path)
    state.schedule.put_settings(at)
    if changes:
        _write_on_main(recipe, lambda: record_changes(recipe.output, at.step, changes))
    mend_best(path, at.best_step)
    return at


def _write_on_main(recipe: Recipe, write: Callable[[], T]) -> T:
    words = f"cannot write into output {recipe.output}"
    return agreement.broadcast_from_main(write, failing=words, error=RecipeError)


def _changes(recipe: Recipe) -> dict[str, list[Any]]:
    """Return what this recipe changes in the run; raises what `changed_keys` does."""
    try:
        before = load_recipe(recipe.output / RECIPE)
    except RecipeError as error:
        log.warning("cannot tell what the resumed run changes: %s", error)
        return {}
    changes = changed_keys(before, recipe)
    for key, (then, now) in changes.items():
        log.info("%s: %s, was %s", key, now, then)
    return changes


def prepare_folder(recipe: Recipe, stack: ExitStack, *, resume: bool) -> FileIdentity:
    """Make the run's folder with its recipe; every rank calls it.

    The main rank holds the folder until ``stack`` is closed; returns what `lock_run` yields. With
    ``resume`` the recipe there stays for now.

    Raises:
        RecipeError: it holds another run, or one is under way there, or it cannot be written, or
            links in it lead out of it and the recipe may be somebody else's.
    """
    run = recipe.output

    def prepare() -> FileIdentity:
        run.mkdir(parents=True, exist_ok=True)
        if not recipe.trust.own:
            check_links(run)
        held = stack.enter_context(lock_run(run))
        if not resume:
            check_unused(run)
            save_recipe(recipe, run / RECIPE)
        return held

    return _write_on_main(recipe, prepare)


@contextmanager
def _clear_errors(grid: Grid, recipe: Recipe) -> Iterator[None]:
    """Raise errors of the operating system and of lost ranks anew, in the user's words."""
    what = f"training with timeout={recipe.timeout:g} s"
    try:
        with agreement.naming_lost_ranks(what, "go on from the last checkpoint with --resume"):
            yield
    except HyperslabError:
        raise
    except torch.OutOfMemoryError as error:
        raise HyperslabError(_out_of_memory(grid, error)) from error
    except OSError as error:
        raise HyperslabError(f"run {recipe.output}: {reason(error)}") from error


def _out_of_memory(grid: Grid, error: torch.OutOfMemoryError) -> str:
    """Say which rank ran out of its device's memory, where, and how much it had taken by then."""
    words = f"{named([grid.rank])} of {grid.size} ran out of the memory of {grid.device}"
    layer = layer_of(error)
    words += f" in {layer}" if layer else " in the backward pass or the optimizer's step"
    if grid.device.type == "cuda":
        peak, total = (
            torch.cuda.max_memory_allocated(grid.device),
            torch.cuda.get_device_properties(grid.device).total_memory,
        )
        words += f"\n    its tensors took up to {peak / 2**30:.2f} of {total / 2**30:.2f} GiB"
    return f"{words}\n    {str(error).splitlines()[0]}"


def layer_of(error: BaseException) -> str:
    """Name the innermost layer whose forward pass an error came out of; "" if it was in none."""
    root: torch.nn.Module | None = None
    inner: torch.nn.Module | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            root = root or module
            inner = module
    if root is None or inner is None:
        return ""
    name = next((name for name, part in root.named_modules() if part is inner), "")
    return f"{name} ({type(inner).__name__})" if name else type(inner).__name__
