"""Tables from the names that a recipe uses to what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hyperslab.errors import RecipeError

T = TypeVar("T")


def choose(table: Mapping[str, T], name: str, key: str) -> T:
    """What ``name``, the value of ``key`` in a recipe, stands for.

    >>> choose({"adam": 1, "sgd": 2}, "sgd", "optimizer.name")
    2

    Raises:
        RecipeError: the table has no such name; nothing else is taken in its place.
    """
    if name not in table:
        raise RecipeError(f"bad value {name!r} for {key!r}: use one of {', '.join(table)}")
    return table[name]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks a key that takes one of a list of words that may grow; for errors."""

    words: Callable[[], Sequence[str]]
