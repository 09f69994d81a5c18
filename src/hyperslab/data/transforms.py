"""Transforms stored values to the network's input, on the device."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from hyperslab.comm import Grid, all_reduce_sum
from hyperslab.errors import DataError
from hyperslab.util.page_locked import LARGE, LentBuffers

Shape = tuple[int, ...]

LowHigh = tuple[float, float]
"""(low, high) in the unit of the volumes (HU)."""


class Transform(ABC):
    """Transforms the values (b, C, d, h, w) of this rank's part of a mini-batch.

    ``signed``: whether whole numbers below zero can be right; otherwise they are counts. Values
    must lie ``above`` a bound, for the reason ``why``.
    """

    signed: bool = False
    above: float = -math.inf
    why: str = ""

    @property
    def name(self) -> str | LowHigh | None:
        """The name that `hyperslab.open` takes; None where values are left as they are stored."""
        return None

    @property
    def lowest(self) -> float:
        """The value that becomes 0."""
        return 0.0

    @abstractmethod
    def apply(self, x: torch.Tensor, shape: Shape, grid: Grid, fresh: bool) -> torch.Tensor:
        """Transform ``x`` of samples of ``shape`` (C, D, H, W); in place only if it is ``fresh``.

        All ranks of a replica call it.
        """


@dataclass(frozen=True)
class AsStored(Transform):
    """Values as they are stored."""

    signed: bool = False

    def apply(self, x: torch.Tensor, shape: Shape, grid: Grid, fresh: bool) -> torch.Tensor:
        return x


@dataclass(frozen=True)
class Log1p(Transform):
    """log(x + 1), as MLPerf's CosmoFlow."""

    name = "log1p"
    above = -1.0
    why = (
        "whose log1p is not a number; data.transform: null (transform=None) takes values as "
        "they are, or give a window"
    )

    def apply(self, x: torch.Tensor, shape: Shape, grid: Grid, fresh: bool) -> torch.Tensor:
        return x.log1p_() if fresh else x.log1p()


@dataclass(frozen=True)
class MeanScale(Transform):
    """Divides by the mean of the whole sample over all channels and voxels: x / mean(x).

    The ranks of a replica sum up. A sample that is zero everywhere stays so.
    """

    name = "mean"
    over: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)

    def apply(self, x: torch.Tensor, shape: Shape, grid: Grid, fresh: bool) -> torch.Tensor:
        sums = x.sum(self.over, keepdim=True, dtype=torch.float64)
        group = grid.group(("depth", "height", "width"))
        count = math.prod(shape[-len(self.over) :])
        mean = all_reduce_sum(sums, group, "the mean of a sample") / count
        mean = torch.where(mean == 0, 1, mean).to(x.dtype)
        return x.div_(mean) if fresh else x / mean


@dataclass(frozen=True)
class Log1pMeanScale(MeanScale):
    """Computes log(1 + x / mean(x)), from 0 to about 10 for a density in any unit.

    The mean of each channel of the whole sample, and with it what that says, is lost: channels
    may be fields in units of their own.
    """

    name = "log1p_mean"
    over = (2, 3, 4)
    above = -(2.0**-126)  # zero passes; what is nearer to it would be zero itself in float32
    why = "whose log1p(x / mean(x)) may not be a number; use it for densities, 0 or more"

    def apply(self, x: torch.Tensor, shape: Shape, grid: Grid, fresh: bool) -> torch.Tensor:
        return super().apply(x, shape, grid, fresh).log1p_()


@dataclass(frozen=True)
class IntensityWindow(Transform):
    """Clipped to [low, high], which becomes [0, 1].

    So the zeros with which convolutions pad are what lies lowest: air, beyond the edge of a scan
    too.
    """

    low: float
    high: float
    signed = True

    @property
    def lowest(self) -> float:
        return self.low

    @classmethod
    def of(cls, window: LowHigh) -> IntensityWindow:
        """Returns the window of two finite numbers, the lower one first."""
        try:
            low, high = map(float, window)
        except (TypeError, ValueError):
            low = high = math.nan
        if not (math.isfinite(high - low) and low < high):
            raise DataError(f"{window=}: needs two numbers, the lower first, as (-200, 250)")
        return cls(low, high)

    @property
    def name(self) -> LowHigh:
        return self.low, self.high

    def apply(self, x: torch.Tensor, shape: Shape, grid: Grid, fresh: bool) -> torch.Tensor:
        clipped = x.clamp_(self.low, self.high) if fresh else x.clamp(self.low, self.high)
        return clipped.sub_(self.low).div_(self.high - self.low)


TRANSFORMS: dict[str, Transform] = {
    "log1p": Log1p(),
    "mean": MeanScale(),
    "log1p_mean": Log1pMeanScale(),
}
"""Transforms that are chosen by name."""


def check_name(transform: str | None) -> None:
    """Refuses a name that no transform has."""
    if transform not in (*TRANSFORMS, "auto", None):
        names = ", ".join(repr(name) for name in (*TRANSFORMS, "auto", None))
        raise DataError(f"{transform=}: choose from {names}")


def transform_of(
    classes: Sequence[str], transform: str | None, window: LowHigh | None
) -> Transform:
    """Chooses the transform of stored values, given the names of the voxels' classes, if any.

    Raises:
        DataError: a transform and a window are given, the window is none, or the name is unknown.
    """
    check_name(transform)
    if window is not None:
        if transform not in ("auto", None):
            raise DataError(f"{transform=} and {window=} are two transforms; give one of them")
        return IntensityWindow.of(window)
    if transform == "auto":
        transform = None if classes else "log1p"
    return AsStored(signed=bool(classes)) if transform is None else TRANSFORMS[transform]


def decode(
    values: torch.Tensor,
    transform: Transform,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    grid: Grid,
    buffers: LentBuffers | None = None,
) -> torch.Tensor:
    """Returns this rank's block (b, C, d, h, w) of samples of ``shape`` (C, D, H, W), transformed.

    Half-precision results are computed in float32, large ones in memory of ``buffers`` on a CPU.
    All ranks of a replica call it.
    """
    wide = torch.promote_types(dtype, torch.float32)
    small = values.numel() * wide.itemsize < LARGE
    if buffers is None or small or values.is_cuda or values.dtype == wide:
        x = values.to(wide)
    else:
        x = buffers.lend(values.shape, wide).copy_(values)
    return transform.apply(x, shape, grid, x is not values).to(dtype)
