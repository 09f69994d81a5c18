"""What a process with ``TRITON_INTERPRET=1``, or a GPU, runs: boxes against torch."""

from __future__ import annotations

import os

import torch

from hyperslab.comm.exchange import Boxes, ExchangePlan, plan_exchange
from hyperslab.geometry import Cover
from hyperslab.planner.trace import VirtualGrid

SHAPE = (2, 3, 9, 10, 12)
GRID = {"depth": 3, "height": 2, "width": 2}


def plan_of(rank: int) -> ExchangePlan:
    """Of one rank, whose neighbours want two planes of what it owns."""
    grid = VirtualGrid(GRID, rank)
    partition = grid.partition(SHAPE)
    wider = tuple(
        tuple((max(0, lo - 2), min(e, hi + 2)) for lo, hi in spans) if len(spans) > 1 else spans
        for e, spans in zip(SHAPE, partition.cover.intervals, strict=True)
    )
    return plan_exchange(partition, Cover(partition.cover.axes, wider), grid)


def check(boxes: Boxes, dtype: torch.dtype, last: bool) -> None:
    """Packing is slicing; adding is adding one after the other."""
    x = torch.randn(boxes.own.shape, dtype=torch.float64).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
    parts = [part.slices(boxes.own) for part in boxes.parts]
    pieces = boxes.pack(x)
    for piece, part in zip(pieces, parts, strict=True):
        assert piece.is_contiguous()
        assert torch.equal(piece, x[part])
    for piece in pieces:
        piece.copy_(torch.randn(piece.shape, dtype=torch.float64))
    expected = x.clone()
    for piece, part in zip(pieces, parts, strict=True):
        expected[part] += piece
    boxes.add(x, pieces)
    tolerance = 0.0 if dtype in (torch.float32, torch.float64) else 0.02  # rounded once only
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    torch.set_default_device(os.environ.get("HYPERSLAB_TEST_DEVICE", "cpu"))
    torch.manual_seed(0)
    for rank in (0, 6):
        boxes = plan_of(rank).boxes_sent
        assert len(boxes.parts) > 6
        assert boxes.table(torch.empty(boxes.own.shape), adding=True).pieces > 3  # at the corners
        check(boxes, torch.float32, last=False)
        check(boxes, torch.bfloat16 if rank else torch.float64, last=True)
    print("equal")
