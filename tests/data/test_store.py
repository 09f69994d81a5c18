"""Boxes that are kept and travel (tier: a few gloo ranks)."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.data import open
from hyperslab.data.sampler import Symmetry
from tests.formats import scans
from tests.formats.universes import folder, unit
from tests.ranks import run_ranks
from tests.selection import by_rotation

N, S, EPOCHS = 11, 7, 3

GRIDS = [
    {"data": 2},
    {"data": 2, "depth": 2},
    {"data": 2, "height": 2, "width": 2},
    {"data": 4, "depth": 2},
    {"data": 3, "width": 2},
]
"""In the gate each of them meets one value of what else a test varies, in turn."""


class Messages(logging.Handler):
    """The records of what this rank has sent: (epoch, step, sample, bytes, from, to)."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.sent: list[tuple[int, ...]] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = re.fullmatch(
            r"epoch (\d+), step (\d+), sample (\d+): .*: (\d+) B from rank (\d+) to rank (\d+)",
            record.getMessage(),
        )
        assert found is not None
        self.sent.append(tuple(map(int, found.groups())))


def epochs(path: Path, extents: dict[str, int], how: dict[str, Any]) -> dict[str, Any]:
    """Three epochs on one rank: what came, what was read and sent, what is kept."""
    messages, logger = Messages(), logging.getLogger("hyperslab.data")
    logger.addHandler(messages)
    logger.setLevel(logging.DEBUG)
    try:
        grid = hs.Grid(**extents)
        shown, read, stored = [], [], []
        with open(path, grid, split="all", **how) as data:
            for epoch in range(EPOCHS):
                for x, y in data.epoch(epoch, onward=epoch + 1 < EPOCHS):
                    shown.append((epoch, data.shown, x.full().numpy(), y.full().numpy()))
                    stored.append(data.stored_bytes)
                read.append(data.bytes_read)
            box = grid.partition((grid.data, *data.shape)).box(grid.coords)
            return {
                "coords": grid.coords,
                "shown": shown,
                "read": read,
                "stored": max(stored),
                "received": data.received_bytes,
                "sent": messages.sent,
                "box": math.prod(box.shape[1:]) * 2,
            }
    finally:
        logger.removeHandler(messages)


def position(coords: dict[str, int]) -> tuple[int, ...]:
    return tuple(coords[axis] for axis in ("depth", "height", "width"))


def check_shown(results: list[dict[str, Any]], volumes: list[Any]) -> None:
    """Every sample once per epoch, on every rank the same ones, whole and right."""
    for result in results:
        for epoch in range(EPOCHS):
            seen = [s for e, samples, _, _ in result["shown"] if e == epoch for s in samples]
            assert Counter(seen) == Counter(range(N))
        for _, samples, x, y in result["shown"]:
            np.testing.assert_array_equal(x, np.stack([volumes[s] for s in samples]))
            np.testing.assert_array_equal(y, np.stack([unit(s) for s in samples]).astype("f4"))
    orders = {tuple((e, s) for e, s, _, _ in result["shown"]) for result in results}
    assert len(orders) == 1


@pytest.mark.parametrize(("extents", "mode"), by_rotation(GRIDS, ["store", "preload"]), ids=str)
def test_every_sample_once_and_read_once(
    tmp_path: Path, extents: dict[str, int], mode: str
) -> None:
    volumes = folder(tmp_path, N)
    how = {"batch_size": 5, "shuffle": True, "transform": None, "mode": mode, "budget": 10**6}
    results = run_ranks(math.prod(extents.values()), epochs, tmp_path, extents, how)
    check_shown(results, volumes)
    positions = [position(result["coords"]) for result in results]
    moved = 0
    for rank, result in enumerate(results):
        assert result["read"][0] == result["read"][-1], "epochs after the first read nothing"
        for epoch, step, _, size, source, target in result["sent"]:
            assert source == rank
            assert positions[source] == positions[target]
            assert epoch > 0 or step == 2, "in epoch 0 only a last one that all replicas compute"
            moved += size
    assert moved == sum(result["received"] for result in results) > 0
    whole = sum(volume.nbytes for volume in volumes)
    assert sum(result["read"][-1] for result in results) == whole
    assert sum(result["stored"] for result in results) == whole + 8 * 4 * N * len({*positions})


