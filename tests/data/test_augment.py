"""Augmented boxes against boxes of the augmented volume (tier: no process)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperslab.data.sampler import Symmetry
from hyperslab.geometry import Box
from tests.formats.universes import GRIDS, Seat, counts


def augmented(volume: Any, turn: Symmetry) -> Any:
    """By element: axis k of the result is axis order[k] of the volume, perhaps backwards."""
    extents = [volume.shape[1 + axis] for axis in turn.order]
    result = np.empty((volume.shape[0], *extents), volume.dtype)
    for index in itertools.product(*map(range, extents)):
        place = [0, 0, 0]
        for k, axis in enumerate(turn.order):
            place[axis] = extents[k] - 1 - index[k] if turn.flipped[k] else index[k]
        result[(slice(None), *index)] = volume[(slice(None), *place)]
    return result


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
@pytest.mark.parametrize("flipped", [*itertools.product((False, True), repeat=3)], ids=str)
def test_boxes_are_those_of_the_augmented_volume(order: Any, flipped: Any) -> None:
    volume = counts(0, (2, 5, 5, 5))
    turn = Symmetry(order, flipped)
    whole = augmented(volume, turn)
    for extents in GRIDS:
        for seat in Seat.all(**extents):
            box = seat.partition((2, *volume.shape)).box(seat.coords)
            box = Box(box.lo[1:], box.hi[1:])
            stored = turn.stored(box, volume.shape)
            assert stored.size == box.size
            got = turn.apply(volume[stored.slices()])
            np.testing.assert_array_equal(got, whole[box.slices()])


@given(shape=st.tuples(*[st.integers(2, 4)] * 3), key=st.integers(0, 10**6))
def test_what_is_drawn_keeps_the_shape(shape: tuple[int, ...], key: int) -> None:
    turn = Symmetry.draw((1, *shape), key)
    assert augmented(np.zeros((1, *shape)), turn).shape == (1, *shape)
    assert Symmetry.draw((1, *shape), key) == turn


def test_all_symmetries_of_a_cube_are_drawn_evenly() -> None:
    drawn = [Symmetry.draw((4, 6, 6, 6), 0, 1, sample) for sample in range(48 * 40)]
    often = [drawn.count(turn) for turn in set(drawn)]
    assert len(often) == 48
    assert max(often) < 80
    assert {t.order for t in (Symmetry.draw((4, 6, 5, 6), 0, i) for i in range(99))} == {
        (0, 1, 2),
        (2, 1, 0),
    }
