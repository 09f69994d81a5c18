"""Confusion counts and scores (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.geometry import Cut
from hyperslab.train.metrics import count_confusion, predicted_classes, scores_of, sum_over_ranks
from tests.ranks import run_ranks

CLASSES = ("background", "organ", "lesion")


def test_scores_by_hand() -> None:
    """Rows are true, columns predicted."""
    scores = scores_of(np.array([[90, 6, 0], [3, 21, 0], [0, 0, 0]]), CLASSES)
    assert scores["organ"] == {
        "dice": pytest.approx(42 / (42 + 6 + 3)),
        "iou": pytest.approx(21 / 30),
        "precision": pytest.approx(21 / 27),
        "recall": pytest.approx(21 / 24),
        "true_positives": 21,
        "false_positives": 6,
        "false_negatives": 3,
    }
    assert scores["background"]["recall"] == pytest.approx(90 / 96)
    assert all(math.isnan(scores["lesion"][key]) for key in ("dice", "iou", "precision", "recall"))


def test_a_class_that_is_missed_altogether_has_dice_zero() -> None:
    scores = scores_of(np.array([[5, 0], [4, 0]]), CLASSES[:2])["organ"]
    assert (scores["dice"], scores["recall"]) == (0.0, 0.0)
    assert math.isnan(scores["precision"])


SHAPE = (3, 4, 5, 7, 6)  # (N, C, D, H, W)


def volumes() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(SHAPE), torch.randint(0, SHAPE[1], (SHAPE[0], *SHAPE[2:]))


def expected() -> np.ndarray:
    logits, true = volumes()
    found = np.zeros((SHAPE[0], SHAPE[1], SHAPE[1]), np.int64)
    for sample in range(SHAPE[0]):
        for t, p in zip(true[sample].flatten(), logits.argmax(1)[sample].flatten(), strict=True):
            found[sample, t, p] += 1
    return found


def counted(axes: dict[str, int], gathered: tuple[str, ...], recut: bool) -> np.ndarray:
    grid = hs.Grid(**axes)
    values, labels = volumes()
    logits = hs.gather(hs.shard(values, grid), gathered)
    if recut:  # as a network may leave it: other bounds than the labels'
        cut = Cut("depth", (0, 4, 5))
        logits = logits.redistribute(logits.partition.with_dim(2, 5, cut))
    predicted = predicted_classes(logits)
    assert predicted.local.dtype == torch.uint8
    assert torch.equal(predicted.full().long(), values.argmax(1))
    true = hs.shard(labels, grid, channels=False)
    return sum_over_ranks(count_confusion(predicted, true, SHAPE[1]), grid).numpy()


@pytest.mark.parametrize(
    ("axes", "gathered", "recut"),
    [
        ({}, (), False),
        ({"depth": 2}, (), True),
        ({"depth": 2, "width": 3}, ("width",), False),  # copies along width count once
        ({"data": 2, "height": 2}, ("height",), False),
        ({"data": 4}, (), False),  # three samples are not cut over four replicas
    ],
    ids=str,
)
def test_every_voxel_is_counted_once(
    axes: dict[str, int], gathered: tuple[str, ...], recut: bool
) -> None:
    for found in run_ranks(math.prod(axes.values()), counted, axes, gathered, recut):
        np.testing.assert_array_equal(found, expected())
