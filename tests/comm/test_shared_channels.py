"""Messages and sums through shared memory (tier: a few gloo ranks)."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hyperslab as hs
from hyperslab.comm import plan_exchange, shared_channels, shared_memory
from hyperslab.comm.exchange import start
from hyperslab.comm.shared_memory import (
    LARGEST_SLOT,
    MOST_OF_FREE_MEMORY,
    SMALL_SUM,
    SPINS,
    SharedChannels,
)
from hyperslab.geometry import Partition
from tests.ranks import RankError, fresh_groups, run_ranks
from tests.selection import in_gate


def connected() -> SharedChannels:
    """What the ranks share once they have a grid."""
    hs.Grid(data=dist.get_world_size())
    shared = shared_channels()
    assert shared is not None
    return shared


def talk(seed: int) -> None:
    """Every rank sends to every other; both know all messages."""
    shared, me, size = connected(), dist.get_rank(), dist.get_world_size()
    chance = random.Random(seed)
    for round_ in range(200):
        shape = [chance.randint(1, 9) for _ in range(chance.randint(0, 4))]
        dtype = chance.choice([torch.float32, torch.float64, torch.bfloat16, torch.uint8])
        pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        used = [pair for pair in pairs if chance.random() < 0.7]
        late = chance.randrange(size) if chance.random() < 0.1 else None

        def message(a: int, b: int, key=(seed, round_), shape=shape, dtype=dtype):  # type: ignore
            generator = torch.Generator().manual_seed(hash((*key, a, b)) % 2**31)
            return torch.rand(shape, generator=generator).mul(100).to(dtype)

        if me == late:
            time.sleep(0.002)
        for a, b in used:
            if a == me:
                whole = torch.stack([message(a, b)] * 2, dim=-1)
                shared.send(whole[..., 0], b, "a test")  # not contiguous
        for a, b in used:
            if b == me:
                out = torch.empty(shape, dtype=dtype)
                shared.receive(out, a, "a test")
                assert torch.equal(out, message(a, b))


@pytest.mark.parametrize("ranks", in_gate([3, 8], kept=[3]))
def test_messages_arrive_whole_and_in_order(ranks: int) -> None:
    run_ranks(ranks, talk, 1)


def talk_waiting(policy: str) -> int:
    with mock.patch.dict(os.environ, OMP_WAIT_POLICY=policy):
        talk(1)
    return connected().segment._spins


def test_ranks_wait_asleep_where_threads_do() -> None:
    """As in the gate, whose sessions share the cores; there no other test waits awake."""
    spins = {}
    for policy in ("active", "PASSIVE"):
        fresh_groups()
        (spins[policy], _) = run_ranks(2, talk_waiting, policy)
    fresh_groups()
    assert spins["PASSIVE"] == 1
    assert spins["active"] == (SPINS if len(os.sched_getaffinity(0)) > 1 else 1)


def orders() -> None:
    """Whatever the order in memory on either side, small or too large for a slot."""
    grid = hs.Grid(depth=2)
    other = 1 - grid.rank
    for shape in ((2, 3, 4, 5), (1, 3, 4, 5, 6), (1, 1, 4, 1, 6), (2, 3, 90, 90, 90)):
        numbers = torch.arange(float(torch.Size(shape).numel())).view(shape)
        last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        for mine in (torch.contiguous_format, last):
            for its in (torch.contiguous_format, last):
                orders = (mine, its) if grid.rank == 0 else (its, mine)
                x = (numbers + grid.rank).contiguous(memory_format=orders[0])
                buffer = torch.empty(shape, memory_format=orders[0])
                sends = [(other, x), (other, x[..., 1:, 1:])]
                cropped = x.new_empty(x[..., 1:, 1:].shape)
                receives = [(other, buffer), (other, cropped)]
                grid.halos.exchange(sends, receives, "a test").wait()
                assert torch.equal(buffer, numbers + other)
                assert torch.equal(cropped, (numbers + other)[..., 1:, 1:])


def test_messages_of_any_order_in_memory() -> None:
    run_ranks(2, orders)


def halo_of(x: torch.Tensor) -> bool:
    """Whether the halo of a block lies in memory as the block does, and is right."""
    grid = hs.Grid(depth=2)
    cut = hs.shard(x, grid)
    block = cut.local.contiguous(memory_format=torch.channels_last_3d)
    plan = plan_exchange(cut.partition, Partition.whole(x.shape).cover, grid)
    (piece,) = start(block, plan, "a test").wait()
    return piece.is_contiguous(memory_format=torch.channels_last_3d) and torch.equal(
        piece, x[plan.receives[0].box.slices()]
    )


def test_a_halo_lies_in_memory_as_its_block() -> None:
    torch.manual_seed(0)
    for x in (torch.randn(1, 3, 4, 5, 6), torch.randn(1, 3, 100, 40, 60)):
        assert run_ranks(2, halo_of, x) == [True, True]


def add(seed: int) -> None:
    """Sums over changing groups of ranks, of changing sizes: what one sum leaves in the areas
    must not reach the next."""
    shared, me, size = connected(), dist.get_rank(), dist.get_world_size()
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    # Small whole numbers: their sums are exact in every order.
    numbers = torch.randint(-50, 50, (size, LARGEST_SLOT + SMALL_SUM), generator=generator).mul(2)
    for _ in range(30):
        ranks = sorted(chance.sample(range(size), chance.randint(2, size)))
        dtype = chance.choice([torch.float32, torch.float64, torch.float16, torch.int64])
        count = chance.choice(
            [1, 7, SMALL_SUM // 8, SMALL_SUM // 2, LARGEST_SLOT // 4 + 3, LARGEST_SLOT]
        )
        begin = chance.randrange(SMALL_SUM)
        if me not in ranks:
            continue
        parts = numbers[:, begin : begin + count]  # others in every round
        x = parts[me].to(dtype, copy=True)
        shared.all_reduce(x, ranks, "a test")
        assert torch.equal(x.double(), parts[ranks].sum(0).double())


@pytest.mark.parametrize("ranks", in_gate([2, 3, 6], kept=[3]))
def test_sums_over_any_ranks(ranks: int) -> None:
    run_ranks(ranks, add, 2)


def same_bits() -> torch.Tensor:
    shared = connected()
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(dist.get_rank()))
    shared.all_reduce(x, range(dist.get_world_size()), "a test")
    return x


def test_every_rank_gets_the_same_bits() -> None:
    first, *others = run_ranks(3, same_bits)
    assert all(torch.equal(first, other) for other in others)


def half_precision() -> float:
    """Three partial sums whose own sum overflows float16 on the way."""
    shared = connected()
    x = torch.tensor([[40000.0, 40000.0, -49984.0][dist.get_rank()]], dtype=torch.float16)
    shared.all_reduce(x, range(3), "a test")
    return x.item()


def test_half_precision_is_added_up_in_single() -> None:
    assert run_ranks(3, half_precision) == [30016.0] * 3


def files() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("hyperslab-*")]


def lasting(before: list[str]) -> set[str]:
    """New files that do not go away: those of other sessions on this machine do."""
    found = set(files()) - set(before)
    deadline = time.monotonic() + 5
    while found and time.monotonic() < deadline:
        time.sleep(0.05)
        found &= set(files())
    return found


def test_nothing_is_left_in_the_file_system() -> None:
    fresh_groups()  # one that shares memory already would make no file
    before = files()
    run_ranks(2, connected_quietly)
    assert not lasting(before)


def connected_quietly() -> None:
    connected()


def large_message() -> None:
    """More than a slot holds goes through the process group."""
    grid = hs.Grid(depth=2)
    shared = shared_channels()
    assert shared is not None
    x = torch.arange(2 * 3 * 600_000, dtype=torch.float32).view(1, 3, 2, 600_000, 1)
    assert not shared.fits(x[:, :, :1])
    assert torch.equal(hs.shard(x, grid).full(), x)


def test_a_message_that_does_not_fit() -> None:
    run_ranks(2, large_message)


def without_memory() -> bool:
    """As where there is no shared memory, or none left."""
    shared_memory.MOST_OF_FREE_MEMORY = 0.0
    try:
        grid = hs.Grid(depth=2)
        x = torch.randn(1, 2, 5, 3, 3)
        return shared_channels() is None and torch.equal(hs.shard(x, grid).full(), x)
    finally:
        shared_memory.MOST_OF_FREE_MEMORY = MOST_OF_FREE_MEMORY


def test_without_shared_memory_the_process_group_does_it() -> None:
    fresh_groups()  # one that shares memory already would go on doing so
    assert run_ranks(2, without_memory) == [True] * 2
    fresh_groups()


def leave_early() -> None:
    """Rank 1 ends after its last message; rank 0 must still get that one."""
    shared = connected()
    if dist.get_rank() == 1:
        shared.send(torch.ones(5), 0, "a test")
        os._exit(3)
    time.sleep(0.5)
    out = torch.zeros(5)
    shared.receive(out, 1, "the last message")
    assert out.sum() == 5
    shared.receive(out, 1, "one more message")


def test_a_dead_rank_is_named_after_its_last_message() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, leave_early)
    caught.match("CommError: rank 0 lost contact with rank 1 during one more message: it has ended")
