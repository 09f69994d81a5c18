"""What a store may take, and one that cannot be made or filled (tier: two gloo ranks)."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import hyperslab as hs
from hyperslab.data import open
from hyperslab.data.store import stores_in_use
from hyperslab.util.free_memory import free_memory
from tests.data.numbered import KEPT, Numbered
from tests.formats.universes import Seat
from tests.ranks import run_ranks


def test_two_data_sets_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 60 * 2 + 8
    monkeypatch.setattr("hyperslab.data.store.free_memory", lambda: 8 * size)
    seat = Seat()
    kept = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            data = open(Numbered(9), seat, batch_size=1, **{**KEPT, "budget": None})
            stack.enter_context(data)
            list(data.epoch(0))
            kept.append(data.stored_bytes)
            data._assembler.store.bytes = 0  # as if it had not been filled yet
    assert kept == [4 * size, 2 * size]
    assert sum(store.room for store in stores_in_use(seat)) == 0


@pytest.mark.parametrize("kind", ["two", "one"])
@pytest.mark.parametrize("inside", [True, False])
def test_control_groups_limit_the_memory(tmp_path: Path, kind: str, inside: bool) -> None:
    """Of both kinds, seen from outside and from inside a container."""
    names = {"two": ("memory.max", "memory.current", "inactive_file", "0::/a/b")}
    older = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    limit, used, cached, line = names.get(kind, (*older, "7:cpu,memory:/a/b"))
    root = tmp_path if kind == "two" else tmp_path / "memory"
    place = root if inside else root / "a"
    place.mkdir(parents=True, exist_ok=True)
    (tmp_path / "mine").write_text(f"1:cpu:/\n{line}\n")
    assert free_memory(tmp_path, tmp_path / "mine") > 10**6
    (place / limit).write_text("1000\n")
    (place / used).write_text("700\n")
    (place / "memory.stat").write_text(f"inactive_file 5\nanon 1\n{cached} 50\n")
    assert free_memory(tmp_path, tmp_path / "mine") == 350
    (place / limit).write_text("max\n")
    assert free_memory(tmp_path, tmp_path / "mine") > 10**6


def opening(broken: int, how: dict[str, Any]) -> str:
    grid = hs.Grid(data=2)
    source = Numbered()
    if grid.rank == broken:
        source.error = hs.DataError("it is damaged")
        how = {k: v / "file" if k == "staging" else v for k, v in how.items()}
    try:
        open(source, grid, batch_size=1, split="all", transform=None, **how)
    except hs.DataError as error:
        return str(error)
    return ""


def test_a_failing_preload_fails_everywhere() -> None:
    words = run_ranks(2, opening, 1, {"mode": "preload", "budget": 10**6})
    assert words == ["rank 1 says: it is damaged", "it is damaged"]


def test_a_failing_staging_folder_fails_everywhere(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = run_ranks(2, opening, 0, {"mode": "store", "budget": 0, "staging": tmp_path})
    assert words[1] == f"rank 0 says: {words[0]}"
    assert words[0].startswith(f"staging folder {tmp_path}/file: ")


@pytest.mark.parametrize("what", ["seed", "batch_size", "mode", "samples"])
def test_ranks_that_open_differently_are_refused(what: str) -> None:
    for words in run_ranks(3, differing, what):
        assert words.startswith(f"the ranks open this data set with different {what}; give")


def differing(what: str) -> str:
    """One rank opens otherwise."""
    grid = hs.Grid(depth=3)
    odd = grid.rank == 1
    how = {"batch_size": 1 + (what == "batch_size" and odd), "seed": int(what == "seed" and odd)}
    mode = "store" if what == "mode" and odd else "direct"
    with pytest.raises(hs.DataError) as error:
        open(Numbered(5 if what == "samples" and odd else 4), grid, split="all", mode=mode, **how)
    return str(error.value)
