"""From a rank's trace and a machine to the seconds of its step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from hyperslab.cost.breakdown import Breakdown, LayerCost, PhaseName
from hyperslab.cost.lanes import Lane
from hyperslab.machine import Machine, Setting
from hyperslab.trace.records import Exchange, LocalOperator, Pass, Sum, Trace, Wait


@dataclass(frozen=True, slots=True)
class StepCost:
    """One rank's step: its seconds by cause and by layer.

    ``guessed`` is the share of the operators' time that comes from shapes that the machine did
    not measure. ``left_out`` names the operators that could not be traced, and how often they
    were called; ``left_out_share`` is the share of the step that they would take if each took as
    long as the operators that were traced do on average.
    """

    rank: int
    seconds: Breakdown
    layers: tuple[LayerCost, ...]
    flops: int
    guessed: float
    left_out: dict[str, int]
    left_out_share: float


def step_cost(trace: Trace, machine: Machine, ranks: int) -> StepCost:
    """The step of one of so many ranks, on a simulated clock.

    Oyama et al. 2020, section III-C: Cost = sum FP + max(sum(BD + BF), sum AR), where
    FP = max(Comp(D_main), sum of 2 SR(D_halo)) + Comp(D_halo) and BD, BF alike; for batch norm
    the time of its operators and that of its all-reduce. What the trace has between the beginning
    of an exchange and the wait for it is the work on D_main, what comes after it that on D_halo.
    With a machine that hides everything and gradients that are ready early this is the paper's
    sum; else what is exposed is longer, see `Lane`.
    """
    walk = _Walk(machine, machine.setting(ranks), trace.rank)
    for event in trace.events:
        walk.take(event)
    return walk.result(trace)


@dataclass(slots=True)
class _Share:
    """What one layer has taken in one pass so far."""

    operators: int = 0
    flops: int = 0
    compute: float = 0.0
    waiting: float = 0.0
    overhead: float = 0.0


@dataclass
class _Walk:
    """The clock of a rank, and what was on it."""

    machine: Machine
    setting: Setting
    rank: int
    now: float = 0.0
    guessed: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    shares: dict[tuple[str, PhaseName], _Share] = field(default_factory=lambda: defaultdict(_Share))

    def __post_init__(self) -> None:
        self.halos = Lane(self.machine.hidden.halos)
        self.gradients = Lane(self.machine.hidden.gradients)
        self.under_way: dict[int, tuple[float, float]] = {}  # exchange: when it arrives, its time
        self.reduced = 0.0  # [s] of all gradients' sums

    def take(self, event: LocalOperator | Exchange | Wait | Sum) -> None:
        """Let an event happen."""
        if isinstance(event, LocalOperator):
            self._operator(event)
        elif isinstance(event, Exchange):
            self._begin(event)
        elif isinstance(event, Wait):
            self._wait(event.exchange)
        elif event.purpose == "gradients":
            self._reduce(event)
        else:
            self._sum(event)

    def _operator(self, event: LocalOperator) -> None:
        """Comp of section III-C, for every operator and not for convolutions alone."""
        if event.stage == "optimizer":
            self.settle_gradients()
        found = self.setting.estimate(event)
        if found.how != "measured":
            self.guessed += found.seconds
        for phase, part, flops in self._phases(event):
            share = self.shares[event.layer, phase]
            share.compute += part * found.seconds
            share.flops += flops
            self.spent[phase] += part * found.seconds
        share.operators += 1
        share.overhead += self.setting.overhead.operator
        self.spent["overhead"] += self.setting.overhead.operator
        self.now += found.seconds + self.setting.overhead.operator

    def _begin(self, event: Exchange) -> None:
        seconds = exchange_seconds(event, self.rank, self.machine)
        self.under_way[id(event)] = (self.halos.send(self.now, seconds), seconds)

    def _wait(self, exchange: Exchange) -> None:
        arrival, seconds = self.under_way.pop(id(exchange))
        exposed = self.halos.exposed(self.now, arrival, seconds)
        self._pass_time("halos", exchange, exposed)

    def _sum(self, event: Sum) -> None:
        """The all-reduce of a batch norm's per-channel sums (section III-C)."""
        seconds = self.machine.sum_seconds(event.nbytes, event.ranks)
        self._pass_time("statistics", event, seconds)

    def _reduce(self, event: Sum) -> None:
        """AR of section III-C, of one bucket, from when it is full."""
        seconds = self.machine.sum_seconds(event.nbytes, event.ranks)
        self.gradients.send(self.now, seconds)
        self.reduced += seconds

    def settle_gradients(self) -> None:
        """Before the optimizer: what of sum AR no work of sum(BD + BF) hides (section III-C)."""
        exposed = self.gradients.exposed(self.now, self.gradients.free, self.reduced)
        self.spent["gradients"] += exposed
        self.now += exposed
        self.reduced = 0.0

    def _pass_time(self, cause: str, event: Exchange | Sum, seconds: float) -> None:
        phase = "forward" if event.stage == "forward" else "backward-data"
        self.shares[event.layer, phase].waiting += seconds
        self.spent[cause] += seconds
        self.now += seconds

    def result(self, trace: Trace) -> StepCost:
        """Everything, once all has happened."""
        self.settle_gradients()
        self.spent["overhead"] += self.setting.overhead.step
        seconds = Breakdown(**{name.replace("-", "_"): spent for name, spent in self.spent.items()})
        layers = tuple(
            LayerCost(
                layer, phase, share.operators, share.flops, share.compute, share.waiting,
                share.overhead,
            )
            for (layer, phase), share in self.shares.items()
        )  # fmt: skip
        missing = sum(trace.not_traced.values())
        done = len(trace.operators)
        return StepCost(
            trace.rank,
            seconds,
            layers,
            flops=trace.flops(),
            guessed=min(1.0, self.guessed / seconds.compute) if self.guessed else 0.0,
            left_out=dict(trace.not_traced),
            left_out_share=missing / (missing + done) if missing else 0.0,
        )

    def _phases(self, event: LocalOperator) -> list[tuple[PhaseName, float, int]]:
        """The passes of an operator: which share of its time each takes, and its flops.

        One that does two is divided as the times of the two alone are.
        """
        if event.stage == "optimizer":
            return [("optimizer", 1.0, event.total_flops)]
        if not event.flops:
            phase: Pass = "forward" if event.stage == "forward" else "backward-data"
            return [(phase, 1.0, 0)]
        if len(event.flops) == 1:
            return [(event.flops[0][0], 1.0, event.flops[0][1])]
        alone = [self.setting.estimate_pass(event, name).seconds for name, _ in event.flops]
        return [
            (name, seconds / sum(alone), flops)
            for (name, flops), seconds in zip(event.flops, alone, strict=True)
        ]


def exchange_seconds(event: Exchange, rank: int, machine: Machine) -> float:
    """The sum of 2 SR(D_halo) over the cut dims: one SR for each neighbour (section III-C).

    A message to a neighbour and the one from it travel at the same time; the larger one counts.
    """
    sent = _by_peer(event.sends)
    received = _by_peer(event.receives)
    return sum(
        machine.send_seconds(max(sent.get(peer, 0), received.get(peer, 0)), rank, peer)
        for peer in sorted({*sent, *received})
    )


def _by_peer(messages: tuple[tuple[int, int], ...]) -> dict[int, int]:
    total: dict[int, int] = defaultdict(int)
    for peer, nbytes in messages:
        total[peer] += nbytes
    return total
