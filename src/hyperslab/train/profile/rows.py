"""From the events of a step to the rows of its timeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hyperslab.train.profile.events import LAYER, MARK, NODE, Recorded
from hyperslab.train.profile.schema import ROWS, UNDER_WAY, StepTimes, TimelineRow, TimelineSpan

COMPUTE: tuple[TimelineRow, ...] = ("convolutions", "operators")
COMMUNICATION: tuple[TimelineRow, ...] = ("halos", "statistics", "gradients")
_ORDER: tuple[TimelineRow, ...] = ("data", "vote", *COMMUNICATION, *COMPUTE, "framework")
"""Where two cover the same time the earlier one counts: an operator within a wait is the wait."""
_LATE = "a bucket of gradients"
"""Hidden behind operators it counts as nothing; where only it goes on the rank waits for it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some time [s] of a row, and what happened in it."""

    row: TimelineRow
    begin: float
    end: float
    label: str


def row_of(event: Recorded) -> TimelineRow | None:
    """The row to which a range belongs that holds the rank up; None for any other."""
    for row in _ORDER:
        if event.name.startswith(f"{MARK}{row}:"):
            return row
    if event.on_device:
        return _row_of_kernel(event)
    if event.is_operator and not any(e.is_operator for e in _above(event)):
        return "convolutions" if "conv" in event.name else "operators"
    return None


def _row_of_kernel(event: Recorded) -> TimelineRow | None:
    if event.name.startswith((MARK, NODE)):
        return None
    if "nccl" in event.name.lower():
        return "halos" if "sendrecv" in event.name.lower() else "gradients"
    words = ("conv", "dgrad", "wgrad", "fprop", "implicit_gemm")
    return "convolutions" if any(word in event.name.lower() for word in words) else "operators"


def _above(event: Recorded) -> Iterable[Recorded]:
    return itertools.islice(event.ancestors, 1, None)


def pieces_of(events: Iterable[Recorded]) -> list[Piece]:
    """What events of one step say about rows; those of an accelerator replace its operators."""
    chosen = [(row, event) for event in events if (row := row_of(event)) is not None]
    accelerated = any(event.on_device for _, event in chosen)
    return [
        Piece(row, event.begin, event.end, label_of(event))
        for row, event in chosen
        if not (accelerated and row in COMPUTE and not event.on_device)
    ]


def label_of(event: Recorded) -> str:
    """The words of a piece: which layer, what."""
    if event.name.startswith(MARK):
        return event.name.rpartition(":")[2]
    layer = event.within(LAYER)
    name = event.name.rpartition("::")[2]
    return name if layer is None else f"{layer.name.removeprefix(LAYER)}: {name}"


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
    if piece.label == _LATE:
        return _ORDER.index("framework") - 0.5
    return _ORDER.index(piece.row)


def under_way(events: Sequence[Recorded]) -> list[Piece]:
    """Messages that travel while the rank may work on.

    Halos from the first to the last mark of their exchange. Gradients where torch averages them
    itself: gloo's own ranges, each from a start in a node of the backward pass to its arrival.
    """
    open_since: dict[str, Recorded] = {}
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


def _buckets(events: Sequence[Recorded]) -> list[Piece]:
    starts = [e for e in events if e.name == "c10d::allreduce_"]
    sums = iter([e for e in events if e.name == "gloo:all_reduce"])
    return [
        Piece("gradients", sent.begin, sent.end, _LATE)
        for start in starts
        if (sent := next((e for e in sums if e.begin >= start.begin), None)) is not None
        and start.within(NODE) is not None
        and start.within(MARK + "statistics:") is None
    ]


def step_times(
    number: int, step: Recorded, events: Sequence[Recorded], labels: list[str]
) -> StepTimes:
    """The rows of one step; ``labels`` gets the words that are new."""
    inside = [e for e in events if e.begin < step.end and e.end > step.begin and e is not step]
    travelling = under_way(inside)
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
