"""Whether two recipes are of one training, and in what they differ."""

from __future__ import annotations

from typing import Any

from hyperslab.recipe.schema import Recipe


def settings_of(recipe: Recipe, *, but: frozenset[str] = frozenset()) -> dict[str, Any]:
    """All that a training depends on, as plain values: not where it writes, nor its patience.

    ``but`` names sections that are of no interest either.
    """
    values = recipe.model_dump(mode="json", exclude={"output", "timeout", *but})
    if "data" in values:
        values["data"] |= recipe.data.absolute_paths()
    return values


def launch_facts(recipe: Recipe, **options: Any) -> dict[str, Any]:
    """All keys of a recipe and a command's ``options``: what all ranks of a run must have alike."""
    values = recipe.model_dump(mode="json")
    values["output"] = str(recipe.output.absolute())
    values["grid"]["auto"] = recipe.grid.auto
    values["data"] |= recipe.data.absolute_paths()
    values["data"]["staging"] = recipe.data.staging is not None  # each node may have its own
    return {**{f"--{name}": value for name, value in options.items()}, **values}


def differences(a: Any, b: Any, key: str = "") -> list[str]:
    """The dotted keys whose values are not the same, in nested dictionaries.

    >>> differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}})
    ['a.c', 'd']
    """
    if isinstance(a, dict) and isinstance(b, dict):
        names = sorted({*a, *b}, key=str)
        found = [differences(a.get(k), b.get(k), f"{key}.{k}".lstrip(".")) for k in names]
        return [name for part in found for name in part]
    return [] if a == b else [key]
