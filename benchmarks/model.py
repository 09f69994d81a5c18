"""The plan's model against measured steps: time, and memory of a rank.

    python benchmarks/model.py [--cases cosmoflow-64 unet3d-32 ...] [--ranks 1 2] [--steps 12]
                               [--json OUT]

For each network, on one rank of two threads and on two ranks of one thread, cut along each axis, in
processes of their own:

1. sums and the operators of the traced step are timed, as `hyperslab calibrate` does: by the
   processes of the step, because where a virtual machine's cores lie changes within minutes, and
   with it the time of a sum by a factor of 2.5 (all else of a machine, by the first network),
2. the step is measured, N times before and N times after its operators; the shorter of the two
   medians counts, as of an operator's two, and their distance says how well it repeats,
3. the step is predicted from that machine file twice: with every operator measured; and as if the
   network had never been calibrated at this width, from the shapes of all others (a call that one
   of them makes, too, such as that of the optimizer, counts as it was timed here),
4. the three grids of two ranks take turns in one process group: is the plan's first the fastest?
5. bytes that autograd saves are counted, and the rank's memory at its highest is read from the
   operating system, each beside the trace's.

Nothing of the measured step goes into a prediction.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from clock import machine as this_machine
from clock import slowest, stopwatch, write_results
from launch import run_ranks
from model_table import print_ranking, print_table
from networks import make_case
from resident import resident
from saved import counting

import hyperslab as hs
from hyperslab.planner.calibrate import calibrate
from hyperslab.planner.cost import RankMemory, rank_memory, step_cost
from hyperslab.planner.machine import Machine
from hyperslab.planner.records import Trace
from hyperslab.planner.timing import Clock, measure_sums
from hyperslab.planner.trace import Workload, trace_step

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
    def shapes(self) -> str:
        """The network and the width of its volumes."""
        return self.name.removesuffix("-bn")

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


def measure(point: Point, steps: int, first: Machine | None, budget: float) -> dict[str, Any]:
    """One point on this rank: the machine with its operators, and the step."""
    torch.set_num_threads(2 if point.ranks == 1 else 1)
    grid = hs.Grid(**point.extents)
    _step_of_nothing(grid)
    base = resident("VmRSS")
    found = _measure_step(point, grid, steps)
    found["process"] = base
    traces = [trace_step(point.workload(), point.extents, rank) for rank in range(grid.size)]
    operators = [operator for trace in traces for operator in trace.operators]
    with tempfile.TemporaryDirectory() as folder:
        done = calibrate(grid, "benchmark", Path(folder), operators, first, budget=budget)
    found["machine"] = done.machine
    if grid.size > 1:
        sums = measure_sums(Clock(grid, budget / 4), grid.size)
        found["machine"] = done.machine.model_copy(update={"sums": sums})
    found["failed"] = done.failed
    again = _measure_step(point, grid, steps)  # machines drift: before and after the operators
    found["seconds"] += again["seconds"]
    return found


def _step_of_nothing(grid: hs.Grid) -> None:
    """So that libraries are loaded: what the process takes then is no tensor of the step."""
    model = hs.parallelize(torch.nn.Conv3d(1, 1, 3, padding=1), grid)
    optimizer = torch.optim.Adam(model.parameters())
    model(hs.shard(torch.zeros(1, 1, 4, 4, 4), grid)).sum().backward()
    optimizer.step()


def _make_step(point: Point, grid: hs.Grid) -> tuple[Any, Callable[[], None]]:
    """The network on the grid, and its step."""
    case = point.case()
    if grid.size > 1:
        case.cut(grid)
    else:
        hs.parallelize(case.model, grid)
        case.x = hs.shard(case.x, grid)
    optimizer = torch.optim.Adam(case.model.parameters())

    def step() -> None:
        case.loss(case.model(case.x), case.y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return case, step


def rank_grids(name: str, steps: int) -> dict[str, list[float]]:
    """Steps of the grids of two ranks in turn, in one process group: seconds by axis."""
    torch.set_num_threads(1)
    made = {}
    for axis in AXES:
        grid = hs.Grid(**{axis: 2})
        made[axis] = grid, _make_step(Point(name, 2, axis), grid)[1]
    seconds: dict[str, list[float]] = {axis: [] for axis in AXES}
    for turn in range(WARM_UP + steps):
        for axis in AXES[turn % 3 :] + AXES[: turn % 3]:
            grid, step = made[axis]
            grid.barrier()
            seconds[axis].append(slowest(stopwatch(grid.device, [step]), grid.device)[0])
    return {axis: times[WARM_UP:] for axis, times in seconds.items()}


def _measure_step(point: Point, grid: hs.Grid, steps: int) -> dict[str, Any]:
    case, step = _make_step(point, grid)
    with counting([*case.model.parameters(), *case.model.buffers()]) as storages:
        loss = case.loss(case.model(case.x), case.y)
    saved = sum(storages.values())
    loss.backward()
    case.model.zero_grad()
    del loss, storages
    seconds = []
    for _ in range(WARM_UP + steps):
        grid.barrier()
        seconds.append(
            slowest(stopwatch(grid.device, [step]), grid.device)[0]
            if grid.size > 1
            else stopwatch(grid.device, [step])[0]
        )
    return {"saved": saved, "peak": resident("VmHWM"), "seconds": seconds[WARM_UP:]}


def predict(point: Point, traces: list[Trace], machine: Machine) -> dict[str, Any]:
    """The step of the slowest rank, and what it is made of."""
    costs = [step_cost(trace, machine, point.ranks) for trace in traces]
    worst = max(costs, key=lambda cost: cost.seconds.total)
    return {
        "seconds": worst.seconds.total,
        "guessed": worst.guessed,
        "unknown": worst.unknown,
        "breakdown": worst.seconds.as_dict(),
    }


def of_other_shapes(point: Point, machines: Mapping[Point, Machine]) -> Machine:
    """The point's machine as if this network had never been calibrated at this width."""
    setting = machines[point].setting(point.ranks)
    known = {
        call: setting.measured.get(call, entry)
        for other, machine in machines.items()
        if other.ranks == point.ranks and other.shapes != point.shapes
        for call, entry in machine.setting(point.ranks).measured.items()
    }
    operators = {"operators": tuple(known.values())}
    return machines[point].with_setting(setting.model_copy(update=operators))


