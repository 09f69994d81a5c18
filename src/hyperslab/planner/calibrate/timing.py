"""Times the operators of traced steps on all ranks at once, and what Python costs beside them.

`Clock` repeats work on all ranks together. `Replay` runs one recorded call again on real
tensors of the same form, with memory in the state in which a step finds it: operands rotate
through several sets, so that small ones come from a cache that other work went through in the
meantime, and large ones from memory; results go to memory that was used before, because they
are kept for one turn of the sets. `measure_overhead` finds what rules, autograd, hooks and the
optimizer's loop take.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hyperslab.comm import Communicator, Grid
from hyperslab.comm.agreement import all_gather
from hyperslab.parallel import parallelize
from hyperslab.planner.machine import Measured, Overhead, measurable_passes
from hyperslab.planner.machine.links import FitResidual
from hyperslab.planner.machine.operator_times import entry_of, write_call
from hyperslab.planner.trace.records import Call, Exchange, LocalOperator, TensorSpec
from hyperslab.planner.trace.step import Device, Workload, trace_step
from hyperslab.tensor import shard
from hyperslab.util.torch_internals import OpOverload

RankedBytes = Sequence[tuple[int, int]]
"""Pairs ranks with sizes [B] of messages."""

REPETITIONS = (5, 100)  # at least and at most


@dataclass(frozen=True)
class Clock:
    """Repeats work on all ranks together, for about ``budget`` [s] each time.

    ``of`` takes one time of a rank's repetitions: the median, as in a step, or the least.
    """

    grid: Grid
    budget: float = 0.3
    of: Callable[[Sequence[float]], float] = statistics.median

    def seconds(
        self, work: Callable[[], object], before: Callable[[], object] | None = None
    ) -> float:
        """Times ``work`` [s] after warming up, the mean over ranks.

        All ranks call this. ``before`` runs before each repetition and is not counted.
        """
        self._once(work, before)
        longest = max(all_gather(self._once(work, before)))
        fewest, most = REPETITIONS
        count = int(min(max(self.budget / longest, fewest), most))
        self.grid.barrier()
        mine = self.of([self._once(work, before) for _ in range(count)])
        return statistics.fmean(all_gather(mine))

    @property
    def least(self) -> Clock:
        """Returns a clock that takes the least time, which other processes disturb least."""
        return replace(self, of=min)

    def exchange_seconds(self, sends: RankedBytes, receives: RankedBytes) -> float:
        """Times messages of these sizes, alone; all ranks call this, also those without any."""
        device = self.grid.device
        pieces = [(peer, torch.ones(n, dtype=torch.uint8, device=device)) for peer, n in sends]

        def exchange() -> None:
            if pieces or receives:
                buffers = [
                    (p, torch.empty(n, dtype=torch.uint8, device=device)) for p, n in receives
                ]
                self.grid.halos.exchange(pieces, buffers, "a measurement").wait()

        return self.seconds(exchange)

    def sum_seconds(self, group: Communicator, nbytes: int) -> float:
        """Times an all-reduce of so many bytes."""
        x = torch.ones(nbytes // 4, device=self.grid.device)
        return self.seconds(
            partial(group.sum_in_place, x, "a measurement"), before=partial(x.fill_, 1)
        )

    def _once(self, work: Callable[[], object], before: Callable[[], object] | None) -> float:
        if before is not None:
            before()
        begin = self._now()
        work()
        return self._now() - begin

    def _now(self) -> float:
        """Reads the clock when everything queued on the device is done."""
        if self.grid.device.type == "cuda":
            torch.cuda.synchronize(self.grid.device)
        return time.perf_counter()


ROTATED_BYTES = 256 << 20  # [B] that all sets of operands take together: more than caches hold
MOST_SETS = 64
WRITES_BEFORE_REFILL = 8  # times that an operand is written to before it gets new values

aten = torch.ops.aten


class Replay:
    """Runs a recorded call again on tensors of its own; call `refresh` before each time.

    With ``library`` the input of a convolution's gradients is oneDNN's, which chooses its kernels.

    Raises:
        LookupError: torch has no such operator.
    """

    def __init__(self, call: Call, device: torch.device, *, library: bool = False) -> None:
        self.operator = operator_of(call.name)
        self._device = device
        self._library = library
        self._writes = self.operator._schema.is_mutable
        self._filled: list[torch.Tensor] = []
        count = int(min(max(ROTATED_BYTES / max(call.nbytes, 1), 1), MOST_SETS))
        self._sets = [self._operands(call) for _ in range(count)]
        self._kept: deque[object] = deque(maxlen=count)
        self._turn = 0

    def refresh(self) -> None:
        """Takes the next operands; those written to must not fade to zeros, which are slower."""
        self._turn += 1
        if self._writes and self._turn % (WRITES_BEFORE_REFILL * len(self._sets)) == 0:
            for flat in self._filled:
                _fill(flat)

    def __call__(self) -> None:
        args, kwargs = self._sets[self._turn % len(self._sets)]
        self._kept.append(self.operator(*args, **kwargs))

    def _operands(self, call: Call) -> tuple[list[Any], dict[str, Any]]:
        args = [self._value(value) for value in call.arguments]
        if self._library and self.operator is aten.convolution_backward.default:
            args[1] = args[1].to_mkldnn()
        return args, {name: self._value(value) for name, value in call.options}

    def _value(self, value: object) -> Any:
        if isinstance(value, TensorSpec):
            flat = flat_tensor(value, self._device)
            if self._writes:
                self._filled.append(flat)
            return flat.as_strided(value.shape, value.strides)
        if isinstance(value, tuple):
            return [self._value(part) for part in value]
        if isinstance(value, torch.device):
            return self._device
        return value


def operator_of(name: str) -> OpOverload:
    """Finds the operator of a name such as ``aten.convolution.default``.

    Raises:
        LookupError: there is none.
    """
    at: Any = torch.ops
    for part in name.split("."):
        try:
            at = getattr(at, part)
        except AttributeError:
            raise LookupError(f"this torch has no operator {name}") from None
    if not isinstance(at, OpOverload):
        raise LookupError(f"{name} names no overload of an operator")
    return at


def flat_tensor(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Makes a tensor that holds one of this form, which no kernel handles as a special case."""
    steps = zip(spec.shape, spec.strides, strict=True)
    extent = 0 if 0 in spec.shape else 1 + sum((n - 1) * stride for n, stride in steps)
    flat = torch.empty(extent, dtype=spec.dtype, device=device)
    _fill(flat)
    return flat


