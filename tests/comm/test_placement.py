"""Which ranks share a node (tiers: no process; a few gloo ranks on machines of several names)."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.comm.bootstrap import launched_as, named
from hyperslab.comm.grid import hosts_of_ranks
from hyperslab.comm.placement import AXES, number_by_node, places, share_between_nodes
from tests.launched import run_launched
from tests.selection import in_gate

GRIDS = st.fixed_dictionaries(
    {axis: st.integers(1, 4) for axis in ("data", "depth", "height", "width")}
)
VOLUMES = st.tuples(*[st.integers(1, 600)] * 3)


@given(GRIDS, VOLUMES, st.integers(1, 12))
def test_no_box_of_positions_has_fewer_bytes_between_nodes(
    extents: dict[str, int], volume: tuple[int, int, int], per_node: int
) -> None:
    shape = tuple(extents[axis] for axis in AXES)  # hypothesis reorders keys
    ranks = math.prod(shape)
    place = places(extents, per_node, volume)
    assert sorted(place.tolist()) == list(range(ranks))
    assert place[0] == 0
    share = share_between_nodes(extents, (place // per_node).tolist(), volume)
    assert share <= share_between_nodes(extents, [at // per_node for at in range(ranks)], volume)
    if ranks % per_node:
        assert place.tolist() == list(range(ranks))
        return
    for box in itertools.product(*(range(1, extent + 1) for extent in shape)):
        parts = [n % m for n, m in zip(shape, box, strict=True)]
        if any(parts) or math.prod(box) != per_node:
            continue
        nodes = [
            str([at // part for at, part in zip(coords, box, strict=True)])
            for coords in itertools.product(*map(range, shape))
        ]
        assert share <= share_between_nodes(extents, nodes, volume)


@given(GRIDS, VOLUMES, st.data())
def test_every_order_of_a_launcher_gives_the_same_nodes(
    extents: dict[str, int], volume: tuple[int, int, int], data: st.DataObject
) -> None:
    ranks = math.prod(extents.values())
    per_node = data.draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    blocks = [f"n{rank // per_node}" for rank in range(ranks)]
    hosts = data.draw(st.permutations(blocks))
    numbers = number_by_node(hosts, extents, volume)
    assert numbers[0] == 0
    assert sorted(numbers) == list(range(ranks))
    where = dict(zip(numbers, hosts, strict=True))
    place = places(extents, per_node, volume)
    for one, other in itertools.pairwise(range(ranks)):
        together = place[one] // per_node == place[other] // per_node
        assert together == (where[one] == where[other])
    for host in hosts:  # in the launcher's order, as the devices of a node are
        mine = [n for n, name in zip(numbers, hosts, strict=True) if name == host]
        assert [place[n] for n in mine] == sorted(place[n] for n in mine)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_ranks_of_unequal_nodes_follow_each_other(hosts: list[str]) -> None:
    numbers = number_by_node(hosts, {"depth": len(hosts)})
    assert numbers[0] == 0
    placed = [hosts[numbers.index(at)] for at in range(len(hosts))]
    assert [host for host, _ in itertools.groupby(placed)] == list(Counter(hosts))


@pytest.mark.parametrize("hosts", [["same"] * 8, [f"n{at}" for at in range(8)]])
def test_names_that_tell_nothing_change_nothing(hosts: list[str]) -> None:
    extents = {"depth": 4, "height": 2}
    assert number_by_node(hosts, extents, (9, 500, 7)) == list(range(8))


def test_a_node_has_a_box_where_a_row_would_cross_more() -> None:
    extents = {"depth": 8, "height": 8}
    rows = share_between_nodes(extents, [at // 8 for at in range(64)])
    boxes = share_between_nodes(extents, (places(extents, 8) // 8).tolist())
    assert (rows, boxes) == (0.5, 4 / 14)


Seen = tuple[int, dict[str, int], str, str, float, list[float], list[str]]


def step(extents: Mapping[str, int]) -> Seen:
    """Make a grid as a program does, and a convolution's gradient on it."""
    said: list[str] = []
    logger = logging.getLogger("hyperslab")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    grid = hs.Grid(**extents)
    logger.removeHandler(handler)
    torch.manual_seed(0)
    model = torch.nn.Conv3d(2, 3, 3, padding=1, dtype=torch.float64)
    x = torch.randn(4, 2, 7, 11, 6, dtype=torch.float64)
    if grid.size > 1:
        model = hs.parallelize(model, grid)
        x = hs.shard(x, grid)
    loss = model(x).relu().square().mean()
    loss.backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    host = hosts_of_ranks(grid)[grid.rank].split()[0]
    me = (grid.rank, grid.coords, host, named([grid.rank]))
    values = gradient.flatten()[:5].tolist()
    if dist.is_initialized():
        assert launched_as(grid.rank) == int(os.environ["RANK"])
        dist.barrier()
        dist.destroy_process_group()
    return (*me, float(loss.detach()), values, [words for words in said if "numbered" in words])


# Two nodes whose ranks are dealt out in turn, in order, and unequal ones; how ranks are numbered
# needs no processes, above.
IN_GATE: list[tuple[str, dict[str, int]]] = [
    ("abab", {"data": 2, "height": 2}),
    ("aabb", {"height": 4}),
    ("aabc", {"depth": 4}),
]
ORDERS: list[tuple[str, dict[str, int]]] = [
    *IN_GATE,
    ("abab", {"depth": 2, "width": 2}),
    ("abba", {"width": 4}),
    ("aaaabbbb", {"depth": 4, "height": 2}),
    ("abababab", {"data": 2, "depth": 2, "width": 2}),
    ("abcdabcd", {"depth": 2, "height": 2, "width": 2}),
]


@pytest.mark.parametrize(("hosts", "extents"), in_gate(ORDERS, kept=IN_GATE))
def test_a_program_computes_the_same_in_every_order(
    hosts: Sequence[str], extents: dict[str, int]
) -> None:
    _, _, _, _, loss, gradient, _ = step({})
    found = run_launched(hosts, step, extents)
    numbers = number_by_node(hosts, extents)
    assert [one[0] for one in found] == numbers
    assert "".join(one[2] for one in found) == hosts
    for number, (rank, coords, _, name, here, values, said) in enumerate(found):
        at = 0
        for axis in AXES:
            at = at * extents.get(axis, 1) + coords[axis]
        assert at == rank
        assert here == pytest.approx(loss, rel=1e-12)
        assert values == pytest.approx(gradient, rel=1e-10)
        moved = numbers != list(range(len(hosts)))
        assert name == f"rank {rank}" + (f" (the launcher's rank {number})" if moved else "")
        assert len(said) == (moved and number == 0)
