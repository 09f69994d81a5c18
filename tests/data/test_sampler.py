"""Splits and orders (tier: no process)."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperslab.data.sampler import SPLITS, Schedule, samples_of
from hyperslab.errors import DataError

FRACTIONS = (0.8, 0.1, 0.1)


@given(n=st.integers(3, 200), pieces=st.integers(1, 4), seed=st.integers(0, 2**40))
def test_volumes_go_whole_to_one_split(n: int, pieces: int, seed: int) -> None:
    volumes = [f"v{i}" for i in range(n) for _ in range(pieces)]
    parts = {part: samples_of(volumes, part, FRACTIONS, seed) for part in SPLITS}
    assert sorted(chain.from_iterable(parts.values())) == list(range(n * pieces))
    held = [{volumes[i] for i in samples} for samples in parts.values()]
    assert sum(map(len, held)) == n
    assert len(held[1]) == len(held[2]) == max(1, round(n / 10))


def test_the_seed_decides_and_new_files_move_few() -> None:
    volumes = [f"v{i}" for i in range(1000)]
    test = set(samples_of(volumes, "test", FRACTIONS, 7))
    assert test == set(samples_of(volumes, "test", FRACTIONS, 7))
    assert len(test & set(samples_of(volumes, "test", FRACTIONS, 8))) < 30
    more = volumes + [f"w{i}" for i in range(10)]
    assert len(test & set(samples_of(more, "test", FRACTIONS, 7))) > 95


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(DataError, match=r"'train'.*train 0, validation 1, test 1.*all"):
        samples_of(["a", "b"], "train", FRACTIONS, 0)
    with pytest.raises(DataError, match=r"'test'.*train 5, validation 1, test 0"):
        samples_of(list("abcdef"), "test", (0.9, 0.1, 0), 0)
    for fractions in [(0.5, 0.5), (0.5, 0.2, 0.2), (1.2, -0.1, -0.1)]:
        with pytest.raises(DataError, match="add up to 1"):
            samples_of(["a"], "train", fractions, 0)


@given(n=st.integers(1, 50), batch=st.integers(1, 60), epoch=st.integers(0, 9))
def test_every_sample_once(n: int, batch: int, epoch: int) -> None:
    samples = tuple(range(5, 5 + n))
    batches = Schedule(samples, batch, 3, True).batches(epoch)
    assert Counter(chain.from_iterable(batches)) == Counter(samples)
    assert len(batches) == Schedule(samples, batch, 3, True).steps
    assert all(len(b) == batch for b in batches[:-1])
    assert Schedule(samples, batch, 3, False).order(epoch) == list(samples)


def test_orders_differ_by_epoch_and_seed_and_never_change() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return Schedule(tuple(range(12)), 4, seed, True).order(epoch)

    orders = {tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert order(1, 2) == [6, 7, 10, 11, 9, 2, 8, 3, 0, 5, 1, 4]  # resumed epochs rely on it