def compare(
    point: Point,
    found: list[dict[str, Any]],
    traces: list[Trace],
    machines: Mapping[Point, Machine],
) -> dict[str, Any]:
    """One line of the table."""
    machine = machines[point]
    seconds = found[0]["seconds"]
    half = len(seconds) // 2
    halves = [statistics.median(seconds[:half]), statistics.median(seconds[half:])]
    measured = min(halves)
    host = RankMemory(process=max(rank["process"] for rank in found))
    peaks = [rank_memory(trace, machine, point.ranks, host) for trace in traces]
    return {
        **asdict(point),
        "measured": measured,
        "steps": seconds,
        "repeats": abs(halves[1] - halves[0]) / measured,
        "calibrated": predict(point, traces, machine),
        "others": predict(point, traces, of_other_shapes(point, machines)),
        "saved": [[rank["saved"], trace.saved] for rank, trace in zip(found, traces, strict=True)],
        "peak": [[rank["peak"], peak.total] for rank, peak in zip(found, peaks, strict=True)],
    }


def ranking(name: str, machines: Mapping[Point, Machine], steps: int) -> dict[str, Any]:
    """Whether the fastest grid of two ranks is the one that the plan names first."""
    points = [Point(name, 2, axis) for axis in AXES]
    settings = [machines[point].setting(2) for point in points]
    operators = tuple(entry for setting in settings for entry in setting.operators)
    setting = settings[0].model_copy(update={"operators": operators})
    machine = machines[points[0]].with_setting(setting)  # one, as a plan has
    turns = run_ranks(2, rank_grids, name, steps)[0]
    measured = {axis: statistics.median(times) for axis, times in turns.items()}
    predicted = {}
    for point in points:
        traces = [trace_step(point.workload(), point.extents, rank) for rank in range(2)]
        predicted[point.axis] = predict(point, traces, machine)["seconds"]
    first = min(predicted, key=lambda axis: predicted[axis])
    behind = measured[first] / min(measured.values()) - 1
    return {"name": name, "measured": measured, "predicted": predicted, "behind": behind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--budget", type=float, default=0.2, help="[s] for each operator")
    parser.add_argument("--minutes", type=float, default=60, help="begin no case after so many")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    where = this_machine()
    print(", ".join(f"{key} {value}" for key, value in where.items()), flush=True)
    points = [
        Point(name, ranks, axis)
        for name in options.cases
        for ranks in options.ranks
        for axis in (AXES if ranks > 1 else AXES[:1])
    ]
    found = {}
    machines: dict[Point, Machine] = {}
    start = time.perf_counter()
    for point in points:
        began = time.perf_counter()
        if began - start > 60 * options.minutes:
            print(f"no time for {point.name} on {point.grid} and what follows")
            break
        first = next((m for other, m in machines.items() if other.ranks == point.ranks), None)
        if first is not None:
            bare = first.setting(point.ranks).model_copy(update={"operators": ()})
            first = first.with_setting(bare)
        found[point] = run_ranks(point.ranks, measure, point, options.steps, first, options.budget)
        machines[point], *_ = [rank.pop("machine") for rank in found[point]]
        print(f"{point.name} on {point.grid}: {time.perf_counter() - began:.0f} s", flush=True)
    rows = []
    for point, ranks in found.items():
        traces = [trace_step(point.workload(), point.extents, rank) for rank in range(point.ranks)]
        rows.append(compare(point, ranks, traces, machines))
    print_table(rows)
    ranked = [
        ranking(name, machines, 2 * options.steps)
        for name in options.cases
        if all(Point(name, 2, axis) in machines for axis in AXES)
    ]
    if ranked:
        print_ranking(ranked)
    write_results(options, where, {"rows": rows, "ranking": ranked})


if __name__ == "__main__":
    main()
