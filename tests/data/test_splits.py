"""Splits by lists and by folds (tier: no process)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hyperslab.data.sampler import SPLITS, Folds, Listed, SplitPolicy
from hyperslab.errors import DataError
from hyperslab.formats.source import Array, Source
from hyperslab.formats.views import Subvolumes
from hyperslab.geometry import Box


class Named(Source):
    """Volumes of zeros with names."""

    dtype = np.dtype(np.float32)
    shape = (1, 4, 4, 4)

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def read(self, sample: int, box: Box) -> Array:
        return np.zeros(box.shape, np.float32)

    def target(self, sample: int) -> Array:
        return np.zeros(1)


FOLDERS = Named(["a/0", "a/1", "a/deep/2", "b/0", "b/1", "c"])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["a"], [0, 1, 2]),
        (["a/deep/", "c.hdf5"], [2, 5]),
        (["b/1.npy", "b/0"], [3, 4]),
        (["*/1"], [1, 4]),
        (["b/*.npy"], [3, 4]),
        (["2:5"], [2, 3, 4]),
        ([":1", "5:"], [0, 5]),
        (["."], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_words_name_samples(words: list[str], found: list[int]) -> None:
    assert Listed(train=tuple(words)).samples(FOLDERS, "train", 0) == found


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"train": ["a"], "test": ["a/deep/2"]}, "data.train and data.test overlap: both have"),
        ({"train": ["a", "a/0"]}, "data.train lists a sample twice, by 'a' and by 'a/0'"),
        ({"train": ["a/3"]}, "data.train: 'a/3' names no sample of the data set; nearest: 'a/"),
        ({"train": ["*.x"]}, "'*.x' names no sample"),
        ({"train": ["4:9"]}, "'4:9' is not a range of 6 samples"),
        ({"train": ["3:3"]}, "'3:3' is not a range of 6 samples"),
        ({"validation": ["a"]}, "no split 'train': data.train lists nothing"),
    ],
)
def test_words_are_refused(splits: dict[str, Any], words: str) -> None:
    listed = Listed(**{split: tuple(value) for split, value in splits.items()})
    with pytest.raises(DataError) as caught:
        listed.samples(FOLDERS, "train", 0)
    assert words in str(caught.value)


def test_parts_of_a_volume_are_listed_by_it_and_stay_together() -> None:
    parts = Subvolumes(FOLDERS, 2)
    listed = Listed(train=("c",), validation=("b/0_0_0_1",))
    assert listed.samples(parts, "train", 0) == list(range(40, 48))
    assert listed.samples(parts, "validation", 0) == [25]
    with pytest.raises(DataError, match=r"overlap: both have .*which is of volume 'c'"):
        Listed(train=("c_0_0_0",), test=("c_1_0_0",)).samples(parts, "train", 0)


def test_parts_of_a_volume_are_in_the_split_that_its_data_set_has_dealt() -> None:
    source = Named(["a", "b", "c"])
    source.splits = {"a": "test", "c": "train"}
    parts = Subvolumes(source, 2)
    dealt: dict[str, Any] = {"fractions": (0.8, 0.1, 0.1), "counts": None, "folders": False}
    assert SplitPolicy("test", **dealt).samples(parts) == list(range(8))
    assert SplitPolicy("train", **dealt).samples(parts) == list(range(16, 24))


@pytest.mark.parametrize(
    "how", [{}, {"folders": True}, {"splits": Folds(1, 2)}, {"splits": Listed(train=("a",))}]
)
def test_all_is_everything_and_other_words_are_refused(how: dict[str, Any]) -> None:
    assert SplitPolicy("all", **how).samples(FOLDERS) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(DataError, match=r"no split 'valid'.*validation"):
        SplitPolicy("valid", **how).samples(FOLDERS)


def test_folds_hold_out_every_volume_once() -> None:
    source = Subvolumes(Named([f"v{i}" for i in range(13)]), 2)
    held_out = []
    for fold in range(5):
        folds = Folds(fold, 5)
        train = folds.samples(source, "train", 3)
        validation = folds.samples(source, "validation", 3)
        assert sorted(train + validation) == list(range(13 * 8))
        volumes = {source.volume(sample) for sample in validation}
        assert len(volumes) in (2, 3)
        assert not volumes & {source.volume(sample) for sample in train}
        held_out += sorted(volumes)
        assert folds.samples(source, "validation", 4) != validation
    assert sorted(held_out) == sorted(f"v{i}" for i in range(13))


def test_folds_leave_the_test_samples_alone() -> None:
    folds = Folds(1, 2, test=("c", "b/1"))
    found = {split: folds.samples(FOLDERS, split, 0) for split in SPLITS}
    assert found["test"] == [4, 5]
    assert sorted(found["train"] + found["validation"]) == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"no split 'test': 2 folds"):
        Folds(1, 2).samples(FOLDERS, "test", 0)


@pytest.mark.parametrize(("fold", "folds"), [(5, 5), (0, 1), (-1, 3)])
def test_there_is_no_such_fold(fold: int, folds: int) -> None:
    with pytest.raises(DataError, match=r"counted from 0"):
        Folds(fold, folds)


def test_more_folds_than_volumes() -> None:
    with pytest.raises(DataError, match=r"data.folds=7, but there are 6 volumes"):
        Folds(0, 7).samples(FOLDERS, "train", 0)
