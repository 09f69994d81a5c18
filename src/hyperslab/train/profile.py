"""Describes the profile of a few steps, and makes it from the events of torch's profiler.

In reading order: the file ``RUN/profile/rank-R.json``, one a rank (``predicted.json`` is alike);
the events that torch's profiler took down; the rows of a step's timeline made from them; the
time of each layer by stage.

Legend: a *row* is one line of a timeline; a *span* is a piece of it, from begin to end [s] after
the step's begin. Rows that a rank works or waits in never overlap; `UNDER_WAY` is beside them. A
*mark* is a range that `hyperslab.train.profiler.marks` opened; its name begins with `MARK`. A
*node* is a step of autograd's backward pass.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.autograd.profiler_util import FunctionEvent

from hyperslab.errors import DataError
from hyperslab.util.atomic_files import write_json

Stage = Literal["forward", "backward", "optimizer"]

TimelineRow = Literal[
    "convolutions", "operators", "halos", "statistics", "gradients", "data", "vote", "framework"
]
"""Names what a rank does: operators of two kinds, what it waits for, and the rest.

``convolutions`` and ``operators`` (all others) are compute; ``halos``, ``statistics`` (every sum
over ranks within a pass) and ``gradients`` are time in which communication holds the rank up;
``data`` is waiting for a mini-batch, ``vote`` for the ranks' agreement about the step before;
``framework`` is the rest of the two passes, the optimizer and the history: Python, and torch
between its operators.
"""

ROWS: tuple[TimelineRow, ...] = (
    "convolutions", "operators", "halos", "statistics", "gradients", "data", "vote", "framework",
)  # fmt: skip

UNDER_WAY = "under way"
"""Added to a row's name: messages that travel while the rank works on."""

TimelineSpan = tuple[float, float, int]
"""Begin and end [s] after the step's begin; the index of its words in ``Profile.labels``."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LayerTime(_Strict):
    """Holds the time that a step spends in one layer and stage [s], a mean over the profiled steps.

    ``layer`` is the submodule's name, "" what belongs to none; ``communication`` is what the rank
    waited there. Torch computes both gradients of a convolution in one operator, so ``backward``
    is BD and BF of Oyama et al. 2020, section III-C, together.
    """

    layer: str
    stage: Stage
    compute: float
    communication: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the time of computation and communication together [s]."""
        return self.compute + self.communication


class StepTimes(_Strict):
    """Holds one step: its number, its time [s], the time in each row [s], and their spans."""

    step: int
    seconds: float
    rows: dict[TimelineRow, float]
    spans: dict[str, list[TimelineSpan]]

    @property
    def covered(self) -> float:
        """Return the share of the step that the rows explain."""
        return sum(self.rows.values()) / self.seconds if self.seconds else 0.0


