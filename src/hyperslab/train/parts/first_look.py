"""Networks that are not ours, looked at when they first run: whether they go with the data.

Legend: N samples, C channels, (D, H, W) voxels of a mini-batch.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hyperslab.checkpoint.data_card import DataCard
from hyperslab.comm.agreement import LOST
from hyperslab.errors import HyperslabError, LayoutError, RecipeError, reason
from hyperslab.recipe.schema import Recipe
from hyperslab.train.parts.networks import name_of, outputs_of

MULTIPLES = (2, 4, 8, 16, 32, 64)
"""Of extents that a network may ask for: it halves them once, twice, ..."""


def look_first(model: torch.nn.Module, recipe: Recipe, about: DataCard) -> None:
    """Let the first forward pass say in one line what does not go with the data.

    Where volumes differ in shape, the first one of each shape.

    Raises, from that pass:
        RecipeError: the network fails on its input, or its output is not what the data need.
    """
    plain = model.forward
    forward = type(model).forward
    name = name_of(recipe)
    seen: set[tuple[int, ...]] = set()

    def first(*args: Any, **options: Any) -> Any:
        shape = tuple(args[0].shape)
        if shape in seen:
            return plain(*args, **options)
        if not about.varied:
            model.forward = plain
        try:
            prediction = _running(lambda: plain(*args, **options), name, shape)
            check_output(prediction, shape, about, name)
        except (RecipeError, LayoutError) as error:
            with _unchanged(model):
                fitting = multiple_that_fits(lambda x: forward(model, x), shape, about)
            if fitting is None:
                raise
            raise RecipeError(f"{_words(error, name, shape)}\n    {_remedy(fitting)}") from error
        seen.add(shape)
        return prediction

    model.forward = first


def _running(run: Callable[[], Any], name: str, shape: tuple[int, ...]) -> Any:
    try:
        return run()
    except (HyperslabError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever is wrong in somebody else's code
        if LOST.search(str(error)):
            raise
        words = " ".join(reason(error).split())[:400]
        raise RecipeError(
            f"{name} fails on the data's mini-batch of shape {list(shape)}: {words}"
        ) from error


def _words(error: HyperslabError, name: str, shape: tuple[int, ...]) -> str:
    first = str(error).splitlines()[0]
    if isinstance(error, RecipeError):
        return first
    return f"{name} fails on the data's mini-batch of shape {list(shape)}: {first}"


def _remedy(multiple: int) -> str:
    return (
        f"it takes volumes whose extents are multiples of {multiple}: set data.multiple: "
        f"{multiple}, which adds background after the last voxels"
    )


def wanted_output(shape: tuple[int, ...], about: DataCard) -> tuple[int, ...]:
    """Of the network for a mini-batch of this shape (N, C, D, H, W)."""
    count = outputs_of(about)
    return (shape[0], count, *shape[2:]) if about.classes else (shape[0], count)


def check_output(output: Any, shape: tuple[int, ...], about: DataCard, name: str) -> None:
    """Compare a network's output with what data of this shape (N, C, D, H, W) need.

    Raises:
        RecipeError: names the dim that differs.
    """
    if not isinstance(output, torch.Tensor):
        raise RecipeError(
            f"{name} gives a {type(output).__name__}, not one tensor\n"
            "    take a form of the network that gives the prediction alone"
        )
    count = outputs_of(about)
    wanted = wanted_output(shape, about)
    found = tuple(output.shape)
    if found == wanted:
        return
    what = f"one channel for each of {count} classes, and the volume's voxels"
    if not about.classes:
        what = f"{count} numbers for each sample: {', '.join(about.parameters.names)}"
    differs = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None)
    where = "" if len(found) != len(wanted) or differs is None else f" (dim {differs} differs)"
    raise RecipeError(
        f"{name} gives {list(found)} for a mini-batch of shape {list(shape)}, but the data need "
        f"{list(wanted)}{where}: {what}\n    ${{data.outputs}} stands for {count} in a recipe"
    )


def multiple_that_fits(
    forward: Callable[[torch.Tensor], Any], shape: tuple[int, ...], about: DataCard
) -> int | None:
    """The least of `MULTIPLES` such that extents rounded up to it suit a network; else None.

    Nothing is computed: the network runs on tensors without values. None as well where the shape
    (N, C, D, H, W) itself suits it, so that something else must be wrong. A multiple is tried on
    odd numbers of it, as a larger one would hide behind an even number.
    """
    if _suits(forward, shape, about):
        return None
    for multiple in MULTIPLES:
        odd = tuple(-(-extent // multiple) // 2 * 2 + 1 for extent in shape[2:])
        if _suits(forward, (*shape[:2], *(multiple * times for times in odd)), about):
            return multiple
    return None


def _suits(forward: Callable[[torch.Tensor], Any], shape: tuple[int, ...], about: DataCard) -> bool:
    try:
        with _silently(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            output = forward(torch.empty(shape))
    except Exception:  # whatever is wrong in somebody else's code
        return False
    return isinstance(output, torch.Tensor) and tuple(output.shape) == wanted_output(shape, about)


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Put buffers back afterwards: counters of batches run even on tensors without values."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


@contextmanager
def _silently() -> Iterator[None]:
    """Torch logs what fails on tensors without values, and warns; both is expected here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before