def _fill(flat: torch.Tensor) -> None:
    if flat.is_floating_point() or flat.is_complex():
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        real.fill_(0.5)
    else:
        flat.zero_()  # also a valid index, and a valid class


ProgressCallback = Callable[[int, int], None]
"""Receives the number of operators done and the number of all."""

TO_LIBRARY = "aten.to_mkldnn.default"


@dataclass(frozen=True, slots=True)
class OperatorToTime:
    """Names an operator to be timed; ``library``: its operand was handed to oneDNN by name.

    A trace shows that as an operator of its own, which comes right before.
    """

    operator: LocalOperator
    library: bool = False


def distinct_operators(
    operators: Iterable[LocalOperator], known: Iterable[Call] = ()
) -> list[OperatorToTime]:
    """Lists each call once, passes that it does together also apart, without known ones.

    ``operators`` are in the order of their trace.
    """
    seen = set(known)
    found = []
    before = ""
    for operator in operators:
        for part in measurable_passes(operator):
            if part.call not in seen:
                seen.add(part.call)
                found.append(OperatorToTime(part, before == TO_LIBRARY))
        before = operator.call.name
    return found


def measure_operators(
    wanted: Sequence[OperatorToTime], clock: Clock, progress: ProgressCallback
) -> tuple[list[Measured], dict[str, str]]:
    """Times each operator, and collects why others could not be run, by name.

    All ranks call this with the same operators; ``progress`` is called after each.
    """
    entries = []
    failed = {}
    for count, each in enumerate(wanted, 1):
        seconds, reason = _measure_call(each, clock)
        if reason:
            failed[each.operator.call.name] = reason
        else:
            entries.append(entry_of(each.operator, seconds))
        progress(count, len(wanted))
    return entries, failed


