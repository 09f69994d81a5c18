"""Fetch, redistribute, gather, shard: values and adjoints (tier: a few gloo ranks)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.comm import communicator, exchange, plan_exchange
from hyperslab.comm.exchange import fetch
from hyperslab.geometry import Cover, Cut, Partition
from hyperslab.kernels.memory_format import CHANNELS_LAST
from tests.ops.serial import AXES, RANKS, draw_examples, grids
from tests.ranks import run_ranks
from tests.selection import in_gate


@dataclass(frozen=True)
class Exchange:
    """Boxes of ``partition`` become those of ``wanted``; ``fill`` beyond the volume's edge."""

    grid: dict[str, int]
    partition: Partition
    wanted: Cover
    fill: float = 0.0
    seed: int = 0


@st.composite
def partitions(draw: st.DrawFn, grid: dict[str, int], shape: tuple[int, ...]) -> Partition:
    """Any dim by any axis or none; shards of any extent, empty ones too."""
    axes = list(draw(st.permutations([*AXES, None, None])))[: len(shape)]
    cuts: list[Cut | None] = []
    for extent, axis in zip(shape, axes, strict=True):
        if axis is None or grid[axis] == 1:
            cuts.append(None)
            continue
        inner = sorted(draw(st.integers(0, extent)) for _ in range(grid[axis] - 1))
        cuts.append(Cut(axis, (0, *inner, extent)))
    return Partition(shape, tuple(cuts))


@st.composite
def covers(draw: st.DrawFn, grid: dict[str, int], shape: tuple[int, ...]) -> Cover:
    """Any interval for every rank of an axis, over the edges as well."""
    axes = [a if a and grid[a] > 1 else None for a in draw(st.permutations([*AXES, None, None]))]
    chosen, intervals = tuple(axes[: len(shape)]), []
    for extent, axis in zip(shape, chosen, strict=True):
        lows = [draw(st.integers(-3, extent)) for _ in range(grid[axis] if axis else 1)]
        intervals.append(tuple((low, low + draw(st.integers(1, extent + 3))) for low in lows))
    return Cover(chosen, tuple(intervals))


@st.composite
def exchanges(draw: st.DrawFn, ranks: int) -> Exchange:
    grid = draw(grids(ranks))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(draw(st.integers(1, 5))))
    partition = draw(partitions(grid, shape))
    wanted = draw(st.one_of(covers(grid, shape), partitions(grid, shape)))
    return Exchange(
        grid,
        partition,
        wanted.cover if isinstance(wanted, Partition) else wanted,
        draw(st.sampled_from([0.0, -2.5])),
        draw(st.integers(0, 999)),
    )


