"""Records the profile of some steps of a run, and writes it however the run ends.

In reading order: `marks` names what a rank waits for and which layer runs: methods are replaced
and hooks added for the profiled steps only, and taken back afterwards; the events that torch's
profiler took down, the rows of a step's timeline made from them, and the time of each layer by
stage; `StepRecorder`, which says when recording begins and what is kept; `ProfiledTrainer`, a
trainer with a recorder at the borders of its steps.

Legend: a *mark* is a range that `marks` opened; its name begins with `MARK`. A *node* is a step of
autograd's backward pass.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import statistics
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function

from hyperslab.comm import Grid
from hyperslab.comm.communicator import GroupCommunicator, PendingMessages
from hyperslab.comm.shared_memory import SharedChannels
from hyperslab.data.dataset import Prefetcher
from hyperslab.errors import reason
from hyperslab.tensor import Sharded
from hyperslab.train import profile as profiles
from hyperslab.train.flops import measure_peak
from hyperslab.train.step import StepResult, Vote
from hyperslab.train.trainer import Progress, Trainer
from hyperslab.util.torch_internals import next_node_number

log = logging.getLogger("hyperslab")

MARK = "hyperslab."
STEP_MARK = f"{MARK}step:"
LAYER_MARK = f"{MARK}layer:"
DEFERRED = " defers "
BACKWARD_NODE = "autograd::engine::evaluate_function: "
OPTIMIZER_STEP = "Optimizer.step#"
OPERATOR_NAME = re.compile(r"(?!autograd::|c10d::|torch::|gloo:|nccl:)\w+::")

Method = Callable[..., Any]  # a method as its class has it


@contextmanager
def marks(model: nn.Module) -> Iterator[None]:
    """Open marks around every wait of this process and every submodule of ``model``."""
    with ExitStack() as stack:
        for owner, name, label in MARKED_METHODS:
            stack.enter_context(_method_marked(owner, name, label))
        stack.enter_context(_layers_marked(model))
        yield


def _sum_label(_own: GroupCommunicator, _x: object, what: str) -> str:
    kind = "gradients" if what == "the average of the gradients" else "statistics"
    return f"{MARK}{kind}:{what}"


MARKED_METHODS: tuple[tuple[type, str, Method], ...] = (
    (PendingMessages, "__init__", lambda own, *of: f"{MARK}halos:{id(own)}:{of[3]}"),
    (PendingMessages, "wait", lambda own: f"{MARK}halos:{id(own)}:{own._what}"),
    (GroupCommunicator, "exchange_flat", lambda *of: f"{MARK}halos:{time.time_ns()}:{of[-1]}"),
    (GroupCommunicator, "sum_in_place", _sum_label),
    (SharedChannels, "average_shown", lambda _own, _sums, what, **_: f"{MARK}gradients:{what}"),
    (Prefetcher, "take", lambda *_: f"{MARK}data:a mini-batch"),
    (Trainer, "train_step", lambda *_: f"{MARK}framework:between operators"),
    (Progress, "record", lambda *_: f"{MARK}framework:the history"),
    (Vote, "result", lambda *_: f"{MARK}vote:the agreement about a step"),
)
"""Class, method, and what names the mark by the method's arguments."""


