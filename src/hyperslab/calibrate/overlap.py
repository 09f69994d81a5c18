"""How much of halos and of gradients travels behind work.

hidden = (one after the other - as it runs) / (one after the other - work alone)
"""

from __future__ import annotations

import statistics
from functools import partial

import torch
from torch import nn

from hyperslab.calibrate.clock import Clock
from hyperslab.comm import Grid
from hyperslab.machine.links import Hidden
from hyperslab.machine.placement import Placement
from hyperslab.parallel import parallelize

HALOS = (64 << 10, 256 << 10, 4 << 20)  # [B]
FEATURES = 1024  # of the layers whose gradients are averaged
LAYERS = 6


def measure_hidden(clock: Clock, placement: Placement) -> Hidden:
    """Both shares, each between 0 and 1; all ranks call this."""
    return Hidden(halos=_hidden_halos(clock, placement), gradients=_hidden_gradients(clock))


def hidden_share(apart: float, together: float, work: float) -> float:
    """Between 0 and 1, from times [s]; 0 where communication takes no time."""
    if apart <= work:
        return 0.0
    return min(max((apart - together) / (apart - work), 0.0), 1.0)


def _hidden_halos(clock: Clock, placement: Placement) -> float:
    """The median over sizes of messages behind a convolution."""
    halos = clock.grid.halos
    partner = placement.partner(clock.grid.rank, placement.nearest)
    x = torch.rand(1, 16, 16, 32, 32, device=clock.grid.device)
    weight = torch.rand(16, 16, 3, 3, 3, device=clock.grid.device)
    shares = []

    def work() -> None:
        torch.conv3d(x, weight, padding=1)

    for nbytes in HALOS:
        mine = torch.ones(nbytes // 4, device=clock.grid.device)

        def run(*, behind: bool, mine: torch.Tensor = mine) -> None:
            if partner is None:
                return work()
            ends = [(partner, mine)], [(partner, torch.empty_like(mine))]
            under_way = halos.exchange(*ends, "a measurement")
            if behind:
                work()
            under_way.wait()
            if not behind:
                work()

        apart = clock.seconds(partial(run, behind=False))
        together = clock.seconds(partial(run, behind=True))
        shares.append(hidden_share(apart, together, clock.seconds(work)))
    return statistics.median(shares)


def _hidden_gradients(clock: Clock) -> float:
    """Of a stack of dense layers: their gradients are as many as its flops are few."""
    grid = Grid(data=clock.grid.size)
    layers = [nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS)]
    model = parallelize(nn.Sequential(*layers), grid, ordinary_inputs="trust")
    x = torch.rand(256, FEATURES, device=grid.device)
    group = grid.gradients
    gradients = torch.cat([p.detach().flatten() for p in model.parameters()])

    def step() -> None:
        model(x).sum().backward()

    def alone() -> None:
        with model.no_sync():  # type: ignore[operator]
            step()

    def apart() -> None:
        alone()
        group.sum_in_place(gradients, "a measurement")

    def reset() -> None:
        gradients.fill_(1)

    return hidden_share(
        clock.seconds(apart, before=reset), clock.seconds(step), clock.seconds(alone)
    )