def whole(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected_box(full: torch.Tensor, lo: Any, hi: Any, fill: float) -> torch.Tensor:
    """By explicit indexing of the whole tensor."""
    for dim, (a, b) in enumerate(zip(lo, hi, strict=True)):
        index = torch.arange(a, b)
        inside = (index >= 0) & (index < full.shape[dim])
        taken = full.index_select(dim, index.clamp(0, full.shape[dim] - 1))
        mask = inside.view([-1 if d == dim else 1 for d in range(full.dim())])
        full = torch.where(mask, taken, torch.tensor(fill, dtype=full.dtype))
    return full


def total(value: torch.Tensor) -> float:
    """The sum over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item()


FORMS = ("by one index", "piece by piece", "every other rank piece by piece")
"""Says how small boxes are put together; messages are the same."""


def check_exchanges(cases: list[Exchange], form: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        rank = dist.get_rank()
        if form == FORMS[1] or (form == FORMS[2] and rank % 2):
            patch.setattr(exchange, "FEW_ELEMENTS", 0)
        _check_exchanges(cases)


def _check_exchanges(cases: list[Exchange]) -> None:
    for case in cases:
        grid = hs.Grid(**case.grid)
        full = whole(case.partition.shape, case.seed)
        own, box = case.partition.box(grid.coords), case.wanted.box(grid.coords)
        x = full[own.slices()].clone()
        if x.dim() in CHANNELS_LAST and case.seed % 2:
            x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
        x.requires_grad_()
        y = fetch(x, plan_exchange(case.partition, case.wanted, grid), fill=case.fill, what="test")
        expected = expected_box(full, box.lo, box.hi, case.fill)
        assert torch.equal(y, expected), case
        # Adjoint: with other numbers in every copy of a replicated box, and a linear F (fill 0).
        v = whole(tuple(x.shape), 100 + grid.rank)
        y0 = fetch(v, plan_exchange(case.partition, case.wanted, grid), what="test")
        w = whole(tuple(y.shape), 200 + grid.rank)
        (xt,) = torch.autograd.grad(y, x, w)
        left, right = total((y0 * w).sum()), total((v * xt).sum())
        assert abs(left - right) <= 1e-11 * (1 + abs(left)), (case, left, right)


FETCHES = [(n, form) for n in (1, 2, 3, 4, 6, 8) for form in FORMS if (n, form) != (1, FORMS[2])]
IN_GATE = [(1, FORMS[0]), *((2, form) for form in FORMS), (8, FORMS[2])]


@pytest.mark.parametrize(("ranks", "form"), in_gate(FETCHES, kept=IN_GATE))
def test_any_fetch_and_its_adjoint(ranks: int, form: str) -> None:
    run_ranks(ranks, check_exchanges, draw_examples(exchanges(ranks), 28), form)


@st.composite
def changes(draw: st.DrawFn, ranks: int) -> tuple[dict[str, int], Partition, Partition, int]:
    grid = draw(grids(ranks))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(draw(st.integers(1, 5))))
    return (
        grid,
        draw(partitions(grid, shape)),
        draw(partitions(grid, shape)),
        draw(st.integers(0, 9)),
    )


def check_changes(cases: list[tuple[dict[str, int], Partition, Partition, int]]) -> None:
    for axes, old, new, seed in cases:
        grid, full = hs.Grid(**axes), whole(old.shape, seed)
        x = hs.Sharded.from_local(full[old.box(grid.coords).slices()].clone(), old, grid)
        y = x.redistribute(new)
        assert y.partition == new
        assert torch.equal(y.local, full[new.box(grid.coords).slices()])
        assert torch.equal(y.full(), full)
        for axis in axes:
            z = hs.gather(y, axis)
            assert axis not in z.partition.axes
            assert torch.equal(z.full(), full)


@pytest.mark.parametrize("ranks", RANKS)
def test_any_redistribution_gather_and_full(ranks: int) -> None:
    run_ranks(ranks, check_changes, draw_examples(changes(ranks), 28))


def messages() -> list[tuple[int, tuple[int, ...]]]:
    """A halo of one plane on three cut dims of 8 ranks: what rank 0 receives, from whom."""
    grid = hs.Grid(depth=2, height=2, width=2)
    partition = grid.partition((1, 1, 8, 8, 8))
    intervals = (((0, 1),), ((0, 1),), *[((-1, 5), (3, 9))] * 3)
    cover = Cover((None, None, "depth", "height", "width"), intervals)
    plan = plan_exchange(partition, cover, grid)
    return [(t.rank, t.box.shape[2:]) for t in plan.receives]


def test_a_halo_is_faces_edges_and_the_corner() -> None:
    received = dict(run_ranks(8, messages)[0])
    assert received == {
        1: (4, 4, 1),
        2: (4, 1, 4),
        3: (4, 1, 1),
        4: (1, 4, 4),
        5: (1, 4, 1),
        6: (1, 1, 4),
        7: (1, 1, 1),
    }


def plans_are_kept() -> bool:
    grid = hs.Grid(width=2)
    partition = grid.partition((1, 1, 6))
    cover = Partition.whole((1, 1, 6)).cover
    return plan_exchange(partition, cover, grid) is plan_exchange(partition, cover, grid)


def test_a_plan_is_made_once() -> None:
    assert run_ranks(2, plans_are_kept) == [True, True]


def double_backward() -> float:
    """The gradient of a gradient's square, through shard, full and a change of the cut."""
    grid = hs.Grid(data=2, width=2)
    full = whole((4, 2, 7), 3).requires_grad_()

    def penalty(x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad((x**3).sum(), full, create_graph=True)
        return (gradient**2).sum()

    (expected,) = torch.autograd.grad(penalty(full), full)
    y = hs.shard(full, grid)
    moved = y.redistribute(y.partition.without(["data"])).redistribute(y.partition)
    (found,) = torch.autograd.grad(penalty(moved.full()), full)
    return ((found - expected).norm() / expected.norm()).item()


def test_gradients_of_gradients() -> None:
    assert max(run_ranks(4, double_backward)) <= 1e-12


def without_shared_memory(extents: dict[str, int]) -> bool:
    """Tell if a halo and its adjoint are the same where the process group sends all messages."""
    grid = hs.Grid(**extents)
    full = torch.arange(2 * 8 * 9 * 5, dtype=torch.float64).view(1, 2, 8, 9, 5).sin()
    weight = torch.arange(3 * 2 * 27, dtype=torch.float64).view(3, 2, 3, 3, 3).cos()
    found, calls = [], []
    own = communicator.GroupCommunicator.exchange_flat
    for shared in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not shared:
                patch.setattr(communicator, "shared_channels", lambda: None)
            patch.setattr(
                communicator.GroupCommunicator,
                "exchange_flat",
                lambda *of: (calls.append(shared), own(*of)),  # noqa: B023 - called in this turn
            )
            x = hs.shard(full, grid, check=False).requires_grad_()
            y = torch.nn.functional.conv3d(x, weight, padding=1).full()
            (y * y.cos()).sum().backward()
            assert x.grad is not None
            found.append((y.detach(), x.grad.full()))
    return len(calls) >= 2 and not any(calls) and all(map(torch.equal, *found))


@pytest.mark.parametrize("extents", [{"depth": 4}, {"depth": 2, "height": 2}], ids=str)
def test_flat_messages_of_a_process_group(extents: dict[str, int]) -> None:
    assert all(run_ranks(4, without_shared_memory, extents))


def again_and_again() -> None:
    """What an exchange of small boxes gave stays as it is while the same plan runs again."""
    grid = hs.Grid(depth=2)
    shape = (1, 2, 6, 4, 3)
    partition = grid.partition(shape)
    wanted = (((0, 1),), ((0, 2),), ((-1, 4), (2, 7)), ((0, 4),), ((0, 3),))
    cover = Cover(partition.cover.axes, wanted)
    plan = plan_exchange(partition, cover, grid)
    blocks = [whole(shape, seed)[partition.box(grid.coords).slices()] for seed in (1, 2)]
    nan = float("nan")
    results = []
    for block, fill in ((blocks[0], 0.0), (blocks[1], -7.0), (blocks[0], nan), (blocks[0], 0.0)):
        y = fetch(block, plan, fill=fill, what="a test")
        results.append((y, y.clone(), fill))
    for y, then, fill in results:
        assert torch.equal(y.nan_to_num(5.0), then.nan_to_num(5.0))
        edge = y[:, :, 0] if grid.rank == 0 else y[:, :, -1]
        assert bool((edge.isnan() if fill != fill else edge == fill).all())
        assert int(y.isnan().sum()) == (edge.numel() if fill != fill else 0)
    assert torch.equal(results[0][0], results[3][0])
    assert not torch.equal(results[0][0], results[1][0])
    (gathers,) = plan.gathers.values()
    kept = len(gathers.meetings)
    assert kept == 1  # whatever fills
    with torch.inference_mode():
        assert torch.equal(fetch(blocks[0], plan, what="a test"), results[0][0])
    with ThreadPoolExecutor(1) as another:
        found = another.submit(fetch, blocks[0], plan, what="a test").result()
    assert torch.equal(found, results[0][0])
    assert len(gathers.meetings) == kept + 1  # threads share no memory
    with mock.patch.object(exchange, "is_capturing", return_value=True):
        assert torch.equal(fetch(blocks[0], plan, what="a test"), results[0][0])
        fetch(blocks[0], plan, fill=3.0, what="a test")
    assert len(gathers.meetings) == kept + 1  # nor does a graph


def test_memory_of_an_exchange_is_used_again() -> None:
    run_ranks(2, again_and_again)


DTYPES = [torch.int16, torch.uint16, torch.uint32, torch.complex64, torch.bool, torch.bfloat16]


def of_any_type() -> list[set[torch.dtype]]:
    """The types that a backend is handed, where no memory is shared."""
    grid = hs.Grid(depth=2)
    handed: list[torch.dtype] = []
    begin = communicator.begin_messages

    def watched(group: Any, *messages: Any) -> Any:
        handed.extend(tensor.dtype for some in messages for _, tensor in some)
        return begin(group, *messages)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "shared_channels", lambda: None)
        patch.setattr(communicator, "begin_messages", watched)
        for dtype in DTYPES:
            full = (torch.arange(2 * 8 * 3 * 5).view(1, 2, 8, 3, 5) % 199).to(dtype)
            x = hs.shard(full, grid, check=False)
            assert torch.equal(x.full(), full), dtype
            found.append(set(handed))
            handed.clear()
    return found


def test_types_that_nccl_lacks_travel_as_bytes() -> None:
    expected = [*[{torch.uint8}] * 4, {torch.bool}, {torch.bfloat16}]
    assert run_ranks(2, of_any_type) == [expected] * 2
