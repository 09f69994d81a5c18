"""Convolution: the rule of ``conv1d``, ``conv2d`` and ``conv3d``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import Grid, plan_exchange
from hyperslab.geometry import Partition, Window
from hyperslab.nn.bufferconv import BufferConv
from hyperslab.nn.convspec import ConvSpec, needs_float32
from hyperslab.nn.slabconv import Slab, SlabConv, aligned, slabs_of, thin
from hyperslab.nn.windowed import (
    check_input,
    output_partition,
    per_dim,
    placement,
    read_cover,
)
from hyperslab.tensor import Sharded, register

LOCAL = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def windows_of(
    weight: torch.Tensor, stride: Any, padding: Any, dilation: Any
) -> tuple[Window, ...]:
    """One window per spatial dim of a weight (out, in / groups, *kernel)."""
    kernel = tuple(weight.shape[2:])
    n = len(kernel)
    strides, dilations = per_dim(stride, n), per_dim(dilation, n)
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
        pads = [(total // 2, total - total // 2) for total in totals]
    else:
        pads = [(p, p) for p in per_dim(padding, n)]
    return tuple(
        Window(k, s, before, after, d)
        for k, s, (before, after), d in zip(kernel, strides, pads, dilations, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's geometry of a convolution; made once per (partition, weight shape, windows)."""

    input: Partition  # the input's, after gathering axes for which the output is too thin
    output: Partition
    spec: ConvSpec | None  # None: nothing is cut in space
    slabs: tuple[Slab, ...] | None  # None: through a halo buffer


def lay_out(
    x: Partition, grid: Grid, shape: torch.Size, windows: Sequence[Window], groups: int
) -> Layout:
    """Where the outputs of a convolution lie and what they read."""
    name = f"conv{len(windows)}d"
    extents = [w.outputs(e) for w, e in zip(windows, x.shape[2:], strict=True)]
    x, cuts = placement(x, grid, windows, extents, name)
    output = output_partition(x, shape[0], extents, cuts)
    if not any(cuts):
        return Layout(x, output, None, None)
    covered = [c is not None or w.before != w.after for c, w in zip(cuts, windows, strict=True)]
    spec = ConvSpec(
        name=f"the halo exchange of {name} {tuple(shape)}",
        windows=tuple(windows),
        covered=tuple(covered),
        groups=groups,
        plan=plan_exchange(x, read_cover(x, windows, cuts, extents, covered), grid),
        out=output.box(grid.coords),
    )
    return Layout(x, output, spec, slabs_of(spec) if aligned(spec) and not thin(spec) else None)


def convolve(
    n: int,
    x: Sharded,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Sharded:
    """An ``n``-dim convolution of a cut tensor (batch, channel, *spatial).

    Distribution scheme:
    1. Place every output on the rank that owns the centre of its window.
    2. Nothing cut in space: the plain local convolution.
    3. Windows aligned with the cut: local convolution plus slabs (`SlabConv`), the halo travels
       meanwhile. Otherwise, or if the block is thin: halo buffer and one convolution of it
       (`BufferConv`).
    """
    check_input(x, n, f"conv{n}d")
    windows = windows_of(weight, stride, padding, dilation)
    if padding == "same" and any(w.stride != 1 for w in windows):
        raise ValueError("padding='same' is not supported for strided convolutions")
    layout = x.grid.remember(
        (lay_out, x.partition, weight.shape, windows, groups),
        lambda: lay_out(x.partition, x.grid, weight.shape, windows, groups),
    )
    x = x.redistribute(layout.input, f"the gather before conv{n}d")
    local, weight = cast_for_autocast(x.local), cast_for_autocast(weight)
    bias = bias if bias is None else cast_for_autocast(bias)
    if layout.spec is None:
        y = uncut(local, weight, bias, (stride, padding, dilation, groups))
        return x.like(y, layout.output)
    if layout.slabs is None:
        return x.like(BufferConv.apply(local, weight, bias, layout.spec), layout.output)
    return x.like(SlabConv.apply(local, weight, bias, layout.spec, layout.slabs), layout.output)


def uncut(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: tuple[Any, ...]
) -> torch.Tensor:
    """Torch's own convolution, but not where its bfloat16 kernel is broken."""
    local = LOCAL[x.dim() - 2]
    if not needs_float32(x, weight):
        return local(x, weight, bias, *options)
    with torch.autocast(x.device.type, enabled=False):
        wide = (x.float(), weight.float(), None if bias is None else bias.float())
        return local(*wide, *options).to(x.dtype)


def cast_for_autocast(value: torch.Tensor) -> torch.Tensor:
    """What autocast does to a convolution's argument; it does not know our autograd functions."""
    kind = value.device.type
    eligible = value.is_floating_point() and value.dtype != torch.float64
    if eligible and torch.is_autocast_enabled(kind):
        return value.to(torch.get_autocast_dtype(kind))
    return value


def _register(n: int) -> None:
    def rule(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Sharded:
        """Any kernel, stride, padding, dilation, groups."""
        return convolve(n, input, weight, bias, stride, padding, dilation, groups)

    register(LOCAL[n], family="convolution")(rule)


for _n in LOCAL:
    _register(_n)
