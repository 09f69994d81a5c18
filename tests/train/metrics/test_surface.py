"""Distances between surfaces, against MONAI's own functions (tier: no process)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from monai.metrics import (
    compute_average_surface_distance,
    compute_hausdorff_distance,
    compute_surface_dice,
)

from hyperslab.train.metrics import bytes_to_measure, surface_scores, surface_summary

VOXEL = (2.5, 0.8, 1.1)


def ball(centre: tuple[float, ...], radius: float, shape: tuple[int, ...] = (18, 22, 20)) -> Any:
    at = np.indices(shape) - np.reshape(centre, (3, 1, 1, 1))
    return (((at * np.reshape(VOXEL, (3, 1, 1, 1))) ** 2).sum(0) < radius**2).astype(np.uint8)


PAIRS = {
    "near": (ball((8, 10, 9), 7), ball((9, 12, 9), 6)),
    "at the rim": (ball((0, 10, 19), 7), ball((3, 0, 15), 8)),
    "far": (ball((2, 3, 3), 3), ball((15, 18, 16), 4)),
    "equal": (ball((8, 10, 9), 7), ball((8, 10, 9), 7)),
    "one voxel": (ball((8, 10, 9), 0.5), ball((8, 10, 9), 7)),
}


@pytest.mark.filterwarnings("ignore:.*always_return_as_numpy:FutureWarning")
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("tolerance", [1.0, 2.0, 4.0])
def test_as_monai_measures(kind: str, tolerance: float) -> None:
    true, predicted = PAIRS[kind]
    found = surface_scores(3 * true, 3 * predicted, 3, VOXEL, tolerance)
    y, p = (torch.from_numpy(mask)[None, None] for mask in (true, predicted))
    how: dict[str, Any] = {"include_background": True, "spacing": VOXEL}
    hausdorff = compute_hausdorff_distance(p, y, percentile=95, **how).item()
    average = compute_average_surface_distance(p, y, symmetric=True, **how).item()
    dice = compute_surface_dice(p, y, [tolerance], **how).item()
    assert found.presence == "both"
    assert found.hausdorff_95 == pytest.approx(hausdorff, rel=1e-5)
    assert found.average == pytest.approx(average, rel=1e-5)
    assert found.dice == pytest.approx(dice, rel=1e-5)


def test_a_shift_in_millimetres() -> None:
    true = np.zeros((10, 10, 10), np.uint8)
    true[3:7, 3:7, 3:7] = 1
    found = surface_scores(true, np.roll(true, 1, 0), 1, (5.0, 1.0, 1.0))
    assert found.hausdorff_95 == 5.0
    assert 0 < found.average < 5


def test_missing_classes_are_said_and_in_no_mean() -> None:
    true, predicted = PAIRS["near"]
    none = np.zeros_like(true)
    kinds = [(true, predicted), (true, none), (none, predicted), (none, none)]
    found = [surface_scores(a, b, 1, VOXEL) for a, b in kinds]
    assert [one.presence for one in found] == ["both", "missed", "invented", "absent"]
    assert [one.dice for one in found[1:3]] == [0, 0]
    assert all(math.isnan(one.hausdorff_95) for one in found[1:])
    whole = surface_summary(found)
    assert whole["hausdorff_95_mm"] == found[0].hausdorff_95
    assert whole["surface_dice"] == pytest.approx(found[0].dice / 3)
    counts = [whole[f"samples_{kind}"] for kind in ("both", "missed", "invented")]
    assert counts == [1, 1, 1]
    assert math.isnan(surface_summary(found[1:])["average_surface_distance_mm"])


def test_memory_is_that_of_the_box_around_both() -> None:
    true, predicted = PAIRS["near"]
    assert 0 < bytes_to_measure(true, predicted) < bytes_to_measure(*PAIRS["far"])
    assert bytes_to_measure(np.zeros_like(true), np.zeros_like(true)) == 0
