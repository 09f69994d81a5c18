"""Computes what a traced step costs on a machine: the seconds and the bytes of a rank.

The model is that of Oyama et al. 2020, section III-C, on a simulated clock (`step_cost`), and
what the paper neglects: small operators, overhead, the optimizer, input. The paper takes for
granted that work hides all that it can: ``max(Comp, SR)`` of a layer,
``max(sum(BD + BF), sum(AR))`` of the gradients. Here a machine says which share of that really
hides (`Lane`).

Waiting for data is what a step needs of the files and what reading ahead cannot hide. Mathuriya
et al. 2018, equation 1: BW_min = b S / t hides the input of a step of t seconds, with b samples
of S bytes. Oyama et al. 2020, section III-B: 64 samples of 512^3 voxels at 240 GB/s take at
least 256 ms without a store.

`rank_memory` says what a rank needs of memory, by what it is for.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hyperslab.comm.shared_memory import shared_bytes
from hyperslab.planner import records
from hyperslab.planner.calls import only_pass
from hyperslab.planner.machine import Machine

PhaseName = records.Pass | str  # a pass of Oyama et al. 2020, or "optimizer"


Number = TypeVar("Number", int, float)


class _Parts(Generic[Number]):
    """Adds up the fields of a dataclass, which divide a sum by cause."""

    @property
    def total(self) -> Number:
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[str, Number]:
        return dict(vars(self))


@dataclass(frozen=True)
class Breakdown(_Parts[float]):
    """Divides a step's time by cause [s]; the parts add up to the step.

    ``forward``, ``backward_data`` and ``backward_filter`` are FP, BD and BF of Oyama et al. 2020,
    section III-C, without the communication in them: the sums over the layers of
    Comp(D_main) + Comp(D_halo). Operators of the backward pass that are no convolution count as
    BD, for they hand a gradient on. ``halos`` and ``gradients`` are what of these messages no
    work hides; of ``statistics`` (batch norm's all-reduce, section III-C) nothing is hidden.
    ``offload`` (activations to a file or a GPU's host, and back), ``optimizer``, ``overhead`` (what
    Python and the rules take between operators) and ``input`` (waiting for data) are neglected by
    the paper.
    """

    forward: float = 0.0
    backward_data: float = 0.0
    backward_filter: float = 0.0
    halos: float = 0.0
    statistics: float = 0.0
    gradients: float = 0.0
    offload: float = 0.0
    optimizer: float = 0.0
    overhead: float = 0.0
    input: float = 0.0

    @property
    def compute(self) -> float:
        """Sums the time of operators alone [s]."""
        return self.forward + self.backward_data + self.backward_filter + self.optimizer


@dataclass(slots=True)
class LayerCost:
    """Holds the cost of one layer in one pass: ``operators`` calls, their time and flops.

    ``waiting`` [s] is for its halos and statistics; ``overhead`` [s] is Python's.
    """

    layer: str
    phase: PhaseName
    operators: int = 0
    flops: int = 0
    compute: float = 0.0
    waiting: float = 0.0
    overhead: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.waiting + self.overhead


@dataclass(slots=True)
class Lane:
    """Queues messages of one kind; work hides the share ``hidden`` of what it could.

    ``hidden`` is (blocking - actual) / (blocking - without communication): 1 gives the paper's
    maxima, 0 the sums of work and messages.
    """

    hidden: float
    free: float = 0.0  # when the lane is [s]

    def send(self, now: float, seconds: float) -> float:
        """Begins a message as soon as the lane is free, and returns when it arrives [s]."""
        self.free = max(now, self.free) + seconds
        return self.free

    def exposed(self, now: float, arrival: float, seconds: float) -> float:
        """Computes the wait [s] for a message of ``seconds`` that arrives at ``arrival``.

        >>> Lane(hidden=1.0).exposed(now=5.0, arrival=4.0, seconds=3.0)
        0.0
        >>> Lane(hidden=1.0).exposed(now=5.0, arrival=7.0, seconds=3.0)
        2.0
        >>> Lane(hidden=0.0).exposed(now=5.0, arrival=4.0, seconds=3.0)
        3.0
        """
        waited = max(0.0, arrival - now)
        return waited + (1 - self.hidden) * max(0.0, seconds - waited)


MOST_UNKNOWN = 0.5  # the share of a step from which on nobody knows its time


@dataclass(frozen=True, slots=True)
class StepCost:
    """Holds the cost of one rank's step, by cause and by layer.

    ``guessed`` is the share of the operators' time that comes from shapes that the machine did
    not measure, and ``unknown`` of that what a measured machine has nothing alike of: its roofline
    stands in for it, which may be many times less. ``left_out`` names the operators that could not
    be traced, and how often they were called; ``left_out_share`` is the share of the step that they
    would take if each took as long as the operators that were traced do on average. ``halo_bytes``
    are those of messages to ranks of the same "node" and, over the "network", of others.
    """

    rank: int
    seconds: Breakdown
    layers: tuple[LayerCost, ...]
    flops: int
    guessed: float
    unknown: float
    left_out: dict[str, int]
    left_out_share: float
    halo_bytes: dict[str, int]

    @property
    def known(self) -> bool:
        """Tells if the step's time is worth being said."""
        return self.unknown < MOST_UNKNOWN


def step_cost(
    trace: records.Trace, machine: Machine, ranks: int, place: NDArray[np.int64] | None = None
) -> StepCost:
    """Computes the step of one of ``ranks`` ranks on a simulated clock.

    They fill nodes in order, or have a ``place`` each.

    Oyama et al. 2020, section III-C: Cost = sum FP + max(sum(BD + BF), sum AR), where
    FP = max(Comp(D_main), sum of 2 SR(D_halo)) + Comp(D_halo) and BD, BF alike; for batch norm
    the time of its operators and that of its all-reduce. What the trace has between the beginning
    of an exchange and the wait for it is the work on D_main, what comes after it that on D_halo.
    With a machine that hides everything and gradients that are ready early this is the paper's
    sum; else what is exposed is longer, see `Lane`.
    """
    clock = _StepClock(machine, ranks, trace.rank, place)
    for event in trace.events:
        clock.take(event)
    return clock.result(trace)


class _StepClock:
    """Advances a rank's clock event by event, and books the time by cause and layer."""

    def __init__(
        self, machine: Machine, ranks: int, rank: int, place: NDArray[np.int64] | None
    ) -> None:
        self.machine = machine
        self.ranks = ranks
        self.setting = machine.setting(ranks)
        self.rank = rank
        self.place = place
        self.sent = {"node": 0, "network": 0}
        self.now = 0.0
        self.guessed = 0.0
        self.unknown = 0.0
        self.spent: dict[str, float] = defaultdict(float)
        self.layers: dict[tuple[str, PhaseName], LayerCost] = {}
        self.halos = Lane(machine.hidden.halos)
        self.gradients = Lane(machine.hidden.gradients)
        self.under_way: dict[int, tuple[float, float]] = {}  # exchange: when it arrives, its time
        self.reduced = 0.0  # [s] of all gradients' sums

    def take(self, event: records.Event) -> None:
        """Advances the clock by one event."""
        match event:
            case records.LocalOperator():
                self._operator(event)
            case records.Exchange():
                # 2 SR(D_halo) of section III-C: a message to each neighbour along each cut dim.
                sizes = event.by_peer
                seconds = self.machine.exchange_seconds(sizes, self.rank, self.place)
                for peer, nbytes in sizes.items():
                    link = self.machine.link(self.rank, peer, self.place)
                    self.sent["network" if link == "network" else "node"] += nbytes
                self.under_way[id(event)] = (self.halos.send(self.now, seconds), seconds)
            case records.Wait():
                arrival, seconds = self.under_way.pop(id(event.exchange))
                exposed = self.halos.exposed(self.now, arrival, seconds)
                self._wait("halos", event.exchange, exposed)
            case records.Sum(purpose="gradients"):
                # AR of section III-C for one bucket, when it is full.
                far = len(event.ranks) > self.machine.ranks_per_node
                nbytes = event.nbytes - far * event.rounded // 2
                seconds = self._sum(nbytes, event.ranks)
                self.gradients.send(self.now, seconds)
                self.reduced += seconds
            case records.Sum():
                # A batch norm's per-channel sums (section III-C).
                seconds = self._sum(event.nbytes, event.ranks)
                self._wait("statistics", event, seconds)
            case records.Offload():
                seconds = self.machine.offload_seconds(event.nbytes, self.ranks)
                self._wait("offload", event, seconds)

    def _sum(self, nbytes: int, ranks: Sequence[int]) -> float:
        if self.place is not None:
            ranks = np.sort(self.place[np.array(ranks)]).tolist()
        return self.machine.sum_seconds(nbytes, ranks)

    def _operator(self, event: records.LocalOperator) -> None:
        """Adds Comp of section III-C, for every operator and not for convolutions alone."""
        # The optimizer needs all gradients: what is still under way is waited for here.
        if event.stage == "optimizer":
            self._settle_gradients()
        found = self.setting.estimate(event)
        overhead = self.setting.overhead.operator
        if found.how != "measured":
            self.guessed += found.seconds
        if found.how == "modelled" and self.machine.measured:
            self.unknown += found.seconds
        # One call may compute both gradients of a convolution; it is booked as two passes.
        for phase, part, flops in self._phases(event):
            layer = self._layer(event.layer, phase)
            layer.compute += part * found.seconds
            layer.flops += flops
            self.spent[phase] += part * found.seconds
        layer.operators += 1
        layer.overhead += overhead
        self.spent["overhead"] += overhead
        self.now += found.seconds + overhead

    def _settle_gradients(self) -> None:
        """Waits, before the optimizer, for what of sum AR no BD and BF hide (section III-C)."""
        exposed = self.gradients.exposed(self.now, self.gradients.free, self.reduced)
        self.spent["gradients"] += exposed
        self.now += exposed
        self.reduced = 0.0

    def _wait(
        self, cause: str, event: records.Exchange | records.Sum | records.Offload, seconds: float
    ) -> None:
        phase = "forward" if event.stage == "forward" else "backward-data"
        self._layer(event.layer, phase).waiting += seconds
        self.spent[cause] += seconds
        self.now += seconds

    def _layer(self, name: str, phase: PhaseName) -> LayerCost:
        return self.layers.setdefault((name, phase), LayerCost(name, phase))

    def result(self, trace: records.Trace) -> StepCost:
        """Collects the cost once all events have happened."""
        self._settle_gradients()
        self.spent["overhead"] += self.setting.overhead.step
        seconds = Breakdown(**{name.replace("-", "_"): spent for name, spent in self.spent.items()})
        missing = sum(trace.not_traced.values())
        done = len(trace.operators)
        return StepCost(
            trace.rank,
            seconds,
            tuple(self.layers.values()),
            flops=trace.flops(),
            guessed=min(1.0, self.guessed / seconds.compute) if self.guessed else 0.0,
            unknown=min(1.0, self.unknown / seconds.compute) if self.unknown else 0.0,
            left_out=dict(trace.not_traced),
            left_out_share=missing / (missing + done) if missing else 0.0,
            halo_bytes=self.sent,
        )

    def _phases(self, event: records.LocalOperator) -> list[tuple[PhaseName, float, int]]:
        """Divides an operator's time among its passes: the share of each, and its flops.

        One that does two is divided as the times of the two alone are.
        """
        if event.stage == "optimizer":
            return [("optimizer", 1.0, event.total_flops)]
        if not event.flops:
            phase: records.Pass = "forward" if event.stage == "forward" else "backward-data"
            return [(phase, 1.0, 0)]
        alone = [self.setting.estimate(only_pass(event, name)).seconds for name, _ in event.flops]
        return [
            (name, seconds / sum(alone), flops)
            for (name, flops), seconds in zip(event.flops, alone, strict=True)
        ]


def exposed_input(
    machine: Machine, nbytes: int, ranks: int, step: float, *, reads: bool, travels: float
) -> float:
    """Computes how long a step of ``step`` [s] waits for its input of ``nbytes`` a rank [s].

    Reading, the store's exchange and the copy to a device go on ahead of the step and beside each
    other, each on a lane of its own, so that the longest wait counts. ``reads``: files are read in
    every step; the share ``travels`` of the boxes comes from the stores of other replicas.
    """
    reading = machine.read_seconds(nbytes, ranks) if reads else 0.0
    exchange = travels * nbytes / (machine.exchange or math.inf)
    copying = nbytes / (machine.copying or math.inf)
    lanes = ((1.0, reading), (machine.hidden.exchange, exchange), (1.0, copying))
    return max(Lane(hidden).exposed(step, spent, spent) for hidden, spent in lanes)


@dataclass(frozen=True)
class RankMemory(_Parts[int]):
    """Divides a rank's peak memory [B] by use; on a GPU, that of the device.

    ``activations`` are what autograd keeps but halos, ``halos`` the pieces of other ranks'
    blocks, and gathered thin maps, that the forward pass receives. ``gradients`` are those of
    DistributedDataParallel's buckets: they are views of them, so that buckets take nothing more.
    ``workspace`` is what else lives in the fullest moment: the operands of one operator, gradients
    of activations, the optimizer's temporaries; on a CPU also a convolution's copy in another
    order. ``communication`` is this rank's part of the memory that the ranks of a node share,
    ``ahead`` the mini-batches that are read ahead, ``store`` the boxes that are kept, ``process``
    what a rank takes that holds no tensor. On a GPU these four are the host's, and none of the
    device's, but for ``process``: its context, NCCL's buffers and cuDNN's workspace.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    halos: int = 0
    workspace: int = 0
    communication: int = 0
    ahead: int = 0
    store: int = 0
    process: int = 0


def rank_memory(trace: records.Trace, machine: Machine, ranks: int, host: RankMemory) -> RankMemory:
    """Adds up a rank's memory at the fullest moment of its trace, and what lies beside it.

    ``host`` has ``ahead``, ``store`` and ``process``. The paper's Table I counts activations alone;
    this is what a device has to have.
    """
    received = sum(
        nbytes
        for event in trace.events
        if isinstance(event, records.Exchange) and event.stage == "forward"
        for _, nbytes in event.receives
    )
    # What is received is kept for the backward pass, a part of what autograd saves.
    halos = min(trace.saved, received)
    kept = trace.parameters + trace.gradients + trace.optimizer_state
    on_cpu = machine.device == "cpu"
    together = min(ranks, machine.ranks_per_node)
    return dataclasses.replace(
        host if on_cpu else RankMemory(process=machine.reserved),
        parameters=trace.parameters,
        gradients=trace.gradients,
        optimizer_state=trace.optimizer_state,
        activations=trace.saved - halos,
        halos=halos,
        workspace=max(0, (trace.heap if on_cpu else trace.peak) - kept - trace.saved),
        communication=shared_bytes(together) // together if on_cpu else 0,
    )
