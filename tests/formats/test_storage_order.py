"""Orders of stored dims (tier: no process)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hyperslab.formats.storage_order import StorageOrder
from hyperslab.geometry import Box

VOLUME = np.arange(3 * 4 * 5 * 6).reshape(3, 4, 5, 6)


@pytest.mark.parametrize("dims", [*map("".join, itertools.permutations("CDHW"))])
@pytest.mark.parametrize("flipped", ["", "D", "HW", "CDHW"])
def test_a_box_of_the_file_is_the_box_of_the_volume(dims: str, flipped: str) -> None:
    order = StorageOrder(dims, flipped)
    stored = VOLUME.transpose(["CDHW".index(dim) for dim in dims])
    stored = np.flip(stored, [dims.index(dim) for dim in flipped])
    assert order.volume_shape(stored.shape) == VOLUME.shape
    assert order.stored_shape(VOLUME.shape) == stored.shape
    box = Box((1, 0, 2, 3), (3, 1, 4, 4))
    found = stored[order.to_file(box, stored.shape).slices()]
    np.testing.assert_array_equal(order.to_volume(found), VOLUME[box.slices()])
    np.testing.assert_array_equal(order.from_volume(VOLUME), stored)


@pytest.mark.parametrize("dims", [*map("".join, itertools.permutations("DHW"))])
def test_files_without_channels(dims: str) -> None:
    order = StorageOrder(dims, flipped=dims[0])
    stored = np.flip(VOLUME[0].transpose(["DHW".index(dim) for dim in dims]), 0)
    box = Box((0, 0, 2, 3), (1, 1, 4, 4))
    found = stored[order.to_file(box, stored.shape).slices()]
    np.testing.assert_array_equal(order.to_volume(found), VOLUME[:1][box.slices()])
    np.testing.assert_array_equal(order.from_volume(VOLUME[:1]), stored)
    assert order.reversed == StorageOrder(dims[::-1], flipped=dims[0])


@pytest.mark.parametrize(
    ("dims", "flipped"), [("CDH", ""), ("CDHH", ""), ("DHWX", ""), ("DHW", "C")]
)
def test_what_is_no_order_is_refused(dims: str, flipped: str) -> None:
    with pytest.raises(ValueError, match=dims):
        StorageOrder(dims, flipped)
