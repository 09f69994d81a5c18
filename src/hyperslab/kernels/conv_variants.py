"""Implements each pass of a convolution in several ways, of which `registry` chooses one.

A `ConvVariant` is one implementation of a convolution pass and the problems it supports. In
reading order: the taps of the last dim as channels (oneDNN's kernels for bfloat16 work on
several channels at a time: of one channel they do the work of many); products of matrices, a
window in each row; direct kernels in bfloat16; Winograd's filtering; bfloat16 in float32, slab by
slab; the variants of the forward pass, of the input's gradient and of the weight's gradient.

As matrices: where windows tile the volume nothing is there twice, and channels last a kernel of
one voxel needs no copy at all. The gradient of the weight is one product of long rows also
where windows overlap (im2col): of small volumes with many channels that takes a third of
oneDNN's time in bfloat16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.kernels.compile import depthwise_is_known, direct_is_known, winograd_is_known
from hyperslab.kernels.conv_problem import (
    IM2COL,
    PROBLEMS,
    WINOGRAD_DTYPES,
    WINOGRAD_KERNEL,
    Problem,
    Task,
    aten_convolution,
    aten_gradients,
    in_channels_last,
    in_contiguous,
    torch_uses_im2col,
)
from hyperslab.kernels.memory_format import CHANNELS_LAST, dense
from hyperslab.util.torch_internals import (
    onednn_transposed_convolution,
    processor_has_matrix_tiles,
)

MOST_IM2COL_BYTES = 64 << 20
"""[B] Columns of im2col: as many times a sample's volume as the kernel has taps, at most."""


def torch_memory_is_small(problem: Problem) -> bool:
    """Says if torch's choice needs no more than `MOST_IM2COL_BYTES` beside the volumes.

    Torch chooses im2col by few of the extents; of a block it may where it does not of the whole.
    """
    if problem.dtype != torch.float32:
        return True
    if not torch_uses_im2col(problem.x, problem.weight, problem.options):
        return True
    taps = math.prod(problem.kernel) * problem.x[1]
    return 4 * taps * math.prod(problem.y[2:]) <= MOST_IM2COL_BYTES


@dataclass(frozen=True, slots=True)
class ConvVariant:
    """Describes one implementation of a convolution pass and the problems it supports.

    ``run`` takes blocks in channels last, the problem last, and gives such blocks.

    ``file`` is where it is written. A ``nested`` one gets `conv.dispatch` as well, for passes that
    it is made of.
    """

    run: Callable[..., Any]
    legal: Callable[[Problem], bool] = lambda _: True
    file: str = "conv_variants.py"
    nested: bool = False


WeightAndBias = tuple[torch.Tensor | None, torch.Tensor | None]
"""Gradients of weight and bias."""

ConvVariants = Mapping[str, ConvVariant]
"""All implementations of one pass, by name."""


def has_columns(problem: Problem) -> bool:
    """Asks for one channel, several taps, and nothing that oneDNN gets wrong: see `guarded`."""
    lone = problem.x[1] == problem.options.groups == 1
    if not lone or problem.kernel[-1] == 1:
        return False
    columns = in_columns(problem)
    return not columns.outreaches and not columns.fills_tiles


@functools.lru_cache(PROBLEMS)
def in_columns(problem: Problem) -> Problem:
    """Returns the same pass with columns for channels."""
    taps = problem.kernel[-1]
    return problem.but(
        x=(problem.x[0], taps, *problem.x[2:-1], problem.y[-1]),
        weight=(problem.weight[0], taps, *problem.kernel[:-1], 1),
        stride=(*problem.options.stride[:-1], 1),
        dilation=(*problem.options.dilation[:-1], 1),
        padding=(*problem.padding[:-1], 0),
    )


