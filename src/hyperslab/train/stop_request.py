"""The signals that end a run after its next checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Remembers that a signal arrived; the step that it arrived in ends first."""

    def __init__(self) -> None:
        self.signal = 0

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Inside, SIGINT, SIGTERM and SIGHUP are only noted; outside they do what they did."""
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number
