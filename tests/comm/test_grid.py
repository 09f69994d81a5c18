"""Ranks, coordinates, partitions and groups of a grid (tier: a few gloo ranks)."""

from __future__ import annotations

import logging
import queue
import socket
from collections.abc import Callable, Sequence
from logging.handlers import QueueHandler

import pytest
import torch
import torch.distributed as dist

import hyperslab as hs
from hyperslab.comm.grid import log_nodes
from tests.ranks import run_ranks


def test_alone_it_needs_no_process_group() -> None:
    grid = hs.Grid()
    assert not dist.is_initialized()
    assert (grid.size, grid.rank, grid.is_main) == (1, 0, True)
    assert grid.group(("data", "depth", "height", "width")) is None
    assert grid.partition((4, 2, 5, 6, 7)).axes == ()
    grid.barrier()


def test_wrong_product_says_both_numbers() -> None:
    with pytest.raises(hs.LayoutError, match="has 6 places but there are 1 ranks") as said:
        hs.Grid(depth=2, width=3)
    assert "ranks=range" not in str(said.value)  # there are no 6 ranks to name


def wrong() -> None:
    hs.Grid(data=3)


def test_wrong_product_of_several_ranks() -> None:
    with pytest.raises(hs.LayoutError, match="has 3 places but there are 2 ranks"):
        run_ranks(2, wrong)


@pytest.mark.parametrize("axes", [{"data": 0}, {"depth": -1, "width": -1}])
def test_every_axis_has_ranks(axes: dict[str, int]) -> None:
    with pytest.raises(hs.LayoutError, match="at least one rank"):
        hs.Grid(**axes)


def coordinates() -> tuple[int, int, int, int]:
    grid = hs.Grid(data=2, height=2, width=2)
    for rank in range(8):
        assert grid.rank_of(grid.coords_of(rank)) == rank
    c = grid.coords
    return c["data"], c["depth"], c["height"], c["width"]


def test_data_is_outermost_and_width_innermost() -> None:
    assert run_ranks(8, coordinates) == [
        (d, 0, h, w) for d in (0, 1) for h in (0, 1) for w in (0, 1)
    ]


def members() -> dict[str, list[int]]:
    grid = hs.Grid(data=2, depth=2, width=2)
    found = {}
    for axes in [("data",), ("depth",), ("width",), ("width", "depth"), ("height", "data")]:
        group = grid.group(axes)
        assert group is not None
        assert grid.group(axes) is group
        found[" ".join(axes)] = list(group.ranks)
    assert grid.group(("height",)) is None
    assert grid.group(("data", "depth", "width")).ranks == tuple(range(grid.size))
    return found


def test_group_members() -> None:
    found = run_ranks(8, members)
    assert found[0] == {
        "data": [0, 4],
        "depth": [0, 2],
        "width": [0, 1],
        "width depth": [0, 1, 2, 3],
        "height data": [0, 4],
    }
    assert found[7] == {
        "data": [3, 7],
        "depth": [5, 7],
        "width": [6, 7],
        "width depth": [4, 5, 6, 7],
        "height data": [3, 7],
    }


def bounds(shape: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    grid = hs.Grid(data=2, depth=3)
    return [None if cut is None else cut.bounds for cut in grid.partition(shape).cuts]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5, 2, 7, 4, 4), [(0, 3, 5), None, (0, 3, 5, 7), None, None]),
        ((5, 2, 7, 4), [(0, 3, 5), None, None, None]),
        ((4, 9), [(0, 2, 4), None]),
        ((3,), [(0, 2, 3)]),
        ((1, 2, 3, 4, 4), [None, None, (0, 1, 2, 3), None, None]),
        ((), []),
    ],
)
def test_how_a_tensor_is_cut(shape: tuple[int, ...], expected: list[object]) -> None:
    assert run_ranks(6, bounds, shape)[0] == expected


def too_small() -> None:
    hs.Grid(height=4).partition((2, 1, 8, 3, 8))


def test_an_extent_too_small_to_cut() -> None:
    with pytest.raises(hs.LayoutError) as caught:
        run_ranks(4, too_small)
    message = str(caught.value)
    assert "cannot cut dim 3 (extent 3)" in message
    assert "into 4 shards along height" in message
    assert "use height<=3" in message


def said(run: Callable[[], object]) -> list[str]:
    """What this rank logs meanwhile."""
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(records)
    logging.getLogger("hyperslab").addHandler(handler)
    run()
    logging.getLogger("hyperslab").removeHandler(handler)
    return [records.get().getMessage() for _ in range(records.qsize())]


def notices() -> int:
    """A notice is logged once, on the main rank."""
    grid = hs.Grid(data=2)
    return len(said(lambda: [grid.partition((1, 3)) for _ in range(3)]))


def test_a_notice_comes_once() -> None:
    assert run_ranks(2, notices) == [1, 0]


def said_of_labels() -> list[str]:
    """What is logged of classes that are taken for images with channels."""
    return said(lambda: hs.Grid(depth=2).partition((2, 4, 4, 4)))


def test_labels_without_channels_are_told_how_to_be_cut() -> None:
    (words,), others = run_ranks(2, said_of_labels)
    assert "one without channels, (batch, depth, height, width), by channels=False" in words
    assert not others


def where() -> tuple[str, bool]:
    grid = hs.Grid(data=2)
    return grid.device.type, torch.cuda.is_available()


def test_gloo_means_the_cpu() -> None:
    assert [device for device, _ in run_ranks(2, where)] == ["cpu", "cpu"]


def said_of_nodes(hosts: Sequence[str], extents: dict[str, int]) -> list[str]:
    """What a rank logs of nodes, on machines of these names."""
    said: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("hyperslab"), Said(logging.INFO)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    name = socket.gethostname
    socket.gethostname = lambda: hosts[dist.get_rank()]
    try:
        grid = hs.Grid(**extents)
        for _ in range(2):
            log_nodes(grid)
    finally:
        socket.gethostname = name
        logger.removeHandler(handler)
        logger.setLevel(before)
    return said


@pytest.mark.parametrize(
    ("hosts", "extents", "words"),
    [
        ("aaaa", {"depth": 2, "width": 2}, None),
        ("aabb", {"depth": 2, "width": 2}, "2 nodes: width inside; depth across; 50%"),
        ("aabb", {"data": 2, "height": 2}, "2 nodes: height inside; data across; 0%"),
        ("aabb", {"depth": 4}, "2 nodes: 2 of depth=4 inside; depth across; 33%"),
        (
            "abab",
            {"depth": 2, "width": 2},
            "2 nodes: their ranks do not follow each other; 50%",
        ),
        ("aaab", {"width": 4}, "2 nodes: 3 of width=4 inside; width across; 33%"),
    ],
)
def test_what_lies_inside_a_node_is_logged_once(
    hosts: str, extents: dict[str, int], words: str | None
) -> None:
    first, *others = run_ranks(4, said_of_nodes, hosts, extents)
    more = " of the halos' bytes travel between nodes" if words and words.endswith("%") else ""
    assert first == ([] if words is None else [f"4 ranks on {words}{more}"])
    assert others == [[], [], []]
