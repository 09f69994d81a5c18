"""How much of halos and of gradients travels behind work: the share of their time that is hidden.

    python benchmarks/overlap.py [--network cosmoflow unet3d] [--width W] [--ranks 2] [--turns 10]
                                 [--dtype float32 bfloat16] [--share-devices] [--json OUT]

    hidden = (blocking - actual) / (blocking - without communication)

of the same step (forward, loss, backward), in turn, in one process group:

- *actual*: as it runs.
- *halos blocking*: every exchange has ended before the work starts that could hide it. *halos
  without*: every exchange delivers a buffer at once, and nobody sends anything.
- *gradients blocking*: they are averaged when the backward pass has ended. *gradients without*:
  they are collected all the same, and nobody averages them.

Nothing else differs, so statistics and the other kind of communication are in all of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from clock import machine, slowest, stopwatch, summary, write_results
from launch import run_ranks
from networks import NETWORKS, OURS, Step, make_case
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import hyperslab as hs
from hyperslab.comm import shared_channels
from hyperslab.comm.communicator import Arriving, GroupCommunicator, PeerTensor
from hyperslab.parallel.averaging import SharedGradients

ACTUAL = ("actual", "actual")
VARIANTS = {
    "actual": ACTUAL,
    "halos blocking": ("blocking", "actual"),
    "halos without": ("without", "actual"),
    "gradients blocking": ("actual", "blocking"),
    "gradients without": ("actual", "without"),
}
"""Of each step: what becomes of its halos, and of its gradients."""

WARM_UP = 2
DRAWS = 4000
"""Of turns with replacement, whose spread is the confidence interval (the bootstrap)."""


class Delivered:
    """Messages that are there already."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.buffers = buffers

    def wait(self) -> list[torch.Tensor]:
        return self.buffers