class Profile(_Strict):
    """Holds what one rank did in some steps; a prediction has layers alone.

    ``usual_seconds`` is the median of the steps before, without the profiler; ``peak`` [flop/s] is
    what this rank's device reaches in a matrix product; ``ended`` says why there are fewer steps
    than ``wanted``.
    """

    version: Literal[1] = 1
    kind: Literal["measured", "predicted"] = "measured"
    rank: int = 0
    ranks: int = 1
    grid: dict[str, int] = {}
    device: str = ""
    precision: str = ""
    torch: str = ""
    wanted: int = 0
    usual_seconds: float | None = None
    peak: float | None = None
    ended: str | None = None
    steps: list[StepTimes] = []
    layers: list[LayerTime] = []
    labels: list[str] = Field(default=[], repr=False)

    @property
    def median(self) -> StepTimes | None:
        """Return the step of median length, which is the one to show; None where there is none."""
        ordered = sorted(self.steps, key=lambda step: step.seconds)
        return ordered[len(ordered) // 2] if ordered else None


def profile_folder(run: Path) -> Path:
    """Return the folder of a run's profiles."""
    return run / "profile"


def profile_path(run: Path, rank: int) -> Path:
    """Return the file of one rank."""
    return profile_folder(run) / f"rank-{rank}.json"


def predicted_path(run: Path) -> Path:
    """Return the file of what was predicted."""
    return profile_folder(run) / "predicted.json"


def write_profile(path: Path, profile: Profile) -> None:
    """Write it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, profile.model_dump())


def read_profile(path: Path) -> Profile:
    """Read a profile or a prediction.

    Raises:
        DataError: it cannot be read or is not one; names the file and the place.
    """
    try:
        return Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(
            f"{path} is no profile: {where}: {first['msg']}\n"
            "    remove it, and profile again with hyperslab train --profile"
        ) from error


def read_profiles(run: Path) -> list[Profile]:
    """Read the profiles of all ranks of a run, by rank; none where nothing was profiled.

    Raises:
        DataError: one of them is broken.
    """
    found = [read_profile(path) for path in profile_folder(run).glob("rank-*.json")]
    return sorted(found, key=lambda profile: profile.rank)


MARK = "hyperslab."
STEP_MARK = f"{MARK}step:"
LAYER_MARK = f"{MARK}layer:"
BACKWARD_NODE = "autograd::engine::evaluate_function: "
OPTIMIZER_STEP = "Optimizer.step#"
OPERATOR_NAME = re.compile(r"(?!autograd::|c10d::|torch::|gloo:|nccl:)\w+::")


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


def events_of(profiler: torch.profiler.profile) -> list[ProfiledRange]:
    """Return everything that was recorded, parents before children."""
    known: dict[int, ProfiledRange] = {}
    found = [_event(e, known) for e in profiler.events() or ()]
    return sorted(found, key=lambda event: (event.begin, -event.end))


def by_range(
    ranges: Sequence[ProfiledRange], events: Sequence[ProfiledRange]
) -> list[list[ProfiledRange]]:
    """For each of ``ranges``, which come one after the other, the events that overlap with it."""
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
        known[id(raw)] = ProfiledRange(
            name=raw.name,
            begin=raw.time_range.start / 1e6,
            end=raw.time_range.end / 1e6,
            parent=None if parent is None else _event(parent, known),
            sequence=raw.sequence_nr,
            on_device=raw.device_type != torch.profiler.DeviceType.CPU,
            device_seconds=raw.device_time_total / 1e6,
        )
    return known[id(raw)]


COMPUTE_ROWS: tuple[TimelineRow, ...] = ("convolutions", "operators")
COMMUNICATION_ROWS: tuple[TimelineRow, ...] = ("halos", "statistics", "gradients")
_ROW_ORDER: tuple[TimelineRow, ...] = (
    "data",
    "vote",
    *COMMUNICATION_ROWS,
    *COMPUTE_ROWS,
    "framework",
)
"""The earlier one counts where two cover the same time: an operator within a wait is the wait."""
_LATE_BUCKET = "a bucket of gradients"
"""Hidden behind operators it counts as nothing; where only it goes on the rank waits for it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Represents a stretch of time [s] in a row, and what happened in it."""

    row: TimelineRow
    begin: float
    end: float
    label: str


def row_of(event: ProfiledRange) -> TimelineRow | None:
    """Return the row to which a range belongs that holds the rank up; None for any other."""
    for row in _ROW_ORDER:
        if event.name.startswith(f"{MARK}{row}:"):
            return row
    if event.on_device:
        return _row_of_kernel(event)
    if event.is_operator and not any(e.is_operator for e in _above(event)):
        convolves = any(word in event.name for word in ("conv", "winograd"))
        return "convolutions" if convolves else "operators"
    return None


def _row_of_kernel(event: ProfiledRange) -> TimelineRow | None:
    if event.name.startswith((MARK, BACKWARD_NODE)):
        return None
    if "nccl" in event.name.lower():
        return "halos" if "sendrecv" in event.name.lower() else "gradients"
    words = ("conv", "dgrad", "wgrad", "fprop", "implicit_gemm")
    return "convolutions" if any(word in event.name.lower() for word in words) else "operators"


def _above(event: ProfiledRange) -> Iterable[ProfiledRange]:
    return itertools.islice(event.ancestors, 1, None)


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
    layer = event.within(LAYER_MARK)
    name = event.name.rpartition("::")[2]
    return name if layer is None else f"{layer.name.removeprefix(LAYER_MARK)}: {name}"


def exclusive(pieces: Sequence[Piece], begin: float, end: float) -> list[Piece]:
    """Every moment of [begin, end) that a piece covers once, in order."""
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
    """Messages that travel while the rank may work on.

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
    return found + _buckets(events)


def _buckets(events: Sequence[ProfiledRange]) -> list[Piece]:
    starts = [e for e in events if e.name == "c10d::allreduce_"]
    sums = iter([e for e in events if e.name == "gloo:all_reduce"])
    return [
        Piece("gradients", sent.begin, sent.end, _LATE_BUCKET)
        for start in starts
        if (sent := next((e for e in sums if e.begin >= start.begin), None)) is not None
        and start.within(BACKWARD_NODE) is not None
        and start.within(MARK + "statistics:") is None
    ]


def step_times(
    number: int, step: ProfiledRange, events: Sequence[ProfiledRange], labels: list[str]
) -> StepTimes:
    """Return the rows of one step; ``labels`` gets the words that are new."""
    inside = [e for e in events if e.begin < step.end and e.end > step.begin and e is not step]
    travelling = messages_under_way(inside)
    late = [piece for piece in travelling if piece.row == "gradients"]
    pieces = exclusive([*pieces_of(inside), *late], step.begin, step.end)
    rows: dict[TimelineRow, float] = dict.fromkeys(ROWS, 0.0)
    spans: dict[str, list[TimelineSpan]] = {}
    index = {label: i for i, label in enumerate(labels)}
    beside = [(f"{piece.row} {UNDER_WAY}", piece) for piece in travelling]
    for name, piece in [*((p.row, p) for p in pieces), *beside]:
        if piece.label not in index:
            index[piece.label] = len(labels)
            labels.append(piece.label)
        begin = round(piece.begin - step.begin, 7)
        end = round(piece.end - step.begin, 7)
        spans.setdefault(name, []).append((begin, end, index[piece.label]))
    for piece in pieces:
        rows[piece.row] += piece.end - piece.begin
    return StepTimes(step=number, seconds=step.end - step.begin, rows=rows, spans=spans)


LayerPlace = tuple[str, Stage]
"""A layer's name, and the stage of the step."""


def layer_times(events: Sequence[ProfiledRange], steps: int) -> list[LayerTime]:
    """Return the mean time [s] of each layer and stage in a step, in the order in which they begin.

    A forward operator belongs to the innermost submodule that runs; a node of the backward pass to
    the layer of the operator whose sequence number it has.
    """
    layers = _layers_by_number(events)
    compute: defaultdict[LayerPlace, float] = defaultdict(float)
    waited: defaultdict[LayerPlace, float] = defaultdict(float)
    for event in events:
        row = None if event.on_device else row_of(event)
        if row is None or (row in COMPUTE_ROWS and _is_in_wait(event)):
            continue
        place = place_of(event, layers)
        if row in COMPUTE_ROWS:
            compute[place] += event.device_seconds or event.end - event.begin
        elif row in COMMUNICATION_ROWS:
            compute[place] += 0.0  # it has its place in the order
            waited[place] += event.end - event.begin
    return [
        LayerTime(
            layer=layer,
            stage=stage,
            compute=compute[layer, stage] / steps,
            communication=waited[layer, stage] / steps,
        )
        for layer, stage in compute
    ]


def _is_in_wait(event: ProfiledRange) -> bool:
    """Check whether an operator is part of a wait."""
    return any(row_of(e) not in (None, *COMPUTE_ROWS, "framework") for e in event.ancestors)


def _layers_by_number(events: Iterable[ProfiledRange]) -> dict[int, str]:
    """Whose forward pass took which of autograd's numbers; the first that has one made its node."""
    found: dict[int, str] = {}
    for event in events:
        if (
            event.sequence >= 0
            and not event.name.startswith(BACKWARD_NODE)
            and event.within(BACKWARD_NODE) is None
        ):
            layer = event.within(LAYER_MARK)
            if layer is not None:
                found.setdefault(event.sequence, layer.name.removeprefix(LAYER_MARK))
    return found


def place_of(event: ProfiledRange, layers: dict[int, str]) -> LayerPlace:
    """Find the layer and stage of an event; recomputed layers count to the backward pass."""
    node = event.within(BACKWARD_NODE)
    layer = event.within(LAYER_MARK)
    if node is not None:
        known = (
            layers.get(node.sequence, "") if layer is None else layer.name.removeprefix(LAYER_MARK)
        )
        return known, "backward"
    if event.within(OPTIMIZER_STEP) is not None:
        return "", "optimizer"
    return ("" if layer is None else layer.name.removeprefix(LAYER_MARK)), "forward"
