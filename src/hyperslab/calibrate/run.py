"""From the ranks of this run to a machine file, or to more calls in one."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from hyperslab.calibrate.clock import Clock
from hyperslab.calibrate.hardware import memory_of_rank, processor_name, sockets
from hyperslab.calibrate.messages import measure_links, measure_sums
from hyperslab.calibrate.operators import distinct_operators, measure_operators
from hyperslab.calibrate.overhead import measure_overhead
from hyperslab.calibrate.overlap import measure_hidden
from hyperslab.calibrate.reads import measure_reading
from hyperslab.calibrate.speeds import launch_seconds, memory_bandwidth, peak_flops
from hyperslab.comm import Grid
from hyperslab.comm.agreement import from_all
from hyperslab.errors import MachineError
from hyperslab.machine import Machine, Setting
from hyperslab.machine.load import current_versions, same_minor
from hyperslab.machine.placement import Placement
from hyperslab.trace.records import LocalOperator

Advance = Callable[[int, int], None]
"""Called with the number of operators done and their number."""


@dataclass(frozen=True)
class Measurement:
    """What to measure: these operators, and reads in this folder.

    ``operators`` may differ between ranks: all ranks measure those of all.
    ``before`` is what was measured before, to which calls are added.
    """

    name: str
    folder: Path
    operators: Sequence[LocalOperator] = ()
    before: Machine | None = None
    budget: float = 0.3  # [s] for each measurement


@dataclass(frozen=True)
class Calibration:
    """The machine, how many calls were measured, and the operators that could not be run."""

    machine: Machine
    measured: int
    failed: dict[str, str]


def calibrate(grid: Grid, measurement: Measurement, progress: Advance) -> Calibration:
    """Measure on all ranks of ``grid`` at once; every rank calls this.

    What the machine before has at this number of ranks stays, calls that it lacks are added.

    Raises:
        MachineError: the machine before was measured with other versions or on another processor.
    """
    clock = Clock(grid, measurement.budget)
    before = measurement.before
    together = ranks_of_node()
    if before is not None:
        check_same(before, measurement.name)
    setting = None if before is None else before.at(together)
    if before is None or setting is None:
        machine, setting = _measure_all(clock, measurement, together)
    else:
        machine = before
    check_threads(setting, measurement.name)
    operators = itertools.chain(*from_all(list(measurement.operators)))  # the same on all ranks
    wanted = distinct_operators(operators, setting.measured)
    count = 0

    def done() -> None:
        nonlocal count
        count += 1
        progress(count, len(wanted))

    entries, failed = measure_operators(wanted, clock, done)
    setting = setting.model_copy(update={"operators": (*setting.operators, *entries)})
    return Calibration(machine.with_setting(setting), len(entries), failed)


def check_same(before: Machine, name: str) -> None:
    """Numbers of two machines must not stand in one file.

    Raises:
        MachineError: names what differs.
    """
    here = current_versions() | {"processor": processor_name()}
    was = before.versions | {"processor": before.processor}
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


def check_threads(setting: Setting, name: str) -> None:
    """A setting has one number of threads.

    Raises:
        MachineError: this process has another.
    """
    if setting.threads != torch.get_num_threads():
        raise MachineError(
            f"{name} has {setting.ranks} ranks of {setting.threads} threads, these have "
            f"{torch.get_num_threads()}\n    set OMP_NUM_THREADS={setting.threads}, or write "
            "another file"
        )


def ranks_of_node() -> int:
    """How many ranks there are on the node of the first one; all ranks call this."""
    names = from_all(socket.gethostname())
    return names.count(names[0])


def _measure_all(clock: Clock, measurement: Measurement, together: int) -> tuple[Machine, Setting]:
    """What does not depend on a network."""
    grid = clock.grid
    before = measurement.before
    per_socket = max(1, together // sockets(grid.device))
    placement = Placement(grid.size, together, per_socket)
    setting = Setting(
        ranks=together,
        threads=torch.get_num_threads(),
        flops=peak_flops(clock),
        bandwidth=memory_bandwidth(clock),
        launch=launch_seconds(clock),
        overhead=measure_overhead(clock),
    )
    machine = Machine(
        name=measurement.name,
        date=date.today(),
        versions=current_versions(),
        processor=processor_name(),
        device=grid.device.type,
        ranks_per_node=together,
        ranks_per_socket=per_socket,
        memory=memory_of_rank(grid.device, together),
        settings=(setting,),
        reading=measure_reading(grid, measurement.folder),
    )
    if grid.size > 1:
        communication = {
            "links": measure_links(clock, placement),
            "sums": measure_sums(clock, together),
            "hidden": measure_hidden(clock, placement),
        }
        machine = machine.model_copy(update=communication)
    if before is not None:
        machine = before.joined(machine)
    return machine, setting
