"""Times what steps are made of, on all ranks at once: operators, messages, sums, Python.

`Clock` repeats work on all ranks together. `Replay` runs one recorded call again on real
tensors of the same form, with memory in the state in which a step finds it: operands rotate
through several sets, so that small ones come from a cache that other work went through in the
meantime, and large ones from memory; results go to memory that was used before, because they
are kept for one turn of the sets.

Each thing is looked at more than once, at different moments, for another program may disturb one.
Messages and sums go through the project's own transport; their times are fitted by regressions
in bytes. The hidden share is (one after the other - as it runs) / (one after the other - work
alone). `measure_overhead` finds what rules, autograd, hooks and the optimizer's loop take.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hyperslab.comm import Communicator, Grid
from hyperslab.comm.agreement import all_gather, any_rank
from hyperslab.comm.grid import hosts_of_ranks
from hyperslab.comm.shared_memory import LARGEST_SLOT, SMALL_SUM, shared_channels
from hyperslab.parallel import no_sync, parallelize
from hyperslab.planner import machine as machines
from hyperslab.planner.calls import measurable_passes, write_call
from hyperslab.planner.machine import FitResidual, LinearFit, LinkClass, Machine, PowerFit
from hyperslab.planner.records import Call, Exchange, LocalOperator, TensorSpec
from hyperslab.planner.search import status_bytes
from hyperslab.planner.trace import Device, Workload, trace_step
from hyperslab.tensor import shard
from hyperslab.util.free_memory import free_memory
from hyperslab.util.torch_internals import OpOverload, tree_leaves

RankedBytes = Sequence[tuple[int, int]]  # ranks and sizes [B] of messages
Work = Callable[[], object]  # that is timed, or comes before

REPETITIONS = (5, 100)  # at least and at most
LONG = 10  # budgets that fewer repetitions may take


TURN = 0.01  # [s]: several times as long as a process has a core before another's turn


def median_of_turns(times: Iterable[float]) -> float:
    """Takes the median of means [s] over neighbouring times that are `TURN` long together.

    Where ranks share cores most repetitions of a short call see no other rank's turn, and some see
    a whole one.

    >>> median_of_turns([0.004, 0.004, 0.007, 0.02, 0.001])
    0.0125
    """
    means, group = [], list[float]()
    for one in times:
        group.append(one)
        if sum(group) >= TURN:
            means.append(statistics.fmean(group))
            group = []
    return statistics.median(means or [statistics.fmean(group)])


@dataclass(frozen=True)
class Clock:
    """Repeats work on all ranks together, for about ``budget`` [s] each time.

    ``of`` takes one time of a rank's repetitions: the median, as in a step, or the least.
    """

    grid: Grid
    budget: float = 0.3
    of: Callable[[Sequence[float]], float] = median_of_turns

    def seconds(self, work: Work, before: Work | None = None) -> float:
        """Times ``work`` [s] after warming up, the mean over ranks.

        All ranks call this. ``before`` runs before each repetition and is not counted.
        """
        return statistics.fmean(self.by_rank(work, before))

    def by_rank(self, work: Work, before: Work | None = None) -> list[float]:
        """Times ``work`` [s] as `seconds` does, for each rank."""
        self._once(work, before)
        first = self._once(work, before)
        # All ranks repeat equally often, or their messages would not meet.
        longest = max(all_gather(first))
        fewest, most = REPETITIONS
        # The longer a call is the less its times differ: one may be enough.
        least = min(fewest, max(1, LONG * self.budget / longest))
        count = int(min(max(self.budget / longest, least), most))
        self.grid.barrier()
        times = [first, *(self._once(work, before) for _ in range(count - 1))]
        return all_gather(self.of(times))

    @property
    def least(self) -> Clock:
        """Returns a clock that takes the least time, which other processes disturb least."""
        return replace(self, of=min)

    def part(self, looks: int) -> Clock:
        """Returns a clock for one of so many looks at the same work, at different moments."""
        return replace(self, budget=self.budget / looks)

    def exchange_seconds(self, sends: RankedBytes, receives: RankedBytes) -> float:
        """Times messages of these sizes, alone; all ranks call this, also those without any."""
        return self.seconds(self.exchange(sends, receives))

    def exchange(self, sends: RankedBytes, receives: RankedBytes) -> Callable[[], None]:
        """Makes messages of these sizes, to be timed."""
        device = self.grid.device
        pieces = [(peer, torch.ones(n, dtype=torch.uint8, device=device)) for peer, n in sends]

        def exchange() -> None:
            if pieces or receives:
                buffers = [
                    (p, torch.empty(n, dtype=torch.uint8, device=device)) for p, n in receives
                ]
                self.grid.halos.exchange(pieces, buffers, "a measurement").wait()

        return exchange

    def sum_seconds(self, group: Communicator, nbytes: int) -> float:
        """Times an all-reduce of so many bytes."""
        x = torch.ones(nbytes // 4, device=self.grid.device)
        return self.seconds(
            partial(group.sum_in_place, x, "a measurement"), before=partial(x.fill_, 1)
        )

    def _once(self, work: Work, before: Work | None) -> float:
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


ROTATED_BYTES = 256 << 20  # [B] of all sets of operands and results: more than caches hold
MOST_SETS = 64
WRITES_BEFORE_REFILL = 8  # times that an operand is written to before it gets new values

aten = torch.ops.aten


class Replay:
    """Runs a recorded call again on tensors of its own; call `refresh` before each time.

    It runs once to begin with, which shows how many results there is room for. With ``library``
    the input of a convolution's gradients is oneDNN's, which chooses its kernels.

    Raises:
        LookupError: torch has no such operator.
    """

    def __init__(self, call: Call, device: torch.device, *, library: bool = False) -> None:
        self.operator = operator_of(call.name)
        self._device = device
        self._library = library
        self._writes = self.operator._schema.is_mutable
        self._filled: list[torch.Tensor] = []
        self._sets = [self._operands(call)]
        self._kept: deque[object] = deque(maxlen=MOST_SETS)
        self._turn = 0
        self()
        results = [x for x in tree_leaves(self._kept.pop()) if isinstance(x, torch.Tensor)]
        operands = [_storage_elements(spec) * spec.dtype.itemsize for spec in call.tensors()]
        each = max(1, sum(operands) + sum(result.nbytes for result in results))
        count = int(min(max(ROTATED_BYTES / each, 1), MOST_SETS))
        self._sets += [self._operands(call) for _ in range(count - 1)]
        self._kept = deque(maxlen=count)

    def refresh(self) -> None:
        """Takes the next operands; those written to must not fade to zeros, which are slower."""
        self._turn += 1
        if self._writes and self._turn % (WRITES_BEFORE_REFILL * len(self._sets)) == 0:
            for tensor in self._filled:
                _fill(tensor)

    def __call__(self) -> None:
        args, kwargs = self._sets[self._turn % len(self._sets)]
        if len(self._sets) == 1:  # large: the next result goes to the memory of this one
            self._kept.clear()
        self._kept.append(self.operator(*args, **kwargs))

    def _operands(self, call: Call) -> tuple[list[Any], dict[str, Any]]:
        args = [self._value(value) for value in call.arguments]
        # What a trace shows as an operator before this one: oneDNN's own format of the input.
        if self._library and self.operator is aten.convolution_backward.default:
            args[1] = args[1].to_mkldnn()
        return args, {name: self._value(value) for name, value in call.options}

    def _value(self, value: object) -> Any:
        if isinstance(value, TensorSpec):
            made = make_tensor(value, self._device)
            if self._writes:
                self._filled.append(made)
            return made
        if isinstance(value, tuple):
            return [self._value(part) for part in value]
        if isinstance(value, torch.device):
            return self._device
        return value


def operator_of(name: str) -> OpOverload:
    """Finds the operator of a name such as ``aten.convolution.default``, or a LookupError."""
    at: Any = torch.ops
    for part in name.split("."):
        try:
            at = getattr(at, part)
        except AttributeError:
            raise LookupError(f"this torch has no operator {name}") from None
    if not isinstance(at, OpOverload):
        raise LookupError(f"{name} names no overload of an operator")
    return at


def make_tensor(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Makes a tensor of this form, with values which no kernel handles as a special case.

    Only its own elements are written to: the rest of a larger tensor's memory is never there.
    """
    flat = torch.empty(_storage_elements(spec), dtype=spec.dtype, device=device)
    made = flat.as_strided(spec.shape, spec.strides)
    _fill(made)
    return made


