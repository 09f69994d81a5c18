"""Boxes that travel, packed and added by one kernel (tiers: one process; an accelerator)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyperslab.comm.exchange import ALIGNED_ELEMENTS, Boxes
from hyperslab.geometry import Box
from tests.comm import packed
from tests.gpus import ON_A_GPU, needs_a_gpu, needs_interpreter, run_module


@pytest.mark.long
@needs_interpreter
def test_kernels_are_slicing_and_adding() -> None:
    assert run_module(packed.__name__, TRITON_INTERPRET="1") == "equal\n"


@pytest.mark.gpu
@needs_a_gpu
def test_kernels_on_a_gpu_are_slicing_and_adding() -> None:
    assert run_module(packed.__name__, **ON_A_GPU) == "equal\n"


@pytest.mark.parametrize("rank", range(0, 12, 5))
def test_disjoint_boxes_cover_what_the_parts_cover(rank: int) -> None:
    """Each element as often as parts have it."""
    boxes = packed.plan_of(rank).boxes_sent
    table = boxes.table(torch.empty(boxes.own.shape), adding=True)
    counted = np.zeros(boxes.own.shape, dtype=int)
    expected = counted.copy()
    for part in boxes.parts:
        expected[part.slices(boxes.own)] += 1
    for size, begin, covering, *shape in table.rows[:, :8].tolist():
        lo = np.unravel_index(begin, boxes.own.shape)
        counted[tuple(slice(a, a + e) for a, e in zip(lo, shape, strict=True))] += covering
        assert size == np.prod(shape)
    np.testing.assert_array_equal(counted, expected)


def test_pieces_lie_in_one_buffer_apart() -> None:
    boxes = Boxes(Box.whole((3, 5)), (Box((0, 0), (3, 1)), Box((1, 0), (2, 5))))
    first, second = boxes.allocate(torch.zeros(1))
    assert (first.shape, second.shape) == ((3, 1), (1, 5))
    assert second.data_ptr() - first.data_ptr() == 4 * ALIGNED_ELEMENTS
    first.fill_(1)
    second.zero_()
    assert first.sum() == 3


def test_on_the_cpu_each_box_is_torchs() -> None:
    boxes = packed.plan_of(0).boxes_sent
    assert not boxes.take_one_kernel(torch.zeros(boxes.own.shape))
