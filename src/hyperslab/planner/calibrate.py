"""Calibrates a machine: from the ranks of this run to a machine file, or to more calls in one.

In reading order: what this node is; peak speed, memory bandwidth, launch and reads of a rank
while all ranks work; the operators of recipes on every grid of so many ranks; `calibrate`.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch

from hyperslab.comm import Grid
from hyperslab.comm.agreement import all_gather, collective_try
from hyperslab.errors import LayoutError, MachineError
from hyperslab.planner import timing
from hyperslab.planner.job import GridJob
from hyperslab.planner.machine import Machine, ReadSpeed, Setting, same_minor
from hyperslab.planner.records import LocalOperator
from hyperslab.planner.search import PlanBounds, grids, make_plan, refusal, trace_grid
from hyperslab.planner.timing import Clock
from hyperslab.planner.trace import Device, positions, trace_step
from hyperslab.train.flops import measure_peak
from hyperslab.train.step import float32_products
from hyperslab.util.optional_libraries import current_versions

CPU_INFO = Path("/proc/cpuinfo")


def processor_name() -> str:
    """Returns the name of the GPU, where there is one, or of the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return (_cpu_fields("model name") or [platform.processor() or platform.machine()])[0]


def instruction_set() -> str:
    """Names the CPU's instructions by which kernels are chosen; "" where a GPU computes."""
    if torch.cuda.is_available():
        return ""
    flags = {*" ".join(_cpu_fields("flags")[:1]).split()}
    wider = [name for name in ("avx512_bf16", "amx_bf16") if name in flags]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *wider])


