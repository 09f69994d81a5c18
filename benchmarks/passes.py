"""Convolutions pass by pass, and what a cut takes off the speed of a block's plain kernel.

Legend: the passes are those of Oyama et al. 2020, section III-C: forward, backward-filter and
backward-data, which Mathuriya et al. 2018 call Fwd, Bww and Bwd. Torch computes both gradients in
one operator; here each is asked for alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from clock import slowest, stopwatch, summary
from fastest import FastestPass, fastest_passes
from torch import nn

import hyperslab as hs
from hyperslab.comm.bootstrap import device_of_rank
from hyperslab.comm.communicator import PeerTensor
from hyperslab.geometry import Partition
from hyperslab.planner.trace import VirtualCommunicator, VirtualGrid, Workload, busiest, trace_step

T = TypeVar("T")

PASSES = ("forward", "backward-filter", "backward-data")

NEAR = 1.15
"""Of the blocks of many parts, which are large, only such kernels keep their operands."""


@dataclass(frozen=True)
class CutConvolution:
    """A convolution of a network and how its input is cut there."""

    name: str
    layer: nn.Conv3d
    partition: Partition


def convolutions(width: int, parts: int, variant: str = "paper2020") -> list[CutConvolution]:
    """Those of CosmoFlow whose sample is cut into so many along depth, as a trace finds them."""
    found: dict[str, CutConvolution] = {}  # a trace may run more than one step

    def build() -> nn.Module:
        features = hs.models.CosmoFlow(width, variant=variant).features
        for name, module in features.named_children():
            if isinstance(module, nn.Conv3d):
                module.register_forward_pre_hook(
                    lambda layer, args, name=name: found.update(
                        {name: CutConvolution(name, layer, args[0].partition)}
                    )
                )
        return features

    channels = 1 if variant == "sc18" else 4
    extents = {"depth": parts}
    trace_step(Workload(build, (1, channels, width, width, width)), extents, busiest(extents))
    return list(found.values())


class EchoCommunicator(VirtualCommunicator):
    """Copies what a rank sends into what it receives: as much work, and nobody to wait for."""

    def exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
    ) -> Echo:
        return Echo(sends, receives)


class Echo:
    """Messages under way from a rank to itself."""

    def __init__(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]) -> None:
        self.sent = [piece.contiguous() for _, piece in sends]
        self.buffers = [buffer for _, buffer in receives]

    def wait(self) -> list[torch.Tensor]:
        for piece, buffer in zip(self.sent, self.buffers, strict=True):
            buffer.copy_(piece.reshape(buffer.shape))
        return self.buffers


class BlockGrid(VirtualGrid):
    """The rank with most neighbours of a grid whose other ranks are not there, with values."""

    has_values = True

    def __init__(self, parts: int) -> None:
        extents = {"depth": parts}
        super().__init__(extents, busiest(extents))
        self.device = device_of_rank()
        self._echo = EchoCommunicator(tuple(range(self.size)), self.rank, self.journal)

    @property
    def halos(self) -> EchoCommunicator:
        return self._echo


class OnePass:
    """A convolution, and the gradient of one of the two tensors that it takes."""

    def __init__(
        self, layer: nn.Conv3d, x: torch.Tensor | hs.Sharded, weight: torch.Tensor, of: torch.Tensor
    ) -> None:
        self.layer = layer
        self.x = x
        self.weight = weight
        self.of = of

    def forward(self) -> None:
        y = F.conv3d(self.x, self.weight, None, self.layer.stride, self.layer.padding)
        self.y = y.local if isinstance(y, hs.Sharded) else y

    def run(self) -> list[float]:
        """Seconds of the forward pass and of the gradient."""
        device = self.weight.device
        (forward,) = stopwatch(device, [self.forward])
        arriving = torch.ones_like(self.y)
        found = stopwatch(device, [lambda: torch.autograd.grad(self.y, self.of, arriving)])
        del self.y
        return [forward, *found]


class LayerPasses:
    """All passes of a convolution on this rank's block, plain or distributed over ``grid``."""

    def __init__(
        self, cut: CutConvolution, grid: hs.Grid, dtype: torch.dtype, *, plain: bool
    ) -> None:
        shape = cut.partition.box(grid.coords).shape
        self.first = cut.layer.in_channels <= 4  # nobody asks for the gradient of the data
        x = torch.randn(shape, device=grid.device, dtype=dtype)
        weight = torch.randn(cut.layer.weight.shape, device=grid.device, dtype=dtype)
        self.passes = []
        for of in (weight, x)[: 1 if self.first else 2]:
            block = x.detach().requires_grad_(of is x)
            kernel = weight.detach().requires_grad_(of is weight)
            whole = block if plain else hs.Sharded.from_local(block, cut.partition, grid)
            leaf = block if of is x else kernel
            self.passes.append(OnePass(cut.layer, whole, kernel, leaf))

    def run(self) -> list[float]:
        """Seconds by pass; 0 for one that the layer does not have."""
        forward, backward_filter = self.passes[0].run()
        backward_data = 0.0 if self.first else self.passes[1].run()[1]
        return [forward, backward_filter, backward_data]


