"""Computes evaluation metrics: errors of predicted numbers, overlap and surfaces of masks.

Numbers: the errors of each parameter (plain arrays in, plain numbers out), predictions averaged
over the samples of a volume and recalibrated by lines, and intervals by a bootstrap over volumes
and seeds. Masks: confusion matrices, counted on cut tensors, and scored; and distances between
the surfaces of predicted and true masks [mm], measured by MONAI's metrics. The surface of a
class are the voxels at its edge, each with a distance to the nearest one of the other mask's
surface. The Hausdorff distance at 95 % and the average take both directions together as
`monai.metrics` does; the surface Dice is the share of distances within a tolerance (Nikolov et
al. 2018, arXiv:1809.04430, with the edges counted as voxels).

Legend: N samples, P parameters, V volumes, S seeds, B replicates; for masks B samples of a
mini-batch, C classes. A confusion matrix (C, C) counts voxels, its row is the true class and its
column the predicted one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from hyperslab.util.optional_libraries import importing

if TYPE_CHECKING:  # who compares runs needs no torch
    import torch

    from hyperslab.comm import Grid
    from hyperslab.formats.targets import Parameters
    from hyperslab.tensor import Sharded

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Holds the network's prediction for each sample beside the truth; float64 throughout.

    ``true`` and ``predicted`` (N, P) are normalised to [-1, 1]; ``parameters`` lead to each one's
    own unit. ``training_mean`` (P,), normalised, is what one would predict without looking at the
    sample. ``volumes`` are those that the samples are parts of; empty where that is not known.
    ``covariance`` (N, P, P) is there if the network predicts it.
    """

    parameters: Parameters
    samples: tuple[str, ...]
    true: FloatArray
    predicted: FloatArray
    training_mean: FloatArray
    volumes: tuple[str, ...] = ()
    covariance: FloatArray | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.parameters.names

    @property
    def true_physical(self) -> FloatArray:
        return self.parameters.physical(self.true)

    @property
    def predicted_physical(self) -> FloatArray:
        return self.parameters.physical(self.predicted)

    @property
    def truths(self) -> FloatArray:
        """Return the true values by volume (V, P)."""
        return means_of_volumes(self.true, self.volumes)

    @property
    def of_parts(self) -> bool:
        return len(set(self.volumes)) < len(self.volumes)


def errors_per_parameter(p: Predictions) -> dict[str, dict[str, float]]:
    """Return the errors of each parameter by name, those of :func:`errors_of`."""
    return {name: errors_of(p, i) for i, name in enumerate(p.names)}


def errors_of(p: Predictions, i: int) -> dict[str, float]:
    """Return the errors of the parameter ``i`` over N samples.

    ``mse_of_mean`` is the error of always predicting ``training_mean`` and ``ratio`` is
    ``mse / mse_of_mean``: 1 means that nothing was learnt, 0 is perfect. ``relative_error`` is
    the mean of |predicted - true| / |true| in physical units. ``relative_error_sc18`` is that of
    Mathuriya et al. 2018, section VII-A, who divide by the prediction; to first order it is the
    same. ``relative_error_sc18_of_mean`` is what always predicting the training mean gives by
    their formula. A number that is not defined, such as the correlation of one sample, is NaN.
    """
    true, predicted = p.true[:, i], p.predicted[:, i]
    true_physical, predicted_physical = p.true_physical[:, i], p.predicted_physical[:, i]
    mean = p.parameters.physical(p.training_mean)[i]
    mse = float(np.mean((predicted - true) ** 2))
    mse_of_mean = float(np.mean((p.training_mean[i] - true) ** 2))
    off = np.abs(predicted_physical - true_physical)
    return {
        **_error_measures(true, predicted),
        "r2": 1.0 - _divide(mse, float(np.var(true))),
        "correlation": correlation(true, predicted),
        "mse_of_mean": mse_of_mean,
        "ratio": _divide(mse, mse_of_mean),
        **{
            f"{k}_physical": v
            for k, v in _error_measures(true_physical, predicted_physical).items()
        },
        "relative_error": _mean_relative(off, true_physical),
        "relative_error_sc18": _mean_relative(off, predicted_physical),
        "relative_error_sc18_of_mean": _mean_relative(
            np.abs(mean - true_physical), np.full_like(true_physical, mean)
        ),
    }