def _storage_elements(spec: TensorSpec) -> int:
    steps = zip(spec.shape, spec.strides, strict=True)
    return 0 if 0 in spec.shape else 1 + sum((n - 1) * stride for n, stride in steps)


def _fill(tensor: torch.Tensor) -> None:
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:  # the same element many times
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    if tensor.is_floating_point() or tensor.is_complex():
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        real.fill_(0.5)
    else:
        tensor.zero_()  # also a valid index, and a valid class


ProgressCallback = Callable[[int, int], None]  # gets the numbers of operators done and of all

TO_LIBRARY = "aten.to_mkldnn.default"


@dataclass(frozen=True, slots=True)
class OperatorToTime:
    """Names an operator to be timed; ``library``: its operand was handed to oneDNN by name.

    A trace shows that as an operator of its own, which comes right before. ``count`` says how often
    steps call it; passes alone count 0 where none does, for they only divide the time of others.
    """

    operator: LocalOperator
    library: bool = False
    count: int = 1


def distinct_operators(
    operators: Iterable[LocalOperator], known: Iterable[Call] = ()
) -> list[OperatorToTime]:
    """Lists each call once, passes that it does together also apart, without known ones.

    ``operators`` are in the order of their trace.
    """
    found: dict[Call, OperatorToTime] = {}
    counts: Counter[Call] = Counter()
    before = ""
    for operator in operators:
        counts[operator.call] += 1
        if operator.call not in found:
            for part in measurable_passes(operator):
                found.setdefault(part.call, OperatorToTime(part, before == TO_LIBRARY))
        before = operator.call.name
    for call in known:
        found.pop(call, None)
    return [replace(one, count=counts[call]) for call, one in found.items()]


