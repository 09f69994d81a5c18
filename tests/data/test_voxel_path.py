"""The files that a voxel and the request for it pass, in reading order (tiers: no process; gloo).

A file is entered when another one calls into it. Neither the way back through a call nor what a
file calls of itself enters anything. One file is entered again: the store asks for what it lacks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hyperslab as hs
from hyperslab.data import Source, open
from tests.data.numbered import Numbered
from tests.formats.universes import Seat, folder
from tests.ranks import run_ranks

PACKAGE = Path(hs.__file__).parent

REQUEST = ["dataset", "assemble", "sampler", "store"]

DIRECT = [*REQUEST, "formats", "transforms"]
READ = [*REQUEST, "assemble", "formats", "transforms"]
KEPT = [*REQUEST, "transforms"]
READ_AND_SENT = [*REQUEST, "assemble", "formats", "host_p2p", "transforms"]
SENT = RECEIVED = [*REQUEST, "host_p2p", "transforms"]


def stop_of(frame: FrameType) -> str | None:
    """The file of the data half in which a call runs; all of ``formats/`` is one stop.

    So is `hyperslab.comm.host_p2p`, which carries boxes from rank to rank.
    """
    file = Path(frame.f_code.co_filename)
    if not file.is_relative_to(PACKAGE):
        return None
    within = file.relative_to(PACKAGE)
    if within == Path("comm/host_p2p.py"):
        return within.stem
    return {"data": within.stem, "formats": "formats"}.get(within.parts[0])


@contextmanager
def entered() -> Iterator[list[str]]:
    """The files that are entered meanwhile, by any thread, in order."""
    stops: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        stop = stop_of(frame) if event == "call" else None
        if stop is None or stop == caller(frame) or stops[-1:] == [stop]:
            return
        stops.append(stop)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield stops
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def caller(frame: FrameType) -> str | None:
    """The file of the data half that has called, if need be through a library."""
    above = frame.f_back
    while above is not None and stop_of(above) is None:
        above = above.f_back
    return None if above is None else stop_of(above)


def again(stops: list[str]) -> list[str]:
    """The files that are entered again after they were left, each time."""
    return [stop for at, stop in enumerate(stops) if stop in stops[:at]]


def path(where: Source | Path, grid: hs.Grid, mode: Any, epoch: int) -> list[str]:
    """What the only box of a mini-batch enters; earlier epochs are shown before."""
    how: Any = {"batch_size": 1, "split": "all", "mode": mode, "prefetch": 0}
    with open(where, grid, **how) as data:
        for earlier in range(epoch):
            list(data.epoch(earlier))
        batches = data.epoch(epoch)
        with entered() as stops:
            next(batches)
    return stops


@pytest.mark.parametrize(
    ("mode", "epoch", "expected"),
    [("direct", 0, DIRECT), ("direct", 1, DIRECT), ("store", 0, READ), ("store", 1, KEPT)],
)
def test_a_box_that_this_rank_reads(
    tmp_path: Path, mode: str, epoch: int, expected: list[str]
) -> None:
    folder(tmp_path, 1)
    found = path(tmp_path, Seat(), mode, epoch)
    assert found == expected
    assert again(found) == (["assemble"] if expected is READ else [])


def both_ends(epoch: int) -> list[str]:
    """Both replicas compute the only sample; the first one keeps it."""
    return path(Numbered(1), hs.Grid(data=2), "store", epoch)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_box_that_another_rank_keeps(epoch: int) -> None:
    sender, receiver = run_ranks(2, both_ends, epoch)
    assert sender == (SENT if epoch else READ_AND_SENT)
    assert receiver == RECEIVED
    assert again(sender) == ([] if epoch else ["assemble"])
    assert again(receiver) == []
