"""What small layers cost the host: CPU time of a step whose kernels take next to nothing.

    python benchmarks/host.py [--layers 7] [--channels 4] [--side 4] [--rounds 300]
                              [--profile] [--json OUT]

A step is the forward and the backward pass of some layers (convolution, batch norm, leaky ReLU) on
a block of ``side``^3 voxels: in plain torch, on one rank, and on a corner of a grid of 2 x 2 x 2
ranks, of which only this one exists. Its messages and sums go to torch's fake process group, which
takes them and does nothing, and convolutions are chosen as on CUDA. Parameters are known as those
of a parallelised module are, so that no operator watches their gradients. A GPU that has more to
do than this waits for nobody; one that has less waits for the host. The best round counts;
`--profile` shows in which functions a step on the corner spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from clock import machine, write_results
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import hyperslab as hs
from hyperslab.comm import Communicator
from hyperslab.comm.communicator import GroupCommunicator
from hyperslab.kernels.registry import choose_as_if_on
from hyperslab.parallel.parallelize import prepare
from hyperslab.planner.trace import VirtualGrid
from hyperslab.tensor.gradient_buffers import GradientBuffers

EXTENTS = {"depth": 2, "height": 2, "width": 2}
WARM_UP = 20

Step = Callable[[], None]


class CornerGrid(VirtualGrid):
    """The first rank of a grid whose messages and sums go to a process group that drops them."""

    has_values = True

    def __init__(self) -> None:
        super().__init__(EXTENTS)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.size)
        assert dist.group.WORLD is not None
        self._halos = GroupCommunicator(dist.group.WORLD)

    @property
    def halos(self) -> Communicator:
        return self._halos

    def _make_group(self, axes: tuple[str, ...]) -> Communicator | None:
        virtual = super()._make_group(axes)
        if virtual is None:
            return None
        group = dist.new_group(list(virtual.ranks))
        assert isinstance(group, dist.ProcessGroup)
        return GroupCommunicator(group)


def layers(options: argparse.Namespace) -> nn.Module:
    """The layers, each as in most networks for volumes."""
    c = options.channels
    parts = [
        (nn.Conv3d(c, c, 3, padding=1), nn.BatchNorm3d(c), nn.LeakyReLU())
        for _ in range(options.layers)
    ]
    return nn.Sequential(*(part for layer in parts for part in layer))


def step_of(options: argparse.Namespace, grid: hs.Grid | None) -> Step:
    """A step of this rank's block; in plain torch without a grid."""
    model = layers(options)
    block = torch.randn(1, options.channels, *[options.side] * 3)
    if grid is None:
        x = block
    else:
        policy = prepare(model, grid, homes=GradientBuffers(model.parameters()))
        extents = [options.side * grid.extents[axis] for axis in EXTENTS]
        partition = grid.partition((1, options.channels, *extents))
        x = hs.Sharded.from_local(block, partition, grid, policy)
    gradient = torch.randn_like(block)

    def step() -> None:
        y = model(x)
        (y.local if isinstance(y, hs.Sharded) else y).backward(gradient)
        model.zero_grad()

    return step


def seconds(step: Step) -> float:
    """CPU time of this process: the machine may do other things meanwhile."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--side", type=int, default=4, help="voxels of the block in each dim")
    parser.add_argument("--rounds", type=int, default=300, help="the best of them counts")
    parser.add_argument("--profile", action="store_true", help="of a step on the corner")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    where = machine()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # nobody fills the halos
    steps = {
        "torch": step_of(options, None),
        "one rank": step_of(options, hs.Grid()),
        "corner of 2 x 2 x 2": step_of(options, CornerGrid()),
    }
    best = dict.fromkeys(steps, float("inf"))
    gc.disable()
    with choose_as_if_on("cuda"):
        for turn in range(WARM_UP + options.rounds):
            for name, step in steps.items():
                spent = seconds(step)
                if turn >= WARM_UP:
                    best[name] = min(best[name], spent)
        if options.profile:
            profile = cProfile.Profile()
            for _ in range(options.rounds):
                profile.runcall(steps["corner of 2 x 2 x 2"])
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    for name, spent in best.items():
        print(f"{name:24}{1e3 * spent:8.2f} ms")
    write_results(options, where, {"seconds": best})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
