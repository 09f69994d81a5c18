"""Confusion matrices of a segmentation: counted on cut tensors, and scored.

Legend: B samples of a mini-batch, C classes; a confusion matrix (C, C) counts voxels, its row is
the true class and its column the predicted one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab.comm import Grid, all_reduce_sum
from hyperslab.tensor import Sharded

Counts = NDArray[np.int64]
Scores = dict[str, float]


def predicted_classes(logits: Sharded) -> Sharded:
    """The most likely class of every voxel, uint8 (B, *spatial), cut like the logits (B, C, ...).

    Every rank decides for its own block; nothing is communicated.
    """
    classes = logits.local.argmax(1).to(torch.uint8)
    return logits.like(classes, logits.partition.without_dim(1))


def count(predicted: Sharded, true: Sharded, classes: int) -> torch.Tensor:
    """This rank's part of the confusion matrices (B, C, C) of a mini-batch, int64.

    Distribution scheme: 1. the true classes are cut like the predicted ones, 2. each rank counts
    the voxels of its block; of ranks with equal copies only the first does. The sum over all ranks
    is the global count.
    """
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
    """The global counts, from those of all ranks, which all call it."""
    return all_reduce_sum(counts, grid.group(tuple(grid.extents)), "the confusion counts")


def scores_of(confusion: Counts, classes: Sequence[str]) -> dict[str, Scores]:
    """By class: Dice, IoU, precision, recall and what they are made of, from one matrix (C, C).

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
            "dice": divide(2 * tp, 2 * tp + fp + fn),
            "iou": divide(tp, tp + fp + fn),
            "precision": divide(tp, tp + fp),
            "recall": divide(tp, tp + fn),
            "true_positives": tp,
            "false_positives": fp,
            "false_negatives": fn,
        }
        for name, tp, fp, fn in zip(
            classes, hit.tolist(), extra.tolist(), missed.tolist(), strict=True
        )
    }


def divide(a: float, b: float) -> float:
    return a / b if b else float("nan")