def _mean_relative(off: FloatArray, to: FloatArray) -> float:
    return float(np.mean(off / np.abs(to))) if np.all(to) else float("nan")


def correlation(a: FloatArray, b: FloatArray) -> float:
    """Return Pearson's correlation of two arrays (N,); NaN where one of them is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")  # a mean of equal numbers rounds: do not correlate what is left
    a = a - a.mean()
    b = b - b.mean()
    return _divide(float(a @ b), float(np.sqrt((a @ a) * (b @ b))))


def means_over_parameters(errors: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Average the normalised errors over the parameters: the loss that the training saw."""
    rows: Sequence[Mapping[str, float]] = list(errors.values())
    means = {k: float(np.mean([row[k] for row in rows])) for k in ("mse", "mae", "mse_of_mean")}
    return {**means, "ratio": _divide(means["mse"], means["mse_of_mean"])}


def _error_measures(true: FloatArray, predicted: FloatArray) -> dict[str, float]:
    off = predicted - true
    mse = float(np.mean(off**2))
    return {
        "mse": mse,
        "mae": float(np.mean(np.abs(off))),
        "rmse": float(np.sqrt(mse)),
        "bias": float(np.mean(off)),
    }


def _divide(a: float, b: float) -> float:
    return a / b if b > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class CalibrationLines:
    """Maps what was predicted to what was true by a line for each parameter, both (P,).

    An average of sub-volumes' predictions is too close to the mean of the prior: each of them
    saw little and was trained to hedge. A line undoes that.
    """

    slope: FloatArray
    intercept: FloatArray

    def __call__(self, predicted: FloatArray) -> FloatArray:
        """Recalibrate predictions (N, P)."""
        return predicted * self.slope + self.intercept


def fit_calibration(predicted: FloatArray, true: FloatArray) -> CalibrationLines:
    """Fit lines of least squares from predictions to truths, both (N, P).

    Where all predictions are the same the line is flat: the mean of the truths.
    """
    x = predicted - predicted.mean(0)
    spread = (x**2).sum(0)
    moves = np.ptp(predicted, axis=0) > 0
    slope = np.zeros_like(spread)
    np.divide((x * (true - true.mean(0))).sum(0), spread, out=slope, where=moves)
    return CalibrationLines(slope, true.mean(0) - slope * predicted.mean(0))


