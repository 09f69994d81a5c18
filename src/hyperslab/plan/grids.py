"""All grids of a number of ranks, and why some of them are not for a job."""

from __future__ import annotations

from collections.abc import Iterator

from hyperslab.comm.grid import AXES, SPATIAL_AXES
from hyperslab.errors import LayoutError
from hyperslab.plan.job import GridJob
from hyperslab.recipe.schema import GridSection
from hyperslab.trace.layers import Layers
from hyperslab.trace.virtual import Messages, VirtualGrid


def grids(ranks: int) -> Iterator[GridSection]:
    """Every grid of so many ranks, by data, depth, height and width, the largest axes first.

    >>> [tuple(grid.model_dump().values()) for grid in grids(2)]
    [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)]
    """
    for extents in _products(ranks, len(AXES)):
        data, depth, height, width = extents
        yield GridSection(data=data, depth=depth, height=height, width=width)


def _products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    if factors == 1:
        yield (number,)
        return
    for first in reversed(_divisors(number)):
        for rest in _products(number // first, factors - 1):
            yield (first, *rest)


def _divisors(number: int) -> list[int]:
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def refusal(grid: GridSection, job: GridJob) -> str:
    """Why the grid cannot be, in the words of the error that training would raise; "" if it can.

    A grid with more replicas than a mini-batch has samples would run, and repeat all work.
    """
    if grid.data > job.batch:
        return (
            f"a mini-batch of {job.batch} is not cut over {grid.data} replicas: they would repeat "
            "each other's work"
        )
    virtual = VirtualGrid(grid.model_dump(), 0, Messages(Layers(), lambda: "forward"))
    try:
        virtual.partition(job.inputs)
    except LayoutError as error:
        return str(error)
    return ""


def box_extents(grid: GridSection, job: GridJob) -> tuple[int, ...]:
    """D, H, W of the largest block that a rank has of a sample."""
    return tuple(
        -(-extent // getattr(grid, axis))
        for extent, axis in zip(job.about.shape[1:], SPATIAL_AXES, strict=True)
    )


def samples_each(grid: GridSection, job: GridJob) -> int:
    """Of a mini-batch, the most that a replica has."""
    return -(-job.batch // grid.data)


def words_of(grid: GridSection) -> str:
    """As one writes it in a recipe's overrides.

    >>> words_of(GridSection(data=2, height=4))
    'data=2 height=4'
    """
    cut = {axis: extent for axis, extent in grid.model_dump().items() if extent > 1}
    return " ".join(f"{axis}={extent}" for axis, extent in cut.items()) or "data=1"
