"""Trains a program's own network into a run folder, as the command line does.

`fit` is ``hyperslab train`` and `TrainedRun` what follows it: evaluation, prediction, report.
Both are attributes of the package, found when they are asked for.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from hyperslab.comm import Grid, bootstrap
from hyperslab.comm.agreement import broadcast_from_main
from hyperslab.errors import RecipeError, Stopped, printable
from hyperslab.formats.source import Source
from hyperslab.losses import gaussian_loss
from hyperslab.recipe.load import recipe_of_values
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.trust import Trust, trust_of
from hyperslab.train.builders import numbering_of
from hyperslab.train.evaluate import ClassEvaluation, Evaluation, evaluate
from hyperslab.train.mask_files import MaskFormat
from hyperslab.train.network import LossFunction, UserObjects, class_name, digest_of_network
from hyperslab.train.predict import InputOutcome, predict
from hyperslab.train.run import RECIPE, train
from hyperslab.train.samples import WindowPolicy
from hyperslab.util.logs import show_logs
from hyperslab.util.optional_libraries import importing_figures


class TrainedRun:
    """Holds a run's folder, and the objects of a program that no recipe can name.

    ``model``: the network, or one built alike; it may be parallelised. ``data``: the source that
    it was trained on. Neither is needed if the recipe names them, as after ``hyperslab train``.
    ``trust``: installed modules whose classes the recipe of somebody else may name, as for
    ``--trust``. Every rank calls the methods alike.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: torch.nn.Module | None = None,
        data: Source | None = None,
        trust: Sequence[str] = (),
    ) -> None:
        self.folder = Path(folder)
        self.given = UserObjects(model=model, source=data)
        self.trust = trust_of(self.folder / RECIPE, trust)

    def evaluate(
        self,
        *,
        checkpoint: str = "best",
        split: str = "test",
        overrides: Sequence[str] = (),
        calibrate: bool = False,
        windows: WindowPolicy | None = None,
    ) -> Evaluation | ClassEvaluation:
        """Evaluate as ``hyperslab evaluate`` does; see `hyperslab.train.evaluate.evaluate`."""
        with _weights_kept(self.given.model):
            return evaluate(
                self.folder,
                checkpoint=checkpoint,
                split=split,
                overrides=overrides,
                calibrate=calibrate,
                windows=windows,
                given=self.given,
                trust=self.trust,
            )

    def predict(
        self,
        inputs: Sequence[str | Path],
        out: str | Path,
        *,
        checkpoint: str = "best",
        native: bool = False,
        windows: WindowPolicy | None = None,
        format: MaskFormat = "nifti",
        overrides: Sequence[str] = (),
    ) -> list[InputOutcome]:
        """Predict as ``hyperslab predict`` does; see `hyperslab.train.predict.predict`."""
        with _weights_kept(self.given.model):
            return predict(
                self.folder,
                inputs,
                out,
                checkpoint=checkpoint,
                native=native,
                windows=windows,
                format=format,
                overrides=overrides,
                given=self.given,
                trust=self.trust,
            )

    def report(self) -> Path:
        """Return the path of the page of ``hyperslab report``, which the main rank writes."""
        with importing_figures():
            from hyperslab.studies.report import write_report
        return broadcast_from_main(lambda: write_report(self.folder))


@contextmanager
def _weights_kept(model: torch.nn.Module | None) -> Iterator[None]:
    """Let a handed-in network, if there is one, have its own weights and mode afterwards."""
    if model is None:
        yield
        return
    tensors = [*model.parameters(), *model.buffers()]  # a state dict may hold other things
    kept = [tensor.detach().clone() for tensor in tensors]
    training = model.training
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)
        model.train(training)


Keys = Mapping[str, Any]
"""A section of a recipe; a ``target`` may be a class itself in place of its name."""

log = logging.getLogger("hyperslab")


def fit(
    model: torch.nn.Module | Keys | str,
    data: str | os.PathLike[str] | Source | Keys,
    *,
    output: str | os.PathLike[str],
    batch_size: int | None = None,
    loss: str | Keys | LossFunction = "mse",
    optimizer: str | Keys | torch.optim.Optimizer = "adam",
    schedule: Keys | LRScheduler | None = None,
    metrics: Mapping[str, str | Keys | LossFunction] | None = None,
    grid: Grid | Keys | None = None,
    resume: bool = False,
    **recipe: Any,
) -> TrainedRun:
    """Train a network as ``hyperslab train`` does: with checkpoints, resumption, history, signals.

    Every rank calls it alike: in a plain script on one rank, or under torchrun, srun or mpirun.

    Args:
        model: an `nn.Module`, which is parallelised in place; or ``{"target": Net, "width": 8}``,
            from which the command line can make it again, too.
        data: a folder, a `Source`, or a recipe's section ``data``.
        output: the run's folder.
        batch_size: samples per step over the whole grid; needed where ``data`` does not say it.
        loss: a name, a section with a ``target``, or a function of prediction and target.
        optimizer: a name, a section, or an optimizer of ``model.parameters()``.
        schedule: a section, or a scheduler of that optimizer, which moves on after each epoch;
            OneCycleLR and CyclicLR after each step.
        metrics: further measures by name, each given like a loss.
        grid: by default all ranks cut the depth.
        resume: go on from the newest checkpoint in ``output``, if there is one.
        recipe: other keys of a recipe: ``epochs=10``, ``precision="bf16"``, ``parallelize={...}``.

    Raises:
        RecipeError: an argument is wrong, or the folder holds another run.
        SystemExit: after a signal, once a checkpoint is written; its code is 128 + the signal's.
        HyperslabError: as `hyperslab.train.run.train`.
    """
    given = _Arguments()
    values: dict[str, Any] = {**recipe, "output": str(output)}
    values["model"] = given.of_model(model)
    values["data"] = given.of_data(data, batch_size)
    values["loss"] = given.of_loss(loss, "loss")
    values["optimizer"] = given.of_optimizer(optimizer, schedule)
    values["metrics"] = {n: given.of_loss(m, f"metrics.{n}") for n, m in (metrics or {}).items()}
    values["grid"] = dict(grid.extents if isinstance(grid, Grid) else grid or {})
    values["handed_in"] = given.handed_in
    trust = Trust(own=True, named=frozenset(given.named), file="hyperslab.fit")
    said = recipe_of_values(values, trust.file, trust=trust)
    _start_ranks(said)
    if said.grid.size == 1 and grid is None and dist.is_initialized():
        extents = said.grid.model_copy(update={"depth": dist.get_world_size()})
        said = said.model_copy(update={"grid": extents})
    if not log.hasHandlers():  # of a program that says nothing of logs, as the command line
        show_logs(is_main=not dist.is_initialized() or dist.get_rank() == 0)
    try:
        train(said, resume=resume, given=given.found())
    except Stopped as stopped:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(printable(str(stopped)), file=sys.stderr)
        raise SystemExit(stopped.code) from None
    instance = model if isinstance(model, torch.nn.Module) else None
    run = TrainedRun(Path(output), model=instance, data=data if isinstance(data, Source) else None)
    run.trust = trust  # this program has just made what the folder names
    return run


