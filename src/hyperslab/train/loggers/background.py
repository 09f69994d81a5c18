"""A logger that may be slow or hang, on a thread of its own: no step waits for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping

from hyperslab.train.loggers.scalar_log import ScalarLog, warn_of

CLOSING = 20.0
"""How long [s] the end of a run waits for what has not been sent yet."""

LONGEST_QUEUE = 100_000
"""Steps that may wait to be sent; more only come together where one hangs."""

log = logging.getLogger("hyperslab")

Work = Callable[[ScalarLog], None]


class BackgroundLog:
    """Opens a logger by ``open_log`` on a thread of its own, and hands on what comes, in order.

    If it fails, or cannot keep up, one warning is logged and the rest is dropped.
    """

    def __init__(self, name: str, open_log: Callable[[], ScalarLog]) -> None:
        self.name = name
        self._waiting: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._off = False
        self._thread = threading.Thread(
            target=self._run, args=(open_log,), name=f"logger {name}", daemon=True
        )
        self._thread.start()

    def add(self, values: Mapping[str, float], step: int) -> None:
        if self._waiting.qsize() >= LONGEST_QUEUE:
            self._off = True
            raise RuntimeError(f"{LONGEST_QUEUE} steps wait to be sent")
        if not self._off:
            kept = dict(values)
            self._waiting.put(lambda opened: opened.add(kept, step))

    def flush(self) -> None:
        self._waiting.put(lambda opened: opened.flush())

    def close(self) -> None:
        """Wait for what is left, but not for ever."""
        self._waiting.put(None)
        self._thread.join(CLOSING)
        if self._thread.is_alive():
            self._off = True
            raise TimeoutError(f"it did not take all that it was sent within {CLOSING:g} s")

    def _run(self, open_log: Callable[[], ScalarLog]) -> None:
        try:
            opened = open_log()
            while (work := self._waiting.get()) is not None and not self._off:
                work(opened)
            opened.close()
        except Exception as error:
            if not self._off:
                warn_of(self.name, error)
            self._off = True
