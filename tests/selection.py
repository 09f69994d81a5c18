"""Marks the cases of a test that only `make test-all` runs as `long`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_gate(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """All values for `pytest.mark.parametrize`, of which only those that are kept are not long.

    A tuple has the values of several names.
    """
    return [
        value
        if value in kept
        else pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.long)
        for value in values
    ]


def by_rotation(names: Iterable[Any], grids: Iterable[Any]) -> list[Any]:
    """Every name with every grid; the first name has its first grid in the gate, the second its
    second, and so on in turn."""
    grids = list(grids)
    return [
        pytest.param(name, grid, marks=() if turn % len(grids) == place else pytest.mark.long)
        for turn, name in enumerate(names)
        for place, grid in enumerate(grids)
    ]
