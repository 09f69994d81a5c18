"""What is made once for a grid and ends with it: plans, layouts, what has been logged."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

G = TypeVar("G")
P = ParamSpec("P")
T = TypeVar("T")


def per_grid(make: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """Call ``make(grid, ...)`` once for each grid and each of its hashable, positional arguments.

    What it returned is kept as long as the grid is, which it must not refer to: a grid holds
    process groups, and they hold sockets. So this is no `functools.lru_cache`, which keeps its
    arguments.
    """
    kept: dict[int, dict[tuple[Hashable, ...], T]] = {}

    @functools.wraps(make)
    def once(grid: G, *key: Any) -> T:
        try:
            return kept[id(grid)][key]
        except KeyError:
            pass  # not here: an error of ``make`` did not come out of looking up
        value = cast(Callable[..., T], make)(grid, *key)
        if id(grid) not in kept:  # a WeakKeyDictionary takes twice the time in every operator
            weakref.finalize(grid, kept.pop, id(grid)).atexit = False
        kept.setdefault(id(grid), {})[key] = value
        return value

    return cast(Callable[Concatenate[G, P], T], once)
