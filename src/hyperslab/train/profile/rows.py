"""From the events of a step to the rows of its timeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hyperslab.train.profile.events import LAYER, MARK, NODE, Event
from hyperslab.train.profile.schema import ROWS, UNDER_WAY, Row, Span, StepTimes

COMPUTE: tuple[Row, ...] = ("convolutions", "operators")
COMMUNICATION: tuple[Row, ...] = ("halos", "statistics", "gradients")
_ORDER: tuple[Row, ...] = ("data", "vote", *COMMUNICATION, *COMPUTE, "framework")
"""Where two cover the same time the earlier one counts: an operator within a wait is the wait."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some time [s] of a row, and what happened in it."""

    row: Row
    begin: float
    end: float
    label: str


def row_of(event: Event) -> Row | None:
    """The row to which a range belongs that holds the rank up; None for any other."""
    for row in _ORDER:
        if event.name.startswith(f"{MARK}{row}:"):
            return row
    if event.on_device:
        return _row_of_kernel(event)
    if event.is_operator and not any(e.is_operator for e in _above(event)):
        return "convolutions" if "conv" in event.name else "operators"
    return None


def _row_of_kernel(event: Event) -> Row | None:
    if event.name.startswith((MARK, NODE)):
        return None
    if "nccl" in event.name.lower():
        return "halos" if "sendrecv" in event.name.lower() else "gradients"
    words = ("conv", "dgrad", "wgrad", "fprop", "implicit_gemm")
    return "convolutions" if any(word in event.name.lower() for word in words) else "operators"


def _above(event: Event) -> Iterable[Event]:
    return itertools.islice(event.ancestors, 1, None)


def pieces_of(events: Iterable[Event]) -> list[Piece]:
    """What events of one step say about rows; those of an accelerator replace its operators."""
    chosen = [(row, event) for event in events if (row := row_of(event)) is not None]
    accelerated = any(event.on_device for _, event in chosen)
    return [
        Piece(row, event.begin, event.end, label_of(event))
        for row, event in chosen
        if not (accelerated and row in COMPUTE and not event.on_device)
    ]


def label_of(event: Event) -> str:
    """The words of a piece: which layer, what."""
    if event.name.startswith(MARK):
        return event.name.rpartition(":")[2]
    layer = event.within(LAYER)
    name = event.name.rpartition("::")[2]
    return name if layer is None else f"{layer.name.removeprefix(LAYER)}: {name}"


def exclusive(pieces: Sequence[Piece], begin: float, end: float) -> list[Piece]:
    """Every moment of [begin, end) that a piece covers once, in order."""
    inside = [p for p in pieces if p.begin < end and p.end > begin]
    rank = {row: i for i, row in enumerate(_ORDER)}
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
        best = min(active, key=lambda p: rank[p.row])
        last = result[-1] if result else None
        if last is not None and (last.row, last.label, last.end) == (best.row, best.label, lo):
            result[-1] = replace(last, end=hi)
        else:
            result.append(replace(best, begin=lo, end=hi))
    return result


def under_way(events: Sequence[Event]) -> list[Piece]:
    """From the first to the last range of each exchange: its messages travel between them."""
    open_since: dict[str, Event] = {}
    found = []
    for event in events:
        if not event.name.startswith(f"{MARK}halos:") or event.on_device:
            continue
        begun = open_since.pop(event.name, None)
        if begun is None:
            open_since[event.name] = event
        else:
            found.append(Piece("halos", begun.begin, event.end, label_of(event)))
    return found


def step_times(number: int, step: Event, events: Sequence[Event], labels: list[str]) -> StepTimes:
    """The rows of one step; ``labels`` gets the words that are new."""
    inside = [e for e in events if e.begin < step.end and e.end > step.begin and e is not step]
    pieces = exclusive(pieces_of(inside), step.begin, step.end)
    rows: dict[Row, float] = dict.fromkeys(ROWS, 0.0)
    spans: dict[str, list[Span]] = {}
    index = {label: i for i, label in enumerate(labels)}
    travelling = [(f"{piece.row} {UNDER_WAY}", piece) for piece in under_way(inside)]
    for name, piece in [*((p.row, p) for p in pieces), *travelling]:
        if piece.label not in index:
            index[piece.label] = len(labels)
            labels.append(piece.label)
        begin = round(piece.begin - step.begin, 7)
        end = round(piece.end - step.begin, 7)
        spans.setdefault(name, []).append((begin, end, index[piece.label]))
    for piece in pieces:
        rows[piece.row] += piece.end - piece.begin
    return StepTimes(step=number, seconds=step.end - step.begin, rows=rows, spans=spans)