@contextmanager
def _method_marked(owner: type, name: str, label: Method) -> Iterator[None]:
    original: Method = owner.__dict__[name]

    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(label(*args, **kwargs)):
            return original(*args, **kwargs)

    setattr(owner, name, marked)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _layers_marked(model: nn.Module) -> Iterator[None]:
    """Put a mark around each submodule's forward.

    One that hands on a tensor which is not computed yet has a mark of its own with autograd's next
    number: the node that will compute it belongs to that submodule.
    """
    open_marks: list[tuple[str, record_function]] = []

    def begin(label: str, *_: object) -> None:
        mark = record_function(label)
        mark.__enter__()
        open_marks.append((label, mark))

    def end(_module: object = None, _inputs: object = None, output: object = None) -> None:
        label, mark = open_marks.pop()
        if isinstance(output, Sharded) and output.pending is not None:
            with record_function(f"{label}{DEFERRED}{next_node_number()}"):
                pass
        mark.__exit__(None, None, None)

    hooks = []
    for name, module in model.named_modules():
        if name:
            opening = functools.partial(begin, f"{LAYER_MARK}{name}")
            hooks.append(module.register_forward_pre_hook(opening))
            hooks.append(module.register_forward_hook(end, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while open_marks:  # of a forward pass that an error ended
            end()


@dataclass(frozen=True, slots=True, eq=False)
class ProfiledRange:
    """One range of the profile; times [s] are on one clock.

    ``sequence`` is autograd's number, which a node shares with the operator that it belongs to, or
    -1; ``on_device`` says whether an accelerator ran it; ``device_seconds`` [s] is what the
    kernels took that it started.
    """

    name: str
    begin: float
    end: float
    parent: ProfiledRange | None = None
    sequence: int = -1
    on_device: bool = False
    device_seconds: float = 0.0

    @property
    def ancestors(self) -> Iterator[ProfiledRange]:
        """Go from the innermost outwards, this one first."""
        event: ProfiledRange | None = self
        while event is not None:
            yield event
            event = event.parent

    @property
    def is_operator(self) -> bool:
        """Say whether torch's dispatcher ran it."""
        return OPERATOR_NAME.match(self.name) is not None

    def within(self, prefix: str) -> ProfiledRange | None:
        """Return the innermost of its ancestors whose name begins so."""
        return next((e for e in self.ancestors if e.name.startswith(prefix)), None)

    @property
    def layer(self) -> str | None:
        """Return the name of the innermost submodule that ran it in its forward pass."""
        mark = self.within(LAYER_MARK)
        return None if mark is None else mark.name.removeprefix(LAYER_MARK)


def events_of(profiler: torch.profiler.profile) -> list[ProfiledRange]:
    """Return everything that was recorded, parents before children."""
    known: dict[int, ProfiledRange] = {}
    found = [_event(e, known) for e in profiler.events() or ()]
    return sorted(found, key=lambda event: (event.begin, -event.end))


def by_range(
    ranges: Sequence[ProfiledRange], events: Sequence[ProfiledRange]
) -> list[list[ProfiledRange]]:
    """List the events that overlap with each of ``ranges``, which come one after the other."""
    ends = [r.end for r in ranges]
    found: list[list[ProfiledRange]] = [[] for _ in ranges]
    for event in events:
        at = bisect_right(ends, event.begin)
        while at < len(ranges) and ranges[at].begin < event.end:
            found[at].append(event)
            at += 1
    return found


def _event(raw: FunctionEvent, known: dict[int, ProfiledRange]) -> ProfiledRange:
    if id(raw) not in known:
        parent = raw.cpu_parent
        name, deferred, number = raw.name.partition(DEFERRED)
        known[id(raw)] = ProfiledRange(
            name=name,
            begin=raw.time_range.start / 1e6,
            end=raw.time_range.end / 1e6,
            parent=None if parent is None else _event(parent, known),
            sequence=int(number) if deferred else raw.sequence_nr,
            on_device=raw.device_type != torch.profiler.DeviceType.CPU,
            device_seconds=raw.device_time_total / 1e6,
        )
    return known[id(raw)]


COMPUTE_ROWS: tuple[profiles.TimelineRow, ...] = ("convolutions", "operators")
COMMUNICATION_ROWS: tuple[profiles.TimelineRow, ...] = ("halos", "statistics", "gradients")
WAITING_ROWS: tuple[profiles.TimelineRow, ...] = ("data", "vote", *COMMUNICATION_ROWS)
_ROW_ORDER: tuple[profiles.TimelineRow, ...] = (*WAITING_ROWS, *COMPUTE_ROWS, "framework")
"""The earlier one counts where two cover the same time: an operator within a wait is the wait."""
_LATE_BUCKET = "a bucket of gradients"
"""Hidden behind operators it counts as nothing; where only it goes on the rank waits for it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Represents a stretch of time [s] in a row, and what happened in it."""

    row: profiles.TimelineRow
    begin: float
    end: float
    label: str


def row_of(event: ProfiledRange) -> profiles.TimelineRow | None:
    """Return the row to which a range belongs that holds the rank up; None for any other."""
    for row in _ROW_ORDER:
        if event.name.startswith(f"{MARK}{row}:"):
            return row
    name = event.name.lower()
    if event.on_device:
        if event.name.startswith((MARK, BACKWARD_NODE)):
            return None
        if "nccl" in name:
            return "halos" if "sendrecv" in name else "gradients"
        words = ("conv", "dgrad", "wgrad", "fprop", "implicit_gemm")
        return "convolutions" if any(word in name for word in words) else "operators"
    above = itertools.islice(event.ancestors, 1, None)
    if event.is_operator and not any(e.is_operator for e in above):
        convolves = any(word in event.name for word in ("conv", "winograd", "depthwise"))
        return "convolutions" if convolves else "operators"
    return None


def pieces_of(events: Iterable[ProfiledRange]) -> list[Piece]:
    """Turn the events of one step into rows; those of an accelerator replace its operators."""
    chosen = [(row, event) for event in events if (row := row_of(event)) is not None]
    accelerated = any(event.on_device for _, event in chosen)
    return [
        Piece(row, event.begin, event.end, label_of(event))
        for row, event in chosen
        if not (accelerated and row in COMPUTE_ROWS and not event.on_device)
    ]


def label_of(event: ProfiledRange) -> str:
    """Return the words of a piece: which layer, what."""
    if event.name.startswith(MARK):
        return event.name.rpartition(":")[2]
    name = event.name.rpartition("::")[2]
    return name if event.layer is None else f"{event.layer}: {name}"


def exclusive(pieces: Sequence[Piece], begin: float, end: float) -> list[Piece]:
    """Cut pieces such that each moment of [begin, end) that one covers is there once, in order."""
    inside = [p for p in pieces if p.begin < end and p.end > begin]
    edges = sorted({begin, end, *(t for p in inside for t in (p.begin, p.end) if begin < t < end)})
    starts = sorted(inside, key=lambda p: p.begin)
    active: list[Piece] = []
    result: list[Piece] = []
    for lo, hi in itertools.pairwise(edges):
        while starts and starts[0].begin <= lo:
            active.append(starts.pop(0))
        active = [p for p in active if p.end > lo]
        if not active:
            continue
        best = min(active, key=_precedence)
        last = result[-1] if result else None
        if last is not None and (last.row, last.label, last.end) == (best.row, best.label, lo):
            result[-1] = replace(last, end=hi)
        else:
            result.append(replace(best, begin=lo, end=hi))
    return result


def _precedence(piece: Piece) -> float:
    if piece.label == _LATE_BUCKET:
        return _ROW_ORDER.index("framework") - 0.5
    return _ROW_ORDER.index(piece.row)


def messages_under_way(events: Sequence[ProfiledRange]) -> list[Piece]:
    """Find the messages that travel while the rank may work on.

    Halos from the first to the last mark of their exchange. Gradients where torch averages them
    itself: gloo's own ranges, each from a start in a node of the backward pass to its arrival.
    """
    open_since: dict[str, ProfiledRange] = {}
    found = []
    for event in events:
        if event.on_device or not event.name.startswith(f"{MARK}halos:"):
            continue
        begun = open_since.pop(event.name, None)
        if begun is None:
            open_since[event.name] = event
        else:
            found.append(Piece("halos", begun.begin, event.end, label_of(event)))
    starts = [e for e in events if e.name == "c10d::allreduce_"]
    sums = iter([e for e in events if e.name == "gloo:all_reduce"])
    return found + [
        Piece("gradients", sent.begin, sent.end, _LATE_BUCKET)
        for start in starts
        if (sent := next((e for e in sums if e.begin >= start.begin), None)) is not None
        and start.within(BACKWARD_NODE) is not None
        and start.within(MARK + "statistics:") is None
    ]


def step_times(
    number: int, step: ProfiledRange, events: Sequence[ProfiledRange], labels: list[str]
) -> profiles.StepTimes:
    """Return the rows of one step; ``labels`` gets the words that are new."""
    inside = [e for e in events if e.begin < step.end and e.end > step.begin and e is not step]
    travelling = messages_under_way(inside)
    late = [piece for piece in travelling if piece.row == "gradients"]
    pieces = exclusive([*pieces_of(inside), *late], step.begin, step.end)
    rows: dict[profiles.TimelineRow, float] = dict.fromkeys(profiles.ROWS, 0.0)
    spans: dict[str, list[profiles.TimelineSpan]] = {}
    index = {label: i for i, label in enumerate(labels)}
    beside = [(f"{piece.row} {profiles.UNDER_WAY}", piece) for piece in travelling]
    for name, piece in [*((p.row, p) for p in pieces), *beside]:
        if piece.label not in index:
            index[piece.label] = len(labels)
            labels.append(piece.label)
        begin = round(piece.begin - step.begin, 7)
        end = round(piece.end - step.begin, 7)
        spans.setdefault(name, []).append((begin, end, index[piece.label]))
    for piece in pieces:
        rows[piece.row] += piece.end - piece.begin
    return profiles.StepTimes(step=number, seconds=step.end - step.begin, rows=rows, spans=spans)


LayerPlace = tuple[str, profiles.Stage]  # a layer's name, and the stage of the step


def layer_times(events: Sequence[ProfiledRange], steps: int) -> list[profiles.LayerTime]:
    """Return the mean time [s] of each layer and stage in a step, in the order in which they begin.

    A forward operator belongs to the innermost submodule that runs; a node of the backward pass to
    the layer of the operator whose sequence number it has.
    """
    layers: dict[int, str] = {}  # by autograd's numbers
    for event in events:
        if event.sequence >= 0 and event.within(BACKWARD_NODE) is None and event.layer is not None:
            layers.setdefault(event.sequence, event.layer)  # the first one made the node
    compute: defaultdict[LayerPlace, float] = defaultdict(float)
    waited: defaultdict[LayerPlace, float] = defaultdict(float)
    for event in events:
        row = None if event.on_device else row_of(event)
        if row is None:
            continue
        if row in COMPUTE_ROWS and any(row_of(e) in WAITING_ROWS for e in event.ancestors):
            continue
        place = place_of(event, layers)
        if row in COMPUTE_ROWS:
            compute[place] += event.device_seconds or event.end - event.begin
        elif row in COMMUNICATION_ROWS:
            compute[place] += 0.0  # it has its place in the order
            waited[place] += event.end - event.begin
    return [
        profiles.LayerTime(
            layer=layer,
            stage=stage,
            compute=compute[layer, stage] / steps,
            communication=waited[layer, stage] / steps,
        )
        for layer, stage in compute
    ]


def place_of(event: ProfiledRange, layers: dict[int, str]) -> LayerPlace:
    """Find the layer and stage of an event; recomputed layers count to the backward pass."""
    node = event.within(BACKWARD_NODE)
    if node is not None:
        return event.layer or layers.get(node.sequence, ""), "backward"
    if event.within(OPTIMIZER_STEP) is not None:
        return "", "optimizer"
    return event.layer or "", "forward"


@dataclass(frozen=True, slots=True)
class ProfilePolicy:
    """Chooses the steps that are profiled: after ``warm_up`` others, ``steps`` of them."""

    warm_up: int = 3
    steps: int = 3


MOST_PROFILES = 32  # ranks that write theirs: 2,048 files would be read by nobody


class StepRecorder:
    """Profiles steps of one rank's training, as a context; every rank has one.

    The first recorded step warms the profiler up and is left out. A profile is written as soon as
    it has its steps, and then nothing is left of it in the run; one that ends before says why.
    """

    def __init__(
        self,
        policy: ProfilePolicy,
        about: profiles.Profile,
        run: Path,
        *,
        model: nn.Module,
        settle: Callable[[], None],
    ) -> None:
        """``about`` says which rank of which run this is.

        ``settle`` waits for messages that are under way between steps: their ends are taken down
        by threads of torch, which must not find that the profiler has gone.
        """
        self.policy = policy
        self.about = about
        self.path = profiles.profile_path(run, about.rank)
        self.model = model
        self.settle = settle
        self.passed: list[float] = []  # times [s] of steps before, without the profiler
        self.complete: dict[str, int] = {}  # the numbers of steps by the names of their ranges
        self.done = False
        self._since: float | None = None
        self._step = ExitStack()  # the range of the step that is under way
        self._opened = 0
        self._profiler: torch.profiler.profile | None = None
        self._marks = ExitStack()

    @property
    def recording(self) -> bool:
        return self._profiler is not None

    def begin_step(self) -> None:
        """Begin a step now; `begin` and `end` of one are where the run's own clock has them."""
        if self.done:
            return
        if not self.recording and len(self.passed) >= self.policy.warm_up:
            self._start()
        if self.recording:
            self._opened += 1
            self._step.enter_context(record_function(f"{STEP_MARK}{self._opened}"))
        self._since = time.perf_counter()

    def end_step(self, number: int, *, keep: bool = True) -> None:
        """End the step that began last; ``keep`` is false if it did other things besides."""
        if self.done or self._since is None:
            return
        seconds = time.perf_counter() - self._since
        self._since = None
        if not self.recording:
            self.passed += [seconds] if keep else []
            return
        self._step.close()
        if keep:
            self.complete[f"{STEP_MARK}{self._opened}"] = number
        if len(self.complete) > self.policy.steps:
            self.finish(None)

    def _start(self) -> None:
        # It would greet and take leave of the terminal on every rank.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        kinds = [ProfilerActivity.CPU]
        if self.about.device == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        self._marks.enter_context(marks(self.model))
        self._profiler = torch.profiler.profile(activities=kinds)
        self._profiler.start()

    def finish(self, ended: str | None) -> None:
        """Write what there is; ``ended`` says why there is not more.

        A profile that cannot be written does not end the training.
        """
        if self.done:
            return
        self.done = True
        events = self._stop()
        wanted = dict(list(self.complete.items())[1:])
        profile = self.about.model_copy(
            update={
                **_measured_steps(events, wanted),
                "wanted": self.policy.steps,
                "usual_seconds": statistics.median(self.passed[1:] or self.passed or [0.0]) or None,
                "ended": ended,
            }
        )
        if profile.rank >= MOST_PROFILES:
            return
        try:
            profiles.write_profile(self.path, profile)
        except OSError as error:
            log.warning("the profile %s cannot be written: %s", self.path, reason(error))
            return
        if profile.rank == 0:
            log.info("%s", profile_summary(profile, self.path))

    def _stop(self) -> list[ProfiledRange]:
        """End the recording; what was recorded."""
        profiler = self._profiler
        if profiler is None:
            return []
        self._step.close()
        self._marks.close()
        self.settle()
        profiler.stop()
        self._profiler = None
        return events_of(profiler)

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        why = "the run ended" if error is None else (str(error) or type(error).__name__)
        self.finish(why.splitlines()[0])


def _measured_steps(
    events: list[ProfiledRange], wanted: dict[str, int]
) -> dict[str, list[profiles.StepTimes] | list[profiles.LayerTime] | list[str]]:
    """Return the parts of a profile that come from events of the ``wanted`` steps."""
    labels: list[str] = []
    chosen = [(wanted[e.name], e) for e in events if e.name in wanted and not e.on_device]
    if not chosen:
        return {"steps": [], "layers": [], "labels": labels}
    by_step = by_range([step for _, step in chosen], events)
    pairs = list(zip(chosen, by_step, strict=True))
    steps = [step_times(number, step, inside, labels) for (number, step), inside in pairs]
    begun = [e for (_, step), inside in pairs for e in inside if e.begin >= step.begin]
    return {"steps": steps, "layers": layer_times(begun, len(chosen)), "labels": labels}


def profile_summary(profile: profiles.Profile, path: Path) -> str:
    """Summarise a profile in a line."""
    median = profile.median
    if median is None:
        return f"no step was profiled: {profile.ended} before there was one ({path})"
    few = f", not {profile.wanted}: {profile.ended}" if profile.ended else ""
    return (
        f"profiled {len(profile.steps)} steps{few}; the rows explain {100 * median.covered:.1f} % "
        f"of {median.seconds:.3g} s\n    `hyperslab report` shows {path}"
    )


def empty_profile(grid: Grid, precision: str, peak: float | None) -> profiles.Profile:
    """Return a profile of this rank that holds nothing yet; benchmarks make one, too."""
    return profiles.Profile(
        rank=grid.rank,
        ranks=grid.size,
        grid=grid.extents,
        device=grid.device.type,
        precision=precision,
        torch=torch.__version__,
        peak=peak,
    )


class ProfiledTrainer(Trainer):
    """Trains as `Trainer`, with a `StepRecorder` at the borders of its steps."""

    def __init__(self, trainer: Trainer, policy: ProfilePolicy) -> None:
        """Takes the place of ``trainer``, which has not begun; every rank makes one.

        Profiles of an earlier start of the run are removed, with what was predicted for it.
        """
        super().__init__(**{one.name: getattr(trainer, one.name) for one in fields(Trainer)})
        run = self.recipe.output
        if self.grid.is_main:
            for old in profiles.profile_folder(run).glob("*.json"):
                old.unlink()
        self.grid.barrier()  # or it might remove what another rank has just written
        peak = self.recipe.peak or measure_peak(self.grid.device, self.recipe.precision)
        self.progress.flops.measured(peak)
        about = empty_profile(self.grid, self.recipe.precision, peak)
        self.recorder = StepRecorder(
            policy, about, run, model=self.model, settle=self.progress.await_vote
        )

    def fit(self) -> None:
        """Train as `Trainer.fit`; however it ends, a profile is written."""
        with self.recorder:
            super().fit()

    def train_epoch(self) -> None:
        """Train as `Trainer.train_epoch`."""
        self.recorder.begin_step()
        self.clock.restart()
        super().train_epoch()
        # What has begun is no step: there is no mini-batch left.
        self.recorder.end_step(self.at.step + 1, keep=False)

    @property
    def measures_layers(self) -> bool:
        """Tell as `Trainer` does, but not before it has profiled: such steps take longer."""
        return self.recorder.done and super().measures_layers

    def record(self, done: StepResult, rate: float) -> None:
        """Record as `Trainer.record`; a step that wrote a checkpoint is not kept."""
        super().record(done, rate)
        every = self.recipe.checkpoint.every_steps
        recording = self.recorder.recording
        self.recorder.end_step(self.at.step, keep=every is None or self.at.step % every != 0)
        if not self.recorder.done:
            self.recorder.begin_step()
        elif recording:
            self.grid.barrier()  # the next step is not to wait for the profiles of others
        if recording or not self.recorder.done:
            self.clock.restart()  # neither to start the profiler nor to write is part of a step
