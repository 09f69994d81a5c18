"""Implements the kernels of `hyperslab.comm.exchange` in Triton, where that is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAM_ELEMENTS = 1024  # elements of a program


def pack_boxes(x: torch.Tensor, buffer: torch.Tensor, rows: torch.Tensor, largest: int) -> None:
    """Copy the boxes of ``x`` to the storage of ``buffer``, which is the first piece there."""
    blocks = triton.cdiv(largest, PROGRAM_ELEMENTS)
    count, width = rows.shape
    _pack_boxes[(count * blocks,)](
        x, buffer, rows, blocks, WIDTH=width, SIZE=PROGRAM_ELEMENTS, enable_fp_fusion=False
    )


def add_boxes(
    block: torch.Tensor, buffer: torch.Tensor, rows: torch.Tensor, largest: int, pieces: int
) -> None:
    """Add the pieces in the storage of ``buffer`` to the boxes of ``block``."""
    blocks = triton.cdiv(largest, PROGRAM_ELEMENTS)
    count, width = rows.shape
    _add_boxes[(count * blocks,)](
        block,
        buffer,
        rows,
        blocks,
        WIDTH=width,
        PIECES=pieces,
        EXACT=block.dtype == torch.float64,
        SIZE=PROGRAM_ELEMENTS,
        enable_fp_fusion=False,
    )


@triton.jit
def _inside(row, element):  # type: ignore[no-untyped-def]
    """Compute indices, in five dims, of an element of the box whose extents stand at ``row``."""
    e = tl.load(row + 4)
    i4 = element % e
    rest = element // e
    e = tl.load(row + 3)
    i3 = rest % e
    rest = rest // e
    e = tl.load(row + 2)
    i2 = rest % e
    rest = rest // e
    e = tl.load(row + 1)
    return rest // e, rest % e, i2, i3, i4


@triton.jit
def _at(row, i0, i1, i2, i3, i4):  # type: ignore[no-untyped-def]
    """Elements from a begin, by the strides at ``row``."""
    first = i0 * tl.load(row) + i1 * tl.load(row + 1) + i2 * tl.load(row + 2)
    return first + i3 * tl.load(row + 3) + i4 * tl.load(row + 4)


@triton.jit
def _pack_boxes(  # type: ignore[no-untyped-def]
    x, buffer, rows, blocks, WIDTH: tl.constexpr, SIZE: tl.constexpr
):
    row = rows + tl.program_id(0) // blocks * WIDTH
    element = (tl.program_id(0) % blocks).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    exist = element < tl.load(row)
    i0, i1, i2, i3, i4 = _inside(row + 3, element)
    from_ = tl.load(row + 1) + _at(row + 8, i0, i1, i2, i3, i4)
    # A box is whole in the buffer, where its elements follow each other.
    tl.store(buffer + tl.load(row + 13) + element, tl.load(x + from_, mask=exist), mask=exist)


@triton.jit
def _add_boxes(  # type: ignore[no-untyped-def]
    block,
    buffer,
    rows,
    blocks,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = rows + tl.program_id(0) // blocks * WIDTH
    element = (tl.program_id(0) % blocks).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    exist = element < tl.load(row)
    i0, i1, i2, i3, i4 = _inside(row + 3, element)
    at = tl.load(row + 1) + _at(row + 8, i0, i1, i2, i3, i4)
    kind: tl.constexpr = tl.float64 if EXACT else tl.float32
    total = tl.load(block + at, mask=exist, other=0.0).to(kind)
    for piece in tl.static_range(PIECES):
        here = exist & (element * 0 + piece < tl.load(row + 2))
        lies = row + 13 + 6 * piece
        from_ = tl.load(lies) + _at(lies + 1, i0, i1, i2, i3, i4)
        total += tl.load(buffer + from_, mask=here, other=0.0).to(kind)
    tl.store(block + at, total.to(block.dtype.element_ty), mask=exist)
