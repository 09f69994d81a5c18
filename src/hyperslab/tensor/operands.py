"""What is done to the operands of every operator before its rule runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hyperslab.comm import Grid
from hyperslab.errors import LayoutError
from hyperslab.tensor.dispatch import Rule


def check_operands(
    values: Iterable[Any], rule: Rule, cut: type, grid: Grid | None = None
) -> Grid | None:
    """The grid of all cut tensors among the arguments of an operator; None if there are none.

    ``cut`` is their class. Unless its rule is ``lazy``, what is pending is computed: see the note
    in `tensor.lazy`. Unless it takes them, dims that were merged where they are cut become whole.

    Raises:
        LayoutError: they are on two grids.
    """
    for value in values:
        kind = type(value)
        if kind is list or kind is tuple:
            grid = check_operands(value, rule, cut, grid)
        elif kind is cut:
            if not rule.lazy and (value.pending is not None or value.readers):
                value.settle()
            if value._partition.merged and not rule.merged:
                value.gather_merged()
            if grid is None:
                grid = value._grid
            elif grid is not value._grid and grid.extents != value._grid.extents:
                raise LayoutError(f"operands on two grids: {grid} and {value._grid}")
    return grid