LOOKS = 2  # the measurements of an operator, at different moments, of which the least counts
NEXT_LOOK = 16  # the operators that are measured before the first of them is measured again


def measure_operators(
    wanted: Sequence[OperatorToTime],
    clock: Clock,
    progress: ProgressCallback,
    end: float = math.inf,
) -> tuple[list[machines.Measured], dict[Call, str]]:
    """Times each operator, and collects why others could not be run.

    All ranks call this with the same operators; ``progress`` is called after each. None is begun
    that would end after ``end`` (`time.monotonic`) on any rank if it took as long as the last.
    """
    starts = range(0, len(wanted), NEXT_LOOK)
    turns = [one for first in starts for one in LOOKS * list(wanted[first : first + NEXT_LOOK])]
    seconds: dict[OperatorToTime, list[float]] = defaultdict(list)
    failed: dict[Call, str] = {}
    last = time.monotonic()
    for done, each in enumerate(turns, 1):
        now = time.monotonic()
        if any_rank(now + (now - last) > end):
            break
        last = now
        if each.operator.call not in failed:
            found, reason = _measure_call(each, clock.part(LOOKS))
            if reason:
                failed[each.operator.call] = reason
            else:
                seconds[each].append(found)
        progress(done, len(turns))
    looked_at = [one for one in seconds if one.operator.call not in failed]
    return [machines.entry_of(one.operator, min(seconds[one])) for one in looked_at], failed


def _measure_call(wanted: OperatorToTime, clock: Clock) -> tuple[float, str]:
    """Times one operator [s], or says why some rank could not run it."""
    call = wanted.operator.call
    reason = ""
    try:
        write_call(call)  # or it could not be kept
        with _memory_of_rank(clock.grid):
            replay = Replay(call, clock.grid.device, library=wanted.library)
    except MemoryError:
        reason = "a rank has too little memory here"
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
    reasons = [found for found in all_gather(reason) if found]
    if reasons:
        return 0.0, reasons[0]
    return clock.seconds(replay, before=replay.refresh), ""


@contextmanager
def _memory_of_rank(grid: Grid) -> Iterator[None]:
    """Lets an allocation fail that is more than a rank's share of the host's free memory.

    Else the system would end a rank without a word.
    """
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    hosts = hosts_of_ranks(grid)
    allowed = status_bytes("VmSize") + free_memory() // hosts.count(hosts[grid.rank])
    limits = [limit for limit in (before, most, allowed) if limit != resource.RLIM_INFINITY]
    # A GPU's driver reserves addresses for all of its memory.
    if grid.device.type == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


TimedBytes = tuple[int, float]  # a message's size [B] and its time [s]

LEAST_SLOPE = 1e-12  # [s/B] of a line that does not rise


