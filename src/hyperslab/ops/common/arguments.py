"""Arguments that torch's functions take in several forms, read into one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex, TypeVar

T = TypeVar("T")

PerDim = int | Sequence[int]
"""A number for every spatial dim, or one for all of them."""

Integers = SupportsIndex | Sequence[int]
"""An integer, or several: torch takes shapes and dims one by one or as one sequence."""


def per_dim(value: SupportsIndex | Iterable[SupportsIndex], n: int) -> tuple[int, ...]:
    """A number or a sequence of one or ``n`` numbers, as ``n`` numbers.

    >>> per_dim(2, 3)
    (2, 2, 2)
    """
    if not isinstance(value, Iterable):
        return (operator.index(value),) * n
    values = tuple(map(operator.index, value))
    if len(values) not in (1, n):
        raise ValueError(f"{values} should be one number or {n}")
    return values * n if len(values) == 1 else values


def hashable(option: T) -> T:
    """A number, a word, or a sequence of numbers, as a key."""
    return tuple(option) if isinstance(option, list) else option  # type: ignore[return-value]


def integers(*given: Integers) -> tuple[int, ...]:
    """The integers of arguments that are given one by one or as one sequence.

    >>> integers(2, 3) == integers((2, 3))
    True
    """
    one = len(given) == 1 and not hasattr(given[0], "__index__")
    values: Sequence[SupportsIndex] = given[0] if one else given  # type: ignore[assignment]
    return tuple(map(operator.index, values))
