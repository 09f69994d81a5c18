"""Whether a backward pass is in a user's function, which sees gradients as serial ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_state = threading.local()  # torch runs the backward of every device in a thread of its own


def sees_serial_gradients() -> bool:
    """Whether who asks for a gradient inside a backward pass wants the serial one."""
    return getattr(_state, "serial", False)


@contextmanager
def seeing_serial_gradients(serial: bool = True) -> Iterator[None]:
    """Within it `sees_serial_gradients` is ``serial``."""
    before = sees_serial_gradients()
    _state.serial = serial
    try:
        yield
    finally:
        _state.serial = before
