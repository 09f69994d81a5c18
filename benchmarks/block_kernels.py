"""The kernels that there are for each pass of a block's convolution.

The list of kernels is this module's own, not that of `hyperslab.ops.kernels`: what a step reaches
is compared with it. Operands lie ready in the format that a kernel wants.

Legend: *c* contiguous, *cl* channels-last; *torch* as torch itself chooses, *oneDNN* asked for by
name, */2* and */4* in so many tiles along the depth, *conv* a transposed convolution's pass as that
of the convolution whose gradient it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

PASSES = ("forward", "weight gradient", "input gradient")

FORMATS = {"c": torch.contiguous_format, "cl": torch.channels_last_3d}
TILES = (2, 4)

Kernel = Callable[[], Any]

_aten = torch.ops.aten


@dataclass(frozen=True)
class BlockConvolution:
    """A 3D convolution of one rank's block, with the padding that makes the block of the result.

    ``x`` is (N, C, D, H, W); ``needs_dx``: somebody wants the gradient of the input.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool
    bias: bool
    dtype: torch.dtype
    needs_dx: bool

    @property
    def out_channels(self) -> int:
        return self.weight[1] * self.groups if self.transposed else self.weight[0]

    def result(self) -> tuple[int, ...]:
        """Shape of what comes out."""
        x = torch.empty(self.x, device="meta")
        return tuple(self.run(x, x.new_empty(self.weight), None).shape)

    def run(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As torch does it by itself."""
        return _aten.convolution(
            x,
            weight,
            bias,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )

    def run_by_name(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As oneDNN does it; not transposed."""
        return _aten.mkldnn_convolution(
            x, weight, bias, self.padding, self.stride, self.dilation, self.groups
        )

    def gradients(
        self, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, which: str
    ) -> tuple[torch.Tensor | None, ...]:
        """Of input, weight and bias: those that ``which`` pass makes; ``x`` chooses the kernel."""
        of_weight = which == "weight gradient"
        return _aten.convolution_backward(
            g,
            x,
            weight,
            [self.out_channels] if self.bias else None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
            [not of_weight, of_weight, of_weight and self.bias],
        )

    @property
    def passes(self) -> tuple[str, ...]:
        return PASSES if self.needs_dx else PASSES[:2]

    @property
    def unsafe(self) -> bool:
        """The kernel is larger than the block: oneDNN's weight gradient reads foreign memory."""
        return any(k > e for k, e in zip(self.weight[2:], self.x[2:], strict=True))

    def with_result(self, extents: Sequence[int]) -> BlockConvolution:
        """The same with the padding, equal on both sides, that makes a result so large."""
        reads = [
            (o - 1) * s + (k - 1) * d + 1
            for o, s, k, d in zip(extents, self.stride, self.weight[2:], self.dilation, strict=True)
        ]
        missing = [max(0, read - e) for read, e in zip(reads, self.x[2:], strict=True)]
        return replace(self, padding=tuple((m + 1) // 2 for m in missing))

    def padded(self) -> BlockConvolution:
        """The same with the padding in the input."""
        spatial = [e + 2 * p for e, p in zip(self.x[2:], self.padding, strict=True)]
        return replace(self, x=(*self.x[:2], *spatial), padding=(0, 0, 0))

    def mirrored(self) -> BlockConvolution:
        """The convolution that a transposed one is the gradient of: its input is the result."""
        return replace(
            self, x=self.result(), output_padding=(0, 0, 0), transposed=False, bias=False
        )


@dataclass(frozen=True)
class Operands:
    """Input, weight, bias and the result's gradient in one format."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    g: torch.Tensor

    def lying(self, memory_format: torch.memory_format) -> Operands:
        x, weight, g = (t.contiguous(memory_format=memory_format) for t in self.tensors)
        return Operands(x, weight, self.bias, g)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x, self.weight, self.g


def operands(block: BlockConvolution) -> Operands:
    """Random ones."""
    x = torch.randn(block.x).to(block.dtype)
    weight = torch.randn(block.weight).to(block.dtype)
    bias = torch.randn(block.out_channels).to(block.dtype) if block.bias else None
    return Operands(x, weight, bias, torch.randn(block.result()).to(block.dtype))


def kernels(block: BlockConvolution, which: str, given: Operands) -> Iterator[tuple[str, Kernel]]:
    """All that do ``which`` pass, by name; each keeps its operands."""
    if block.unsafe and which == "weight gradient" and not block.transposed:
        margins = [p for p in reversed(block.padding) for _ in range(2)]
        given = replace(given, x=F.pad(given.x, margins))
        block = block.padded()
    for name, memory_format in FORMATS.items():
        lying = given.lying(memory_format)
        yield f"torch {name}", _by_torch(block, which, lying)
        if block.transposed:
            yield f"conv {name}", _as_convolution(block, which, lying)
        else:
            yield f"oneDNN {name}", _by_name(block, which, lying)
            for count in TILES if _can_be_tiled(block, which) else ():
                tiles = [
                    _by_name(part, which, operands.lying(memory_format))
                    for part, operands in tiles_of(block, which, lying, count)
                ]
                yield f"oneDNN {name}/{count}", lambda tiles=tiles: [tile() for tile in tiles]


def _by_torch(block: BlockConvolution, which: str, given: Operands) -> Kernel:
    if which == "forward":
        return lambda: block.run(given.x, given.weight, given.bias)
    return lambda: block.gradients(given.g, given.x, given.weight, which)


def _by_name(block: BlockConvolution, which: str, given: Operands) -> Kernel:
    if which == "forward":
        return lambda: block.run_by_name(given.x, given.weight, given.bias)
    x = given.x.to_mkldnn()  # chooses the kernel; the gradients are ordinary tensors
    return lambda: block.gradients(given.g, x, given.weight, which)


def _as_convolution(block: BlockConvolution, which: str, given: Operands) -> Kernel:
    """A transposed convolution's passes are a convolution's with input and result exchanged."""
    mirror = block.mirrored()
    x, weight, g = given.tensors
    shaped = torch.empty_like(g)
    if which == "forward":
        bias = None if given.bias is None else given.bias.view(1, -1, 1, 1, 1)

        def forward() -> torch.Tensor | None:
            y = mirror.gradients(x, shaped, weight, "input gradient")[0]
            return y if bias is None or y is None else y.add_(bias)

        return forward
    if which == "input gradient":
        return lambda: mirror.run_by_name(g, weight, None)
    by_name = g.to_mkldnn()
    if not block.bias:
        return lambda: mirror.gradients(x, by_name, weight, which)
    return lambda: (mirror.gradients(x, by_name, weight, which), g.sum((0, 2, 3, 4)))


def _can_be_tiled(block: BlockConvolution, which: str) -> bool:
    simple = which != "input gradient" or block.stride[0] == block.dilation[0] == 1
    return simple and block.result()[2] >= 4 * max(TILES)


def tiles_of(
    block: BlockConvolution, which: str, given: Operands, count: int
) -> list[tuple[BlockConvolution, Operands]]:
    """The pass in tiles along the depth, each with the planes around it that it reads.

    The tiles of the result (the input's gradient: of the input) lie side by side in the whole.
    """
    kernel = block.weight[2]
    reach = (kernel - 1) * block.dilation[0]
    if which == "input gradient":
        margin = reach - block.padding[0]
        g = F.pad(given.g, [0, 0, 0, 0, margin, margin])
        pieces = _spans(block.x[2], count)
        cut = [
            replace(given, x=given.x[:, :, lo:hi], g=g[:, :, lo : hi + reach]) for lo, hi in pieces
        ]
        padding = (reach, *block.padding[1:])
    else:
        margin = block.padding[0]
        x = F.pad(given.x, [0, 0, 0, 0, margin, margin])
        stride = block.stride[0]
        cut = [
            replace(
                given,
                x=x[:, :, lo * stride : (hi - 1) * stride + reach + 1],
                g=given.g[:, :, lo:hi],
            )
            for lo, hi in _spans(given.g.shape[2], count)
        ]
        padding = (0, *block.padding[1:])
    return [(replace(block, x=tuple(part.x.shape), padding=padding), part) for part in cut]


def _spans(extent: int, count: int) -> list[tuple[int, int]]:
    edges = [extent * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))
