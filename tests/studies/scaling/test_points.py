"""Which grids and mini-batches a study takes (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hyperslab.data.sampler import samples_of
from hyperslab.errors import LayoutError
from hyperslab.recipe.schema import GridSection, Recipe
from hyperslab.studies.scaling.points import ScalingKind, ScalingPoint, grown_points, own_points


def recipe(batch_size: int = 16, samples: int = 128, **grid: int) -> Recipe:
    data: dict[str, Any] = {
        "synthetic": {"width": 512, "samples": samples},
        "batch_size": batch_size,
    }
    return Recipe(data=data, grid=grid, output=Path("out"))  # type: ignore[arg-type]


def extents(points: list[ScalingPoint]) -> list[tuple[int, ...]]:
    return [(*point.grid.model_dump().values(), point.batch_size) for point in points]


def test_strong_scaling_is_the_papers() -> None:
    # Figure 4 of Oyama et al. 2020: 16 groups, 8 to 64 ranks along the depth of a sample.
    points = grown_points(ScalingKind.STRONG, recipe(data=16), [128, 256, 512, 1024], "depth")
    assert extents(points) == [(16, depth, 1, 1, 16) for depth in (8, 16, 32, 64)]


def test_another_axis_grows_from_one() -> None:
    points = grown_points(ScalingKind.STRONG, recipe(depth=4, width=2), [2, 4], "depth")
    assert extents(points) == [(1, 1, 1, 2, 16), (1, 2, 1, 2, 16)]
    assert extents(grown_points(ScalingKind.STRONG, recipe(), [1, 4], "data")) == [
        (1, 1, 1, 1, 16),
        (4, 1, 1, 1, 16),
    ]


def test_weak_scaling_keeps_the_samples_of_a_replica() -> None:
    points = grown_points(ScalingKind.WEAK, recipe(8, data=2, depth=4), [4, 8, 2048], "data")
    assert extents(points) == [(1, 4, 1, 1, 4), (2, 4, 1, 1, 8), (512, 4, 1, 1, 2048)]


def test_grids_of_ones_own() -> None:
    grids = [GridSection(data=4, height=2), GridSection()]
    assert extents(own_points(ScalingKind.STRONG, recipe(), grids)) == [
        (4, 1, 2, 1, 16),
        (1, 1, 1, 1, 16),
    ]
    points = own_points(ScalingKind.WEAK, recipe(8, data=2), grids)
    assert extents(points) == [(4, 1, 2, 1, 16), (1, 1, 1, 1, 4)]
    assert (points[0].ranks, points[0].cut, points[1].cut) == (8, "data 4 x height 2", "uncut")


@pytest.mark.parametrize(
    ("batch_size", "samples", "epoch"), [(16, 128, 128), (48, 128, 144), (4, 1, 4)]
)
def test_an_epoch_is_whole_mini_batches(batch_size: int, samples: int, epoch: int) -> None:
    base = recipe(samples=samples)
    one = ScalingPoint(GridSection(), batch_size).recipe(base, output=Path("there"), epochs=4)
    assert (one.epochs, one.output, one.data.batch_size) == (4, Path("there"), batch_size)
    assert one.data.synthetic is not None
    names = one.data.synthetic.source().names
    assert len(samples_of(names, "train", one.data.fractions, one.data.seed)) == epoch
    assert len(samples_of(names, "validation", one.data.fractions, one.data.seed)) == 1
    assert base == recipe(samples=samples)


def test_what_does_not_divide() -> None:
    with pytest.raises(
        LayoutError,
        match=r"12 ranks do not make .* grid\.data=8 their number must be a multiple of 8",
    ):
        grown_points(ScalingKind.STRONG, recipe(data=8), [8, 12], "depth")
    with pytest.raises(LayoutError, match=r"mini-batch of 16 .* evenly to grid\.data=3 replicas"):
        grown_points(ScalingKind.STRONG, recipe(), [1, 3], "data")
    with pytest.raises(LayoutError, match="6 ranks do not make a grid that grows along data"):
        grown_points(ScalingKind.WEAK, recipe(depth=4), [4, 6], "data")
    with pytest.raises(LayoutError, match=r"mini-batch of 15 .* grid\.data=2"):
        grown_points(ScalingKind.WEAK, recipe(15, data=2), [4], "data")
    with pytest.raises(LayoutError, match="two grids have 2 ranks"):
        own_points(ScalingKind.STRONG, recipe(), [GridSection(depth=2), GridSection(width=2)])
