"""Random bits of a box against unsigned arithmetic of NumPy (tier: no process)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyperslab.geometry import Box
from hyperslab.kernels.random_bits import reference, uniform_bits

BOXES = [
    ((2, 3, 4, 5), Box((0, 0, 0, 0), (2, 3, 4, 5))),
    ((2, 3, 4, 5), Box((1, 0, 2, 1), (2, 3, 4, 4))),
    ((7, 6), Box((3, 1), (7, 5))),
    ((1, 2, 3, 4, 5), Box((0, 1, 0, 2, 0), (1, 2, 3, 4, 5))),
    ((4, 3, 2), Box((1, 1, 0), (1, 3, 2))),
]


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
