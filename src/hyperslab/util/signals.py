"""Names the signals that end a run after its next checkpoint, and notes that one has come.

It needs the standard library alone.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hyperslab.errors import Stopped

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The last two are what Slurm sends before a job's time is over, if it is asked to."""


def heeded_signals() -> list[signal.Signals]:
    """Return the signals that end a run of this process: `nohup` has it ignore SIGHUP."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored]


class StopRequest:
    """Remembers the signals that ``arrived``; the step that one arrived in ends first."""

    def __init__(self) -> None:
        self.arrived: list[int] = []

    @property
    def signal(self) -> int:
        """Return the last one, or 0."""
        return self.arrived[-1] if self.arrived else 0

    def check(self) -> None:
        """Raise `Stopped` if one arrived."""
        if self.signal:
            raise Stopped(self.signal, f"stopped by {signal.Signals(self.signal).name}")

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Note the signals that end a run, inside; outside they do what they did."""
        before = {number: signal.signal(number, self._note) for number in heeded_signals()}
        try:
            yield self
        finally:
            for number, action in before.items():
                signal.signal(number, action)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.arrived.append(number)