def _measure_call(wanted: OperatorToTime, clock: Clock) -> tuple[float, str]:
    """Times one operator [s], or says why some rank could not run it."""
    call = wanted.operator.call
    reason = ""
    try:
        write_call(call)  # or it could not be kept
        replay = Replay(call, clock.grid.device, library=wanted.library)
        replay()
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
    reasons = [found for found in all_gather(reason) if found]
    if reasons:
        return 0.0, reasons[0]
    return clock.seconds(replay, before=replay.refresh), ""


NETWORK_DEPTHS = (1, 2, 4, 8)  # blocks of the networks that are compared
FEATURE_MAPS = 4
NETWORK_WIDTH = 8  # voxels: so few that Python's share is most of the step
NETWORK_OUTPUTS = 4


def measure_overhead(clock: Clock) -> Overhead:
    """Fits the overhead of an operator and of a step to small networks of several depths.

    All ranks call this. They cut the volume along its depth, so that rules and halos are in it;
    the time of the messages themselves is not.
    """
    clock = clock.least  # a small difference of large numbers
    points = [_measure_depth(blocks, clock) for blocks in NETWORK_DEPTHS]
    counts, beside = np.array(points, float).T
    each, once = np.polyfit(counts, beside, 1)
    each = max(float(each), 0.0)
    once = max(float(once), 0.0)
    left = np.abs(once + each * counts - beside) / np.abs(beside)
    residual = FitResidual(median=float(np.median(left)), worst=float(left.max()))
    return Overhead(operator=each, step=once, residual=residual)


def _measure_depth(blocks: int, clock: Clock) -> tuple[int, float]:
    """Counts a step's operators, and times [s] what is not theirs."""
    grid = Grid(depth=clock.grid.size)
    shape = (1, FEATURE_MAPS, NETWORK_WIDTH * grid.size, NETWORK_WIDTH, NETWORK_WIDTH)
    workload = Workload(
        build=lambda: _small_network(blocks, grid.size),
        inputs=shape,
        target=(1, NETWORK_OUTPUTS),
        loss=F.mse_loss,
        optimizer=torch.optim.Adam,
    )
    device: Device = "cuda" if grid.device.type == "cuda" else "cpu"
    traces = [trace_step(workload, grid.extents, rank, device) for rank in range(grid.size)]
    mine = traces[grid.rank]
    every = [operator for trace in traces for operator in trace.operators]
    entries, _ = measure_operators(distinct_operators(every), clock, lambda *_: None)
    times = {entry.parsed: entry.seconds for entry in entries}
    compute = sum(times.get(operator.call, 0.0) for operator in mine.operators)
    messages = sum(
        clock.exchange_seconds(event.sends, event.receives)
        for event in mine.events
        if isinstance(event, Exchange)
    )
    step = _step_seconds(blocks, shape, grid, clock)
    return len(mine.operators), step - compute - messages


def _step_seconds(blocks: int, shape: tuple[int, ...], grid: Grid, clock: Clock) -> float:
    """Times a step, without the gradients' sum."""
    model = parallelize(_small_network(blocks, grid.size), grid)
    optimizer = torch.optim.Adam(model.parameters())
    x = shard(torch.rand(shape, device=grid.device), grid)
    y = shard(torch.rand(1, NETWORK_OUTPUTS, device=grid.device), grid)

    def step() -> None:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = clock.seconds(step)
    if grid.size > 1:
        nbytes = sum(p.nbytes for p in model.parameters())
        seconds -= clock.sum_seconds(grid.gradients, nbytes)
    return seconds


def _small_network(blocks: int, ranks: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Conv3d(FEATURE_MAPS, FEATURE_MAPS, 3, padding=1), nn.LeakyReLU()]
    features = FEATURE_MAPS * ranks * (NETWORK_WIDTH // 2) ** 3
    return nn.Sequential(
        *layers, nn.AvgPool3d(2), nn.Flatten(), nn.Linear(features, NETWORK_OUTPUTS)
    )