@pytest.mark.parametrize(
    ("kept", "extents"), by_rotation([0, 2, 3], [{"data": 2, "depth": 2}, {"depth": 3}]), ids=str
)
def test_what_does_not_fit_is_read_again(
    tmp_path: Path, extents: dict[str, int], kept: int
) -> None:
    volumes = folder(tmp_path, N)
    box = -(-S // extents["depth"]) * S * S * 4 * 2 + 32
    how = {"batch_size": 4, "shuffle": True, "transform": None, "mode": "store"}
    ranks = math.prod(extents.values())
    results = run_ranks(ranks, epochs, tmp_path, extents, {**how, "budget": kept * box + 5})
    check_shown(results, volumes)
    for result in results:
        assert result["stored"] <= kept * box + 5
    replicas = extents.get("data", 1)
    once = kept * replicas
    samples_read = once + EPOCHS * (N - once)
    assert sum(result["read"][-1] for result in results) == samples_read * volumes[0].nbytes


@pytest.mark.parametrize(
    ("extents", "kept"), by_rotation([*GRIDS, {"depth": 3}], [0, 2, N]), ids=str
)
def test_whole_samples_are_read_and_sent_by_one_rank(
    tmp_path: Path, extents: dict[str, int], kept: int
) -> None:
    """As in figure 5 of Oyama et al. 2020: all that others get of a sample one rank has read."""
    volumes = folder(tmp_path, N)
    size = volumes[0].nbytes + 32  # of a whole sample and its target [B]
    ranks = math.prod(extents.values())
    how = {"batch_size": 5, "shuffle": True, "transform": None, "mode": "sample"}
    results = run_ranks(ranks, epochs, tmp_path, extents, {**how, "budget": kept * size})
    check_shown(results, volumes)
    keepers: dict[int, set[int]] = {}
    for _, _, sample, _, source, _ in (message for result in results for message in result["sent"]):
        keepers.setdefault(sample, set()).add(source)
    assert all(len(sources) == 1 for sources in keepers.values())
    assert len(set.union(*keepers.values())) == min(ranks, N), "every rank has its turn"
    once = [result["stored"] // size for result in results]
    again = [
        (result["read"][-1] // volumes[0].nbytes - kept_here) // EPOCHS
        for result, kept_here in zip(results, once, strict=True)
    ]
    assert sum(once) + sum(again) == N
    for kept_here, read_again in zip(once, again, strict=True):
        assert kept_here == min(kept, kept_here + read_again)
    read = sum(result["read"][-1] for result in results)
    assert read == (sum(once) + EPOCHS * sum(again)) * volumes[0].nbytes


@pytest.mark.parametrize("mode", ["store", "sample"])
def test_a_second_level_on_disk(tmp_path: Path, mode: str) -> None:
    volumes = folder(tmp_path / "files", N)
    how = {"batch_size": 4, "shuffle": True, "transform": None, "mode": mode, "budget": 3000}
    extents = {"data": 2, "depth": 2}
    results = run_ranks(
        4, epochs, tmp_path / "files", extents, {**how, "staging": tmp_path / "fast"}
    )
    check_shown(results, volumes)
    for result in results:
        assert 0 < result["stored"] <= 3000
        assert result["read"][0] == result["read"][2]
    assert list((tmp_path / "fast").iterdir()) == [], "the file has no name"


@pytest.mark.parametrize(
    ("extents", "mode"),
    by_rotation([{"data": 2, "depth": 3}, {"depth": 2, "width": 2}], ["store", "sample"]),
    ids=str,
)
def test_augmented_boxes_come_from_their_keepers(
    tmp_path: Path, extents: dict[str, int], mode: str
) -> None:
    volumes = folder(tmp_path, N)
    how = {"batch_size": 4, "transform": None, "mode": mode, "budget": 10**6, "augment": True}
    results = run_ranks(math.prod(extents.values()), epochs, tmp_path, extents, how)
    for result in results:
        for epoch, samples, x, _ in result["shown"]:
            for sample, values in zip(samples, x, strict=True):
                turn = Symmetry.draw(volumes[0].shape, 0, epoch, sample)
                np.testing.assert_array_equal(values, turn.apply(volumes[sample]))
        assert result["read"][0] == result["read"][2]
    whole = sum(volume.nbytes for volume in volumes)
    assert sum(result["read"][2] for result in results) == whole


def labelled(path: Path, extents: dict[str, int], augment: bool, mode: str) -> list[Any]:
    how: Any = {"batch_size": 3, "split": "all", "mode": mode, "budget": 10**6}
    with open(path, hs.Grid(**extents), shuffle=True, augment=augment, **how) as data:
        return [
            (data.shown, x.full().numpy(), y.full().numpy(), data.bytes_read)
            for epoch in range(2)
            for x, y in data.epoch(epoch)
        ]


@pytest.mark.parametrize(("augment", "mode"), by_rotation([False, True], ["store", "sample"]))
def test_labels_travel_with_their_volumes(tmp_path: Path, augment: bool, mode: str) -> None:
    shape, extents = (1, 7, 6, 5), {"data": 2, "height": 2}
    scans.folder(tmp_path, 5, shape)
    results = run_ranks(4, labelled, tmp_path, extents, augment, mode)
    for result in results:
        assert result[1][3] == result[3][3], "the second epoch reads nothing"
        for step, (samples, x, y, _) in enumerate(result):
            for sample, volume, classes in zip(samples, x, y, strict=True):
                turn = Symmetry.draw(shape, 0, step // 2, sample, turns=False)
                expected = scans.hu(sample, shape), scans.labels(sample, shape[1:])[None]
                if augment:
                    expected = tuple(turn.apply(part) for part in expected)
                np.testing.assert_array_equal(volume, expected[0])
                np.testing.assert_array_equal(classes[None], expected[1])


def resumed(path: Path, extents: dict[str, int], start: int, mode: str = "store") -> list[Any]:
    how: Any = {"batch_size": 2, "shuffle": True, "mode": mode, "budget": 10**6}
    with open(path, hs.Grid(**extents), split="all", transform=None, **how) as data:
        return [x.full().numpy() for x, _ in data.epoch(2, start)]


@pytest.mark.parametrize("mode", ["store", "sample"])
def test_an_epoch_resumes_with_an_empty_store(tmp_path: Path, mode: str) -> None:
    folder(tmp_path, N)
    every = run_ranks(2, resumed, tmp_path, {"data": 2}, 0)[0]
    for rest in run_ranks(4, resumed, tmp_path, {"data": 2, "width": 2}, 3, mode):
        assert len(rest) == len(every) - 3
        for a, b in zip(every[3:], rest, strict=True):
            np.testing.assert_array_equal(a, b)
