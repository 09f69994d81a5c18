"""Applies a linear map along every spatial dim of a block in one pass.

Interpolation and average pooling are such maps. The results of a dim are made of a few elements
each, which a `SparseMap` lists; the adjoint of one is another. The operator ``resample`` has no
graph: `hyperslab.ops.spatial` and `hyperslab.ops.pooling` have. First the maps, then the plain
reference by torch's single operators, then the compiled version.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hyperslab.kernels.compile import (
    PLANS_KEPT,
    STREAMED,
    TYPE_CODES,
    Library,
    Sizes,
    addresses,
    blocks_in,
    call,
    integers,
    three,
)
from hyperslab.kernels.memory_format import as_dense, memory_format_by_strides, strides_in
from hyperslab.kernels.registry import Operands, declare


class Line(NamedTuple):
    """Describes windows along one dim, of which the first begins at ``-padding``."""

    kernel: int
    stride: int
    padding: int
    outputs: int


@dataclass(frozen=True, slots=True, eq=False)
class SparseMap:
    """Lists the entries ``e`` of each result ``o``, the sum of ``weight[e] * x[source[e]]``.

    They are ``begin[o]`` to ``begin[o + 1]``: ``begin`` has one number more than there are results.
    ``extent``: how many elements there are.
    """

    begin: torch.Tensor
    source: torch.Tensor
    weight: torch.Tensor
    extent: int

    @staticmethod
    def of_taps(index: torch.Tensor, weight: torch.Tensor, extent: int) -> SparseMap:
        """Makes a map of the elements and their weights for each result: (taps, results)."""
        taps, results = index.shape
        begin = torch.arange(results + 1) * taps
        # Dense: of a single result the transposed view keeps its stride.
        source = index.T.contiguous().view(-1)
        return SparseMap(begin, source, weight.T.float().contiguous().view(-1), extent)

    @staticmethod
    def of_windows(line: Line, extent: int) -> SparseMap:
        """Makes a map to the sums of windows; what lies beyond the ``extent`` counts as zero."""
        first = torch.arange(line.outputs, device="cpu") * line.stride - line.padding
        taps = first[:, None] + torch.arange(line.kernel, device="cpu")
        inside = (taps >= 0) & (taps < extent)
        begin = F.pad(inside.sum(1).cumsum(0), [1, 0])
        return SparseMap(begin, taps[inside], inside[inside].float(), extent)

    @property
    def results(self) -> int:
        return len(self.begin) - 1

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.begin, self.source, self.weight]

    def adjoint(self) -> SparseMap:
        """Returns the map from the gradients of the results to those of the elements."""
        order = torch.argsort(self.source, stable=True)
        result = torch.arange(self.results).repeat_interleave(self.begin.diff())
        counts = torch.bincount(self.source, minlength=self.extent)
        begin = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return SparseMap(begin, result[order], self.weight[order], self.results)


def apply_maps(
    maps: Sequence[SparseMap], order: torch.memory_format, dtype: torch.dtype, x: torch.Tensor
) -> torch.Tensor:
    """Applies a map for each spatial dim to a block, brought to a memory format, in ``dtype``."""
    if not x.is_contiguous(memory_format=order):
        x = torch.ops.hyperslab.reorder(x, order is not torch.contiguous_format, x.dtype)
    tensors = [tensor for one in maps for tensor in one.tensors]
    return torch.ops.hyperslab.resample(x, tensors, [one.results for one in maps], dtype)


def resample(
    x: torch.Tensor, maps: Sequence[torch.Tensor], extents: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Returns (N, C, *extents) in ``dtype`` and in x's memory format.

    ``maps`` are begin, source (int64) and weight (float32) of a `SparseMap` for each dim, applied
    one after the other. Summed in float32, of float64 in float64.
    """
    check_maps(x, maps, extents)
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    for dim, extent in enumerate(extents, start=2):
        begin, source, weight = maps[3 * dim - 6 : 3 * dim - 3]
        result = torch.arange(extent, device=x.device).repeat_interleave(begin.diff())
        along = [-1 if d == dim else 1 for d in range(x.dim())]
        parts = y.index_select(dim, source) * weight.to(y.dtype).view(along)
        shape = [*y.shape[:dim], extent, *y.shape[dim + 1 :]]
        y = y.new_zeros(shape).index_add_(dim, result, parts)
    return _resample_form(x, maps, extents, dtype).copy_(y)


def check_maps(x: torch.Tensor, maps: Sequence[torch.Tensor], extents: Sequence[int]) -> None:
    """Checks that there is a map of three tensors for every spatial dim, with so many results."""
    begins = [len(begin) - 1 for begin in maps[::3]]
    if len(maps) != 3 * (x.dim() - 2) or begins != list(extents):
        raise ValueError(f"maps with {begins} results for a block {tuple(x.shape)} and {extents}")


def _resample_form(
    x: torch.Tensor, maps: Sequence[torch.Tensor], extents: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Gives the shape and strides; the reference reads how many entries a result has."""
    shape = (*x.shape[:2], *extents)
    return torch.empty(
        shape, dtype=dtype, device=x.device, memory_format=memory_format_by_strides(x)
    )


def compiled_resample(functions: Library, given: Operands) -> torch.Tensor:
    x, maps, extents, dtype = given
    memory_format = memory_format_by_strides(x)
    last = memory_format != torch.contiguous_format
    results = tuple(extents)
    numbers = _resample_numbers(x.shape, results, (x.dtype, dtype), last)
    if numbers is None:
        return NotImplemented
    check_maps(x, maps, extents)
    x = as_dense(x, memory_format)
    shape = (*x.shape[:2], *results)
    y = torch.empty_strided(shape, strides_in(shape, memory_format), dtype=dtype)
    tensors = addresses(x, y, *_IDENTITY * (3 - len(results)), *maps)
    call(functions.resample, tensors + numbers, max(x.numel(), y.numel()))
    return y


_IDENTITY = [torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, dtype=torch.float32)]
"""The map of a dim that is not there."""


@functools.lru_cache(PLANS_KEPT)
def _resample_numbers(
    shape: Sizes, results: Sizes, types: tuple[torch.dtype, torch.dtype], channels_last: bool
) -> bytes | None:
    """Packs the numbers for C; None where it does not know the types or the number of dims."""
    known = all(dtype in TYPE_CODES for dtype in types)
    if not known or not 3 <= len(shape) <= 5 or not math.prod(shape) * math.prod(results):
        return None
    size = math.prod(shape[:2]) * math.prod(results) * types[1].itemsize
    return integers(
        *(TYPE_CODES[dtype] for dtype in types),
        *blocks_in(shape, channels_last),
        *three(shape[2:]),
        *three(results),
        size >= STREAMED,
    )


declare(resample, compiled_resample, "resample.c", meta=_resample_form)
