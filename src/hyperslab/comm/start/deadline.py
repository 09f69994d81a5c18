"""A time limit for calls that know none: a store waits for ever where nobody answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from hyperslab.errors import CommError

T = TypeVar("T")

PAUSES = (0.002, 0.25)  # [s] between two looks, the first and the longest


class Deadline:
    """So many seconds from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """[s], 0 at the least."""
        return max(0.0, self._end - time.monotonic())

    def poll(self, found: Callable[[], bool]) -> bool:
        """Look until it is found, in ever longer pauses; whether it was in time."""
        pause, longest = PAUSES
        while not found():
            if not self.left:
                return False
            time.sleep(min(pause, self.left))
            pause = min(2 * pause, longest)
        return True


def in_time(seconds: float, make: Callable[[], T], late: Callable[[], CommError]) -> T:
    """What ``make`` returns or raises, on a thread of its own.

    A thread that hangs is left behind: torch cannot be told to give up a connection.

    Raises:
        CommError: ``late()``, after so many seconds.
    """
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(make())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise late()
    return found[0]
