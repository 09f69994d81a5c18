"""Synthetic volumes are the same voxel by voxel however they are cut (tier: no process)."""

from __future__ import annotations

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.data import SyntheticVolumes
from hyperslab.geometry import Box

SHAPE = (2, 12, 16, 20)
WHOLE = Box.whole(SHAPE)


@pytest.fixture
def counts() -> SyntheticVolumes:
    return SyntheticVolumes(SHAPE, 6, targets=3)


@pytest.mark.parametrize("box", [Box((1, 3, 5, 7), (2, 9, 16, 8)), Box((0, 0, 0, 0), (2, 1, 1, 1))])
def test_a_box_is_that_of_the_volume(counts: SyntheticVolumes, box: Box) -> None:
    assert np.array_equal(counts.read(3, box), counts.read(3, WHOLE)[box.slices()])


def test_a_box_of_labels_is_that_of_the_volume() -> None:
    source = SyntheticVolumes(SHAPE, 2, classes=3)
    box = Box((3, 5, 7), (9, 16, 8))
    whole = source.labels(1, Box.whole(SHAPE[1:]))
    assert np.array_equal(source.labels(1, box), whole[box.slices()])
    assert whole.dtype == np.uint8
    assert np.bincount(whole.ravel()).min() > whole.size / 4
    assert source.classes == ("background", "class 1", "class 2")


def test_values_are_counts_without_a_pattern() -> None:
    volume = SyntheticVolumes((1, 32, 32, 32), 1).read(0, Box.whole((1, 32, 32, 32)))
    assert volume.dtype == np.int16
    assert volume.min() == 0
    assert volume.mean() == pytest.approx(1, abs=0.05)
    assert volume.var() == pytest.approx(1, abs=0.1)
    centred = (volume[0] - volume.mean()) / volume.std()
    for dim in range(3):  # neighbours know nothing of each other
        ahead = np.take(centred, range(1, 32), dim)
        behind = np.take(centred, range(31), dim)
        assert abs((ahead * behind).mean()) < 0.05


def test_samples_channels_and_targets_differ(counts: SyntheticVolumes) -> None:
    first = counts.read(0, WHOLE)
    assert (first != counts.read(1, WHOLE)).mean() > 0.5
    assert (first[0] != first[1]).mean() > 0.5
    targets = np.array([counts.target(sample) for sample in range(6)])
    assert targets.shape == (6, 3)
    assert len(np.unique(targets)) == 18
    assert (np.abs(targets) <= 1).all()


def test_the_values_stay_what_they_are(counts: SyntheticVolumes) -> None:
    # Numbers of this version: a run that is resumed by another must find the same.
    assert counts.read(5, WHOLE)[1, 7, 2, :8].tolist() == [0, 1, 2, 0, 1, 5, 3, 0]
    assert counts.target(5).tolist() == pytest.approx([0.116223, 0.839139, -0.447558], abs=1e-6)


def test_open_takes_them(counts: SyntheticVolumes) -> None:
    with hs.open(counts, hs.Grid(), batch_size=2, split="all", shuffle=False) as data:
        (x, y), *rest = data.epoch(0)
        assert data.transform == "log1p"
        assert np.allclose(x.full()[1].numpy(), np.log1p(counts.read(1, WHOLE)))
        assert np.allclose(y.full()[1].numpy(), counts.target(1))
        assert len(rest) == 2
