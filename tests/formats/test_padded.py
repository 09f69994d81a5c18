"""Extents rounded up where volumes are read (tiers: no process; gloo ranks)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.formats.views import Joined, Padded, Selected, Subvolumes
from hyperslab.geometry import Box
from tests.data.test_shapes import Shapes
from tests.formats.nifti.lists import SHAPES, decathlon
from tests.formats.universes import Seat
from tests.ranks import run_ranks


def test_what_is_added_and_where() -> None:
    source = Padded(Shapes(), 4, -7.5)
    assert source.shapes == (
        (2, 12, 8, 12),
        (2, 8, 12, 8),
        (2, 12, 8, 12),
        (2, 12, 12, 8),
        (2, 8, 8, 8),
    )
    assert source.shape == (2, 12, 8, 12)
    for sample, shape in enumerate(source.shapes):
        expected = np.full(shape, -8, np.int16)
        inside = Box.whole(Shapes().shape_of(sample)).slices()
        expected[inside] = Shapes().values(sample)
        for box in (Box.whole(shape), Box((0, 5, 2, 1), (2, 8, 7, 8)), Box((1, 7, 6, 4), shape)):
            np.testing.assert_array_equal(source.read(sample, box), expected[box.slices()])
        classes = np.zeros(shape[1:], np.uint8)
        classes[inside[1:]] = Shapes().values(sample)[0] % 10
        box = Box((3, 1, 0), (8, 8, 8))
        np.testing.assert_array_equal(source.labels(sample, box), classes[box.slices()])
        assert source.unpadded(sample) == Shapes().shape_of(sample)[1:]


def test_the_same_extents_make_one_shape() -> None:
    assert Padded(Shapes(((1, 5, 6, 7), (1, 8, 8, 8))), 8).shapes == ()


def test_the_fill_is_what_the_transform_makes_zero(tmp_path: Path) -> None:
    decathlon(tmp_path)
    for how, lowest in (({"window": (-40, 90)}, 0.0), ({}, 0.0)):
        with hs.open(tmp_path, Seat(), batch_size=1, split="all", multiple=16, **how) as data:  # type: ignore[arg-type]
            for x, y in data.epoch(0):
                assert x.shape == (1, 1, 16, 16, 16)
                depth, height, width = SHAPES[data.shown[0]]
                beyond = x.local[0, 0].clone()
                beyond[:depth, :height, :width] = lowest
                assert (beyond == lowest).all()
                assert (y.local[0, depth:] == 0).all()
    with pytest.raises(hs.DataError, match="changes the mean"):
        hs.open(tmp_path, Seat(), batch_size=1, split="all", multiple=16, transform="mean")


def test_targets_that_may_change_alone_still_do() -> None:
    source = Shapes()
    assert not Padded(source, 4).targets_apart
    source.targets_apart = True
    assert Padded(source, 4).targets_apart


def test_views_of_it_know_what_is_stored() -> None:
    source = Padded(Shapes(((2, 5, 6, 7), (2, 6, 5, 7))), 8)
    views = (Selected(source), Joined({Path("/a"): source, Path("/b"): source}))
    for view in (*views, Padded(source, 12)):
        assert [view.unpadded(sample) for sample in range(2)] == [(5, 6, 7), (6, 5, 7)]
    assert source.alone(1).unpadded(0) == (6, 5, 7)
    assert Subvolumes(source, 4).unpadded(0) == (4, 4, 4)


def test_one_at_least() -> None:
    with pytest.raises(hs.DataError, match="multiple=0"):
        Padded(Shapes(), 0)


def shown(path: Path, grid: dict[str, int]) -> list[np.ndarray]:
    with hs.open(
        path, hs.Grid(**grid), batch_size=1, split="all", multiple=4, augment=True
    ) as data:
        return [x.full().numpy() for x, _ in data.epoch(0)]


def test_on_a_grid(tmp_path: Path) -> None:
    decathlon(tmp_path)
    serial = shown(tmp_path, {})
    for found in run_ranks(4, shown, tmp_path, {"depth": 2, "height": 2}):
        for got, expected in zip(found, serial, strict=True):
            np.testing.assert_array_equal(got, expected)
