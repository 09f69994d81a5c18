"""Training steps on one device: hyperslab beside plain torch, eager and compiled, in turn.

`benchmarks/first_hour.py` runs them. Forward and backward of one sample in bfloat16 autocast,
channels last: time, highest memory, share of the GPU's highest flop/s. A case that does not fit the
memory is written down as such.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from clock import now
from networks import Case, make_case
from torch.utils.flop_counter import FlopCounterMode

import hyperslab as hs

DTYPE = torch.bfloat16
WARM_UP = 3  # steps: kernels are chosen and compiled

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bfloat16 of NVIDIA's data sheets [flop/s] (SXM), by a part of the name."""


@dataclass(frozen=True)
class Options:
    """How a comparison runs; ``distconv`` is the folder of LLNL's."""

    device: str
    steps: int = 5  # in a turn
    turns: int = 3
    distconv: Path | None = None


@dataclass(frozen=True)
class Network:
    """One of `networks.NETWORKS`, at a width."""

    network: str
    width: int
    batch_norm: bool = False

    @property
    def name(self) -> str:
        return f"{self.network}-{self.width}" + ("-batch-norm" if self.batch_norm else "")


CASES = [
    *(Network("cosmoflow", width, norm) for width in (128, 256, 512) for norm in (False, True)),
    Network("unet3d", 256),
]


class Runner:
    """A step of one variant, again and again."""

    def __init__(self, case: Case, forward: Callable[[], torch.Tensor]) -> None:
        self.case = case
        self.forward = forward
        self.device = case.y.device
        self.kept = 0  # bytes between steps: parameters, the sample, what compiling left

    def step(self) -> float:
        """Forward, loss and backward; what it took [s]."""
        began = now(self.device)
        with torch.autocast(self.device.type, DTYPE):
            loss = self.case.loss(self.forward().float(), self.case.y)
        loss.backward()
        seconds = now(self.device) - began
        self.case.model.zero_grad()
        return seconds


def hyperslab(case: Case, _options: Options) -> Runner:
    case.cut(hs.Grid())
    return Runner(case, lambda: case.model(case.x))


def eager(case: Case, _options: Options) -> Runner:
    return Runner(case, lambda: case.model(case.x))


def compiled(case: Case, _options: Options) -> Runner:
    model = torch.compile(case.model)
    return Runner(case, lambda: model(case.x))


def distconv(case: Case, options: Options) -> Runner:
    """LLNL's (github.com/LBANN/DistConv), from a folder that the user names."""
    if options.distconv is None:
        raise ImportError("--distconv PATH says where it is")
    sys.path.insert(0, str(options.distconv))
    from distconv import DCTensor, DistConvDDP, ParallelStrategy

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    strategy = ParallelStrategy(num_shards=1)
    model = DistConvDDP(case.model, parallel_strategy=strategy)
    return Runner(case, lambda: model(DCTensor.distribute(case.x, strategy)).to_ddp())


VARIANTS = {"hyperslab": hyperslab, "eager": eager, "compiled": compiled, "distconv": distconv}


def build(network: Network, variant: str, options: Options) -> Runner:
    """A variant with the same numbers as the others, channels last."""
    device = torch.device(options.device)
    with torch.device(device):
        case = make_case(network.network, network.width, network.batch_norm, device)
    case.model.to(memory_format=torch.channels_last_3d)
    case.x = case.x.contiguous(memory_format=torch.channels_last_3d)
    return VARIANTS[variant](case, options)


def flops_of(network: Network) -> int:
    """Of forward and backward, by torch's formulas; multiplication and addition are two."""
    meta = torch.device("meta")
    with meta:
        case = make_case(network.network, network.width, network.batch_norm, meta)
    with FlopCounterMode(display=False) as count:
        case.model(case.x).sum().backward()
    return count.get_total_flops()


def peak_of(device: torch.device) -> tuple[float, str]:
    """The highest flop/s, and where the number is from."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, peak in PEAKS.items():
            if part in name:
                return peak, "data sheet"
    side = 8192 if device.type == "cuda" else 512
    a = torch.randn(side, side, device=device, dtype=DTYPE)
    times = []
    for _ in range(10):
        began = now(device)
        a @ a
        times.append(now(device) - began)
    return 2 * side**3 / min(times), "measured product of matrices"


def measured(runner: Runner, steps: int) -> dict[str, Any]:
    """Times and highest memory of some steps, without what other variants keep meanwhile."""
    if runner.device.type != "cuda":
        return {"seconds": [runner.step() for _ in range(steps)], "memory": None}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - runner.kept
    seconds = [runner.step() for _ in range(steps)]
    return {"seconds": seconds, "memory": torch.cuda.max_memory_allocated() - others}


def attempt(action: Callable[[], Any]) -> Any:
    """What ``action`` returns, or the words of why there is nothing: no memory, no such library."""
    try:
        return action()
    except (torch.cuda.OutOfMemoryError, ImportError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def compare(
    network: Network, variants: list[str], options: Options
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every variant's result, after turns in which each of them ran."""
    runners: dict[str, Runner] = {}
    parts: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}

    def turn(variant: str) -> None:
        if variant not in runners:
            before = torch.cuda.memory_allocated()
            runners[variant] = build(network, variant, options)
            measured(runners[variant], WARM_UP)
            runners[variant].kept = torch.cuda.memory_allocated() - before
            parts[variant] = []
        parts[variant].append(measured(runners[variant], options.steps))

    for _ in range(options.turns):
        for variant in variants:
            if variant not in failed:
                words = attempt(lambda variant=variant: turn(variant))
                if words is not None:
                    failed[variant] = words
                    runners.pop(variant, None)
                gc.collect()
    for variant in variants:
        if variant in failed:
            yield variant, {"failed": failed[variant]}
            continue
        seconds = [second for part in parts[variant] for second in part["seconds"]]
        memory = [part["memory"] for part in parts[variant]]
        yield (
            variant,
            {
                "median": statistics.median(seconds),
                "best": min(seconds),
                "memory": None if None in memory else max(memory),
            },
        )
