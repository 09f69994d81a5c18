"""Describes how a block lies in memory: contiguous or channels last, dtype, planes beside it.

In reading order: the memory format of a tensor and the strides that go with it; half precision,
which takes part in sums as float32; `HaloPaddedBuffer`, a block with planes beside it for the
halo of the convolution that reads it; and the layout that all fused kernels share (numbers of
channels, tiles of a pooling, *marks*; see `hyperslab.kernels.epilogue`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

SHAPES_KEPT = 4096
"""Shapes whose strides are known: a network has a few for each of its layers."""

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Keyed by the number of dims."""


def memory_format_of(x: torch.Tensor) -> torch.memory_format:
    """Returns channels last if ``x`` is that and nothing else; contiguous for all other strides."""
    last = CHANNELS_LAST.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


@functools.lru_cache(SHAPES_KEPT)
def strides_in(
    shape: tuple[int, ...], memory_format: torch.memory_format = torch.contiguous_format
) -> tuple[int, ...]:
    """Returns the strides [elements] that torch gives to a new tensor of this memory format.

    >>> strides_in((2, 3, 1, 4), torch.channels_last)
    (12, 1, 12, 3)
    """
    last = memory_format is not torch.contiguous_format
    inner = (1, *range(len(shape) - 1, 1, -1)) if last else range(len(shape) - 1, 0, -1)
    strides = [0] * len(shape)
    step = 1
    for dim in (*inner, 0) if shape else ():
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def new_contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocates a tensor on the CPU: `torch.empty` takes the host twice as long."""
    return torch.empty_strided(shape, strides_in(shape), dtype=dtype)


def dense(x: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Returns ``x`` with the strides that a new tensor of this memory format has.

    A view may have others in a dim of extent one. Torch (2.13) then takes it for another format:
    its batch norm computes wrong gradients, silently.
    """
    strides = strides_in(x.shape, memory_format)
    if x.stride() == strides:
        return x
    if x.is_contiguous(memory_format=memory_format):
        return x.as_strided(x.shape, strides)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=memory_format).copy_(
        x
    )