class Halos(GroupCommunicator):
    """Messages that are sent in one of three ways."""

    way = "actual"

    def exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
    ) -> Arriving:
        if self.way == "without":
            return Delivered([self._zeros(i, buffer) for i, (_, buffer) in enumerate(receives)])
        under_way = super().exchange(sends, receives, what)
        return Delivered(under_way.wait()) if self.way == "blocking" else under_way

    @cached_property
    def _kept(self) -> dict[Any, torch.Tensor]:
        return {}

    def _zeros(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Made once: to fill it in every step would be time that no message takes."""
        key = (index, like.shape, like.dtype)
        if key not in self._kept:
            self._kept[key] = torch.zeros_like(like)
        return self._kept[key]


class MeasuredGrid(hs.Grid):
    """A grid whose halos are sent in one of three ways."""

    @cached_property
    def halos(self) -> Halos:  # type: ignore[override]
        return Halos(super().halos.group)  # type: ignore[attr-defined]


class Gradients:
    """Gradients that are averaged in one of three ways.

    ``averaging`` is DistributedDataParallel, or what does its work in shared memory: all at the end
    of the backward pass, so that there is nothing to wait for longer.
    """

    way = "actual"

    def __init__(
        self, averaging: DistributedDataParallel | SharedGradients, group: dist.ProcessGroup
    ) -> None:
        self.group = group
        self.waiting: list[Callable[[], object]] = []
        if isinstance(averaging, SharedGradients):
            self._now = averaging.average
            averaging.average = self._average  # type: ignore[method-assign]
        else:
            averaging.register_comm_hook(None, self._hook)

    def finish(self) -> None:
        """What the backward pass has left to do."""
        for average in self.waiting:
            if self.way == "blocking":
                average()
        self.waiting.clear()

    def _average(self) -> None:
        if self.way == "actual":
            self._now()
        else:
            self.waiting.append(self._now)

    def _at_once(self, buffer: torch.Tensor) -> None:
        dist.all_reduce(buffer.div_(self.group.size()), group=self.group)

    def _hook(self, _state, bucket):  # type: ignore[no-untyped-def]
        """As DistributedDataParallel does it by itself."""
        if self.way == "actual":
            return allreduce_hook(self.group, bucket)
        self.waiting.append(partial(self._at_once, bucket.buffer()))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


class Variants:
    """One step of a network on a grid, in every variant."""

    def __init__(self, network: str, width: int, extents: dict[str, int], dtype: torch.dtype):
        self.grid = MeasuredGrid(**extents)
        case = make_case(network, width, False, self.grid.device)
        case.cut(self.grid)
        averaging = case.model.no_sync.__self__  # type: ignore[union-attr]
        self.gradients = Gradients(averaging, self.grid.gradients.group)
        self.step = Step(case, dtype)
        self.step.forward()  # the last layer's weight begins at zero, and so do gradients before it
        self.step.backward()
        self.step.update()

    def seconds(self, name: str) -> float:
        """Of one step, by the slowest rank; all ranks call this."""
        self.grid.halos.way, self.gradients.way = VARIANTS[name]
        torch.manual_seed(1)  # the same dropout in all
        self.step.optimizer.zero_grad()
        self.grid.barrier()
        parts = [self.step.forward, self.step.backward, self.gradients.finish]
        passes = stopwatch(self.grid.device, parts)
        return slowest([sum(passes)], self.grid.device)[0]


def measure(variants: Variants, turns: int) -> dict[str, Any]:
    """Seconds of every variant in every turn; on every rank."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    names = list(VARIANTS)
    for turn in range(WARM_UP + turns):
        first = turn % len(names)  # none always comes after the same other one
        for name in names[first:] + names[:first]:
            seconds[name].append(variants.seconds(name))
    kept = {name: np.array(times[WARM_UP:]) for name, times in seconds.items()}
    return {
        "seconds": {name: summary(times.tolist()) for name, times in kept.items()},
        **{kind: hidden(kept, kind) for kind in ("halos", "gradients")},
        "turns": {name: times.tolist() for name, times in kept.items()},
    }


def hidden(seconds: dict[str, Any], kind: str) -> dict[str, Any]:
    """The hidden share of one kind of communication and the seconds it would take unhidden.

    Medians over turns of differences within a turn, each with its 95 % confidence interval. The
    share is None, not measurable, where the interval of the seconds holds 0, or its own interval
    is as wide as all that it could be.
    """
    blocking = seconds[f"{kind} blocking"]
    draws = np.random.default_rng(0).integers(len(blocking), size=(DRAWS, len(blocking)))
    cost = blocking - seconds[f"{kind} without"]
    saved = blocking - seconds["actual"]
    costs = np.median(cost[draws], axis=1)
    result: dict[str, Any] = {"seconds": interval(float(np.median(cost)), costs), "share": None}
    if result["seconds"]["low"] > 0:
        shares = np.median(saved[draws], axis=1) / costs
        share = interval(float(np.median(saved) / np.median(cost)), shares)
        if share["high"] - share["low"] < 1:
            result["share"] = share
    return result


def interval(value: float, drawn: Any) -> dict[str, float]:
    """A value and where 95 % of those drawn lie."""
    low, high = np.percentile(drawn, (2.5, 97.5))
    return {"value": value, "low": float(low), "high": float(high)}


def way() -> str:
    """What carries the messages."""
    return "shared memory" if shared_channels() is not None else str(dist.get_backend())


def on_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Every network in every dtype."""
    results: dict[str, Any] = {}
    for network in options.network:
        width = options.width or NETWORKS[network]
        results[network] = {"width": width}
        for name in options.dtype:
            extents = {options.axis: options.ranks}
            variants = Variants(network, width, extents, getattr(torch, name))
            results[network][name] = measure(variants, options.turns)
    return {"carried by": way(), **results}


def print_hidden(title: str, result: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, times in result["seconds"].items():
        print(
            f"  {name:20}{1e3 * times['median']:9.1f} ms  "
            f"({1e3 * times['min']:.1f} to {1e3 * times['max']:.1f})"
        )
    for kind in ("halos", "gradients"):
        cost = result[kind]["seconds"]
        share = result[kind]["share"]
        words = "share not measurable within the noise"
        if share is not None:
            words = f"{share['value']:.2f} hidden ({share['low']:.2f} to {share['high']:.2f})"
        print(
            f"  {kind:10} take {1e3 * cost['value']:6.1f} ms "
            f"({1e3 * cost['low']:.1f} to {1e3 * cost['high']:.1f}) unhidden: {words}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = list(NETWORKS)
    parser.add_argument("--network", nargs="+", choices=names, default=OURS)
    parser.add_argument("--width", type=int, help="voxels along each side")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--axis", choices=["data", "depth", "height", "width"], default="depth")
    parser.add_argument("--turns", type=int, default=10, help="of all variants")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--share-devices", action="store_true", help="all ranks on one GPU")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    where = machine()
    begin = time.perf_counter()
    results = run_ranks(options.ranks, on_ranks, options, share_devices=options.share_devices)[0]
    where["seconds"] = time.perf_counter() - begin
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print(f"{options.ranks} ranks x 1 thread along {options.axis}, by {results['carried by']}")
    for network in options.network:
        for name in options.dtype:
            title = f"{network}-{results[network]['width']}, {name}"
            print_hidden(title, results[network][name])
    write_results(options, where, results)


if __name__ == "__main__":
    main()
