"""Measures messages, sums over ranks, and how much of them travels behind work.

Messages and sums go through the project's own transport; their times are fitted by regressions
in bytes. The hidden share is (one after the other - as it runs) / (one after the other - work
alone).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from hyperslab.comm import Grid
from hyperslab.comm.shared_memory import LARGEST_SLOT, SMALL_SUM, shared_channels
from hyperslab.parallel import parallelize
from hyperslab.planner.calibrate.timing import Clock
from hyperslab.planner.machine.links import (
    LINKS,
    AllReduceFits,
    AnyFit,
    FitResidual,
    HiddenShares,
    LinearFit,
    LinkClass,
    Placement,
    PowerFit,
)

TimedBytes = tuple[int, float]
"""Pairs a message's size [B] with its time [s]."""

LEAST_SLOPE = 1e-12  # [s/B] of a line that does not rise


def fit_line(points: Sequence[TimedBytes], up_to: int | None = None) -> LinearFit:
    """Fits latency and bandwidth by least squares of relative errors."""
    nbytes = np.array([n for n, _ in points], float)
    seconds = np.array([s for _, s in points])
    columns = np.stack([1 / seconds, nbytes / seconds], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)
    if latency < 0:  # then through zero
        latency = 0.0
        slope = float(np.sum(nbytes / seconds) / np.sum((nbytes / seconds) ** 2))
    line = LinearFit(
        up_to=up_to, latency=float(latency), bandwidth=1 / max(float(slope), LEAST_SLOPE)
    )
    return line.model_copy(update={"residual": residual_of(line.seconds, points)})


def fit_power(points: Sequence[TimedBytes], up_to: int | None = None) -> PowerFit:
    """Fits scale and exponent by least squares of logarithms."""
    logs = np.log([[n, s] for n, s in points])
    exponent, shift = np.polyfit(logs[:, 0], logs[:, 1], 1)
    power = PowerFit(up_to=up_to, scale=float(np.exp(shift)), exponent=float(exponent))
    return power.model_copy(update={"residual": residual_of(power.seconds, points)})


def residual_of(fit: Callable[[float], float], points: Sequence[TimedBytes]) -> FitResidual:
    """Computes how far points are from a fit, as a share of their times."""
    shares = [abs(fit(nbytes) - seconds) / seconds for nbytes, seconds in points]
    return FitResidual(median=statistics.median(shares), worst=max(shares))


def geometric_series(first: int, last: int, factor: int = 4) -> list[int]:
    """Multiplies ``first`` until ``last``, both included.

    >>> geometric_series(64, 1000)
    [64, 256, 1000]
    """
    found = [first]
    while found[-1] * factor < last:
        found.append(found[-1] * factor)
    return [*found, last] if last > first else found


SMALLEST_MESSAGE = 64  # [B]
LARGEST_MESSAGE = 16 << 20  # [B]
LARGEST_SUM = 32 << 20  # [B]


def measure_links(clock: Clock, placement: Placement) -> dict[LinkClass, tuple[LinearFit, ...]]:
    """Times messages that cross, as halos travel, for each class of link that is there.

    All ranks talk with a partner at once; one for whom there is none waits.
    """
    shared = shared_channels()
    ends = [] if shared is None else [shared.slot]
    found: dict[LinkClass, tuple[LinearFit, ...]] = {}
    for name in LINKS:
        partners = [placement.partner(rank, name) for rank in range(clock.grid.size)]
        mine = partners[clock.grid.rank]

        def seconds(nbytes: int, mine: int | None = mine) -> float:
            messages = [] if mine is None else [(mine, nbytes)]
            return clock.exchange_seconds(messages, messages)

        if partners.count(None) < len(partners):
            found[name] = _fit_pieces(fit_line, seconds, ends, LARGEST_MESSAGE)
    return found


def measure_sums(clock: Clock, ranks_per_node: int) -> tuple[AllReduceFits, ...]:
    """Times all-reduces over 2, 4, 8 ... ranks of a node, all such groups at once."""
    ends = [] if shared_channels() is None else [SMALL_SUM, LARGEST_SLOT]
    found = []
    for ranks in geometric_series(2, ranks_per_node, 2):
        if ranks <= ranks_per_node and clock.grid.size % ranks == 0:
            group = Grid(data=clock.grid.size // ranks, depth=ranks).group(("depth",))
            assert group is not None
            seconds = partial(clock.sum_seconds, group)
            pieces = _fit_pieces(fit_power, seconds, ends, LARGEST_SUM)
            found.append(AllReduceFits(ranks=ranks, pieces=pieces))
    return tuple(found)


def _fit_pieces(
    fit: Callable[[Sequence[TimedBytes], int | None], AnyFit],
    seconds: Callable[[int], float],
    ends: Sequence[int],
    last: int,
) -> tuple[AnyFit, ...]:
    """Fits a piece for each way in which sizes up to ``last`` travel; they change at ``ends``."""
    firsts = [SMALLEST_MESSAGE, *(end + 4096 for end in ends)]
    pieces = []
    for first, end in zip(firsts, [*ends, None], strict=True):
        sizes = geometric_series(first, end or last)
        pieces.append(fit([(nbytes, seconds(nbytes)) for nbytes in sizes], end))
    return tuple(pieces)


HALO_BYTES = (64 << 10, 256 << 10, 4 << 20)  # [B]
LAYER_FEATURES = 1024  # of the layers whose gradients are averaged
LAYER_COUNT = 6


def measure_hidden(clock: Clock, placement: Placement) -> HiddenShares:
    """Measures the hidden shares of halos and of gradients, 0 to 1; all ranks call this."""
    return HiddenShares(halos=_hidden_halos(clock, placement), gradients=_hidden_gradients(clock))


def hidden_share(apart: float, together: float, work: float) -> float:
    """Computes a share between 0 and 1 from times [s]; 0 where communication takes no time."""
    if apart <= work:
        return 0.0
    return min(max((apart - together) / (apart - work), 0.0), 1.0)


def _hidden_halos(clock: Clock, placement: Placement) -> float:
    """Measures the median share that a convolution hides, over sizes of messages."""
    halos = clock.grid.halos
    partner = placement.partner(clock.grid.rank, placement.link(0, 1))
    x = torch.rand(1, 16, 16, 32, 32, device=clock.grid.device)
    weight = torch.rand(16, 16, 3, 3, 3, device=clock.grid.device)
    shares = []

    def work() -> None:
        torch.conv3d(x, weight, padding=1)

    for nbytes in HALO_BYTES:
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
    """Measures a stack of dense layers, which has many gradients for few flops."""
    grid = Grid(data=clock.grid.size)
    layers = [nn.Linear(LAYER_FEATURES, LAYER_FEATURES) for _ in range(LAYER_COUNT)]
    model = parallelize(nn.Sequential(*layers), grid, ordinary_inputs="trust")
    x = torch.rand(256, LAYER_FEATURES, device=grid.device)
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
