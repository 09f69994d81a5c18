"""What is kept and what is read ahead, as policies and in short (tier: no process)."""

from __future__ import annotations

import mmap
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import hyperslab as hs
from hyperslab.data import PrefetchPolicy, StorePolicy, open
from tests.data.numbered import Numbered
from tests.formats.universes import Seat

SIZE = 60 * 2 + 8  # of a sample [B]

ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"store": StorePolicy("direct"), "prefetch": PrefetchPolicy()}),
    ({"store": "preload"}, {"store": StorePolicy("preload")}),
    ({"store": "store"}, {"mode": "store"}),
    ({"mode": "store", "budget": 3 * SIZE}, {"store": StorePolicy(budget=3 * SIZE)}),
    ({"mode": "sample", "budget": 3 * SIZE}, {"store": StorePolicy("sample", 3 * SIZE)}),
    ({"store": "store", "budget": SIZE}, {"store": StorePolicy("store", SIZE)}),
    ({"prefetch": 3}, {"prefetch": PrefetchPolicy(3)}),
    ({"prefetch_bytes": 2 * SIZE}, {"prefetch": PrefetchPolicy(2, 2 * SIZE)}),
    ({"prefetch": 5, "prefetch_bytes": SIZE}, {"prefetch": PrefetchPolicy(5, SIZE)}),
]


def opened(**how: Any) -> tuple[int, int, int]:
    """What is read ahead, what may be kept, and what is kept after an epoch [B]."""
    with open(Numbered(), Seat(), batch_size=1, split="all", **how) as data:
        assert len(list(data.epoch(0))) == 4
        return data.prefetch, data.store_room, data.stored_bytes


@pytest.mark.parametrize(("short", "policies"), ALIKE, ids=str)
def test_short_forms_are_policies(short: dict[str, Any], policies: dict[str, Any]) -> None:
    assert opened(**short) == opened(**policies)


def test_a_staging_folder_takes_what_memory_does_not(tmp_path: Path) -> None:
    policy = StorePolicy(budget=SIZE, staging=tmp_path / "fast")
    assert opened(store=policy) == (2, SIZE, SIZE)
    assert opened(mode="store", budget=SIZE, staging=str(tmp_path / "fast")) == (2, SIZE, SIZE)


@pytest.mark.parametrize(
    "how",
    [
        {"store": "kept"},
        {"mode": "kept"},
        {"mode": "store", "budget": -1},
        {"budget": 5},
        {"staging": "fast"},
        {"prefetch": -1},
        {"prefetch_bytes": -1},
        {"store": "store", "mode": "preload"},
        {"store": StorePolicy(), "budget": 5},
        {"prefetch": PrefetchPolicy(), "prefetch_bytes": 5},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(hs.DataError, match="|".join(how)):
        opened(**how)


@pytest.mark.parametrize("kept", [0, 1, 3, 9])
def test_staging_is_bounded_by_size(tmp_path: Path, kept: int) -> None:
    """Of four samples one is in memory and the others on disk, as far as there is room."""
    source = Numbered()
    policy = StorePolicy("store", SIZE, tmp_path, kept * (SIZE + mmap.PAGESIZE))
    how: Any = {"batch_size": 1, "split": "all", "transform": None, "store": policy}
    with open(source, Seat(), **how) as data:
        reads = [len(list(data.epoch(epoch))) and data.bytes_read for epoch in range(3)]
        assert (data.store_room, data.stored_bytes) == (SIZE, SIZE)
        assert data.staging_room == min(kept, 3) * (SIZE + mmap.PAGESIZE)
    again = max(0, 3 - kept) * (SIZE - 8)
    assert [after - before for before, after in pairwise(reads)] == [again, again]


def test_a_staging_budget_needs_staging(tmp_path: Path) -> None:
    with pytest.raises(hs.DataError, match="staging_budget belongs to a staging folder"):
        StorePolicy("store", staging_budget=5)
    with pytest.raises(hs.DataError, match="staging_budget=-1"):
        StorePolicy("store", staging=tmp_path, staging_budget=-1)


def test_one_rank_does_not_read_what_all_read_together() -> None:
    source = Numbered()
    source.collective = True
    with pytest.raises(hs.DataError, match="reads a sample on one rank, the driver on all"):
        open(source, Seat(), batch_size=1, split="all", mode="sample")


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(TypeError, match=r"open\(\) got an unexpected keyword argument 'depth'"):
        opened(depth=2)


def test_a_gpu_never_waits_for_a_batch_that_nobody_reads() -> None:
    """However large it is, unless none is wanted."""
    policy = PrefetchPolicy(2, SIZE)
    assert [policy.batches(SIZE // 3, kind) for kind in ("cpu", "cuda")] == [2, 2]
    assert [policy.batches(SIZE, kind) for kind in ("cpu", "cuda")] == [1, 1]
    assert [policy.batches(2 * SIZE, kind) for kind in ("cpu", "cuda")] == [0, 1]
    assert PrefetchPolicy(0, SIZE).batches(2 * SIZE, "cuda") == 0
    assert PrefetchPolicy(2, 0).batches(2 * SIZE, "cuda") == 0