def dense_as_it_lies(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` as `dense` does, in the memory format that it has."""
    strides = x.stride()
    if strides == strides_in(x.shape):  # nearly always this, or what follows
        return x
    last = CHANNELS_LAST.get(len(strides))
    if last is not None and strides == strides_in(x.shape, last) and not x.is_contiguous():
        return x
    return dense(x, memory_format_of(x))


def with_gradient_in(
    y: torch.Tensor, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """Has the gradient of torch's own result come in a memory format, by default that of ``y``.

    Torch (2.13) computes wrong gradients, silently, of a single sample's instance norm channels
    last, and takes 1.7 times as long to resize back a contiguous one of such a result.
    """
    if y.requires_grad:
        order = memory_format or memory_format_of(y)
        strides = strides_in(y.shape, order)
        # A second derivative may reach ``y`` on no way: then there is none.
        y.register_hook(lambda g: g if g is None or g.stride() == strides else dense(g, order))
    return y


def as_dense(x: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Returns ``x`` without gaps in this format: itself where it is so, whatever its strides say.

    For kernels that are told the format beside the tensor.
    """
    if x.is_contiguous(memory_format=memory_format):
        return x
    return x.contiguous(memory_format=memory_format)


def channels_last_by_strides(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` in channels last, of one channel as well; differentiable.

    One channel lies alike in both formats. Torch then goes by the strides, and has cuDNN convolve a
    CT or MRI volume in contiguous memory.
    """
    x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    return x if x.shape[1] != 1 else x.squeeze(1).unsqueeze(-1).movedim(-1, 1)


HALF = (torch.float16, torch.bfloat16)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Returns float32 for half precision, whose partial sums may overflow, else ``dtype``."""
    return torch.float32 if dtype in HALF else dtype


def as_result(x: torch.Tensor) -> torch.Tensor:
    """Lay it out as a new result: contiguous, with torch's own strides for extents of 1, too."""
    return x.contiguous().view(x.shape)


Block = TypeVar("Block", torch.Tensor, torch.Tensor | None)


def as_float32(block: Block) -> Block:
    """Returns half precision as float32: partial results may overflow or be rounded again."""
    return block.float() if block is not None and block.dtype in HALF else block


@dataclass(slots=True)
class HaloPaddedBuffer:
    """Holds planes before and after a block in its first spatial dim, in one buffer with it.

    The code that computes the block asks for memory of it; the code that reads the block fills the
    planes beside it, where it would otherwise copy the block.
    """

    before: int
    after: int
    buffer: torch.Tensor | None = field(default=None, init=False)

    def empty(self) -> HaloPaddedBuffer:
        """Returns a buffer with as many planes for another block."""
        return HaloPaddedBuffer(self.before, self.after)

    def block(
        self, shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format
    ) -> torch.Tensor | None:
        """Takes memory for a block of this shape, a tensor of its own; once only.

        None where its planes do not lie one after the other: of several samples, or contiguous.
        """
        last = CHANNELS_LAST.get(len(shape))
        if self.buffer is not None or memory_format is not last or shape[0] != 1:
            return None
        samples, channels, extent, *rest = shape
        extents = (samples, channels, self.before + extent + self.after, *rest)
        self.buffer = buffer = torch.empty(extents, dtype=dtype, memory_format=last)
        first = self.before * buffer.stride(2)
        return buffer.as_strided(shape, strides_in(tuple(shape), last), first).data


MOST_TAPS = 256
"""Elements of a window, or of a tile, of which one byte names the largest."""


def memory_format_by_strides(x: torch.Tensor) -> torch.memory_format:
    """Returns channels last if ``x`` is that and not contiguous; contiguous for all other strides.

    A tensor of one voxel a sample is both. Its strides then say which it is: as torch makes them,
    of ones in contiguous memory, of the number of channels in channels last.
    """
    last = CHANNELS_LAST.get(x.dim())
    if last is None or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    if x.is_contiguous() and x.stride(-1) != x.shape[1]:
        return torch.contiguous_format
    return last


def pooled_shape(shape: Sequence[int], pool: Sequence[int]) -> list[int]:
    if not pool:
        return list(shape)
    if len(pool) != len(shape) - 2 or any(e % p for e, p in zip(shape[2:], pool, strict=True)):
        raise ValueError(
            f"tiles {list(pool)} do not cover extents {list(shape[2:])}; pool with torch's own"
        )
    return [*shape[:2], *(e // p for e, p in zip(shape[2:], pool, strict=True))]


def bit_bytes(shape: Sequence[int], slope: float, has_norm: bool) -> int:
    """Counts the bytes of the bits in the marks of a block of this shape; see `epilogue`."""
    return 0 if has_norm or slope == 1 else -(-math.prod(shape) // 8)


def winner_bytes(shape: Sequence[int], pool: Sequence[int], maximum: bool) -> int:
    """Counts the bytes of the winners in the marks of a block of this shape."""
    result = pooled_shape(shape, pool)
    if not (maximum and pool):
        return 0
    if math.prod(pool) > MOST_TAPS:
        raise ValueError(
            f"maximum over tiles {list(pool)} of more than {MOST_TAPS} elements: "
            "pool with torch's own"
        )
    return math.prod(result)


def check_norm(
    shape: Sequence[int], norm: Sequence[int] | None, through: Sequence[int] | None = None
) -> None:
    """Checks the shapes of a normalisation's numbers against the block's channels.

    Raises:
        ValueError: ``norm`` is not (3, 1 or N, C), or ``through`` not (2, ...) beside it.
    """
    rows = None if norm is None else norm[1]
    fits = norm is None or (list(norm) == [3, rows, shape[1]] and rows in (1, shape[0]))
    if not fits or (through is not None and list(through) != [2, rows, shape[1]]):
        raise ValueError(
            f"numbers of shapes {[list(t) for t in (norm, through) if t is not None]} for a block "
            f"of shape {list(shape)}: its norm must be [3, 1 or {shape[0]}, {shape[1]}]"
        )


def shape_or_none(parts: torch.Tensor | None) -> torch.Size | None:
    return None if parts is None else parts.shape


def per_channel(parts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Appends dims: (count, 1 or N, C, 1, ...) in the type in which ``x`` is computed."""
    return parts.to(compute_dtype(x)).view(*parts.shape, *[1] * (x.dim() - 2))


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
