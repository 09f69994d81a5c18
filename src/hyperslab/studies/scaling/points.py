"""Says which points a scaling study has: each is one grid with its mini-batch; without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hyperslab import errors
from hyperslab.recipe.schema import GridSection, Recipe


class ScalingKind(StrEnum):
    """Tells strong scaling, of one mini-batch, from weak, of one number of samples a replica.

    Oyama et al. 2020, sections V-B and V-C.
    """

    STRONG = "strong"
    WEAK = "weak"


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """Holds one grid and the samples of a mini-batch on it."""

    grid: GridSection
    batch_size: int

    @property
    def ranks(self) -> int:
        return self.grid.size

    @property
    def name(self) -> str:
        extents = "x".join(map(str, self.grid.model_dump().values()))
        return f"{self.ranks:04}-ranks-{extents}-batch-{self.batch_size}"

    @property
    def cut(self) -> str:
        """Writes the grid in words: ``data 2 x depth 4``."""
        parts = [f"{axis} {n}" for axis, n in self.grid.model_dump().items() if n > 1]
        return " x ".join(parts) or "uncut"

    def refused(self, error: errors.HyperslabError) -> RefusedPoint:
        """Refuses the point by an error that does not name it."""
        return RefusedPoint(self.ranks, type(error)(f"{self.ranks} ranks ({self.cut}): {error}"))

    def recipe(self, base: Recipe, *, output: Path, epochs: int) -> Recipe:
        """Makes the recipe of the training that measures this point.

        Synthetic data are at least as many samples as the recipe says, in whole mini-batches,
        and one sample for the validation, which is not measured.
        """
        data = base.data.model_copy(update={"batch_size": self.batch_size})
        if data.synthetic is not None:
            count = math.ceil(data.synthetic.samples / self.batch_size) * self.batch_size + 1
            changes = {
                "synthetic": data.synthetic.model_copy(update={"samples": count}),
                "fractions": ((count - 1) / count, 1 / count, 0.0),
            }
            data = data.model_copy(update=changes)
        kept = base.checkpoint.model_copy(update={"every": epochs, "every_steps": None})
        return base.model_copy(
            update={
                "data": data,
                "grid": self.grid,
                "epochs": epochs,
                "checkpoint": kept,
                "output": output,
            }
        )


@dataclass(frozen=True, slots=True)
class RefusedPoint:
    """Holds a number of ranks that a study cannot have, and the error that says why."""

    ranks: int
    error: errors.HyperslabError

    @property
    def reason(self) -> str:
        return "; ".join(line.strip() for line in str(self.error).splitlines())


def points_or_refusals(
    recipe: Recipe, ranks: Iterable[int], points: Callable[[list[int]], list[ScalingPoint]]
) -> tuple[list[ScalingPoint], list[RefusedPoint]]:
    """Collects ``points`` by numbers of ranks; one that cannot be does not stop the others."""
    found = []
    refused = []
    for count in ranks:
        try:
            (point,) = points([count])
        except errors.LayoutError as error:
            refused.append(RefusedPoint(count, error))
            continue
        try:
            recipe.model_copy(update={"grid": point.grid}).check_cuts()
            found.append(point)
        except errors.LayoutError as error:
            refused.append(point.refused(error))
    return found, refused


def own_points(
    kind: ScalingKind, recipe: Recipe, grids: Sequence[GridSection]
) -> list[ScalingPoint]:
    """Makes points of the user's grids, with the mini-batch that such a study has on them.

    Raises:
        LayoutError: two have as many ranks, or the mini-batch is no multiple of a data axis.
    """
    sizes = [grid.size for grid in grids]
    if twice := {size for size in sizes if sizes.count(size) > 1}:
        raise errors.LayoutError(
            f"two grids have {min(twice)} ranks\n    a study has one for each number of ranks: "
            "give the other one an --output of its own"
        )
    if kind is ScalingKind.STRONG:
        return [_checked(grid, recipe.data.batch_size) for grid in grids]
    if not grids:
        return []
    if recipe.grid.auto:
        raise errors.LayoutError(
            "weak scaling adds replicas, and grid=auto does not say how many ranks one has\n"
            "    give the ranks of a replica, such as grid.depth=8"
        )
    replica = _checked(recipe.grid, recipe.data.batch_size)
    each = replica.batch_size // recipe.grid.data
    return [ScalingPoint(grid, each * grid.data) for grid in grids]


def grown_points(
    kind: ScalingKind, recipe: Recipe, ranks: Iterable[int], axis: str
) -> list[ScalingPoint]:
    """Makes points of the recipe's grid with more and more ranks along ``axis``.

    In weak scaling that is "data": more replicas, each with as many samples.
    """
    return own_points(kind, recipe, [_grown(recipe.grid, axis, count) for count in ranks])


def _grown(grid: GridSection, axis: str, ranks: int) -> GridSection:
    others = {name: extent for name, extent in grid.model_dump().items() if name != axis}
    size = math.prod(others.values())
    if ranks % size:
        cut = " ".join(f"grid.{name}={extent}" for name, extent in others.items() if extent > 1)
        raise errors.LayoutError(
            f"{ranks} ranks do not make a grid that grows along {axis}: with {cut} their number "
            f"must be a multiple of {size}\n    choose other ranks, or change the grid"
        )
    return GridSection(**{**others, axis: ranks // size})


def _checked(grid: GridSection, batch_size: int) -> ScalingPoint:
    if batch_size % grid.data:
        raise errors.LayoutError(
            f"a mini-batch of {batch_size} cannot be dealt out evenly to grid.data={grid.data} "
            f"replicas ({grid.size} ranks)\n    choose other ranks, or a data.batch_size that is a "
            f"multiple of {grid.data}"
        )
    return ScalingPoint(grid, batch_size)


def not_here(recipe: Recipe, more: str = "") -> errors.DataError:
    """Makes the error that says that there are no data, and what takes their place."""
    return errors.DataError(
        f"{recipe.data.where} is not here\n    data.path=null data.synthetic.width=N takes its "
        f"place: volumes made in memory{more}"
    )
