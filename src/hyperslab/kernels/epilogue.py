"""Computes what stands between two convolutions in one pass: normalise, activate, pool.

An *epilogue* is normalisation, activation and pooling of one tensor, each optional::

    u = (x - mean) * scale + shift   per channel (batch norm) or per sample and channel (others)
    a = activation(u)                by its slope below zero: 1 identity, 0 relu, else leaky relu
    y = mean or maximum of a         over tiles that cover the block without overlap

The operators, of which the plain references say what they return::

    torch.ops.hyperslab.channel_sums         what the moments of x are made of
    torch.ops.hyperslab.chain_forward        y, and marks: what its gradient needs
    torch.ops.hyperslab.chain_forward_into   the same, into memory that is there
    torch.ops.hyperslab.chain_backward_sums  sums of du and of du * (x - mean)
    torch.ops.hyperslab.chain_backward       dx

They have no graph: call them inside a `torch.autograd.Function`.

*Marks* are bytes in the order in which the block lies in memory: one *bit* an element of ``x``
(does the activation pass the gradient unscaled?), eight to a byte, and after the last byte one
*winner* an element of a maximum ``y``: the number, row by row, of its element in the tile. Bits
are kept only without a normalisation, which asks for ``x`` in the backward pass anyway.

In reading order: marks and tiles by torch, the plain references, the compiled versions.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hyperslab.kernels.compile import (
    PLANS_KEPT,
    STREAMED,
    TYPE_CODES,
    Library,
    Sizes,
    as_dense_float32,
    blocks_in,
    call,
    parts_for,
    three,
)
from hyperslab.kernels.memory_format import (
    as_dense,
    bit_bytes,
    check_norm,
    compute_dtype,
    memory_format_by_strides,
    new_contiguous,
    per_channel,
    pooled_shape,
    shape_or_none,
    strides_in,
    winner_bytes,
)
from hyperslab.kernels.registry import Operands, declare


def passes_gradient(u: torch.Tensor, slope: float) -> torch.Tensor:
    """Marks where the activation hands a gradient on unscaled, as torch's do."""
    if slope == 1:
        return torch.ones_like(u, dtype=torch.bool)
    return ~(u <= 0) if slope == 0 else u > 0