def volume_indices(volumes: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the volumes by name, and which of them each sample belongs to (N,)."""
    names, indices = np.unique(np.asarray(volumes, dtype=object).astype(str), return_inverse=True)
    return tuple(names.tolist()), indices


def means_of_volumes(values: FloatArray, volumes: Sequence[str]) -> FloatArray:
    """Average over the samples of each volume: (N, ...) to (V, ...), in the order of names."""
    names, indices = volume_indices(volumes)
    sums = np.zeros((len(names), *values.shape[1:]))
    np.add.at(sums, indices, values)
    counts = np.bincount(indices).reshape(-1, *[1] * (values.ndim - 1))
    return sums / counts


def averaged_over_volumes(p: Predictions) -> Predictions:
    """Return one prediction a volume, the mean of those of its samples.

    It has no covariance: how the errors of parts of one volume go together is not predicted.
    """
    names, _ = volume_indices(p.volumes)
    predicted = means_of_volumes(p.predicted, p.volumes)
    means = replace(p, true=p.truths, predicted=predicted, covariance=None)
    return replace(means, samples=names, volumes=names)


def calibration_of(validation: Predictions) -> CalibrationLines:
    """Fit the lines that recalibrate averages over volumes to those of the validation split."""
    whole = averaged_over_volumes(validation)
    return fit_calibration(whole.predicted, whole.true)


def recalibrated(p: Predictions, calibration: CalibrationLines) -> Predictions:
    """Replace the predictions, without their covariance: it is that of others."""
    return replace(p, predicted=calibration(p.predicted), covariance=None)


BOOTSTRAP_REPLICATES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """Holds an estimate and the two ends of its interval."""

    value: float
    lower: float
    upper: float


def bootstrap_means(
    errors: Sequence[FloatArray], *, replicates: int = BOOTSTRAP_REPLICATES, seed: int = 0
) -> FloatArray:
    """Return the mean error of each configuration in each replicate (C, B).

    ``errors`` are those of the configurations, each (S, V): an own number of seeds, the same
    volumes. Seeds and volumes are crossed, so each level is drawn by itself, with replacement
    (Owen 2007, "The pigeonhole bootstrap"): in a replicate one draw of volumes is that of all
    configurations, which makes their comparison a paired one, and each configuration draws its
    own seeds. Chance that belongs to one seed on one volume is counted with both levels: where it
    prevails intervals are too wide, up to 1.7 times. Few seeds make them too narrow where seeds
    prevail.

    Raises:
        ValueError: no seed, no volume, or another number of volumes.
    """
    counts = {array.shape[1] for array in errors}
    if len(counts) != 1 or 0 in counts or any(len(array) == 0 for array in errors):
        shapes = ", ".join(str(array.shape) for array in errors)
        raise ValueError(f"errors of {shapes}: need (seeds, volumes), all of the same volumes")
    of_volumes, state = _first_shares(seed, counts.pop(), replicates)
    random = np.random.default_rng()
    random.bit_generator.state = state
    means = []
    for array in errors:
        of_seeds = _replicate_shares(random, len(array), replicates)
        means.append(np.sum((of_volumes @ array.T) * of_seeds, axis=1))
    return np.stack(means)


def ratio_interval(
    above: FloatArray, below: FloatArray, *, replicates: int = BOOTSTRAP_REPLICATES
) -> ConfidenceInterval:
    """Return the ratio of two mean errors, (S, V) each over the same volumes, with its interval."""
    first, second = bootstrap_means([above, below], replicates=replicates)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(np.divide(above.mean(), below.mean()))
        ends = np.quantile(first / second, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return ConfidenceInterval(value, float(ends[0]), float(ends[1]))


@lru_cache(maxsize=2)  # of test and validation samples, which take turns
def _first_shares(seed: int, count: int, replicates: int) -> tuple[FloatArray, Mapping[str, Any]]:
    """Return the shares that a fresh generator draws first, and its state after them.

    A page compares many errors on the same volumes, and to draw those takes most of the time.
    """
    random = np.random.default_rng(seed)
    return _replicate_shares(random, count, replicates), random.bit_generator.state


def _replicate_shares(random: np.random.Generator, count: int, replicates: int) -> FloatArray:
    """Return the share of each replicate that each of ``count`` items has (B, count)."""
    drawn = random.multinomial(count, np.full(count, 1 / count), size=replicates)
    return drawn / count


Counts = NDArray[np.int64]
Scores = dict[str, float]


def predicted_classes(logits: Sharded) -> Sharded:
    """Return each voxel's most likely class, uint8 (B, *spatial), cut like the logits (B, C, ...).

    Every rank decides for its own block; nothing is communicated.
    """
    classes = logits.local.argmax(1).byte()
    return logits.like(classes, logits.partition.without_dim(1))


def count_confusion(predicted: Sharded, true: Sharded, classes: int) -> torch.Tensor:
    """Return this rank's part of the confusion matrices (B, C, C) of a mini-batch, int64.

    Distribution scheme: 1. the true classes are cut like the predicted ones, 2. each rank counts
    the voxels of its block; of ranks with equal copies only the first does. The sum over all ranks
    is the global count.
    """
    import torch

    true = true.redistribute(predicted.partition, "the true classes")
    counts = torch.zeros(predicted.shape[0], classes, classes, dtype=torch.int64)
    counts = counts.to(predicted.local.device)
    if predicted.partition.is_first_copy(predicted.grid.coords):
        first, last = predicted.box.interval(0)
        pairs = true.local.flatten(1).long() * classes + predicted.local.flatten(1)
        for sample, values in zip(range(first, last), pairs, strict=True):
            matrix = torch.bincount(values, minlength=classes * classes)
            counts[sample] = matrix.view(classes, classes)
    return counts


def sum_over_ranks(counts: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the global counts, from those of all ranks, which all call it."""
    from hyperslab.comm import all_reduce_sum

    return all_reduce_sum(counts, grid.group(tuple(grid.extents)), "the confusion counts")


def scores_of(confusion: Counts, classes: Sequence[str]) -> dict[str, Scores]:
    """Score each class from one matrix (C, C): Dice, IoU, precision, recall and their counts.

    ``true_positives`` (tp), ``false_positives`` (fp) and ``false_negatives`` (fn) are voxels.
    Dice is 2 tp / (2 tp + fp + fn), IoU tp / (tp + fp + fn), precision tp / (tp + fp), recall
    tp / (tp + fn); NaN where nothing is to be divided by, as of a class that is neither there nor
    predicted.
    """
    hit = np.diag(confusion)
    extra = confusion.sum(0) - hit
    missed = confusion.sum(1) - hit
    return {
        name: {
            "dice": _divide(2 * tp, 2 * tp + fp + fn),
            "iou": _divide(tp, tp + fp + fn),
            "precision": _divide(tp, tp + fp),
            "recall": _divide(tp, tp + fn),
            "true_positives": tp,
            "false_positives": fp,
            "false_negatives": fn,
        }
        for name, tp, fp, fn in zip(
            classes, hit.tolist(), extra.tolist(), missed.tolist(), strict=True
        )
    }


Labelled = NDArray[np.uint8]

SURFACE_TOLERANCE = 2.0  # [mm] within which the surface Dice takes two surfaces for one

SURFACE_VOXEL_BYTES = 80
"""A voxel of the box around both masks takes so much host memory [B]: edges, distances, indices."""

Presence = Literal["both", "missed", "invented", "absent"]


@dataclass(frozen=True, slots=True)
class SurfaceScores:
    """Holds the surface distances [mm] of one class in one sample, and their surface Dice.

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
    tolerance: float = SURFACE_TOLERANCE,
) -> SurfaceScores:
    """Score the class ``label`` in two masks (D, H, W) with voxels of this size [mm]."""
    ours = predicted == label
    theirs = true == label
    if not (ours.any() and theirs.any()):
        if ours.any():
            return SurfaceScores("invented", dice=0.0)
        return SurfaceScores("missed", dice=0.0) if theirs.any() else SurfaceScores("absent")
    import torch

    inside = _box_around(ours | theirs)
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
    """Bound the memory that `surface_scores` takes for any class but the background [B]."""
    box = _box_around((true > 0) | (predicted > 0))
    return math.prod(s.stop - s.start for s in box) * SURFACE_VOXEL_BYTES


def surface_summary(scores: Sequence[SurfaceScores]) -> dict[str, float]:
    """Average one class over the samples that have it in both masks, and count them.

    The surface Dice is over those that have it in either. Where there is none it is NaN.
    """
    by = {
        kind: [s for s in scores if s.presence == kind] for kind in ("both", "missed", "invented")
    }
    there = by["both"]
    return {
        "hausdorff_95_mm": _mean_distance([s.hausdorff_95 for s in there]),
        "average_surface_distance_mm": _mean_distance([s.average for s in there]),
        "surface_dice": _mean_distance([s.dice for kind in by.values() for s in kind]),
        **{f"samples_{kind}": float(len(found)) for kind, found in by.items()},
    }


def monai_metrics() -> Any:
    """Import `monai.metrics.utils`, which needs the extra ``medical``."""
    with importing("medical", "the distance of surfaces"):
        import scipy.ndimage  # noqa: F401 - which MONAI asks for when it measures
        from monai.metrics import utils
    return utils


def _box_around(mask: NDArray[np.bool_]) -> tuple[slice, ...]:
    """Return the box around what is true, with a voxel more on each side where there is one."""
    found = []
    for dim in range(mask.ndim):
        others = tuple(d for d in range(mask.ndim) if d != dim)
        places = np.flatnonzero(mask.any(axis=others))
        if not len(places):
            return (slice(0, 0),) * mask.ndim
        found.append(slice(max(0, int(places[0]) - 1), min(mask.shape[dim], int(places[-1]) + 2)))
    return tuple(found)


def _mean_distance(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan
