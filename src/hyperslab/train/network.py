"""Makes the network of a recipe, ours or anybody's, and checks that it goes with the data.

In reading order: `UserObjects`, what a program hands in in place of what a recipe would name;
networks of programs, made anew by their class; those that a recipe declares; and the check of a
network that is not ours when it runs for the first time.

Legend: N samples, C channels, (D, H, W) voxels of a mini-batch.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hyperslab.checkpoint.run_state import DataCard
from hyperslab.comm.agreement import LOST_RANK_WORDS
from hyperslab.errors import HyperslabError, LayoutError, RecipeError, reason
from hyperslab.formats.source import Source
from hyperslab.losses import gaussian_outputs
from hyperslab.recipe.instantiate import A_NETWORK, Maker
from hyperslab.recipe.network import PythonModel
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.section import TargetSection
from hyperslab.train.samples import mismatch_message
from hyperslab.util.torch_internals import FAKE_TENSOR_MODULE, fake_tensor_mode, own_tensors

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class UserObjects:
    """Objects of a program; where there is none the recipe says what is taken.

    ``optimizer`` and ``schedule`` are those of ``model``.
    """

    model: torch.nn.Module | None = None
    source: Source | None = None
    loss: LossFunction | None = None
    optimizer: torch.optim.Optimizer | None = None
    schedule: LRScheduler | None = None
    metrics: Mapping[str, LossFunction] = field(default_factory=dict)


NO_USER_OBJECTS = UserObjects()


PLAIN_SETTINGS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)


def outputs_of(about: DataCard, loss: object = None) -> int:
    """Count the channels of a network's output: one a class, or one a parameter.

    For the ``loss`` "gaussian" of a recipe they are means and a covariance.
    """
    numbers = len(about.parameters.names)
    return len(about.classes) or (gaussian_outputs(numbers) if loss == "gaussian" else numbers)


def rebuilt_network(recipe: Recipe, config: PythonModel) -> torch.nn.Module:
    """Return the network that a program has trained, made anew by its class alone.

    Raises:
        RecipeError: its class cannot be imported or needs arguments, or what it makes is another
            network; says how to hand it in.
    """
    section = TargetSection.model_validate(
        {"target": config.python_class}, context={"trust": config.trust}
    )
    maker = Maker("model", A_NETWORK)
    why = f"{config.python_class}() is built differently from the network that was trained"
    cause = None
    try:
        maker.check(section)
        with torch.random.fork_rng(devices=[]):
            model: torch.nn.Module = maker(section)
        if digest_of_network(model) == config.digest:
            return model
    except RecipeError as error:
        why = str(error).splitlines()[0]
        cause = error
    name = config.python_class.rpartition(".")[2]
    raise RecipeError(
        f"the network of {recipe.output} came from a program and cannot be built again: {why}\n"
        f"    pass it: hs.TrainedRun({str(recipe.output)!r}, model={name}(...)).evaluate(), or "
        '.predict(...); or let fit make it from {"target": ..., ...} (docs/own-networks.md)'
    ) from cause


def class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def digest_of_network(model: torch.nn.Module) -> str:
    """Compute the SHA-256 of how a network is built: its parts' classes, and all plain settings.

    Of two networks of one class with other strides, activations or probabilities of dropout it
    differs, also where their weights have the same names and shapes.
    """
    lines = []
    for name, part in model.named_modules():
        lines.append(f"{name}: {type(part).__qualname__}")
        for key, value in sorted(vars(part).items()):
            if not key.startswith("_") and key not in ("training", "forward", "no_sync"):
                lines.append(f"{name}.{key} = {_plainly(value)}")
        for key, weight in own_tensors(part):
            form = None if weight is None else (tuple(weight.shape), weight.dtype)
            lines.append(f"{name}.{key}: {form}")
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def _plainly(value: Any) -> str:
    if isinstance(value, PLAIN_SETTINGS):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plainly, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {_plainly(v)}' for k, v in value.items())}}}"
    named = getattr(value, "__qualname__", None)
    return f"{type(value).__qualname__} {named}" if named else type(value).__qualname__


def build_network(
    recipe: Recipe, about: DataCard, given: UserObjects = NO_USER_OBJECTS
) -> torch.nn.Module:
    """Build the recipe's network for such data; its weights come from torch's generator.

    Raises:
        RecipeError: the network is for another kind of data, or for volumes of another size; or of
            a target what `Maker` raises.
    """
    config = recipe.model
    if config.segments not in (None, bool(about.classes)):
        raise RecipeError(mismatch_message(recipe, about.classes))
    if given.model is not None:
        return given.model
    if isinstance(config, PythonModel):
        return rebuilt_network(recipe, config)
    return config.build(about.shape, outputs_of(about, recipe.loss), where=recipe.data.where)


MULTIPLES = (2, 4, 8, 16, 32, 64)  # as a network halves extents once, twice, ...


def check_first_pass(model: torch.nn.Module, recipe: Recipe, about: DataCard) -> None:
    """Let the first forward pass say in one line what does not go with the data.

    Where volumes differ in shape, the first one of each shape.

    Raises, from that pass:
        RecipeError: the network fails on its input, or its output is not what the data need.
    """
    plain = model.forward
    forward = type(model).forward
    name = recipe.model.words
    seen: set[tuple[int, ...]] = set()

    def first(*args: Any, **options: Any) -> Any:
        shape = tuple(args[0].shape)
        if shape in seen:
            return plain(*args, **options)
        failing = f"{name} fails on the data's mini-batch of shape {list(shape)}"
        if not about.varied:
            model.forward = plain
        try:
            prediction = _run_clearly(lambda: plain(*args, **options), failing)
            check_output(prediction, shape, about, name, recipe.loss)
        except (RecipeError, LayoutError) as error:
            with buffers_kept(model):
                fitting = multiple_that_fits(lambda x: forward(model, x), shape, about, recipe.loss)
            if fitting is None:
                raise
            words = str(error).splitlines()[0]
            if isinstance(error, LayoutError):
                words = f"{failing}: {words}"
            raise RecipeError(
                f"{words}\n    it takes volumes whose extents are multiples of {fitting}: set "
                f"data.multiple: {fitting}, which adds background after the last voxels"
            ) from error
        seen.add(shape)
        return prediction

    model.forward = first


def _run_clearly(run: Callable[[], Any], failing: str) -> Any:
    try:
        return run()
    except (HyperslabError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever is wrong in somebody else's code
        if LOST_RANK_WORDS.search(str(error)):
            raise
        words = " ".join(reason(error).split())[:400]
        raise RecipeError(f"{failing}: {words}") from error


def wanted_output(shape: tuple[int, ...], about: DataCard, loss: object = None) -> tuple[int, ...]:
    """Return the shape of the output that is wanted for a mini-batch (N, C, D, H, W)."""
    count = outputs_of(about, loss)
    return (shape[0], count, *shape[2:]) if about.classes else (shape[0], count)


def check_output(
    output: Any, shape: tuple[int, ...], about: DataCard, name: str, loss: object = None
) -> None:
    """Refuse an output that is not what data of this shape (N, C, D, H, W) need (`RecipeError`)."""
    if not isinstance(output, torch.Tensor):
        raise RecipeError(
            f"{name} gives a {type(output).__name__}, not one tensor\n"
            "    take a form of the network that gives the prediction alone"
        )
    count = outputs_of(about, loss)
    wanted = wanted_output(shape, about, loss)
    found = tuple(output.shape)
    if found == wanted:
        return
    what = f"one channel for each of {count} classes, and the volume's voxels"
    if not about.classes:
        names = about.parameters.names
        what = f"{count} numbers for each sample: {', '.join(names)}"
        if count > len(names):
            what += f", and {count - len(names)} of their covariance (loss: gaussian)"
    differs = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None)
    where = "" if len(found) != len(wanted) or differs is None else f" (dim {differs} differs)"
    remedy = f"${{data.outputs}} stands for {count} in a recipe"
    if about.classes and (*found[:1], *found[2:]) == wanted:
        remedy = "these are several predictions: switch deep supervision off, or write a loop of "
        remedy += "your own"
    raise RecipeError(
        f"{name} gives {list(found)} for a mini-batch of shape {list(shape)}, but the data need "
        f"{list(wanted)}{where}: {what}\n    {remedy}"
    )


def multiple_that_fits(
    forward: Callable[[torch.Tensor], Any],
    shape: tuple[int, ...],
    about: DataCard,
    loss: object = None,
) -> int | None:
    """Return the least of `MULTIPLES` such that extents rounded up to it suit a network; else None.

    Nothing is computed: the network runs on tensors without values. None as well where the shape
    (N, C, D, H, W) itself suits it, so that something else must be wrong. A multiple is tried on
    odd numbers of it, as a larger one would hide behind an even number.
    """
    if _network_suits(forward, shape, about, loss):
        return None
    for multiple in MULTIPLES:
        odd = tuple(-(-extent // multiple) // 2 * 2 + 1 for extent in shape[2:])
        tried = (*shape[:2], *(multiple * times for times in odd))
        if _network_suits(forward, tried, about, loss):
            return multiple
    return None


def _network_suits(
    forward: Callable[[torch.Tensor], Any], shape: tuple[int, ...], about: DataCard, loss: object
) -> bool:
    try:
        with _fake_tensor_errors_silenced(), torch.no_grad(), fake_tensor_mode():
            output = forward(torch.empty(shape))
    except Exception:  # whatever is wrong in somebody else's code
        return False
    wanted = wanted_output(shape, about, loss)
    return isinstance(output, torch.Tensor) and tuple(output.shape) == wanted


@contextmanager
def buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put buffers back afterwards: counters of batches run even on tensors without values.

    So do those that modules hold as plain numbers, which are put back, too.
    """
    numbers = [
        (vars(part), {key: v for key, v in vars(part).items() if isinstance(v, int | float)})
        for part in model.modules()
    ]
    places = [
        (part, name, buffer)
        for part in model.modules()
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False)
    ]
    before = [buffer.clone() for _, _, buffer in places]
    try:
        yield
    finally:
        for (part, name, buffer), value in zip(places, before, strict=True):
            buffer.copy_(value)
            setattr(part, name, buffer)  # which may have been replaced
        for now, held in numbers:
            now.update(held)


@contextmanager
def _fake_tensor_errors_silenced() -> Iterator[None]:
    """Silence what torch logs and warns of on tensors without values, which may well fail."""
    log = logging.getLogger(FAKE_TENSOR_MODULE)
    before = log.disabled
    log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before
