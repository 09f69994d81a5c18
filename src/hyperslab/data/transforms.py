"""From stored values to the network's input, on the device.

``"log1p"``: log(x + 1), as MLPerf's CosmoFlow. ``"mean"``: x / mean(x), the mean of the whole
sample over all channels and voxels. ``None``: as stored. A window (low, high) [HU]: clipped to it,
then low becomes 0 and high 1, so that the zeros with which convolutions pad are what lies lowest:
air, beyond the edge of a scan too.
"""

from __future__ import annotations

import math

import torch

from hyperslab.comm import Grid, all_reduce_sum
from hyperslab.errors import DataError
from hyperslab.formats.shared.checks import check_finite
from hyperslab.formats.source import Array

TRANSFORMS = ("log1p", "mean", None)

Window = tuple[float, float]
Transform = str | Window | None


def check_window(window: Window) -> Window:
    """The window as two numbers.

    Raises:
        DataError: it is not two finite numbers, the lower one first.
    """
    try:
        low, high = map(float, window)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(high - low) and low < high):
        raise DataError(f"window={window!r}: needs two numbers, the lower first, as (-200, 250)")
    return low, high


def check(values: Array, transform: Transform, where: str, *, signed: bool = False) -> None:
    """Refuse values that cannot be right before they reach the network as NaN.

    Raises:
        DataError: NaN or infinite; negative integers, for they are counts if not ``signed``; for
            ``"log1p"`` a value at or below -1.
    """
    low, _ = check_finite(values, where)
    if not signed and values.dtype.kind == "i" and low < 0:
        raise DataError(f"{where} holds negative counts, down to {low}")
    if transform == "log1p" and low <= -1:
        raise DataError(
            f'{where} holds {low}, of which log1p is not a number; use transform="mean" or a window'
        )


def decode(
    values: torch.Tensor,
    shape: tuple[int, ...],
    grid: Grid,
    transform: Transform,
    dtype: torch.dtype,
) -> torch.Tensor:
    """This rank's block (b, C, d, h, w) of samples of ``shape`` (C, D, H, W), transformed.

    Half-precision results are computed in float32. For ``"mean"`` the ranks of a replica sum up.
    """
    x = values.to(torch.promote_types(dtype, torch.float32))
    if transform == "log1p":
        x = x.log1p() if x is values else x.log1p_()  # a converted copy is ours to change
    elif transform == "mean":
        sums = x.sum((1, 2, 3, 4), keepdim=True, dtype=torch.float64)
        group = grid.group(("depth", "height", "width"))
        mean = all_reduce_sum(sums, group, "the mean of a sample") / math.prod(shape)
        x = x / torch.where(mean == 0, 1, mean).to(x.dtype)  # an empty sample stays zero
    elif isinstance(transform, tuple):
        low, high = transform
        x = x.clamp(low, high).sub_(low).div_(high - low)
    return x.to(dtype)
