"""What torch's profiler took down, in the form in which it is looked into.

Legend: a *mark* is a range that `hyperslab.train.profile.ranges` opened; its name begins with
`MARK`. A *node* is a step of autograd's backward pass.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.profiler_util import FunctionEvent

MARK = "hyperslab."
STEP = f"{MARK}step:"
LAYER = f"{MARK}layer:"
NODE = "autograd::engine::evaluate_function: "
OPTIMIZER = "Optimizer.step#"
OPERATOR = re.compile(r"(?!autograd::|c10d::|torch::|gloo:|nccl:)\w+::")


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One range of the profile; times [s] are on one clock.

    ``sequence`` is autograd's number, which a node shares with the operator that it belongs to, or
    -1; ``on_device`` says whether an accelerator ran it; ``device_seconds`` [s] is what the
    kernels took that it started.
    """

    name: str
    begin: float
    end: float
    parent: Recorded | None = None
    sequence: int = -1
    on_device: bool = False
    device_seconds: float = 0.0

    @property
    def ancestors(self) -> Iterator[Recorded]:
        """From the innermost outwards, this one first."""
        event: Recorded | None = self
        while event is not None:
            yield event
            event = event.parent

    @property
    def is_operator(self) -> bool:
        """Whether torch's dispatcher ran it."""
        return OPERATOR.match(self.name) is not None

    def within(self, prefix: str) -> Recorded | None:
        """The innermost of its ancestors whose name begins so."""
        return next((e for e in self.ancestors if e.name.startswith(prefix)), None)


def events_of(profiler: torch.profiler.profile) -> list[Recorded]:
    """Everything that was recorded, parents before children."""
    known: dict[int, Recorded] = {}
    found = [_event(e, known) for e in profiler.events() or ()]
    return sorted(found, key=lambda event: (event.begin, -event.end))


def by_range(ranges: Sequence[Recorded], events: Sequence[Recorded]) -> list[list[Recorded]]:
    """For each of ``ranges``, which come one after the other, the events that overlap with it."""
    ends = [r.end for r in ranges]
    found: list[list[Recorded]] = [[] for _ in ranges]
    for event in events:
        at = bisect_right(ends, event.begin)
        while at < len(ranges) and ranges[at].begin < event.end:
            found[at].append(event)
            at += 1
    return found


def _event(raw: FunctionEvent, known: dict[int, Recorded]) -> Recorded:
    if id(raw) not in known:
        parent = raw.cpu_parent
        known[id(raw)] = Recorded(
            name=raw.name,
            begin=raw.time_range.start / 1e6,
            end=raw.time_range.end / 1e6,
            parent=None if parent is None else _event(parent, known),
            sequence=raw.sequence_nr,
            on_device=raw.device_type != torch.profiler.DeviceType.CPU,
            device_seconds=raw.device_time_total / 1e6,
        )
    return known[id(raw)]
