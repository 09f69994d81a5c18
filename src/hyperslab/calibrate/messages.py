"""Messages between neighbours and sums over ranks, through the project's own transport."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from hyperslab.calibrate.clock import Clock
from hyperslab.calibrate.fit import Point, fit_line, fit_power, sizes
from hyperslab.comm import Grid
from hyperslab.comm.shared_memory.channels import LARGEST, shared_channels
from hyperslab.comm.shared_memory.sums import SMALL
from hyperslab.machine.links import LINKS, Line, LinkClass, Sums
from hyperslab.machine.placement import Placement

SMALLEST = 64  # [B]
LARGEST_MESSAGE = 16 << 20  # [B]
LARGEST_SUM = 32 << 20  # [B]


def measure_links(clock: Clock, placement: Placement) -> dict[LinkClass, tuple[Line, ...]]:
    """A message there and one back at once, as halos travel, for each class of link that is there.

    All ranks talk with a partner at once; one for whom there is none waits.
    """
    found: dict[LinkClass, tuple[Line, ...]] = {}
    for name in LINKS:
        if any(placement.partner(rank, name) is not None for rank in range(clock.grid.size)):
            found[name] = _measure_link(clock, placement.partner(clock.grid.rank, name))
    return found


def measure_sums(clock: Clock, ranks_per_node: int) -> tuple[Sums, ...]:
    """All-reduces over 2, 4, 8 ... ranks of a node, all such groups at once."""
    grid = clock.grid
    counts = [n for n in _doubling(ranks_per_node) if grid.size % n == 0]
    return tuple(_measure_sums(clock, ranks) for ranks in counts)


def _measure_link(clock: Clock, partner: int | None) -> tuple[Line, ...]:
    slot = _slot()
    pieces = []
    for first, last, up_to in _ranges([slot], LARGEST_MESSAGE):
        points = [(n, _exchange_seconds(clock, partner, n)) for n in sizes(first, last)]
        pieces.append(fit_line(points, up_to))
    return tuple(pieces)


def _exchange_seconds(clock: Clock, partner: int | None, nbytes: int) -> float:
    halos = clock.grid.halos
    mine = torch.ones(nbytes // 4, device=clock.grid.device)

    def exchange() -> None:
        if partner is not None:
            buffer = torch.empty_like(mine)
            halos.exchange([(partner, mine)], [(partner, buffer)], "a measurement").wait()

    return clock.seconds(exchange)


def _measure_sums(clock: Clock, ranks: int) -> Sums:
    grid = Grid(data=clock.grid.size // ranks, depth=ranks)
    group = grid.group(("depth",))
    assert group is not None
    pieces = []
    for first, last, up_to in _ranges([SMALL, LARGEST], LARGEST_SUM):
        points: list[Point] = []
        for nbytes in sizes(first, last):
            x = torch.ones(nbytes // 4, device=grid.device)
            seconds = clock.seconds(
                partial(group.sum_in_place, x, "a measurement"), before=partial(x.fill_, 1)
            )
            points.append((nbytes, seconds))
        pieces.append(fit_power(points, up_to))
    return Sums(ranks=ranks, pieces=tuple(pieces))


def _slot() -> int | None:
    """The largest message [B] that goes through shared memory; None where there is none."""
    shared = shared_channels()
    return None if shared is None else shared.slot


def _ranges(bounds: Sequence[int | None], last: int) -> list[tuple[int, int, int | None]]:
    """First and last size of each piece of a fit, and the bound that the file says."""
    inner = [bound for bound in bounds if bound is not None] if _slot() else []
    edges = [SMALLEST, *inner, last]
    firsts = [SMALLEST, *(bound + 4096 for bound in inner)]
    return list(zip(firsts, edges[1:], [*inner, None], strict=True))


def _doubling(most: int) -> list[int]:
    counts = []
    n = 2
    while n < most:
        counts.append(n)
        n *= 2
    return [*counts, most] if most > 1 else []
