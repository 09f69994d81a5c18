"""Random bits of a box against unsigned arithmetic of NumPy (tier: no process)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hyperslab.geometry import Box
from hyperslab.kernels.random_bits import uniform_bits

BOXES = [
    ((2, 3, 4, 5), Box((0, 0, 0, 0), (2, 3, 4, 5))),
    ((2, 3, 4, 5), Box((1, 0, 2, 1), (2, 3, 4, 4))),
    ((7, 6), Box((3, 1), (7, 5))),
    ((1, 2, 3, 4, 5), Box((0, 1, 0, 2, 0), (1, 2, 3, 4, 5))),
    ((4, 3, 2), Box((1, 1, 0), (1, 3, 2))),
]


def reference(shape: Sequence[int], box: Box, seed: int) -> NDArray[np.uint32]:
    """Draws the same integers by unsigned arithmetic, which wraps around, for the whole volume."""
    index = np.arange(math.prod(shape), dtype=np.uint64).reshape(tuple(shape))[box.slices()]
    outer, inner = np.divmod(index, np.uint64(math.prod(shape[-2:])))

    key = outer * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    key = key ^ (key >> np.uint64(31))
    low = key.astype(np.uint32)
    high = (key >> np.uint64(32)).astype(np.uint32)
    return mixed(mixed(inner.astype(np.uint32) ^ low) + high) & np.uint32(0x7FFFFFFF)


def mixed(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    return bits ^ (bits >> np.uint32(16))


@pytest.mark.parametrize("seed", [0, 1, 2**62 - 1, 123456789012345])
@pytest.mark.parametrize(("shape", "box"), BOXES, ids=str)
def test_equals_the_reference(shape: tuple[int, ...], box: Box, seed: int) -> None:
    got = uniform_bits(shape, box, seed, torch.device("cpu"))
    assert got.dtype == torch.int32
    np.testing.assert_array_equal(got.numpy(), reference(shape, box, seed).astype(np.int32))


def test_a_box_has_its_part_of_the_whole() -> None:
    shape, box = BOXES[1]
    whole = uniform_bits(shape, Box.whole(shape), 5, torch.device("cpu"))
    assert torch.equal(whole[box.slices()], uniform_bits(shape, box, 5, torch.device("cpu")))
