"""The operator as torch knows it: schema, reference, form on the meta device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused.layout import format_of
from hyperslab.ops.kernels.fused.operators import FusedOperator, registered
from hyperslab.ops.kernels.resample import compiled, reference


def _form(
    x: torch.Tensor, maps: Sequence[torch.Tensor], extents: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    shape = (*x.shape[:2], *extents)
    return torch.empty(shape, dtype=dtype, device=x.device, memory_format=format_of(x))


RESAMPLE = FusedOperator(
    # y (N, C, *extents) in `dtype` and in x's memory format; summed in float32, of float64 in
    # float64. maps: begin, source (int64) and weight (float32) of a `SparseMap` for each dim.
    "resample(Tensor x, Tensor[] maps, int[] extents, ScalarType dtype) -> Tensor",
    reference.resample_by_dims,
    _form,
    compiled.compiled_resample,
)


RESAMPLE_LIBRARY = registered((RESAMPLE,))
"""Keeps the registration alive."""