def measure_layer(
    cut: CutConvolution, grid: hs.Grid, turns: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Plain and distributed in turn, on all ranks that are there at once; the slowest counts.

    The fastest kernels come after them, pass by pass: their operands would not fit beside the
    columns that torch unfolds large blocks into.
    """
    sides = {
        name: LayerPasses(cut, grid, dtype, plain=name == "plain")
        for name in ("plain", "distributed")
    }
    shape = cut.partition.box(grid.coords).shape
    first = sides["plain"].first
    times: dict[str, list[list[float]]] = {name: [] for name in sides}
    for _ in range(1 + turns):
        for name, side in sides.items():
            grid.barrier()
            times[name].append(slowest(side.run(), grid.device))
    sides.clear()
    passes = fastest_passes(cut.layer, shape, dtype, grid, needs_dx=not first, near=NEAR)
    alone = list(map(partial(_turns_of, turns=1 + turns), passes))
    if first:
        alone.append([0.0] * (1 + turns))
    times["fastest"] = [list(turn) for turn in zip(*alone, strict=True)]
    by_pass = {
        name: {which: summary([turn[i] for turn in rows[1:]]) for i, which in enumerate(PASSES)}
        for name, rows in times.items()
    }
    return {
        "layer": cut.name,
        "input": list(cut.partition.box(grid.coords).shape),
        "cut": any(axis is not None for axis in cut.partition.cuts),
        "flops": flops_of_pass(cut, grid),
        **by_pass,
    }


def _turns_of(one: FastestPass, turns: int) -> list[float]:
    return [one.fastest() for _ in range(turns)]


def flops_of_pass(cut: CutConvolution, grid: hs.Grid) -> int:
    """Of one pass [flop] on this rank's block without slabs: the same number for all three."""
    shape = cut.partition.box(grid.coords).shape
    layer = cut.layer
    form = torch.empty(shape, device="meta")
    y = F.conv3d(form, form.new_empty(layer.weight.shape), None, layer.stride, layer.padding)
    return 2 * y.numel() * layer.weight[0].numel()


def measure_parts(
    parts: int, width: int, turns: int, dtype: torch.dtype, ranks: int
) -> list[dict[str, Any]]:
    """Table II of Oyama et al. 2020 for a number of parts.

    Where there are as many ranks they are the parts; otherwise each rank runs one rank's block.
    """
    grid = hs.Grid(depth=parts) if parts == ranks else BlockGrid(parts)
    return [measure_layer(cut, grid, turns, dtype) for cut in convolutions(width, parts)]


def measure_passes(
    width: int, variant: str, turns: int, dtype: torch.dtype, threads: int
) -> list[dict[str, Any]]:
    """Table I of Mathuriya et al. 2018: the plain convolutions of a whole sample, on rank 0."""
    grid = BlockGrid(1)
    torch.set_num_threads(threads)
    rows = []
    for cut in convolutions(width, 1, variant):
        layer = LayerPasses(cut, grid, dtype, plain=True)
        times = [layer.run() for _ in range(1 + turns)][1:]
        by_pass = {name: summary([t[i] for t in times]) for i, name in enumerate(PASSES)}
        shape = list(cut.partition.shape)
        flops = flops_of_pass(cut, grid)
        rows.append({"layer": cut.name, "input": shape, "flops": flops, "plain": by_pass})
    torch.set_num_threads(1)
    return rows


def print_passes(title: str, rows: list[dict[str, Any]]) -> None:
    """Milliseconds and Gflop/s of each pass, by layer."""
    print(f"\n{title}")
    print(f"{'':30}{'milliseconds':>26}{'Gflop/s':>29}")
    names = ("Fwd", "Bww", "Bwd")
    columns = "".join(f"{name:>{w}}" for first in (10, 13) for name, w in _wide(names, first))
    print(f"{'':8}{'input':>22}{columns}")
    for row in rows:
        times = [row["plain"][name]["median"] for name in PASSES]
        print_times(row["layer"], row["input"], times, [row["flops"] for _ in PASSES])
    totals = [sum(row["plain"][name]["median"] for row in rows) for name in PASSES]
    flops = [sum(row["flops"] for row in rows if row["plain"][name]["median"]) for name in PASSES]
    print_times("all", [], totals, flops)


def print_times(layer: str, shape: list[int], times: list[float], flops: list[int]) -> None:
    form = " x ".join(map(str, shape[1:]))
    milliseconds = "".join(f"{1e3 * t:{w}.2f}" if t else f"{'':{w}}" for t, w in _wide(times, 10))
    speeds = [f / t / 1e9 if t else 0.0 for f, t in zip(flops, times, strict=True)]
    rates = "".join(f"{v:{w}.1f}" if v else f"{'':{w}}" for v, w in _wide(speeds, 13))
    print(f"{layer:8}{form:>22}{milliseconds}{rates}")


def _wide(values: Sequence[T], first: int) -> list[tuple[T, int]]:
    return list(zip(values, (first, 8, 8), strict=True))


def print_parts(title: str, rows: list[dict[str, Any]]) -> None:
    """As Table II: time, speed, the plain kernel's speed, and the share of it."""
    print(f"\n{title}")
    print(f"{'':8}{'block':>22}{'time [ms]':>11}{'Gflop/s':>9}", end="")
    print("".join(f"{side:>9}{'share':>8}" for side in ("plain", "fastest")), end="")
    print("".join(f"{name:>17}" for name in PASSES))
    for row in rows:
        form = " x ".join(map(str, row["input"][1:])) + ("" if row["cut"] else " whole")
        print_share(row["layer"], form, [row])
    print_share("all", "", rows)


def print_share(layer: str, form: str, rows: list[dict[str, Any]]) -> None:
    sums = {
        side: [sum(row[side][name]["median"] for row in rows) for name in PASSES]
        for side in ("plain", "distributed", "fastest")
    }
    flops = sum(row["flops"] for row in rows for name in PASSES if row["plain"][name]["median"] > 0)
    plain = sum(sums["plain"])
    whole = sum(sums["distributed"])
    print(f"{layer:8}{form:>22}{1e3 * whole:11.2f}{flops / whole / 1e9:9.1f}", end="")
    fastest = sum(sums["fastest"])
    for alone in (plain, fastest):
        print(f"{flops / alone / 1e9:9.1f}{alone / whole:8.3f}", end="")
    pairs = zip(sums["plain"], sums["distributed"], strict=True)
    print("".join(f"{a / b:17.3f}" if b else f"{'':17}" for a, b in pairs))
