"""Sampling at given coordinates: any output may read any input, which must be whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.ops.linalg.contraction import DimLabel, contract
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe


@register(F.grid_sample, family="spatial")
def grid_sample(
    input: torch.Tensor,
    grid: torch.Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> torch.Tensor:
    """Of a volume that is not cut in space, at coordinates that may be."""
    if input.dim() != grid.dim() or input.shape[0] != grid.shape[0]:
        raise LayoutError(f"grid_sample takes as many places as samples\n{describe([input, grid])}")
    n = input.dim() - 2
    outputs: list[DimLabel] = [("output", d) for d in range(n)]

    def run(volume: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(volume, points, mode, padding_mode, align_corners)

    labels: list[list[DimLabel]] = [
        ["batch", "channel", *[("input", d) for d in range(n)]],
        ["batch", *outputs, "coordinate"],
    ]
    output = ["batch", "channel", *outputs]
    return contract("grid_sample", (input, grid), labels, output, run, linear=False)


@register(F.affine_grid, family="spatial")
def affine_grid(theta: Sharded, size: Sequence[int], align_corners: bool | None = None) -> Sharded:
    """Coordinates for every sample by its own matrix; only the batch may be cut."""
    batch, *matrix = theta.partition.cuts
    if any(matrix) or size[0] != theta.shape[0]:
        raise LayoutError(
            f"affine_grid takes a whole matrix for each of {size[0]} samples, got "
            f"{theta.partition}\n    use hyperslab.gather(x, axes) before it"
        )
    local = theta.local
    points = F.affine_grid(local, [local.shape[0], *size[1:]], align_corners)
    shape = (theta.shape[0], *points.shape[1:])
    return theta.like(points, Partition(shape, (batch, *[None] * (len(shape) - 1))))
