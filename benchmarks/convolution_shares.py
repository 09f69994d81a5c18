"""The share of a block's kernel that the distributed convolution reaches, layer by layer.

As table II of Oyama et al. 2020; once of torch's plain convolution, once of the fastest kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from clock import slowest, stopwatch, summary
from fastest import fastest_passes
from torch import nn

import hyperslab as hs
from hyperslab.geometry import Partition

WARM_UP = 3
SIDES = ("plain", "distributed", "fastest")
"""Of a convolution: torch's of the block as it is, ours, the fastest kernels for the block."""


def compare_convolutions(
    width: int, ranks: int, steps: int, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Every convolution of the network, forward and backward, as it lies there; on every rank."""
    grid = hs.Grid(depth=ranks)
    layers: list[tuple[str, nn.Conv3d, Partition]] = []
    features = hs.models.CosmoFlow(width).to(grid.device).features
    for name, module in features.named_children():
        if isinstance(module, nn.Conv3d):
            module.register_forward_pre_hook(
                lambda layer, args, name=name: layers.append((name, layer, args[0].partition))
            )
    with torch.no_grad():
        features(hs.shard(torch.zeros(1, 4, width, width, width, device=grid.device), grid))
    return [
        {"layer": name, **compare_layer(layer, partition, i > 0, grid, steps, dtype)}
        for i, (name, layer, partition) in enumerate(layers)
    ]


def compare_layer(
    layer: nn.Conv3d,
    partition: Partition,
    needs_dx: bool,
    grid: hs.Grid,
    steps: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """One convolution of one input, plain and distributed in turn, on all ranks at once."""
    block = torch.randn(
        partition.box(grid.coords).shape, device=grid.device, dtype=dtype, requires_grad=needs_dx
    )
    cut = hs.Sharded.from_local(block, partition, grid)
    weight = torch.randn(layer.weight.shape, device=grid.device, dtype=dtype, requires_grad=True)
    plain = Convolution(layer, block, weight)
    distributed = Convolution(layer, cut, weight)
    alone = list(fastest_passes(layer, block.shape, dtype, grid, needs_dx=needs_dx))
    flops = weight.numel() * block.numel() / block.shape[1]
    turns = []
    for _ in range(WARM_UP + steps * min(10, 1 + int(1e9 / flops))):  # short ones more often
        sides = []
        for side in (plain, distributed):
            grid.barrier()
            sides.append(slowest(side.run(), grid.device))
        forward, *gradients = (one.fastest() for one in alone)
        turns.append([*sides, [forward, sum(gradients)]])
    turns = turns[WARM_UP:]
    shares = [sum(turn[0]) / sum(turn[1]) for turn in turns]
    of_fastest = [sum(turn[2]) / sum(turn[1]) for turn in turns]
    by_side = {
        side: {
            name: summary([t[i][part] for t in turns])
            for part, name in enumerate(("forward", "backward"))
        }
        for i, side in enumerate(SIDES)
    }
    cut_along = ", ".join(cut.axis for cut in partition.cuts if cut is not None)
    common = {"input": list(partition.shape), "cut": cut_along}
    return common | {"share": summary(shares), "share of fastest": summary(of_fastest)} | by_side


class Convolution:
    """A convolution to be timed."""

    def __init__(self, layer: nn.Conv3d, x: Any, weight: torch.Tensor) -> None:
        self.layer = layer
        self.x = x
        self.weight = weight
        self.gradient: torch.Tensor | None = None

    def forward(self) -> None:
        y = F.conv3d(self.x, self.weight, None, self.layer.stride, self.layer.padding)
        self.y = y.local if isinstance(y, hs.Sharded) else y

    def backward(self) -> None:
        if self.gradient is None:
            self.gradient = torch.randn_like(self.y)
        self.y.backward(self.gradient)

    def run(self) -> list[float]:
        return stopwatch(self.weight.device, [self.forward, self.backward])


def print_convolutions(name: str, rows: list[dict[str, Any]], ranks: int) -> None:
    print(
        f"\n{name}: convolution of the block, plain, distributed and by the fastest kernels,",
        end="",
    )
    print(f" {ranks} ranks")
    titles = "".join(f"{side + ' [ms]':>18}" for side in SIDES)
    print(f"{'':34}{titles}{'share of plain':>16}{'of fastest':>16}")
    columns = f"{'best':>9}{'median':>9}" * len(SIDES) + f"{'best':>8}{'paired':>8}" * 2
    print(f"{'layer':8}{'input':>26}{columns}")
    totals = {(side, kind): 0.0 for side in SIDES for kind in ("min", "median")}
    for row in rows:
        times = {
            (side, kind): sum(part[kind] for part in row[side].values()) for side, kind in totals
        }
        totals = {key: totals[key] + times[key] for key in totals}
        shape = " x ".join(map(str, row["input"][1:])) + ("" if row["cut"] else " (whole)")
        paired = {key: row[key]["median"] for key in ("share", "share of fastest")}
        print_shares(f"{row['layer']:8}{shape:>26}", times, list(paired.values()))
    medians = [totals[side, "median"] for side in SIDES]
    print_shares(f"{'all':34}", totals, [medians[0] / medians[1], medians[2] / medians[1]])


def print_shares(label: str, times: dict[tuple[str, str], float], paired: list[float]) -> None:
    columns = "".join(f"{1e3 * t:9.2f}" for t in times.values())
    plain, distributed, fastest = (times[side, "min"] for side in SIDES)
    of_plain = f"{plain / distributed:8.3f}{paired[0]:8.3f}"
    print(f"{label}{columns}{of_plain}{fastest / distributed:8.3f}{paired[1]:8.3f}")
