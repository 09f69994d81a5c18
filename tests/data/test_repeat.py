"""Samples that an epoch shows several times, splits by counts (tiers: no process; gloo ranks)."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.data import open
from hyperslab.data.sampler import SPLITS, Schedule, Symmetry, samples_of
from hyperslab.data.store import deal_samples
from hyperslab.errors import DataError
from tests.formats.universes import Seat, folder, unit
from tests.ranks import run_ranks
from tests.selection import by_rotation

N = 5


@given(
    n=st.integers(1, 30),
    batch=st.integers(1, 70),
    repeat=st.integers(1, 4),
    epoch=st.integers(0, 5),
)
def test_an_epoch_is_so_many_passes(n: int, batch: int, repeat: int, epoch: int) -> None:
    samples = tuple(range(3, 3 + n))
    schedule = Schedule(samples, batch, 3, True, repeat)
    once = Schedule(samples, batch, 3, True)
    batches = schedule.batches(epoch)
    order = list(chain.from_iterable(batches))
    assert len(batches) == schedule.steps
    assert len(order) == schedule.shown == repeat * n
    passes = [once.order(number) for number in range(epoch * repeat, epoch * repeat + repeat)]
    assert order == list(chain.from_iterable(passes))
    assert Counter(order) == dict.fromkeys(samples, repeat)
    for step, shown in enumerate(batches):
        assert shown[0] == passes[schedule.pass_of(epoch, step) - epoch * repeat][step * batch % n]


def test_what_comes_again_has_one_owner() -> None:
    schedule = Schedule(tuple(range(7)), 3, 1, True, 3)
    kept = deal_samples(schedule, 2, 4)
    assert Counter(chain.from_iterable(kept)) == dict.fromkeys(range(7), 1)


def shown(path: Path, extents: dict[str, int], how: dict[str, Any]) -> list[Any]:
    """Two epochs; read and kept at the end."""
    grid = hs.Grid(**extents)
    found = []
    with open(path, grid, split="all", shuffle=True, transform=None, seed=4, **how) as data:
        assert len(data) == N * how["repeat"]
        for epoch in range(2):
            for x, y in data.epoch(epoch, onward=epoch == 0):
                found.append((epoch, data.shown, x.full().numpy(), y.full().numpy()))
            read = data.bytes_read
            if epoch == 0:
                first = read
        if how.get("store") == "store":
            assert read == first  # nothing is read twice
    return found


@pytest.mark.parametrize(
    ("extents", "how"),
    by_rotation(
        [{}, {"data": 2}, {"data": 2, "depth": 2}, {"width": 2}],
        [("direct", 2), ("store", 3), ("store", 2), ("direct", 3)],
    ),
    ids=str,
)
def test_values_on_every_grid(
    tmp_path: Path, extents: dict[str, int], how: tuple[str, int]
) -> None:
    store, repeat = how
    """Five samples in mini-batches of two: some begin with one pass and end with the next."""
    volumes = folder(tmp_path, N)
    how = {"batch_size": 2, "repeat": repeat, "store": store, "augment": True}
    schedule = Schedule(tuple(range(N)), 2, 4, True, repeat)
    for rank in run_ranks(int(np.prod([*extents.values(), 1])), shown, tmp_path, extents, how):
        seen = Counter()
        for number, (epoch, samples, x, y) in enumerate(rank):
            step = number % schedule.steps
            assert list(samples) == schedule.batches(epoch)[step]
            turn = schedule.pass_of(epoch, step)
            for i, sample in enumerate(samples):
                symmetry = Symmetry.draw((4, 7, 7, 7), 4, turn, sample)
                np.testing.assert_array_equal(x[i], symmetry.apply(volumes[sample]))
                np.testing.assert_array_equal(y[i], unit(sample).astype("f4"))
                seen[sample] += 1
        assert seen == dict.fromkeys(range(N), 2 * repeat)


def test_skipping_with_repetition(tmp_path: Path) -> None:
    """A damaged file is left out of both passes."""
    folder(tmp_path, N)
    broken = tmp_path / "a/univ_001.hdf5"
    how = {"split": "all", "shuffle": True, "batch_size": 2, "repeat": 2, "on_error": "skip"}
    with open(tmp_path, Seat(), **how) as data:
        broken.write_bytes(b"")
        found = [sample for _ in data.epoch(0) for sample in data.shown]
    assert Counter(found) == {0: 2, 2: 2, 3: 2, 4: 2}


def test_a_repetition_of_none_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, N)
    with pytest.raises(DataError, match="repeat=0: needs to be >= 1"):
        open(tmp_path, Seat(), batch_size=2, repeat=0)


VOLUMES = [f"v{i}" for i in range(40) for _ in range(3)]


def volumes_of(counts: tuple[int | None, int, int], part: str) -> set[str]:
    samples = samples_of(VOLUMES, part, (0.8, 0.1, 0.1), 7, counts)
    held = {VOLUMES[sample] for sample in samples}
    assert len(samples) == 3 * len(held)
    return held


def test_counts_are_exact() -> None:
    parts = {part: volumes_of((None, 5, 2), part) for part in SPLITS}
    assert [len(part) for part in parts.values()] == [33, 5, 2]
    assert len(set.union(*parts.values())) == 40


def test_validation_and_test_stay_when_there_is_less_to_train_on() -> None:
    """Learning curves compare on the same volumes, and larger training sets hold smaller ones."""
    sizes = [1, 8, 20, 33]
    trained = [volumes_of((size, 5, 2), "train") for size in sizes]
    assert [len(part) for part in trained] == sizes
    assert all(a < b for a, b in pairwise(trained))
    for part in ("validation", "test"):
        assert len({frozenset(volumes_of((size, 5, 2), part)) for size in sizes}) == 1
    assert trained[-1] == volumes_of((None, 5, 2), "train")


def test_bad_counts_are_refused() -> None:
    with pytest.raises(DataError, match=r"train 34, validation 5 and test 2 are 41 volumes.* 40"):
        volumes_of((34, 5, 2), "train")
    with pytest.raises(DataError, match=r"validation 39 and test 2 are 41 volumes.* 40"):
        volumes_of((None, 39, 2), "test")
    with pytest.raises(DataError, match="fewer than 0"):
        volumes_of((None, -1, 2), "test")
    with pytest.raises(DataError, match=r"no volume for split 'train'.*train 0, validation 38"):
        volumes_of((None, 38, 2), "train")
    with pytest.raises(DataError, match=r"'test'.*test 0"):
        volumes_of((3, 5, 0), "test")