def sockets(device: torch.device) -> int:
    """Counts the CPU's sockets; GPUs that reach each other's memory count as one."""
    if device.type == "cuda":
        count = torch.cuda.device_count()
        near = [d for d in range(1, count) if torch.cuda.can_device_access_peer(0, d)]
        return max(1, count // (1 + len(near)))
    return max(1, len(set(_cpu_fields("physical id"))))


def memory_of_rank(device: torch.device, ranks: int) -> int:
    """Returns the memory [B] of a GPU, or a rank's part of the node's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def reserved_of_device(device: torch.device) -> int:
    """Measures what of a GPU [B] holds no tensor by now: contexts, NCCL's buffers, workspaces."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def _cpu_fields(name: str) -> list[str]:
    """Returns the values of a field of /proc/cpuinfo, one for each core."""
    if not CPU_INFO.exists():
        return []
    pairs = (line.partition(":") for line in CPU_INFO.read_text().splitlines())
    return [value.strip() for key, _, value in pairs if key.strip() == name]


TRIAD_BYTES = 64 << 20  # [B] of each of three arrays: more than caches hold


def peak_flops(device: torch.device) -> dict[str, float]:
    """Measures the rate [flop/s] of a product of matrices by dtype, the mean over ranks.

    Without instructions for bfloat16 convolutions in it are computed in float32: it has at least
    the peak of that.
    """
    single, half = (measure_peak(device, precision) for precision in ("float32", "bf16"))
    found = [statistics.fmean(rates) for rates in zip(*all_gather((single, half)), strict=True)]
    return {"float32": found[0], "bfloat16": max(found)}


def memory_bandwidth(clock: Clock) -> float:
    """Measures the bandwidth [B/s] of a triad, a = b + s c: two arrays read, one written."""
    b = torch.rand(TRIAD_BYTES // 4, device=clock.grid.device)
    c = b.clone()
    a = torch.empty_like(b)
    return 3 * TRIAD_BYTES / clock.seconds(lambda: torch.add(b, c, alpha=3.0, out=a))


def launch_seconds(clock: Clock) -> float:
    """Measures the time [s] of an operator on a single element."""
    x = torch.ones(1, device=clock.grid.device)
    return clock.seconds(lambda: x.add_(1))


FILE_SIZES = (1 << 20, 64 << 20)  # [B] of files: one for the latency, one for the bandwidth
READ_BYTES = 1 << 20  # [B] of a read
READ_TRIES = 3


def measure_reading(grid: Grid, folder: Path) -> ReadSpeed:
    """Times reads of each rank's own files in ``folder``, past the page cache if possible.

    All ranks call this. ``total`` is what all of them get together.
    """
    times = []
    direct = True
    for size in FILE_SIZES:
        failing = f"cannot write a file in {folder} to time how it is read"
        with ExitStack() as opened:
            make = partial(_write_random, folder, size, opened)
            path = collective_try(make, failing=failing, error=MachineError)
            tries = []
            for _ in range(READ_TRIES):
                grid.barrier()
                seconds, past = _timed_read(path, size)
                tries.append(max(all_gather(seconds)))
                direct = direct and past
            times.append(min(tries))
    small, large = FILE_SIZES
    bandwidth = (large - small) / max(times[1] - times[0], 1e-9)
    return ReadSpeed(
        bandwidth=bandwidth,
        total=bandwidth * grid.size,
        latency=max(times[0] - small / bandwidth, 0.0),
        cached=not all(all_gather(direct)),
    )


def _write_random(folder: Path, size: int, opened: ExitStack) -> Path:
    """Writes a file of random bytes, which goes when ``opened`` is closed."""
    scratch = tempfile.TemporaryDirectory(dir=folder, prefix=".hyperslab-read-")
    path = Path(opened.enter_context(scratch), "file")
    with path.open("xb") as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
    return path


def _timed_read(path: Path, size: int) -> tuple[float, bool]:
    """Times one read [s], and tells whether it went past the page cache."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        file = os.open(path, os.O_RDONLY | direct)
    except OSError:  # this file system has none
        direct = 0
        file = os.open(path, os.O_RDONLY)
    try:
        buffer = mmap.mmap(-1, min(READ_BYTES, size))  # O_DIRECT wants whole pages
        begin = time.perf_counter()
        while os.readv(file, [buffer]):
            pass
        return time.perf_counter() - begin, bool(direct)
    finally:
        os.close(file)


def operators_of_grids(
    job: GridJob, where: Path, ranks: int, device: Device
) -> Iterator[LocalOperator]:
    """Traces a step on each grid of so many ranks, of one rank for each kind of position.

    Grids on which it cannot run are left out. ``where`` is its recipe's file, named in errors.

    Raises:
        LayoutError: it cannot run on any grid of so many ranks; says why for one.
    """
    workload = job.workload()
    traced, reason = 0, ""
    for grid in grids(ranks):
        if reason := refusal(grid, job):
            continue
        extents = grid.model_dump()
        # Some layer inside may not be cut so.
        with suppress(LayoutError):
            for rank in positions(extents):
                yield from trace_step(workload, extents, rank, device).operators
                traced += 1
    if not traced:
        raise LayoutError(f"{where} runs on no grid of {ranks} ranks\n    {reason}")


BEST_GRIDS = 3  # grids of a plan whose operators are measured where there is no time for all


def operators_of_plan(
    job: GridJob, ranks: int, machine: Machine, bounds: PlanBounds
) -> Iterator[LocalOperator]:
    """Traces the grids that a plan of so many ranks finds best, on the ranks that decide."""
    best = make_plan(job, machine, ranks, bounds).traced[:BEST_GRIDS]
    for place, one in enumerate(reversed(best)):
        for trace in trace_grid(job, one.grid, machine):
            yield from 3**place * trace.operators  # what counts most is measured first


@dataclass(frozen=True)
class Calibration:
    """Holds the machine, the number of measured calls, and the operators that could not run.

    ``left`` counts the calls for which there was no time.
    """

    machine: Machine
    measured: int
    failed: dict[str, str]
    left: int = 0


def calibrate(
    grid: Grid,
    name: str,
    folder: Path,
    operators: Sequence[LocalOperator] = (),
    before: Machine | None = None,
    *,
    budget: float = 0.3,
    limit: float = math.inf,
    progress: timing.ProgressCallback = lambda done, total: None,
) -> Calibration:
    """Measures these operators on all ranks of ``grid`` at once, and reads in ``folder``.

    Every rank calls this; ``operators`` may differ, all ranks measure those of all. What the
    machine ``before`` has at this number of ranks stays, and calls that it lacks are added. Each
    measurement takes ``budget`` [s], all together about ``limit`` [s]: calls of which a trace has
    most, by their rooflines, come first, and passes alone last.

    Raises:
        MachineError: the machine before was measured with other versions or on another processor.
    """
    end = time.monotonic() + limit
    clock = Clock(grid, budget)
    hosts = all_gather(socket.gethostname())
    together = hosts.count(hosts[0])
    machine = before
    if machine is not None:
        _check_same(machine, name)
    if machine is None or machine.at(together) is None:
        measured = _measure_all(clock, name, folder, together)
        machine = measured if machine is None else machine.joined(measured)
    setting = machine.setting(together)
    _check_threads(setting, name)
    everybody = [*itertools.chain(*all_gather(list(operators)))]  # the same on all ranks
    wanted = timing.distinct_operators(everybody, setting.measured)
    # Passes alone only divide the time of a call that does both.
    wanted.sort(
        key=lambda one: (one.count == 0, -max(one.count, 1) * setting.roofline_of(one.operator))
    )
    with float32_products("float32"):  # as runs have it
        entries, failed = timing.measure_operators(wanted, clock, progress, end)
    setting = setting.model_copy(update={"operators": (*setting.operators, *entries)})
    left = len(wanted) - len(entries) - len(failed)
    reasons = {call.name: reason for call, reason in failed.items()}
    return Calibration(machine.with_setting(setting), len(entries), reasons, left)


def _check_same(before: Machine, name: str) -> None:
    """Refuses to mix the numbers of two machines in one file (`MachineError`)."""
    here = current_versions() | {"processor": processor_name()}
    was = before.versions | {"processor": before.processor}
    if before.instructions:  # files of before this was written down have none
        here["instructions"], was["instructions"] = instruction_set(), before.instructions
    different = [
        f"{key}: {was.get(key)} there, {here[key]} here"
        for key in here
        if not (key in was and (same_minor(was[key], here[key]) or was[key] == here[key]))
    ]
    if different:
        raise MachineError(
            f"{name} was measured elsewhere or with other versions ({'; '.join(different)})\n"
            "    write another file"
        )


def _check_threads(setting: Setting, name: str) -> None:
    """Refuses to mix two numbers of threads in one setting (`MachineError`)."""
    if setting.threads != torch.get_num_threads():
        raise MachineError(
            f"{name} has {setting.ranks} ranks of {setting.threads} threads, these have "
            f"{torch.get_num_threads()}\n    set OMP_NUM_THREADS={setting.threads}, or write "
            "another file"
        )


def _measure_all(clock: Clock, name: str, folder: Path, together: int) -> Machine:
    """Measures all that does not depend on a network."""
    grid = clock.grid
    setting = Setting(
        ranks=together,
        threads=torch.get_num_threads(),
        flops=peak_flops(grid.device),
        bandwidth=memory_bandwidth(clock),
        launch=launch_seconds(clock),
        overhead=timing.measure_overhead(clock),
    )
    machine = Machine(
        name=name,
        date=date.today(),
        versions=current_versions(),
        processor=processor_name(),
        instructions=instruction_set(),
        device="cuda" if grid.device.type == "cuda" else "cpu",
        ranks_per_node=together,
        ranks_per_socket=max(1, together // sockets(grid.device)),
        memory=memory_of_rank(grid.device, together),
        settings=(setting,),
        reading=measure_reading(grid, folder),
    )
    if grid.size > 1:
        communication = {
            "links": timing.measure_links(clock, machine),
            "sums": timing.measure_sums(clock, together),
            "hidden": timing.measure_hidden(clock, machine),
        }
        machine = machine.model_copy(update=communication)
    if grid.device.type == "cuda":
        machine = machine.model_copy(update={"reserved": reserved_of_device(grid.device)})
    return machine
