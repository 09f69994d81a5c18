"""Networks that are not ours: made from a recipe's target, or made anew by their class."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from hyperslab.checkpoint.data_card import DataCard
from hyperslab.errors import RecipeError
from hyperslab.recipe.schema import PythonModel, Recipe, TargetModel
from hyperslab.recipe.targets.instantiate import A_NETWORK, Maker, imported
from hyperslab.recipe.targets.section import TargetSection

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)


def references_to_data(about: DataCard) -> dict[str, Any]:
    """What a recipe's ``${...}`` may stand for."""
    return {
        "data.channels": about.shape[0],
        "data.extents": list(about.shape[1:]),
        "data.outputs": outputs_of(about),
    }


def outputs_of(about: DataCard) -> int:
    """How many channels a network's output has: one a class, or one a parameter."""
    return len(about.classes) or len(about.parameters.names)


def from_target(recipe: Recipe, about: DataCard) -> torch.nn.Module:
    """The network that a recipe names; raises what `Maker` does."""
    assert isinstance(recipe.model, TargetModel)
    references = references_to_data(about)
    maker = Maker("model", A_NETWORK, references=references, trusted=recipe.trusted)
    model: torch.nn.Module = maker(recipe.model)
    return model


def rebuilt(recipe: Recipe, about: DataCard) -> torch.nn.Module:
    """The network that a program has trained, made anew by its class alone.

    Raises:
        RecipeError: its class cannot be imported or needs arguments, or what it makes is another
            network; says how to hand it in.
    """
    config = recipe.model
    assert isinstance(config, PythonModel)
    section = TargetSection(target=config.python_class)
    maker = Maker("model", A_NETWORK)
    try:
        maker.check(section)
        with torch.random.fork_rng(devices=[]):
            model: torch.nn.Module = maker(section)
    except RecipeError as error:
        raise RecipeError(_not_rebuilt(recipe, str(error).splitlines()[0])) from error
    if digest_of_network(model) != config.digest:
        words = f"{config.python_class}() is built otherwise than the network that was trained"
        raise RecipeError(_not_rebuilt(recipe, words))
    return model


def _not_rebuilt(recipe: Recipe, why: str) -> str:
    assert isinstance(recipe.model, PythonModel)
    name = recipe.model.python_class.rpartition(".")[2]
    return (
        f"the network of {recipe.output} came from a program and cannot be made anew: {why}\n"
        f"    hand it in: hs.TrainedRun({str(recipe.output)!r}, model={name}(...)).evaluate(), or "
        '.predict(...); or let fit make it from {"target": ..., ...} (docs/own-networks.md)'
    )


def check_target(recipe: Recipe) -> None:
    """Look at a network's target and its arguments, and make nothing; raises as `Maker` does."""
    if isinstance(recipe.model, TargetModel):
        Maker("model", A_NETWORK, trusted=recipe.trusted).check(recipe.model)


def name_of(recipe: Recipe) -> str:
    """By which errors call the network."""
    config = recipe.model
    if isinstance(config, TargetModel):
        return f"model.target {config.target}"
    if isinstance(config, PythonModel):
        return f"the network {config.python_class}"
    return f"model.name={config.name}"


def class_name(kind: type) -> str:
    """The dotted name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_importable(kind: type) -> bool:
    """Whether its name leads back to it, in another process, too."""
    if kind.__module__ == "__main__" or "<" in kind.__qualname__:
        return False
    try:
        return imported(class_name(kind), "model") is kind
    except RecipeError:
        return False


def digest_of_network(model: torch.nn.Module) -> str:
    """The SHA-256 of how a network is built: the classes of its parts, and all plain settings.

    Of two networks of one class with other strides, activations or probabilities of dropout it
    differs, also where their weights have the same names and shapes.
    """
    text = hashlib.sha256()
    for line in _described(model):
        text.update(f"{line}\n".encode())
    return text.hexdigest()


def _described(model: torch.nn.Module) -> Iterator[str]:
    for name, part in model.named_modules():
        yield f"{name}: {type(part).__qualname__}"
        for key, value in sorted(vars(part).items()):
            if not key.startswith("_") and key not in ("training", "forward", "no_sync"):
                yield f"{name}.{key} = {_plainly(value)}"
        for key, weight in (*part._parameters.items(), *part._buffers.items()):
            form = None if weight is None else (tuple(weight.shape), weight.dtype)
            yield f"{name}.{key}: {form}"


def _plainly(value: Any) -> str:
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plainly, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {_plainly(v)}' for k, v in value.items())}}}"
    named = getattr(value, "__qualname__", None)
    return f"{type(value).__qualname__} {named}" if named else type(value).__qualname__