def in_memory_order(x: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Returns the elements in the order in which they lie in a tensor of this format."""
    if memory_format == torch.contiguous_format:
        return x.reshape(-1)
    return x.movedim(1, -1).reshape(-1)


def from_memory_order(
    elements: torch.Tensor, shape: Sequence[int], memory_format: torch.memory_format
) -> torch.Tensor:
    """Undoes `in_memory_order`: a tensor of this shape and format."""
    if memory_format == torch.contiguous_format:
        return elements.view(*shape)
    return elements.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def bits_of(flags: torch.Tensor) -> torch.Tensor:
    """Packs booleans, eight to a byte, the first one lowest."""
    padded = flags.new_zeros(-(-len(flags) // 8) * 8)
    padded[: len(flags)] = flags
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def flags_of(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Unpacks ``count`` booleans: undo `bits_of`."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, None] >> places & 1).view(-1)[:count].bool()


def elements_of_tiles(x: torch.Tensor, pool: Sequence[int]) -> list[torch.Tensor]:
    """Lists views of ``x``: its elements at each place in a tile, row by row."""
    steps = [[slice(place, None, k) for place in range(k)] for k in pool]
    return [x[(slice(None), slice(None), *place)] for place in itertools.product(*steps)]


def mean_of_tiles(x: torch.Tensor, pool: Sequence[int]) -> torch.Tensor:
    """Averages tiles: (N, C, *extents) -> (N, C, *extents / pool)."""
    first, *others = elements_of_tiles(x, pool)
    return sum(others, first) / math.prod(pool)


def maximum_of_tiles(x: torch.Tensor, pool: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the maxima and their numbers in their tiles (uint8): as in torch the last NaN, else
    the first that is not less than any other.
    """
    best, *others = elements_of_tiles(x, pool)
    winner = torch.zeros_like(best, dtype=torch.uint8)
    for number, other in enumerate(others, start=1):
        wins = (other > best) | other.isnan()
        best = torch.where(wins, other, best)
        winner = torch.where(wins, number, winner)
    return best, winner


def spread_mean(g: torch.Tensor, pool: Sequence[int]) -> torch.Tensor:
    """Spreads each gradient over its tile: the adjoint of `mean_of_tiles`."""
    g = g / math.prod(pool)
    for dim, k in enumerate(pool, start=2):
        g = g.repeat_interleave(k, dim)
    return g


def spread_maximum(g: torch.Tensor, winner: torch.Tensor, pool: Sequence[int]) -> torch.Tensor:
    """Sends each gradient to the winner: the adjoint of `maximum_of_tiles`."""
    shape = [*g.shape[:2], *(e * k for e, k in zip(g.shape[2:], pool, strict=True))]
    spread = g.new_zeros(shape)
    for number, part in enumerate(elements_of_tiles(spread, pool)):
        part.copy_(torch.where(winner == number, g, 0))
    return spread


def channel_sums(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Sums up (3, K) in float64, of which parts and ranks each have their own, to be added up.

    They are the sum of ``x``, its square by the number of values, and the sum of squares around
    their mean. ``groups`` 0: K = C, over batch and space; else K = N * groups, over space and the
    channels of a group.
    """
    wide = x.double()
    if groups == 0:
        slices = wide.transpose(0, 1).flatten(1)
    else:
        rows = x.shape[0] * groups
        slices = wide.reshape(rows, -1) if x.numel() else wide.new_zeros(rows, 0)
    count = max(1, slices.shape[1])
    total = slices.sum(1)
    around = (slices - total[:, None] / count).square().sum(1)
    return torch.stack([total, total * total / count, around])


def chain_forward(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    mark: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``y`` in ``dtype`` and in x's memory format, and its marks (empty without ``mark``).

    ``norm`` is (3, 1 or N, C): mean, scale and shift. Computed in float32, of float64 in float64;
    differentiable.
    """
    check_norm(x.shape, shape_or_none(norm))
    winner_bytes(x.shape, pool, maximum)
    memory_format = memory_format_by_strides(x)
    u = normalized(x, norm)
    y = activated(u, slope)
    kept = []
    if mark and bit_bytes(x.shape, slope, norm is not None):
        kept.append(bits_of(in_memory_order(passes_gradient(u, slope), memory_format)))
    if pool and maximum:
        y, winner = maximum_of_tiles(y, pool)
        if mark:
            kept.append(in_memory_order(winner, memory_format))
    elif pool:
        y = mean_of_tiles(y, pool)
    y = torch.empty_like(y, dtype=dtype, memory_format=memory_format).copy_(y)
    return y, torch.cat(kept) if kept else x.new_empty(0, dtype=torch.uint8)


def chain_forward_into(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    mark: bool,
    y: torch.Tensor,
) -> torch.Tensor:
    """Writes the result into ``y``, which has its shape and memory format; returns the marks."""
    result, marks = torch.ops.hyperslab.chain_forward(x, norm, slope, pool, maximum, mark, y.dtype)
    y.copy_(result)
    return marks


def normalized(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    """Computes ``u`` of the epilogue, in the type in which it is computed."""
    u = x.to(compute_dtype(x))
    if norm is None:
        return u
    mean, scale, shift = per_channel(norm, x)
    return (u - mean) * scale + shift


def activated(u: torch.Tensor, slope: float) -> torch.Tensor:
    """Computes ``a`` of the epilogue."""
    if slope == 1:
        return u
    return torch.relu(u) if slope == 0 else torch.where(u > 0, u, u * slope)


def chain_backward(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor | None,
    norm: torch.Tensor | None,
    through: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Computes ``scale * du + b * (x - mean) + c``, of x's ``shape``, in x's memory format.

    Without ``x`` in g's, which must then be that of the forward pass, by its strides. ``through``
    is (2, 1 or N, C), b and c; without it ``scale * du``, and without ``norm`` du.
    """
    check_norm(shape, shape_or_none(norm), shape_or_none(through))
    memory_format = memory_format_by_strides(g if x is None else x)
    if slope == 1:
        passing = None
    elif norm is None:
        bits = marks[: bit_bytes(shape, slope, has_norm=False)]
        passing = from_memory_order(flags_of(bits, math.prod(shape)), shape, memory_format)
    else:
        assert x is not None, "the bits of a chain with a normalisation come from x"
        passing = passes_gradient(normalized(x, norm), slope)
    dx = gradient_of_u(g, marks, passing, memory_format, slope, pool, maximum, shape)
    if norm is not None:
        mean, scale, _ = per_channel(norm, dx)
        dx = dx * scale
        if through is not None:
            assert x is not None, "b is a factor of x"
            b, c = per_channel(through, dx)
            dx = dx + (x.to(dx.dtype) - mean) * b + c
    return torch.empty_like(dx, dtype=dtype, memory_format=memory_format).copy_(dx)


def gradient_of_u(
    g: torch.Tensor,
    marks: torch.Tensor,
    passing: torch.Tensor | None,
    memory_format: torch.memory_format,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    shape: Sequence[int],
) -> torch.Tensor:
    """Computes ``du``; ``passing``: where the activation hands it on, None: everywhere."""
    if list(g.shape) != pooled_shape(shape, pool):
        raise ValueError(
            f"a gradient of shape {list(g.shape)} for a result of {pooled_shape(shape, pool)}"
        )
    da = g.to(compute_dtype(g))
    if pool and maximum:
        winners = marks[len(marks) - winner_bytes(shape, pool, maximum) :]
        winner = from_memory_order(winners, pooled_shape(shape, pool), memory_format)
        da = spread_maximum(da, winner, pool)
    elif pool:
        da = spread_mean(da, pool)
    if passing is None:
        return da
    return torch.where(passing, da, 0 if slope == 0 else da * slope)


def chain_backward_sums(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor,
    norm: torch.Tensor,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
) -> torch.Tensor:
    """Sums up du and du * (x - mean): (2, 1 or N, C), like ``norm``, in float64.

    ``g`` is the gradient of y; ``marks`` hold winners or nothing.
    """
    check_norm(x.shape, norm.shape)
    passing = None if slope == 1 else passes_gradient(normalized(x, norm), slope)
    du = gradient_of_u(
        g, marks, passing, memory_format_by_strides(x), slope, pool, maximum, x.shape
    ).double()
    products = torch.stack([du, du * (x.to(compute_dtype(x)) - per_channel(norm, x)[0])])
    sums = products.flatten(3).sum(3) if x.dim() > 2 else products
    return sums if norm.shape[1] == len(x) else sums.sum(1, keepdim=True)


POINTERS = struct.Struct("@8q")
"""Packs where the tensors of a ``chain`` in ``chain.h`` begin; 0 for those that there are not."""

EPILOGUE_NUMBERS = struct.Struct("@14qd")
"""The numbers of ``chain`` in ``chain.h``, but for those of the part and of all parts."""

Geometry = tuple[int, ...]
"""blocks, depth, height, width, channels, scale_rows, tiles of three extents, maximum."""


@dataclass(frozen=True, slots=True)
class EpiloguePlan:
    """Keeps what C is told of epilogues on blocks of one shape and memory format."""

    memory_format: torch.memory_format
    strides: Sizes  # of the block in this format
    result: Sizes
    result_strides: Sizes
    bits: int  # bytes of marks
    winners: int
    size: int  # elements of the block
    numbers: bytes

    def check(self, g: torch.Tensor, marks: torch.Tensor) -> None:
        """Checks that there are as many gradients and marks as the C code reads."""
        count = self.bits + self.winners
        if g.shape != self.result or marks.numel() < count or not marks.is_contiguous():
            raise ValueError(
                f"a gradient of shape {list(g.shape)} and {marks.numel()} bytes of marks for a "
                f"chain whose result has shape {list(self.result)} and which keeps {count} bytes"
            )


@functools.lru_cache(PLANS_KEPT)
def epilogue_plan(
    shape: Sizes,
    told: tuple[Sizes, Sizes],
    types: tuple[torch.dtype | None, ...],
    pool: Sizes,
    maximum: bool,
    slope: float,
    norm: Sizes | None,
    through: Sizes | None = None,
) -> EpiloguePlan | None:
    """Plans an epilogue; None where the C code does not know the types or the number of dims.

    Args:
        shape: of the block.
        told: shape and strides of a tensor in the block's memory format.
        types: of x, the result's gradient, and what is written: the result, or dx where there is
            a gradient.
        norm, through: shapes of the numbers of channels.
    """
    check_norm(shape, norm, through)
    result = pooled_shape(shape, pool)
    known = all(dtype is None or dtype in TYPE_CODES for dtype in types)
    if not known or not 2 <= len(shape) <= 5 or not math.prod(shape):
        return None
    memory_format = memory_format_by_strides(torch.empty_strided(*told, device="meta"))
    _, of_gradient, of_written = types
    written = result if of_gradient is None else shape
    size = math.prod(written) * (of_written.itemsize if of_written else 0)
    last = memory_format != torch.contiguous_format
    return EpiloguePlan(
        memory_format=memory_format,
        strides=strides_in(shape, memory_format),
        result=tuple(result),
        result_strides=strides_in(tuple(result), memory_format),
        bits=bit_bytes(shape, slope, norm is not None),
        winners=winner_bytes(shape, pool, maximum),
        size=math.prod(shape),
        numbers=EPILOGUE_NUMBERS.pack(
            *(0 if dtype is None else TYPE_CODES[dtype] for dtype in types),
            *_epilogue_geometry(shape, last, 0 if norm is None else norm[1], pool, maximum),
            size >= STREAMED,
            slope,
        ),
    )


def _epilogue_geometry(
    shape: Sizes, channels_last: bool, rows: int, pool: Sizes, maximum: bool
) -> Geometry:
    """Describes an epilogue on a block of this shape; without pooling a block is one line.

    ``rows``: of the normalisation's numbers, 0 without one.
    """
    samples, channels, *extents = shape
    if not pool:
        voxels = math.prod(extents)
        if rows == 0:
            return (1, 1, 1, samples * channels * voxels, 1, 1, 1, 1, 1, 0)
        extents = [1, 1, voxels]
        pool = (1, 1, 1)
        maximum = False
    rows = max(1, rows)
    blocks, side_by_side = blocks_in(shape, channels_last)
    rows *= channels // side_by_side
    return (blocks, *three(extents), side_by_side, rows, *three(pool), int(maximum))


def _plan(
    given: Operands,
    told: torch.Tensor,
    shape: Sizes,
    types: tuple[torch.dtype | None, ...],
    through: torch.Tensor | None = None,
) -> EpiloguePlan | None:
    """Plans the epilogue that these operands describe; see `epilogue_plan`."""
    norm = given.norm
    return epilogue_plan(
        shape,
        (told.shape, told.stride()),
        types,
        tuple(given.pool),
        given.maximum,
        given.slope,
        None if norm is None else norm.shape,
        None if through is None else through.shape,
    )


with torch.inference_mode(False):
    NO_MARKS = torch.empty(0, dtype=torch.uint8, device="cpu")


def compiled_chain_forward(
    functions: Library, given: Operands
) -> tuple[torch.Tensor, torch.Tensor]:
    x = given.x
    plan = _plan(given, x, x.shape, (x.dtype, None, given.dtype))
    if plan is None:
        return NotImplemented
    y = torch.empty_strided(plan.result, plan.result_strides, dtype=given.dtype)
    return y, _run_forward(functions, plan, given, y)


def compiled_chain_forward_into(functions: Library, given: Operands) -> torch.Tensor:
    x, y = given.x, given.y
    plan = _plan(given, x, x.shape, (x.dtype, None, y.dtype))
    if plan is None or (y.shape, y.stride()) != (plan.result, plan.result_strides):
        return NotImplemented
    return _run_forward(functions, plan, given, y)


def _run_forward(
    functions: Library, plan: EpiloguePlan, given: Operands, y: torch.Tensor
) -> torch.Tensor:
    """Fills ``y``, which is dense, and returns the marks."""
    x = as_dense(given.x, plan.memory_format)
    norm = as_dense_float32(given.norm)
    bits = plan.bits if given.mark else 0
    winners = plan.winners if given.mark else 0
    marks = NO_MARKS
    if bits or winners:
        new = torch.zeros if bits else torch.empty  # rows that share a byte add their bits to it
        marks = new(bits + winners, dtype=torch.uint8)
    first = marks.data_ptr()
    last = first + bits if winners else 0
    scales = 0 if norm is None else norm.data_ptr()
    pointers = POINTERS.pack(x.data_ptr(), 0, y.data_ptr(), bits and first, last, scales, 0, 0)
    call(functions.chain_forward, pointers + plan.numbers, plan.size)
    return marks


def compiled_chain_backward(functions: Library, given: Operands) -> torch.Tensor:
    g, marks, x, norm, through, slope = given[:6]
    shape = tuple(given.shape)
    types = (None if x is None else x.dtype, g.dtype, given.dtype)
    plan = _plan(given, g if x is None else x, shape, types, through)
    reads = norm is not None and (slope != 1 or through is not None)
    if plan is None or (reads and x is None):
        return NotImplemented
    plan.check(g, marks)
    g = as_dense(g, plan.memory_format)
    if reads and x.shape != shape:
        raise ValueError(f"a gradient of a block {list(shape)} by one {list(x.shape)}")
    x = as_dense(x, plan.memory_format) if reads else None
    norm = as_dense_float32(norm)
    through = as_dense_float32(through)
    dx = torch.empty_strided(shape, plan.strides, dtype=given.dtype)
    first = marks.data_ptr()
    pointers = POINTERS.pack(
        0 if x is None else x.data_ptr(),
        g.data_ptr(),
        dx.data_ptr(),
        first if plan.bits else 0,
        first + plan.bits,
        0 if norm is None else norm.data_ptr(),
        0 if through is None else through.data_ptr(),
        0,
    )
    call(functions.chain_backward, pointers + plan.numbers, plan.size)
    return dx


def compiled_channel_sums(functions: Library, given: Operands) -> torch.Tensor:
    x, groups = given
    if x.dtype not in TYPE_CODES or not x.numel():
        return NotImplemented
    memory_format = memory_format_by_strides(x)
    x = as_dense(x, memory_format)
    last = memory_format != torch.contiguous_format
    slices, numbers = _moments_plan(x.shape, x.dtype, groups, last)
    sums = _compiled_sums(functions, (3, slices), x.numel(), numbers, x)
    if last and groups:
        sums = sums.view(3, x.shape[0] * groups, -1).sum(2)
    return sums


@functools.lru_cache(PLANS_KEPT)
def _moments_plan(shape: Sizes, dtype: torch.dtype, groups: int, last: bool) -> tuple[int, bytes]:
    """Counts the sums, and packs the numbers for C. Channels last, groups add up channels' sums."""
    samples, channels = shape[:2]
    if last:
        rows = samples if groups else 1
        blocks = samples
        width = channels
    else:
        blocks = samples * (groups or channels)
        rows = blocks if groups else channels
        width = 1
    line = math.prod(shape) // blocks // width
    numbers = (TYPE_CODES[dtype], 0, 0, blocks, 1, 1, line, width, rows, 1, 1, 1, 0, 0, 1.0)
    return rows * width, EPILOGUE_NUMBERS.pack(*numbers)


def compiled_chain_backward_sums(functions: Library, given: Operands) -> torch.Tensor:
    g, marks, x, norm = given[:4]
    plan = _plan(given, x, x.shape, (x.dtype, g.dtype, None))
    if plan is None:
        return NotImplemented
    plan.check(g, marks)
    g = as_dense(g, plan.memory_format)
    x = as_dense(x, plan.memory_format)
    sums = (2, *norm.shape[1:])
    return _compiled_sums(functions, sums, plan.size, plan.numbers, x, g, marks, norm)


def _compiled_sums(
    functions: Library,
    shape: Sizes,
    size: int,
    numbers: bytes,
    x: torch.Tensor,
    g: torch.Tensor | None = None,
    marks: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs the sums in float64; each part of the work has its own."""
    parts = parts_for(size)
    sums = new_contiguous(shape if parts == 1 else (parts, *shape), torch.float64)
    norm = as_dense_float32(norm)
    pointers = POINTERS.pack(
        x.data_ptr(),
        0 if g is None else g.data_ptr(),
        0,
        0,
        0 if marks is None else marks.data_ptr(),
        0 if norm is None else norm.data_ptr(),
        0,
        sums.data_ptr(),
    )
    call(functions.chain_sums, pointers + numbers, size)
    return sums if parts == 1 else sums.sum(0)


declare(channel_sums, compiled_channel_sums, "sums.c", "tiles")
declare(chain_forward, compiled_chain_forward, "forward.c", "tiles")
declare(chain_forward_into, compiled_chain_forward_into, "forward.c", writes=("y",))
declare(chain_backward_sums, compiled_chain_backward_sums, "sums.c", "tiles")
declare(chain_backward, compiled_chain_backward, "backward.c", "tiles")
