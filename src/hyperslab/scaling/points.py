"""The points of a study: grids of more and more ranks, and the mini-batch on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hyperslab.errors import HyperslabError, LayoutError
from hyperslab.recipe.schema import GridSection, Recipe


class ScalingKind(StrEnum):
    """Strong: the mini-batch stays. Weak: the samples of a replica stay.

    Oyama et al. 2020, sections V-B and V-C.
    """

    STRONG = "strong"
    WEAK = "weak"


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One grid and the samples of a mini-batch on it."""

    grid: GridSection
    batch_size: int

    @property
    def ranks(self) -> int:
        return self.grid.size

    @property
    def name(self) -> str:
        """Of its folder."""
        extents = "x".join(map(str, self.grid.model_dump().values()))
        return f"{self.ranks:04}-ranks-{extents}-batch-{self.batch_size}"

    @property
    def cut(self) -> str:
        """The grid in words: ``data 2 x depth 4``."""
        parts = [f"{axis} {n}" for axis, n in self.grid.model_dump().items() if n > 1]
        return " x ".join(parts) or "uncut"

    def recipe(self, base: Recipe, *, output: Path, epochs: int) -> Recipe:
        """The training that measures this point.

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
    """A number of ranks that a study cannot have, and the error that says why."""

    ranks: int
    error: HyperslabError

    @property
    def reason(self) -> str:
        """In one line."""
        return "; ".join(line.strip() for line in str(self.error).splitlines())


def points_or_refusals(
    ranks: Iterable[int], points: Callable[[list[int]], list[ScalingPoint]]
) -> tuple[list[ScalingPoint], list[RefusedPoint]]:
    """Those of ``points`` by numbers of ranks; one that cannot be does not stop the others."""
    found = []
    refused = []
    for count in ranks:
        try:
            found += points([count])
        except LayoutError as error:
            refused.append(RefusedPoint(count, error))
    return found, refused


def own_points(
    kind: ScalingKind, recipe: Recipe, grids: Sequence[GridSection]
) -> list[ScalingPoint]:
    """Grids that the user has said, with the mini-batch that such a study has on them.

    Raises:
        LayoutError: two have as many ranks, or the mini-batch is no multiple of a data axis.
    """
    sizes = [grid.size for grid in grids]
    if twice := {size for size in sizes if sizes.count(size) > 1}:
        raise LayoutError(
            f"two grids have {min(twice)} ranks\n    a study has one for each number of ranks: "
            "give the other one an --output of its own"
        )
    if kind is ScalingKind.STRONG:
        return [_checked(grid, recipe.data.batch_size) for grid in grids]
    return [ScalingPoint(grid, _samples_each(recipe) * grid.data) for grid in grids]


def strong_points(recipe: Recipe, ranks: Iterable[int], axis: str) -> list[ScalingPoint]:
    """The recipe's mini-batch on its grid, of which ``axis`` grows to so many ranks.

    Raises:
        LayoutError: a number of ranks is no multiple of the other axes, or the mini-batch no
            multiple of the data axis.
    """
    return [_checked(_grown(recipe.grid, axis, count), recipe.data.batch_size) for count in ranks]


def weak_points(recipe: Recipe, ranks: Iterable[int]) -> list[ScalingPoint]:
    """The recipe's grid with more and more replicas, and as many samples for each as it has.

    Raises:
        LayoutError: as `strong_points`.
    """
    each = _samples_each(recipe)
    grids = [_grown(recipe.grid, "data", count) for count in ranks]
    return [ScalingPoint(grid, each * grid.data) for grid in grids]


def _samples_each(recipe: Recipe) -> int:
    """Of a mini-batch, those of each replica on the recipe's own grid."""
    if recipe.grid.auto:
        raise LayoutError(
            "weak scaling takes more and more replicas, and grid=auto does not say what one is\n"
            "    give the ranks of a replica, such as grid.depth=8"
        )
    return _checked(recipe.grid, recipe.data.batch_size).batch_size // recipe.grid.data


def _grown(grid: GridSection, axis: str, ranks: int) -> GridSection:
    others = {name: extent for name, extent in grid.model_dump().items() if name != axis}
    size = math.prod(others.values())
    if ranks % size:
        cut = " ".join(f"grid.{name}={extent}" for name, extent in others.items() if extent > 1)
        raise LayoutError(
            f"{ranks} ranks cannot be made by more places along {axis}: with {cut} it takes a "
            f"multiple of {size}\n    choose other ranks, or change the grid"
        )
    return GridSection(**{**others, axis: ranks // size})


def _checked(grid: GridSection, batch_size: int) -> ScalingPoint:
    if batch_size % grid.data:
        raise LayoutError(
            f"a mini-batch of {batch_size} cannot be dealt out evenly to grid.data={grid.data} "
            f"replicas ({grid.size} ranks)\n    choose other ranks, or a data.batch_size that is a "
            f"multiple of {grid.data}"
        )
    return ScalingPoint(grid, batch_size)
