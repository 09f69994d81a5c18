"""Keeps what the host does out of CUDA graphs: it is done beside each replay, or refused.

[Note: capture] ``torch.cuda.graph`` records the kernels that a step queues, and a replay queues
these again; nothing that the host does is repeated. In a step of a cut network the host

- draws a seed for the random numbers of a volume: every replay would drop the same elements,
  without a word;
- looks now and then whether the ranks have one random state, one set of parameters and the same
  ordinary inputs, and waits for what was asked before;
- copies messages to and from its own memory where the ranks have gloo alone.

`hyperslab.graphed` opens a `Beside` for its captures. Seeds are then places on the device, which it
fills before each replay, and comparisons are made after each. In other captures the same places
refuse, and what goes through the host's memory is refused in all. What has none of them is not
touched: the kernels of one rank, and messages and sums over NCCL, are as capturable as torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hyperslab.errors import UnsupportedOp


def is_capturing() -> bool:
    """Tell whether the current stream records a CUDA graph; False where CUDA has not begun."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@dataclass
class Beside:
    """Collects what the host does beside a step that is captured.

    ``seeds``: numbers on the device, to be drawn before each replay, in this order; ``actions``: to
    be called after it. Tensors that these hold have the values of the last replay.
    """

    seeds: list[torch.Tensor] = field(default_factory=list)
    actions: list[Callable[[], object]] = field(default_factory=list)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Collect in here. Backward passes run on threads of their own, so all threads do."""
        _OPEN.append(self)
        try:
            yield
        finally:
            _OPEN.pop()


_OPEN: list[Beside] = []
"""Has the capture that is under way, of which a process can have one at a time."""


def refuse_capture(what: str, remedy: str) -> None:
    """Refuse what the host does once, at the capture, and would have to do at every replay.

    Raises:
        UnsupportedOp: the current stream records a CUDA graph.
    """
    if is_capturing():
        raise UnsupportedOp(
            f"{what} is part of a CUDA graph that is being captured; a replay would leave it out, "
            f"or repeat it wrongly\n    {remedy}"
        )


def beside_capture(what: str) -> Beside | None:
    """Return where to put ``what`` while a graph is captured; None where it is to be done now.

    Raises:
        UnsupportedOp: the capture is not of `hyperslab.graphed`, so nobody would do it.
    """
    if not is_capturing():
        return None
    if not _OPEN:
        refuse_capture(what, "capture the step by hyperslab.graphed, which does it at each replay")
    return _OPEN[-1]


def do_beside(action: Callable[[], object], what: str) -> None:
    """Call ``action`` now, or after each replay of the step that is captured.

    Raises:
        UnsupportedOp: the capture is not of `hyperslab.graphed`.
    """
    beside = beside_capture(what)
    if beside is None:
        action()
    else:
        beside.actions.append(action)
