"""Volumes of different shapes in one data set (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.formats.source import Array
from hyperslab.geometry import Box
from tests.ranks import run_ranks

SHAPES = ((2, 9, 8, 10), (2, 7, 11, 8), (2, 9, 8, 10), (2, 12, 9, 8), (2, 8, 8, 8))


class Shapes(hs.Source):
    """Each voxel is a number of its own; labels are their last digits."""

    def __init__(self, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
        self.names = [f"v{number}" for number in range(len(shapes))]
        self.shapes = shapes
        self.shape = max(shapes, key=np.prod)
        self.dtype = np.dtype(np.int16)
        self.classes = tuple("abcdefghij")

    def values(self, sample: int) -> Array:
        shape = self.shapes[sample]
        return (100 * sample + np.arange(np.prod(shape))).reshape(shape).astype(np.int16)

    def read(self, sample: int, box: Box) -> Array:
        return self.values(sample)[box.slices()]

    def labels(self, sample: int, box: Box) -> Array:
        return (self.values(sample)[0][box.slices()] % 10).astype(np.uint8)


def flips(values: Array) -> list[bytes]:
    """All eight of a volume (C, D, H, W)."""
    axes = [[a for a in (1, 2, 3) if number >> a - 1 & 1] for number in range(8)]
    return [np.flip(values, found).tobytes() for found in axes]


def shown(grid: dict[str, int], **how: Any) -> list[tuple[str, Any, Any]]:
    """Two epochs, as torch has them."""
    found = []
    place = hs.Grid(**grid)
    with hs.open(Shapes(), place, batch_size=1, split="all", shuffle=True, **how) as data:
        for epoch in (0, 1):
            for x, y in data.epoch(epoch):
                found.append((data.shown_names[0], x.full().numpy(), y.full().numpy()))
    return found


GRIDS = [{"depth": 2}, {"data": 2}, {"height": 2, "width": 2}, {"data": 2, "depth": 2}]


@pytest.mark.parametrize("how", [{"store": "direct"}, {"store": "store"}], ids=str)
@pytest.mark.parametrize("augment", [False, True])
def test_serial(how: dict[str, Any], augment: bool) -> None:
    found = shown({}, augment=augment, **how)
    assert len(found) == 10
    source = Shapes()
    for name, x, y in found:
        sample = source.names.index(name)
        values = source.values(sample)
        assert x.shape == (1, *source.shape_of(sample))
        np.testing.assert_array_equal(y[0], x[0, 0] % 10)
        if augment:
            assert x[0].astype(np.int16).tobytes() in flips(values)
        else:
            np.testing.assert_array_equal(x[0], values)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_same_on_every_grid(grid: dict[str, int]) -> None:
    serial = shown({}, augment=True)
    ranks = int(np.prod(list(grid.values())))
    for found in run_ranks(ranks, functools.partial(shown, augment=True, store="store"), grid):
        assert [name for name, *_ in found] == [name for name, *_ in serial]
        for (_, x, y), (_, a, b) in zip(found, serial, strict=True):
            np.testing.assert_array_equal(x, a)
            np.testing.assert_array_equal(y, b)


def trained(grid: dict[str, int]) -> list[torch.Tensor]:
    """A few steps over volumes of four shapes; the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv3d(2, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(4, 10, 1)
    ).double()
    place = hs.Grid(**grid)
    model = hs.parallelize(model, place)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hs.open(Shapes(), place, batch_size=1, split="all", dtype=torch.float64) as data:
        for x, y in data.epoch(0):
            torch.nn.functional.cross_entropy(model(x * 1e-3), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_training_on_a_grid_is_that_of_one_rank() -> None:
    serial = trained({})
    for found in run_ranks(4, trained, {"depth": 2, "width": 2}):
        for got, expected in zip(found, serial, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_what_does_not_go_with_several_shapes_is_refused() -> None:
    grid = hs.Grid()
    with pytest.raises(hs.DataError, match=r"(?s)v1': has 7 x 11 x 8 .* 'v0' has 9.*accumulate"):
        hs.open(Shapes(), grid, batch_size=2)
    with pytest.raises(hs.LayoutError, match="different shapes into sub-volumes"):
        hs.open(Shapes(), grid, batch_size=1, subvolume=4)


def thin(grid: dict[str, int]) -> str:
    with pytest.raises(hs.LayoutError) as caught:
        hs.open(Shapes(((1, 8, 4, 4), (1, 1, 4, 4))), hs.Grid(**grid), batch_size=1, split="all")
    return str(caught.value)


def test_the_volume_that_is_too_thin_for_the_grid_is_named() -> None:
    assert all(words.startswith("sample 'v1': ") for words in run_ranks(2, thin, {"depth": 2}))
