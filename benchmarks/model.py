"""The plan's model against measured steps: time, and memory of a rank.

    python benchmarks/model.py [--cases cosmoflow-64 unet3d-32 ...] [--ranks 1 2] [--steps 12]
                               [--machine OUT.yaml] [--json OUT]

For each network, on one rank of two threads and on two ranks of one thread, cut along each axis, in
processes of their own:

1. the operators of the traced step are timed one by one (`hyperslab calibrate` does the same),
2. the step is measured: median of N, and the median of its first and second half apart, which
   says how well a measurement repeats,
3. the step is predicted from the machine file twice: with every operator measured; and as if this
   case had never been calibrated, from the shapes of all other cases,
4. bytes that autograd saves are counted, and the rank's memory at its highest is read from the
   operating system, each beside the trace's.

Nothing of the measured step goes into a prediction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from clock import machine as this_machine
from clock import slowest, stopwatch
from launch import run_ranks
from networks import make_case
from saved import counting

import hyperslab as hs
from hyperslab.calibrate.run import Request, calibrate
from hyperslab.cost.memory import HostMemory, rank_memory
from hyperslab.cost.step import step_cost
from hyperslab.machine import Machine, load_machine
from hyperslab.machine.load import save_machine
from hyperslab.trace import Trace, Workload, trace_step

CASES = [
    *(f"cosmoflow-{width}{bn}" for width in (32, 64, 128) for bn in ("", "-bn")),
    "unet3d-32",
    "unet3d-64",
]
AXES = ("depth", "height", "width")
WARM_UP = 3


@dataclass(frozen=True)
class Point:
    """A network on a grid."""

    name: str
    ranks: int
    axis: str

    @property
    def extents(self) -> dict[str, int]:
        return {self.axis: self.ranks} if self.ranks > 1 else {}

    @property
    def grid(self) -> str:
        return f"{self.ranks} x {self.axis}" if self.ranks > 1 else "1"

    def case(self) -> Any:
        network, width, *rest = self.name.split("-")
        return make_case(network, int(width), bool(rest), torch.device("cpu"))

    def workload(self) -> Workload:
        case = self.case()
        volume = case.y.dim() > 2
        return Workload(
            build=lambda: self.case().model,
            inputs=tuple(case.x.shape),
            target=tuple(case.y.shape),
            target_dtype=case.y.dtype,
            target_channels=not volume,
            loss=case.loss,
            optimizer=torch.optim.Adam,
        )


def memory(name: str) -> int:
    """VmRSS or VmHWM of this process [B]."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def measure(point: Point, steps: int, machine: Machine | None) -> dict[str, Any]:
    """One point on this rank: the machine with its operators, and the step."""
    torch.set_num_threads(2 if point.ranks == 1 else 1)
    grid = hs.Grid(**point.extents)
    base = memory("VmRSS")
    found = _measure_step(point, grid, steps)
    found["process"] = base
    trace = trace_step(point.workload(), point.extents, grid.rank)
    with tempfile.TemporaryDirectory() as folder:
        request = Request("benchmark", Path(folder), trace.operators, machine)
        done = calibrate(grid, request, lambda _done, _all: None)
    found["machine"] = done.machine if grid.is_main else None
    found["failed"] = done.failed
    again = _measure_step(point, grid, steps)  # machines drift: before and after the operators
    found["seconds"] += again["seconds"]
    return found


def _measure_step(point: Point, grid: hs.Grid, steps: int) -> dict[str, Any]:
    case = point.case()
    if grid.size > 1:
        case.cut(grid)
    else:
        hs.parallelize(case.model, grid)
        case.x = hs.shard(case.x, grid)
    optimizer = torch.optim.Adam(case.model.parameters())
    saved: list[int] = []

    def step() -> None:
        case.loss(case.model(case.x), case.y).backward()
        optimizer.step()
        optimizer.zero_grad()

    with counting([*case.model.parameters(), *case.model.buffers()]) as storages:
        loss = case.loss(case.model(case.x), case.y)
    saved.append(sum(storages.values()))
    loss.backward()
    optimizer.zero_grad()
    del loss, storages
    seconds = []
    for _ in range(WARM_UP + steps):
        grid.barrier()
        seconds.append(slowest(stopwatch(grid.device, [step]), grid.device)[0] if grid.size > 1
                       else stopwatch(grid.device, [step])[0])
    return {"saved": saved[0], "peak": memory("VmHWM"), "seconds": seconds[WARM_UP:]}