def fit_line(points: Sequence[TimedBytes], up_to: int | None = None) -> LinearFit:
    """Fits latency and bandwidth by least squares of relative errors."""
    nbytes = np.array([n for n, _ in points], float)
    seconds = np.array([s for _, s in points])
    columns = np.stack([1 / seconds, nbytes / seconds], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)
    if latency < 0:  # then through zero
        latency = 0.0
        slope = float(np.sum(nbytes / seconds) / np.sum((nbytes / seconds) ** 2))
    line = LinearFit(
        up_to=up_to, latency=float(latency), bandwidth=1 / max(float(slope), LEAST_SLOPE)
    )
    return line.model_copy(update={"residual": residual_of(line.seconds, points)})


def fit_power(points: Sequence[TimedBytes], up_to: int | None = None) -> PowerFit:
    """Fits scale and exponent by least squares of logarithms."""
    logs = np.log([[n, s] for n, s in points])
    exponent, shift = np.polyfit(logs[:, 0], logs[:, 1], 1)
    power = PowerFit(up_to=up_to, scale=float(np.exp(shift)), exponent=float(exponent))
    return power.model_copy(update={"residual": residual_of(power.seconds, points)})


def residual_of(fit: Callable[[float], float], points: Sequence[TimedBytes]) -> FitResidual:
    """Computes how far points are from a fit, as a share of their times."""
    shares = [abs(fit(nbytes) - seconds) / abs(seconds) for nbytes, seconds in points]
    return FitResidual(median=statistics.median(shares), worst=max(shares))


def geometric_series(first: int, last: int, factor: int = 4) -> list[int]:
    """Multiplies ``first`` until ``last``, both included.

    >>> geometric_series(64, 1000)
    [64, 256, 1000]
    """
    found = [first]
    while found[-1] * factor < last:
        found.append(found[-1] * factor)
    return [*found, last] if last > first else found


SMALLEST_MESSAGE = 64  # [B]
LARGEST_MESSAGE = 16 << 20  # [B]
LARGEST_SUM = 32 << 20  # [B]
TURNS = 3  # in which all sizes are timed


def measure_links(clock: Clock, machine: Machine) -> dict[LinkClass, tuple[LinearFit, ...]]:
    """Times messages that cross, as halos travel, for each class of link that is there.

    All ranks talk with a partner at once; one for whom there is none waits.
    """
    clock = clock.part(TURNS)
    shared = shared_channels()
    ends = [] if shared is None else [shared.slot]
    found: dict[LinkClass, tuple[LinearFit, ...]] = {}
    ranks = clock.grid.size
    for name in machines.LINKS:
        partners = [machine.partner(rank, name, ranks) for rank in range(ranks)]
        mine = partners[clock.grid.rank]

        def seconds(nbytes: int, mine: int | None = mine) -> float:
            messages = [] if mine is None else [(mine, nbytes)]
            return clock.exchange_seconds(messages, messages)

        if partners.count(None) < len(partners):
            found[name] = _fit_pieces(fit_line, seconds, ends, LARGEST_MESSAGE)
    return found


