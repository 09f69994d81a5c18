"""Packs and adds all boxes of a block that travel, by one kernel on a CUDA device.

A block that is cut along three axes has up to 26 neighbours, and a kernel for each of them costs
more to start than to run. What has to be known of the boxes is a table on the device, which is
made once for a plan and the strides of a block. On the CPU, and without Triton, each box is
handled by torch; that is the reference, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hyperslab.geometry import Box
from hyperslab.kernels.registry import triton_runs

ALIGNED_ELEMENTS = 64  # elements: every box begins on a boundary of at least 128 bytes
MOST_PACKED_DIMS = 5
PACKED_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoxTable:
    """Holds ``rows`` for a kernel, on the device; ``largest``: elements of the largest box."""

    rows: torch.Tensor
    largest: int
    pieces: int  # at most, that meet in one box


@dataclass(frozen=True, slots=True)
class Boxes:
    """Lists the boxes of a block ``own`` that travel, by the order of their messages."""

    own: Box
    parts: tuple[Box, ...]
    _tables: dict[object, BoxTable] = field(default_factory=dict, compare=False, repr=False)

    @property
    def offsets(self) -> list[int]:
        """Return where each begins in one buffer for all [elements], and the buffer's end."""
        sizes = (-(-part.size // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS for part in self.parts)
        return list(itertools.accumulate(sizes, initial=0))

    def allocate(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Allocate a contiguous tensor for each, in one buffer."""
        *begins, end = self.offsets
        buffer = like.new_empty(end)
        return [
            buffer[begin : begin + part.size].view(part.shape)
            for begin, part in zip(begins, self.parts, strict=True)
        ]

    def take_one_kernel(self, block: torch.Tensor) -> bool:
        """Tell whether one kernel handles all boxes of this block."""
        return (
            block.device.type == "cuda"
            and len(self.parts) > 1
            and block.dtype in PACKED_TYPES
            and block.dim() <= MOST_PACKED_DIMS
            and triton_runs()
        )

    def pack(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Copy the boxes of ``x``, each contiguous."""
        from hyperslab.comm.packing_triton import pack_boxes

        pieces = self.allocate(x)
        table = self.table(x, adding=False)
        pack_boxes(x, pieces[0], table.rows, table.largest)
        return pieces

    def add(self, block: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        """Add each piece to its box of ``block``, in place; the pieces are those of `allocate`.

        Where several meet they are added in their order, as one after the other would be.
        """
        from hyperslab.comm.packing_triton import add_boxes

        table = self.table(block, adding=True)
        add_boxes(block, pieces[0], table.rows, table.largest, table.pieces)

    def table(self, block: torch.Tensor, *, adding: bool) -> BoxTable:
        """Return where each box lies in a block of such strides, and where in the buffer; once.

        For ``adding`` the same for the disjoint boxes that the parts fall into: each has the parts
        that cover it, in their order.
        """
        key = (adding, block.stride(), block.device)
        if key not in self._tables:
            alone = [(part, [number]) for number, part in enumerate(self.parts)]
            cells = _split_disjoint(self.parts) if adding else alone
            self._tables[key] = self._write_table(cells, block.stride(), block.device)
        return self._tables[key]

    def _write_table(
        self, cells: Sequence[tuple[Box, list[int]]], strides: Strides, device: torch.device
    ) -> BoxTable:
        """Write a row for each cell, given the numbers of the parts that cover it.

        Its size, its first element in the block, the number of parts, five extents, five strides
        of the block; then, for each part, its first element in the buffer and its five strides.
        """
        most = max(len(covering) for _, covering in cells)
        offsets = self.offsets
        rows = []
        for cell, covering in cells:
            row = [cell.size, _first_element(cell, self.own, strides), len(covering)]
            row += [*_pad_to_dims(cell.shape, 1), *_pad_to_dims(strides, 0)]
            for number in covering:
                part = self.parts[number]
                lies = [math.prod(part.shape[dim + 1 :]) for dim in range(part.ndim)]
                row.append(offsets[number] + _first_element(cell, part, lies))
                row += _pad_to_dims(lies, 0)
            rows.append(row + [0] * (6 * (most - len(covering))))
        table = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
        return BoxTable(table, max(row[0] for row in rows), most)


def _first_element(part: Box, box: Box, strides: Sequence[int]) -> int:
    """Return the first element of ``part`` in a tensor that holds ``box``."""
    return sum((p - b) * s for p, b, s in zip(part.lo, box.lo, strides, strict=True))


def _pad_to_dims(values: Sequence[int], fill: int) -> list[int]:
    return [fill] * (MOST_PACKED_DIMS - len(values)) + list(values)


def _split_disjoint(parts: Sequence[Box]) -> list[tuple[Box, list[int]]]:
    """Boxes that tile the union of ``parts``, each with the numbers of those that cover it."""
    ends = [sorted({e for part in parts for e in part.interval(d)}) for d in range(parts[0].ndim)]
    cells = []
    for intervals in itertools.product(*(list(itertools.pairwise(e)) for e in ends)):
        cell = Box.of(list(intervals))
        covering = [number for number, part in enumerate(parts) if part.contains(cell)]
        if covering:
            cells.append((cell, covering))
    return cells
