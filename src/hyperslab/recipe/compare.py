"""Compares recipes: whether they are of one training, and which keys a resumed run may change.

Keys that may change are listed; those that are not named may not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hyperslab.errors import RecipeError
from hyperslab.recipe.schema import Recipe


def plain_values(recipe: Recipe, *, but: Iterable[str] = ()) -> dict[str, Any]:
    """Return all sections but some as plain values, with paths that hold in any working folder."""
    values = recipe.model_dump(mode="json", exclude={*but})
    if "data" in values:
        values["data"] |= recipe.data.absolute_paths()
    return values


def settings_of(recipe: Recipe, *, but: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return plain values of all that a training depends on: not where it writes, nor patience.

    ``but`` names sections that are of no interest either.
    """
    return plain_values(recipe, but={"output", "timeout", *but})


def launch_facts(recipe: Recipe, **options: Any) -> dict[str, Any]:
    """Return all keys of a recipe and a command's ``options``: all ranks must have them alike."""
    values = plain_values(recipe)
    values["output"] = str(recipe.output.absolute())
    values["grid"]["auto"] = recipe.grid.auto
    values["data"]["staging"] = recipe.data.staging is not None  # each node may have its own
    return {**{f"--{name}": value for name, value in options.items()}, **values}


def differences(a: Any, b: Any, key: str = "") -> list[str]:
    """Return the dotted keys whose values are not the same, in nested dictionaries.

    >>> differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}})
    ['a.c', 'd']
    """
    if isinstance(a, dict) and isinstance(b, dict):
        names = sorted({*a, *b}, key=str)
        found = [differences(a.get(k), b.get(k), f"{key}.{k}".lstrip(".")) for k in names]
        return [name for part in found for name in part]
    return [] if a == b else [key]


def value_at(values: Any, key: str) -> Any:
    """Look up a dotted key in nested dictionaries; None where there is nothing.

    >>> value_at({"a": {"b": 1}}, "a.b"), value_at({"a": 1}, "a.b")
    (1, None)
    """
    if not key:
        return values
    for name in values if isinstance(values, dict) else ():
        if key == str(name) or key.startswith(f"{name}."):  # names may have dots themselves
            return value_at(values[name], key[len(str(name)) + 1 :])
    return None


TAKES_EFFECT = (
    "optimizer.learning_rate",
    "optimizer.schedule",
    "optimizer.clip",
    "optimizer.larc",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.momentum",
    "optimizer.weight_decay",
    "data.augment",
    "ema",
    "precision",
    "parallelize.gradients",
)
"""The steps after the checkpoint are done with the new value."""

SAME_RESULT = (
    # on which machine, and how far
    *("grid", "memory", "kernels", "device", "peak", "timeout", "epochs", "stop_at", "output"),
    # what is written and measured on the way
    *("checkpoint", "loggers", "layers", "metrics", "follow_test", "mlperf"),
    *(f"parallelize.{key}" for key in ("until", "ordinary_inputs", "random_states")),
    # where the same volumes are now, and how they are read
    *(f"data.{key}" for key in ("path", "files", "keys", "table", "plugins", "format", "channels")),
    *(f"data.{key}" for key in ("driver", "mode", "budget", "staging", "staging_budget")),
    *(f"data.{key}" for key in ("prefetch", "prefetch_bytes", "on_error")),
    *(f"data.{key}" for key in ("outside_files", "missing_chunks", "shape")),
)
"""These say how, where and how long: the steps are the same, up to rounding."""

COMPARED = (
    # which samples a step sees
    *(f"data.{key}" for key in ("batch_size", "seed", "repeat", "fractions", "counts", "splits")),
    *(f"data.{key}" for key in ("train", "validation", "test", "fold", "folds")),
    # what of them
    *(f"data.{key}" for key in ("subvolume", "redshifts", "targets", "columns", "ranges")),
)
"""The checkpoint says itself what they came to; see `RunState.restore`."""


def nothing_left(done: int, recipe: Recipe) -> str:
    """Say of a run with that many epochs done that the recipe asks for no more."""
    all_of_them = "all " if done == recipe.epochs else ""
    asked = "" if all_of_them else f", and epochs={recipe.epochs} asks for no more"
    return (
        f"{all_of_them}{done} epochs of {recipe.output} are done{asked}: nothing is left to resume"
    )


def changed_keys(before: Recipe, now: Recipe) -> dict[str, list[Any]]:
    """Return the keys that a resumed run changes, with the value before and the value now.

    Raises:
        RecipeError: it must not change one of them; names it, with both values.
    """
    old, new = launch_facts(before), launch_facts(now)
    found = {key: [value_at(old, key), value_at(new, key)] for key in differences(old, new)}
    for key, (then, value) in found.items():
        may_change = TAKES_EFFECT + SAME_RESULT + COMPARED
        if not any(key == name or key.startswith(f"{name}.") for name in may_change):
            raise RecipeError(
                f"--resume: {key} is {value} but the run in output {now.output} has {then}\n"
                "    change it back, or start another run; a resumed run may change "
                f"{', '.join(TAKES_EFFECT)}, and keys that do not change its steps "
                "(docs/reliability.md)"
            )
    return found