def columns_of(x: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Turns (N, 1, ..., W) into (N, taps, ..., outputs), channels last."""
    padding = problem.padding[-1]
    step = problem.options.dilation[-1]
    span = step * (problem.kernel[-1] - 1) + 1
    lines = F.pad(x.squeeze(1), (padding, padding))
    windows = lines.unfold(-1, span, problem.options.stride[-1])[..., ::step]
    return in_channels_last(windows.contiguous().movedim(-1, 1))


MOST_WINDOWS = 8 << 20
"""[B] Windows that are there at a time: a voxel is in as many as the kernel has taps."""


def windows_tile(problem: Problem) -> bool:
    """Says if the windows cover the volume without overlap."""
    options = problem.options
    return (
        options.groups == 1
        and set(options.dilation) == {1}
        and problem.kernel == options.stride
        and not any(problem.padding)
        and not any(problem.left_over)
    )


def windows_are_small(problem: Problem) -> bool:
    """Says if windows overlap, and those of a sample take no more than `MOST_WINDOWS`."""
    if problem.options.groups > 1 or math.prod(problem.kernel) == 1:
        return False
    return not windows_tile(problem) and _samples_at_once(problem) > 0


def _samples_at_once(problem: Problem) -> int:
    of_a_sample = math.prod(problem.weight[1:]) * math.prod(problem.y[2:])
    return MOST_WINDOWS // (of_a_sample * problem.dtype.itemsize)


def is_voxelwise(problem: Problem) -> bool:
    """Says if every window is one voxel, and every voxel a window."""
    return windows_tile(problem) and math.prod(problem.kernel) == 1


def by_voxels(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """Computes the forward pass, or the input's gradient, as a product of rows of voxels."""
    forward = problem.task == "forward"
    matrix = weight.flatten(1)
    rows = F.linear(_voxel_rows(x), matrix if forward else matrix.t(), bias)
    samples, channels, *extents = problem.y if forward else problem.x
    return in_channels_last(rows.view(samples, *extents, channels).movedim(-1, 1))


def input_by_matrix(
    g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    # One row an output channel, with the columns of `_window_rows`.
    windows = _voxel_rows(g) @ weight.movedim(1, -1).reshape(weight.shape[0], -1)
    extents = problem.y[2:]
    n = len(extents)
    x = windows.view(problem.y[0], *extents, *problem.kernel, problem.x[1])
    order = [0, *(i for dim in range(1, n + 1) for i in (dim, dim + n)), 2 * n + 1]
    samples, channels, *volume = problem.x
    x = x.permute(order).reshape(samples, *volume, channels).movedim(-1, 1)
    x = in_channels_last(x)
    return x if bias is None else x.add_(bias.view(-1, *[1] * n))


def weight_by_matrix(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows = _voxel_rows(g)
    windows = _window_rows(x, problem) if math.prod(problem.kernel) > 1 else _voxel_rows(x)
    matrix = rows.t() @ windows
    dw = matrix.view(problem.weight[0], *problem.kernel, problem.weight[1]).movedim(-1, 1)
    return dw, rows.sum(0) if with_bias else None  # the code that keeps it puts it into order


def weight_by_samples(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> WeightAndBias:
    """Computes the gradients from some samples at a time; their sum in float32."""
    size = _samples_at_once(problem)
    dw = None
    for some, of_some in zip(x.split(size), g.split(size), strict=True):
        part = replace(problem, x=tuple(some.shape))
        product, _ = weight_by_matrix(some, of_some, weight, False, part)
        dw = product if dw is None else dw.float().add_(product)
    assert dw is not None
    return dw.to(x.dtype), _voxel_rows(g).sum(0) if with_bias else None


def _voxel_rows(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def _window_rows(x: torch.Tensor, problem: Problem) -> torch.Tensor:
    options = problem.options
    if any(options.padding):
        x = F.pad(x, options.margins)
    windows = x.movedim(1, -1)
    steps = zip(problem.kernel, options.stride, options.dilation, strict=True)
    for dim, (taps, stride, dilation) in enumerate(steps, 1):
        span = dilation * (taps - 1) + 1
        windows = windows.unfold(dim, span, stride)[..., ::dilation]
    n = len(problem.kernel)
    return windows.movedim(n + 1, -1).reshape(x.shape[0] * math.prod(problem.y[2:]), -1)


MOST_DIRECT_CHANNELS = 32
"""Channels of either volume up to which it may be faster than oneDNN, which fills up 16."""

DIRECT_CACHE_BYTES = 32 << 20
"""[B] Planes that the kernel may keep beside the volumes."""


def fits_direct_bf16(problem: Problem) -> bool:
    """Asks for steps of one voxel, and a processor that has the instructions."""
    options = problem.options
    volumes = (problem.x, problem.y)
    plane = max(2 * volume[1] * math.prod(volume[-2:]) for volume in volumes)  # but for a margin
    return (
        problem.dtype == torch.bfloat16
        and options.groups == 1
        and set(options.stride) == set(options.dilation) == {1}
        and max(volume[1] for volume in volumes) <= MOST_DIRECT_CHANNELS
        and min(_direct_padding(problem)) >= 0
        and problem.kernel[0] * plane <= DIRECT_CACHE_BYTES
        and direct_is_known()
    )


def forward_by_direct_bf16(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    return torch.ops.hyperslab.direct_convolution(x, weight, bias, problem.options.padding, False)


def input_by_direct_bf16(
    g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """Computes the input's gradient: a convolution by the kernel turned round."""
    return torch.ops.hyperslab.direct_convolution(g, weight, bias, _direct_padding(problem), True)


def weight_by_direct_bf16(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> WeightAndBias:
    dw, db = torch.ops.hyperslab.direct_convolution_gradient(
        x, g, problem.kernel, problem.options.padding, with_bias
    )
    return dw, db if with_bias else None


def _direct_padding(problem: Problem) -> list[int]:
    return [k - 1 - p for k, p in zip(problem.kernel, problem.options.padding, strict=True)]


LEAST_WINOGRAD_CHANNELS = 8
"""Channels of either volume: the kernel works on eight or sixteen at a time."""

WINOGRAD_CACHE_BYTES = 32 << 20
"""[B] Products of 64 kinds and 27 taps that each thread keeps; channels not filled up."""


def fits_winograd(problem: Problem) -> bool:
    """Asks for steps of one voxel, and a processor that has the instructions."""
    options = problem.options
    channels = problem.x[1], problem.y[1]
    return (
        problem.dtype in WINOGRAD_DTYPES
        and options.groups == 1
        and set(options.stride) == set(options.dilation) == {1}
        and problem.kernel == WINOGRAD_KERNEL
        and min(channels) >= LEAST_WINOGRAD_CHANNELS
        and 4 * (64 + 27) * channels[0] * channels[1] <= WINOGRAD_CACHE_BYTES
        and winograd_is_known()
    )


def weight_by_winograd(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> WeightAndBias:
    dw, db = torch.ops.hyperslab.winograd_gradient(x, g, problem.options.padding, with_bias)
    return dw, db if with_bias else None


def is_depthwise(problem: Problem) -> bool:
    """Says if every channel is convolved by itself, in three dims."""
    return len(problem.kernel) == 3 and problem.weight[:2] == (problem.options.groups, 1)


def fits_depthwise(problem: Problem) -> bool:
    """Asks for one result a channel, steps of one voxel, and the processor's instructions."""
    one = is_depthwise(problem) and set(problem.options.stride) == {1}
    return one and problem.dtype in WINOGRAD_DTYPES and depthwise_is_known()


def weight_by_channel(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> WeightAndBias:
    """Computes the weight's gradient in one pass over both volumes, the bias's in another."""
    steps = problem.options.padding, problem.options.dilation
    dw = torch.ops.hyperslab.depthwise_gradient(x, g, problem.kernel, *steps)
    db = torch.ops.hyperslab.channel_sums(g, 0)[0].to(g.dtype) if with_bias else None
    return dw, db


WIDENED_BYTES = 32 << 20
"""[B] What a slab of both volumes takes in float32, if a plane is not more."""

Dispatch = Callable[..., Any]
"""Runs a pass by the implementation that the rule chooses: `conv.dispatch`."""


def is_bfloat16(problem: Problem) -> bool:
    """Asks for what can be computed in float32 and rounded."""
    return problem.dtype == torch.bfloat16


def forward_widened(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    problem: Problem,
    dispatch: Dispatch,
) -> torch.Tensor:
    """Convolves in float32, a slab of the result at a time."""
    y = _empty_in_channels_last(problem.y, x)
    wide, wide_bias = weight.float(), None if bias is None else bias.float()
    for first, end in _slabs(problem, problem.y[2]):
        slab, block = _read_by(problem, x, first, end)
        y[:, :, first:end] = dispatch(slab, block, wide, wide_bias)
    return y


def weight_widened(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    with_bias: bool,
    problem: Problem,
    dispatch: Dispatch,
) -> WeightAndBias:
    """Adds up the gradients of weight and bias in float32, a slab of ``g`` at a time."""
    wide = weight.float()
    dw, db = torch.zeros_like(wide), wide.new_zeros(len(wide)) if with_bias else None
    for first, end in _slabs(problem, problem.y[2]):
        slab, block = _read_by(problem, x, first, end)
        dw_slab, db_slab = dispatch(slab, block, _planes(g, first, end), wide, with_bias)
        dw += dw_slab
        if db is not None:
            db += db_slab
    return dw.to(x.dtype), None if db is None else db.to(x.dtype)


def input_widened(
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    problem: Problem,
    dispatch: Dispatch,
) -> torch.Tensor:
    """Computes the input's gradient in float32, a slab of it at a time."""
    if can_flip(problem):
        turned = turned_kernel(weight, problem.options.groups)
        return forward_widened(g, turned, bias, flipped(problem), dispatch)
    x = _empty_in_channels_last(problem.x, g)
    wide = weight.float()
    stride, padding_in_depth = problem.options.stride[0], problem.padding[0]
    reach = problem.options.dilation[0] * (problem.kernel[0] - 1)
    for first, end in _slabs(problem, problem.x[2], stride):
        # The windows that reach the slab, and all planes that they read: some are beyond it.
        one = max(0, -(-(first + padding_in_depth - reach) // stride))
        last = min(problem.y[2] - 1, (end - 1 + padding_in_depth) // stride)
        part = g.new_zeros(*problem.x[:2], end - first, *problem.x[3:], dtype=torch.float32)
        if one <= last:
            slab = _in_float32(problem, (last - one) * stride + reach + 1)
            read = dispatch(slab, _planes(g, one, last + 1), wide, None)
            begin = one * stride - padding_in_depth
            part = _planes(read, first - begin, end - begin)
        if bias is not None:
            part += bias.float().view(-1, *[1] * len(problem.kernel))
        x[:, :, first:end] = part
    return x


def _slabs(problem: Problem, planes: int, step: int = 1) -> list[tuple[int, int]]:
    """Cuts so many planes of one of the volumes into slabs of whole steps."""
    nbytes = 4 * (math.prod(problem.x) + math.prod(problem.y))
    thick = max(1, WIDENED_BYTES * planes // nbytes // step) * step
    return [(first, min(first + thick, planes)) for first in range(0, planes, thick)]


def _read_by(
    problem: Problem, x: torch.Tensor, first: int, end: int
) -> tuple[Problem, torch.Tensor]:
    """Returns the pass for some planes of the result, and what its windows read, in float32."""
    stride = problem.options.stride[0]
    planes = (end - 1 - first) * stride + problem.options.dilation[0] * (problem.kernel[0] - 1) + 1
    begin = first * stride - problem.padding[0]
    return _in_float32(problem, planes), _planes(x, begin, begin + planes)


@functools.lru_cache(PROBLEMS)
def _in_float32(problem: Problem, planes: int) -> Problem:
    """Returns the pass over so many planes of the input, padded in the other dims only."""
    x = (*problem.x[:2], planes, *problem.x[3:])
    return problem.but(x=x, dtype=torch.float32, padding=(0, *problem.padding[1:]))


def _planes(x: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Returns some planes of a block in float32, channels last; beyond it there are zeros."""
    before, after = max(-first, 0), max(end - x.shape[2], 0)
    part = x[:, :, first + before : end - after].float()
    if before or after:
        part = F.pad(part, [0, 0] * (x.dim() - 3) + [before, after])
    return in_channels_last(part)


def _empty_in_channels_last(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    last = CHANNELS_LAST[len(shape)]
    return dense(torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=last), last)


def forward_by_onednn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """Calls oneDNN by name, whatever torch would choose."""
    options = problem.options
    y = torch.mkldnn_convolution(
        x, weight, bias, options.padding, options.stride, options.dilation, options.groups
    )
    return in_channels_last(y)


def in_contiguous_memory(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Makes a pass of one that takes contiguous operands."""

    def contiguous(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
    ) -> torch.Tensor:
        return run(in_contiguous(x), weight.contiguous(), bias, problem)

    return contiguous


def forward_in_columns(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """Calls oneDNN with the taps of the last dim as channels."""
    turned = weight.movedim(-1, 1).movedim(2, -1).contiguous()  # (out, taps, ..., 1)
    return forward_by_onednn(columns_of(x, problem), turned, bias, in_columns(problem))


FORWARD_VARIANTS: ConvVariants = {
    "widened": ConvVariant(forward_widened, is_bfloat16, nested=True),
    "onednn": ConvVariant(forward_by_onednn, lambda problem: not problem.hangs),
    "voxels": ConvVariant(by_voxels, is_voxelwise),
    "contiguous": ConvVariant(
        in_contiguous_memory(forward_by_onednn), lambda problem: not problem.hangs
    ),
    "columns": ConvVariant(forward_in_columns, has_columns),
    "registers": ConvVariant(
        forward_by_direct_bf16, fits_direct_bf16, "conv_in_c.py, csrc/direct.c"
    ),
}


def input_by_torch(
    g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """Leaves the choice to torch: im2col for small blocks in float32."""
    options = problem.options._replace(output_padding=problem.left_over)
    return in_channels_last(aten_convolution(g, weight, bias, options))


def input_by_onednn(
    g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """Calls oneDNN by name, whatever torch would choose."""
    options = problem.options
    given = (options.padding, problem.left_over, options.stride, options.dilation, options.groups)
    x = onednn_transposed_convolution()(g, weight, bias, *given, "none", [], "")
    return in_channels_last(x)


def onednn_has_input_pass(problem: Problem) -> bool:
    """Asks for no groups, no dilation and no rows beyond the windows: oneDNN has none of these."""
    options = problem.options
    reached = all(r < s for r, s in zip(problem.left_over, options.stride, strict=True))
    return options.groups == 1 and set(options.dilation) == {1} and reached


def input_by_flipped_kernel(
    g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """Convolves ``g`` with the kernel turned round: the forward pass is the faster one."""
    turned = turned_kernel(weight, problem.options.groups)
    return forward_by_onednn(g, turned, bias, flipped(problem))


TAPS_BY_PARITY = torch.tensor([2, 0, 3, 1], device="cpu")
"""Lists the taps of three of which even results are made, then odd ones; the fourth is zero."""


def input_by_parity(
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    problem: Problem,
    dispatch: Dispatch,
) -> torch.Tensor:
    """Makes the results between two neighbours of ``g``, even and odd, channels of one result."""
    filters, channels, *kernel = weight.shape
    n = len(kernel)
    taps = F.pad(weight, [0, 1] * n)
    for dim in range(2, n + 2):
        taps = taps.index_select(dim, TAPS_BY_PARITY)
    order = [*range(2, 2 * n + 2, 2), 1, 0, *range(3, 2 * n + 3, 2)]
    taps = taps.view(filters, channels, *[2] * (2 * n)).permute(order)
    taps = in_channels_last(taps.reshape(-1, filters, *[2] * n))
    shapes = {"x": tuple(problem.y), "weight": tuple(taps.shape)}
    forward = problem.but(task="forward", **shapes, stride=(1,) * n, padding=(1,) * n)
    bias = None if bias is None else bias.repeat(2**n)
    pairs = dispatch(forward, g, taps, bias).movedim(1, -1)
    pairs = pairs.unflatten(-1, (*[2] * n, channels))
    order = [0, *(i for dim in range(1, n + 1) for i in (dim, dim + n)), 2 * n + 1]
    doubled = [2 * extent for extent in forward.y[2:]]
    x = pairs.permute(order).reshape(len(g), *doubled, channels).movedim(-1, 1)
    for dim, (padding, extent) in enumerate(zip(problem.padding, problem.x[2:], strict=True), 2):
        x = x.narrow(dim, padding, extent)
    return in_channels_last(x)


def steps_by_two(problem: Problem) -> bool:
    """Asks for windows of three voxels in steps of two, in every dim."""
    options = problem.options
    kinds = set(problem.kernel), set(options.stride), set(options.dilation)
    return options.groups == 1 and kinds == ({3}, {2}, {1})


def turned_kernel(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Returns the kernel turned round, inputs and outputs changing places."""
    dims = tuple(range(2, weight.dim()))
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(dims)


def input_in_float32(
    g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """Convolves in float32 with the kernel turned round: of small volumes and few products."""
    wide = None if bias is None else bias.float()
    return input_by_flipped_kernel(g.float(), weight.float(), wide, problem).to(problem.dtype)


def is_flipped_in_float32(problem: Problem) -> bool:
    """Asks for a depthwise problem in half precision that could be flipped in float32."""
    half = problem.dtype == torch.bfloat16 and is_depthwise(problem)
    return half and can_flip(replace(problem, dtype=torch.float32))


def can_flip(problem: Problem) -> bool:
    """Asks for no stride, no more padding than the kernel reaches, and nothing of `guarded`."""
    if set(problem.options.stride) != {1} or min(_flipped_padding(problem)) < 0:
        return False
    forward = flipped(problem)
    return not (forward.outreaches or forward.fills_tiles or forward.hangs)


@functools.lru_cache(PROBLEMS)
def flipped(problem: Problem) -> Problem:
    """Returns the forward pass that computes the same."""
    groups = problem.options.groups
    weight = (problem.x[1], problem.weight[0] // groups, *problem.kernel)
    padding = tuple(_flipped_padding(problem))
    return problem.but(task="forward", x=tuple(problem.y), weight=weight, padding=padding)


def _flipped_padding(problem: Problem) -> list[int]:
    steps = zip(problem.kernel, problem.padding, problem.options.dilation, strict=True)
    return [d * (k - 1) - p for k, p, d in steps]


INPUT_VARIANTS: ConvVariants = {
    "widened": ConvVariant(input_widened, is_bfloat16, nested=True),
    "flipped": ConvVariant(input_by_flipped_kernel, can_flip),
    "float32": ConvVariant(input_in_float32, is_flipped_in_float32),
    "onednn": ConvVariant(input_by_onednn, onednn_has_input_pass),
    "contiguous": ConvVariant(in_contiguous_memory(input_by_onednn), onednn_has_input_pass),
    "torch": ConvVariant(input_by_torch, torch_memory_is_small),
    "matrix": ConvVariant(input_by_matrix, windows_tile),
    "parity": ConvVariant(input_by_parity, steps_by_two, nested=True),
    "voxels": ConvVariant(by_voxels, is_voxelwise),
    "registers": ConvVariant(input_by_direct_bf16, fits_direct_bf16, "conv_in_c.py, csrc/direct.c"),
}


def overruns(problem: Problem) -> bool:
    """Says if oneDNN's weight gradient may damage memory on this processor."""
    return processor_has_matrix_tiles() and problem.overruns_tiles


def torch_has_weight_pass(problem: Problem) -> bool:
    """Asks for what torch computes right, with little memory."""
    return torch_memory_is_small(problem) and not overruns(problem)


def weight_by_torch(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> WeightAndBias:
    """Leaves the choice to torch: im2col for small blocks in float32."""
    return aten_gradients(g, x, weight, problem.options, [False, True, with_bias])[1:]


def weight_contiguous(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> WeightAndBias:
    x = in_contiguous(x)
    if x.dtype == torch.float32:
        x = x.to_mkldnn()  # chooses the kernel; the gradients are ordinary tensors
    like = weight if weight.is_contiguous() else torch.empty(weight.shape, dtype=weight.dtype)
    return weight_by_torch(x, in_contiguous(g), like, with_bias, problem)


def weight_in_halves(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> WeightAndBias:
    """Makes a batch of the two halves of the volume, with what windows share: torch takes oneDNN.

    It is the one way to oneDNN's kernel for channels last: what ``to_mkldnn`` makes is contiguous.
    """
    span, starts = _halves(problem)
    shape = (2, x.shape[1], span, *x.shape[3:])
    parts = torch.empty(shape, dtype=x.dtype, memory_format=CHANNELS_LAST[x.dim()])
    for part, lo in zip(parts, starts, strict=True):
        first = max(lo, 0)
        end = min(lo + span, x.shape[2])
        part[:, : first - lo].zero_()
        part[:, first - lo : end - lo] = x[0, :, first:end]
        part[:, end - lo :].zero_()
    batch = g[0].unflatten(1, (2, -1)).transpose(0, 1)
    options = problem.options._replace(padding=(0, *problem.padding[1:]))
    return aten_gradients(batch, parts, weight, options, [False, True, with_bias])[1:]


def has_halves(problem: Problem) -> bool:
    """Asks for float32, one sample and even outputs, each half of which reads something."""
    if problem.dtype != torch.float32 or problem.x[0] != 1 or problem.y[2] % 2:
        return False
    span, starts = _halves(problem)
    return all(lo + span > 0 and lo < problem.x[2] for lo in starts)


def _halves(problem: Problem) -> tuple[int, tuple[int, int]]:
    """Counts the planes that each half of the outputs reads, and names the first."""
    stride = problem.options.stride[0]
    half = problem.y[2] // 2
    span = (half - 1) * stride + problem.options.dilation[0] * (problem.kernel[0] - 1) + 1
    return span, (-problem.padding[0], half * stride - problem.padding[0])


def takes_im2col(problem: Problem) -> bool:
    """Says if torch computes by im2col what oneDNN would do in a tenth of the time."""
    return (
        problem.dtype == torch.float32
        and problem.options.groups == 1
        and problem.x[0] == 1
        and torch.Size(problem.x[:4]).numel() <= IM2COL
    )


def weight_turned(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    with_bias: bool,
    problem: Problem,
    dispatch: Dispatch,
) -> WeightAndBias:
    """Lets depth and height change places, so that there are more planes than rows."""
    turned = [in_channels_last(t.transpose(2, 3)) for t in (x, g, weight)]
    dw, db = dispatch(problem.turned, *turned, with_bias)
    return dw.transpose(2, 3), db


def fits_turned(problem: Problem) -> bool:
    """Asks for what oneDNN computes right only with depth and height exchanged."""
    return problem.overruns_tiles and not problem.turned.overruns_tiles


WEIGHT_VARIANTS: ConvVariants = {
    "turned": ConvVariant(weight_turned, fits_turned, nested=True),
    "widened": ConvVariant(weight_widened, is_bfloat16, nested=True),
    "torch": ConvVariant(weight_by_torch, torch_has_weight_pass),
    "halves": ConvVariant(weight_in_halves, has_halves),
    "contiguous": ConvVariant(weight_contiguous, lambda problem: not overruns(problem)),
    "matrix": ConvVariant(weight_by_matrix, windows_tile),
    "im2col": ConvVariant(weight_by_samples, windows_are_small),
    "registers": ConvVariant(
        weight_by_direct_bf16, fits_direct_bf16, "conv_in_c.py, csrc/direct_gradient.c"
    ),
    "winograd": ConvVariant(weight_by_winograd, fits_winograd, "conv_in_c.py, csrc/winograd.c"),
    "depthwise": ConvVariant(weight_by_channel, fits_depthwise, "conv_in_c.py, csrc/depthwise.c"),
}


CONV_VARIANTS: dict[Task, ConvVariants] = {
    "forward": FORWARD_VARIANTS,
    "input": INPUT_VARIANTS,
    "weight": WEIGHT_VARIANTS,
}
