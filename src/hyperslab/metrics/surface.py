"""Distances between the surfaces of predicted and true masks [mm], measured by MONAI's metrics.

Of a class the surface are the voxels at its edge; each has a distance to the nearest one of the
other mask's surface. The Hausdorff distance at 95 % and the average take both directions together
as `monai.metrics` does; the surface Dice is the share of distances within a tolerance (Nikolov et
al. 2018, arXiv:1809.04430, with the edges counted as voxels).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab.optional_libraries import importing

Labelled = NDArray[np.uint8]

TOLERANCE = 2.0
"""Within which the surface Dice takes two surfaces for one [mm]."""

VOXEL_BYTES = 80
"""Of host memory for a voxel of the box around both masks: edges, distance maps, indices [B]."""

Presence = Literal["both", "missed", "invented", "absent"]


@dataclass(frozen=True, slots=True)
class SurfaceScores:
    """Of one class in one sample: how far apart the surfaces are [mm], and their surface Dice.

    ``presence``: the class is in both masks, ``"missed"`` by the predicted one, ``"invented"`` by
    it, or in none. Distances are known of ``"both"`` alone and else NaN; the surface Dice is then
    0, and NaN where the class is in none.
    """

    presence: Presence
    hausdorff_95: float = math.nan
    average: float = math.nan
    dice: float = math.nan


def surface_scores(
    true: Labelled,
    predicted: Labelled,
    label: int,
    voxel: Sequence[float],
    tolerance: float = TOLERANCE,
) -> SurfaceScores:
    """Those of the class ``label`` in two masks (D, H, W) with voxels of this size [mm].

    Raises:
        HyperslabError: the extra ``medical`` is not installed.
    """
    ours = predicted == label
    theirs = true == label
    if not (ours.any() and theirs.any()):
        if ours.any():
            return SurfaceScores("invented", dice=0.0)
        return SurfaceScores("missed", dice=0.0) if theirs.any() else SurfaceScores("absent")
    inside = _around(ours | theirs)
    pair = [torch.from_numpy(mask[inside]) for mask in (ours, theirs)]
    utils = monai_metrics()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of MONAI about its own arguments
        _, distances, _ = utils.get_edge_surface_distance(
            *pair, spacing=list(voxel), symmetric=True
        )
    both = [found.double().numpy() for found in distances]
    every = np.concatenate(both)
    return SurfaceScores(
        "both",
        max(float(np.percentile(found, 95)) for found in both),
        float(every.mean()),
        float((every <= tolerance).mean()),
    )


def bytes_to_measure(true: Labelled, predicted: Labelled) -> int:
    """What `surface_scores` takes at most for any class but the background [B]."""
    box = _around((true > 0) | (predicted > 0))
    return math.prod(s.stop - s.start for s in box) * VOXEL_BYTES


def summary(scores: Sequence[SurfaceScores]) -> dict[str, float]:
    """Of one class over samples: means over those that have it in both masks, and how many.

    The surface Dice is over those that have it in either. Where there is none it is NaN.
    """
    by = {
        kind: [s for s in scores if s.presence == kind] for kind in ("both", "missed", "invented")
    }
    there = by["both"]
    return {
        "hausdorff_95_mm": _mean([s.hausdorff_95 for s in there]),
        "average_surface_distance_mm": _mean([s.average for s in there]),
        "surface_dice": _mean([s.dice for kind in by.values() for s in kind]),
        **{f"samples_{kind}": float(len(found)) for kind, found in by.items()},
    }


def monai_metrics() -> Any:
    """The module `monai.metrics.utils`.

    Raises:
        HyperslabError: the extra ``medical`` is not installed.
    """
    with importing("medical", "the distance of surfaces"):
        import scipy.ndimage  # noqa: F401 - which MONAI asks for when it measures
        from monai.metrics import utils
    return utils


def _around(mask: NDArray[np.bool_]) -> tuple[slice, ...]:
    """The box around what is true, with a voxel more on each side where there is one."""
    found = []
    for dim in range(mask.ndim):
        others = tuple(d for d in range(mask.ndim) if d != dim)
        places = np.flatnonzero(mask.any(axis=others))
        if not len(places):
            return (slice(0, 0),) * mask.ndim
        found.append(slice(max(0, int(places[0]) - 1), min(mask.shape[dim], int(places[-1]) + 2)))
    return tuple(found)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan
