"""Resampling, against torch's, and the place of every voxel (tier: no process)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyperslab.formats.nifti import resample

FINER = [
    ((5, 7, 9), (5, 7, 9)),
    ((3, 4, 5), (6, 8, 10)),
    ((5, 7, 9), (8, 9, 20)),
    ((1, 4, 1), (4, 5, 3)),
]
SHAPES = [
    ((5, 7, 9), (5, 7, 9)),
    ((6, 8, 10), (3, 4, 5)),
    ((5, 7, 9), (8, 3, 20)),
    ((1, 4, 3), (4, 1, 3)),
    ((13, 2, 17), (4, 9, 4)),
]


@pytest.mark.parametrize(("old", "new"), FINER, ids=str)
def test_linear_is_that_of_centres(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(-1000, 3000, old).astype(np.int16)
    x = torch.from_numpy(values).double()[None, None]
    expected = F.interpolate(x, new, mode="trilinear", align_corners=False)[0, 0]
    got = resample.blurred_linear(values, new)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=2e-3)


@pytest.mark.parametrize(("old", "new"), SHAPES, ids=str)
def test_nearest_is_that_of_centres(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    labels = np.random.default_rng(1).integers(0, 3, old).astype(np.uint8)
    x = torch.from_numpy(labels).double()[None, None]
    expected = F.interpolate(x, new, mode="nearest-exact")[0, 0]
    np.testing.assert_array_equal(resample.nearest(labels, new), expected)


@pytest.mark.parametrize(("old", "new"), SHAPES, ids=str)
def test_every_voxel_stays_where_it_is(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """A linear field of the place in millimetres is resampled to itself, but at the rim."""
    affine = np.eye(4)
    affine[:3] = [[0, 0.5, 2, -30], [0, 3, 0, 4], [1.5, 0, 0.25, 9]]
    place = np.moveaxis(np.indices(old), 0, -1) @ affine[:3, :3].T + affine[:3, 3]
    there = resample.resampled_affine(affine, old, new)
    expected = np.moveaxis(np.indices(new), 0, -1) @ there[:3, :3].T + there[:3, 3]
    centres = np.moveaxis(np.indices(new), 0, -1) + 0.5
    ratio = np.array(old) / np.array(new)
    blurred = np.where(ratio > 1, 2 * ratio, 0)  # what of the rim the Gaussian mixes in
    inside = centres * ratio >= 0.5 + blurred
    inside &= centres * ratio <= np.array(old) - 0.5 - blurred
    inside = inside.all(-1)
    for k in range(3):
        got = resample.blurred_linear(place[..., k], new)
        np.testing.assert_allclose(got[inside], expected[inside][:, k], atol=1e-3)
    np.testing.assert_allclose(resample.spacing(there), resample.spacing(affine) * ratio)
    np.testing.assert_allclose(  # the outer corner of the first voxel, and of the last
        [there @ [-0.5, -0.5, -0.5, 1], there @ [*(np.array(new) - 0.5), 1]],
        [affine @ [-0.5, -0.5, -0.5, 1], affine @ [*(np.array(old) - 0.5), 1]],
    )


def wave(extent: int, periods: int, size: int) -> tuple[float, float]:
    """The amplitude of a wave before and after it is brought to ``size`` voxels."""
    x = np.sin(2 * np.pi * periods * (np.arange(extent) + 0.5) / extent)
    values = np.broadcast_to(x[:, None, None], (extent, 3, 3))
    middle = slice(size // 4, -size // 4)
    found = resample.blurred_linear(values, (size, 3, 3))[middle, 1, 1]
    return float(np.sqrt(2) * x.std()), float(np.sqrt(2) * found.std())


def test_what_the_new_lattice_cannot_show_is_taken_away() -> None:
    _, kept = wave(256, 8, 64)
    assert kept > 0.9, "16 voxels in a period remain 8"
    before, aliased = wave(256, 80, 64)
    assert before == pytest.approx(1, rel=0.01)
    assert aliased < 0.02, "it would come back as a wave of 16 periods"


def test_finer_and_back_is_the_same() -> None:
    labels = np.random.default_rng(2).integers(0, 3, (7, 5, 6)).astype(np.uint8)
    for finer in [(7, 10, 18), (8, 9, 11), (20, 13, 7)]:
        back = resample.nearest(resample.nearest(labels, finer), labels.shape)
        np.testing.assert_array_equal(back, labels)