def measure_sums(clock: Clock, ranks_per_node: int) -> tuple[machines.AllReduceFits, ...]:
    """Times all-reduces over 2, 4, 8 ... ranks of a node, then of nodes, all such groups at once.

    In memory that ranks share a fit by logarithms is nearer; over a network latency and bytes
    add up.
    """
    clock = clock.part(TURNS)
    fit: Callable[[Sequence[TimedBytes], int | None], PowerFit | LinearFit] = fit_line
    ends: list[int] = []
    if shared_channels() is not None:
        fit, ends = fit_power, [SMALL_SUM, LARGEST_SLOT]
    within = [n for n in geometric_series(2, ranks_per_node, 2) if n <= ranks_per_node]
    found = []
    for ranks in [*within, *geometric_series(2 * ranks_per_node, clock.grid.size, 2)]:
        if clock.grid.size % ranks == 0:
            group = Grid(data=clock.grid.size // ranks, depth=ranks).group(("depth",))
            assert group is not None
            pieces = _fit_pieces(fit, partial(clock.sum_seconds, group), ends, LARGEST_SUM)
            found.append(machines.AllReduceFits(ranks=ranks, pieces=pieces))
    return tuple(found)


def _fit_pieces(
    fit: Callable[[Sequence[TimedBytes], int | None], machines.AnyFit],
    seconds: Callable[[int], float],
    ends: Sequence[int],
    last: int,
) -> tuple[machines.AnyFit, ...]:
    """Fits a piece for each way in which sizes up to ``last`` travel; they change at ``ends``.

    All sizes are timed one after the other, `TURNS` times; the median of each counts.
    """
    firsts = [SMALLEST_MESSAGE, *(end + 4096 for end in ends)]
    pairs = zip(firsts, [*ends, None], strict=True)
    pieces = [(geometric_series(first, end or last), end) for first, end in pairs]
    sizes = [nbytes for series, _ in pieces for nbytes in series]
    turns = [[seconds(nbytes) for nbytes in sizes] for _ in range(TURNS)]
    times = dict(zip(sizes, np.median(turns, axis=0).tolist(), strict=True))
    return tuple(fit([(nbytes, times[nbytes]) for nbytes in series], end) for series, end in pieces)


HALO_BYTES = (64 << 10, 256 << 10, 4 << 20)  # [B]
LAYER_FEATURES = 1024  # of the layers whose gradients are averaged
LAYER_COUNT = 6


def measure_hidden(clock: Clock, machine: Machine) -> machines.HiddenShares:
    """Measures the hidden shares of halos and of gradients, 0 to 1; all ranks call this."""
    return machines.HiddenShares(
        halos=_hidden_halos(clock, machine), gradients=_hidden_gradients(clock)
    )


def hidden_share(apart: float, together: float, work: float) -> float:
    """Computes a share between 0 and 1 from times [s]; 0 where communication takes no time."""
    if apart <= work:
        return 0.0
    return min(max((apart - together) / (apart - work), 0.0), 1.0)


def _hidden_halos(clock: Clock, machine: Machine) -> float:
    """Measures the median share that a convolution hides, over sizes of messages."""
    halos = clock.grid.halos
    partner = machine.partner(clock.grid.rank, machine.link(0, 1), clock.grid.size)
    x = torch.rand(1, 16, 16, 32, 32, device=clock.grid.device)
    weight = torch.rand(16, 16, 3, 3, 3, device=clock.grid.device)
    shares = []

    def work() -> None:
        torch.conv3d(x, weight, padding=1)

    for nbytes in HALO_BYTES:
        mine = torch.ones(nbytes // 4, device=clock.grid.device)

        def run(*, behind: bool, mine: torch.Tensor = mine) -> None:
            if partner is None:
                return work()
            ends = [(partner, mine)], [(partner, torch.empty_like(mine))]
            under_way = halos.exchange(*ends, "a measurement")
            if behind:
                work()
            under_way.wait()
            if not behind:
                work()

        apart = clock.seconds(partial(run, behind=False))
        together = clock.seconds(partial(run, behind=True))
        shares.append(hidden_share(apart, together, clock.seconds(work)))
    return statistics.median(shares)


def _hidden_gradients(clock: Clock) -> float:
    """Measures a stack of dense layers, which has many gradients for few flops."""
    grid = Grid(data=clock.grid.size)
    layers = [nn.Linear(LAYER_FEATURES, LAYER_FEATURES) for _ in range(LAYER_COUNT)]
    model = parallelize(nn.Sequential(*layers), grid, ordinary_inputs="trust")
    x = torch.rand(256, LAYER_FEATURES, device=grid.device)
    group = grid.gradients
    gradients = torch.cat([p.detach().flatten() for p in model.parameters()])

    def step() -> None:
        model(x).sum().backward()

    def alone() -> None:
        with no_sync(model):
            step()

    def apart() -> None:
        alone()
        group.sum_in_place(gradients, "a measurement")

    def reset() -> None:
        gradients.fill_(1)

    return hidden_share(
        clock.seconds(apart, before=reset), clock.seconds(step), clock.seconds(alone)
    )


NETWORK_DEPTHS = (1, 2, 4, 8)  # blocks of the networks that are compared
FEATURE_MAPS = 4
NETWORK_WIDTH = 8  # voxels: so few that Python's share is most of the step
NETWORK_OUTPUTS = 4


def measure_overhead(clock: Clock) -> machines.Overhead:
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
    residual = residual_of(lambda operators: once + each * operators, points)
    return machines.Overhead(operator=each, step=once, residual=residual)


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