class _Arguments:
    """Turns what a program gives into what a recipe says; keeps objects that none can hold."""

    def __init__(self) -> None:
        self.handed_in: dict[str, str] = {}
        self.named: set[str] = set()
        self.objects: dict[str, Any] = {}
        self.metrics: dict[str, LossFunction] = {}

    def found(self) -> UserObjects:
        return UserObjects(**self.objects, metrics=self.metrics)

    def of_model(self, model: torch.nn.Module | Keys | str) -> Any:
        if isinstance(model, torch.nn.Module):
            if "no_sync" in vars(model):
                raise RecipeError("the model is parallelised already: fit does that itself")
            self.objects["model"] = model
            name = class_name(type(model))
            return {"name": "python", "python_class": name, "digest": digest_of_network(model)}
        if isinstance(model, str):
            return {"name": model}
        if not isinstance(model, Mapping):
            raise RecipeError(
                f"model is {_kind_of(model)}: pass a torch.nn.Module, or "
                '{"target": Net, ...} to have it made'
            )
        return self._named(model, "model")

    def of_data(
        self, data: str | os.PathLike[str] | Source | Keys, batch_size: int | None
    ) -> dict[str, Any]:
        if isinstance(data, Source):
            self.objects["source"] = data
            section: dict[str, Any] = {"python_class": class_name(type(data))}
        elif isinstance(data, Mapping):
            section = self._named(data, "data")
        elif isinstance(data, str | os.PathLike):
            section = {"path": str(Path(data))}
        else:
            raise RecipeError(
                f"data is {_kind_of(data)}: pass a folder, a hyperslab.Source or a recipe's "
                "section; a torch DataLoader goes with a loop of your own (docs/own-data.md)"
            )
        return section if batch_size is None else {**section, "batch_size": batch_size}

    def of_loss(self, loss: str | Keys | LossFunction, key: str) -> Any:
        if isinstance(loss, str):
            return loss
        if isinstance(loss, Mapping):
            return self._named(loss, key)
        if loss is gaussian_loss:  # by its name, which says how many outputs the network has
            return "gaussian"
        if isinstance(loss, type) or not callable(loss):
            raise RecipeError(
                f"{key} is {_kind_of(loss)}: give a name or a function, or an instance of a class"
            )
        if key == "loss":
            self.objects["loss"] = loss
        else:
            self.metrics[key.partition(".")[2]] = loss
        return self._handed_in(loss, key)

    def of_optimizer(
        self, optimizer: str | Keys | torch.optim.Optimizer, schedule: Keys | LRScheduler | None
    ) -> dict[str, Any]:
        if isinstance(optimizer, torch.optim.Optimizer):
            if "model" not in self.objects:
                raise RecipeError("an optimizer needs its network: pass that network, too")
            self.objects["optimizer"] = optimizer
            section = self._handed_in(optimizer, "optimizer")
            rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
            if max(rates, default=0.0) > 0:  # of layers that rest it is 0
                section["learning_rate"] = next(rate for rate in rates if rate > 0)
        elif isinstance(optimizer, str):
            section = {"name": optimizer}
        else:
            section = self._named(optimizer, "optimizer")
        if isinstance(schedule, LRScheduler):
            if schedule.optimizer is not self.objects.get("optimizer"):
                raise RecipeError("the schedule belongs to another optimizer: pass that, too")
            self.objects["schedule"] = schedule
            section["schedule"] = self._handed_in(schedule, "optimizer.schedule")
        elif schedule is not None:
            section["schedule"] = self._named(schedule, "optimizer.schedule")
        return section

    def _handed_in(self, thing: Any, key: str) -> dict[str, Any]:
        name = getattr(thing, "__qualname__", None)
        found = f"{thing.__module__}.{name}" if name else class_name(type(thing))
        self.handed_in[key] = found
        return {"target": found}

    def _named(self, section: Keys, key: str) -> dict[str, Any]:
        """Put names in place of classes and functions."""
        found = {}
        for name, value in section.items():
            if name == "target" and not isinstance(value, str):
                value = class_name(value)
            if name == "target":
                self.named.add(value)
            is_section = isinstance(value, Mapping)
            found[name] = self._named(value, f"{key}.{name}") if is_section else value
        return found


def _kind_of(thing: object) -> str:
    """Name what it is, for errors."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    return f"a {type(thing).__name__}"


def _start_ranks(recipe: Recipe) -> None:
    """Start ``torch.distributed`` where this is one of several ranks; it ends with the program."""
    if recipe.device == "auto":
        bootstrap.start_distributed(recipe.timeout, numbering=numbering_of(recipe))
    elif bootstrap.start_ranks(recipe.device, recipe.timeout, numbering=numbering_of(recipe)):
        atexit.register(bootstrap.stop_distributed)
