"""Parts of a compiled function in threads: none outlives the call (tier: one process)."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hyperslab.kernels.compile import _in_parts

PARTS = 4


class Work:
    """Stands for a compiled function: notes which parts ran, and how many run now."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.running = 0

    def __call__(self, arguments: bytes) -> int:
        self.running += 1
        time.sleep(0.03)
        (part,) = struct.unpack("q", arguments)
        self.ran.append(part)
        self.running -= 1
        return 0

    def run(self) -> int:
        return _in_parts(self, [struct.pack("q", i) for i in range(PARTS)])


Start = Callable[[threading.Thread], None]


def at_start(
    monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException, begins: bool
) -> None:
    """Raise ``error`` in the start of this number; the thread ``begins`` nonetheless, or not."""
    start: Start = threading.Thread.start
    count = 0

    def failing(thread: threading.Thread) -> None:
        nonlocal count
        count += 1
        if count != number or begins:
            start(thread)
        if count == number:
            raise error

    monkeypatch.setattr(threading.Thread, "start", failing)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("number", range(1, PARTS))
def test_interrupt(monkeypatch: pytest.MonkeyPatch, number: int, begins: bool) -> None:
    at_start(monkeypatch, number, KeyboardInterrupt(), begins)
    work = Work()
    with pytest.raises(KeyboardInterrupt):
        work.run()
    assert work.running == 0
    ran = list(work.ran)
    time.sleep(0.1)
    assert work.ran == ran, "a thread wrote after the call"


@pytest.mark.parametrize("number", range(1, PARTS))
def test_no_more_threads(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    at_start(monkeypatch, number, RuntimeError("can't start new thread"), begins=False)
    work = Work()
    assert work.run() == 0
    assert sorted(work.ran) == list(range(PARTS)), "every part once"


def test_interrupts_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second and a third Ctrl-C do not end the wait for the threads either."""
    interrupts = 0

    class Impatient:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            nonlocal interrupts
            if threading.current_thread() is threading.main_thread() and interrupts < 2:
                interrupts += 1
                raise KeyboardInterrupt
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    at_start(monkeypatch, 2, KeyboardInterrupt(), begins=True)
    names = SimpleNamespace(Lock=Impatient, Thread=threading.Thread)
    monkeypatch.setattr("hyperslab.kernels.compile.threading", names)
    work = Work()
    with pytest.raises(KeyboardInterrupt):
        work.run()
    assert interrupts == 2
    assert work.running == 0
