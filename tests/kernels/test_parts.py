"""Parts of a compiled function on the threads of torch's OpenMP (tier: one process)."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hyperslab.kernels import compile as compiled
from hyperslab.kernels.compile import WORTH_A_THREAD

THREADS = 4
WORDS = 5


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Gives torch more threads than one, and takes them back."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


class Work:
    """Stands for a compiled function: notes its arguments and the thread of each call."""

    def __init__(self, failing: int | None = None) -> None:
        self.called: list[tuple[int, ...]] = []
        self.threads: list[int] = []
        self.failing = failing
        self.function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._run)

    def _run(self, arguments: int) -> int:
        numbers = struct.unpack(f"{WORDS + 2}q", ctypes.string_at(arguments, 8 * (WORDS + 2)))
        self.threads.append(threading.get_native_id())
        self.called.append(numbers)
        return int(numbers[WORDS] == self.failing)

    def run(self, size: int) -> None:
        compiled.call(self.function, struct.pack(f"{WORDS}q", *range(WORDS)), size)


@pytest.mark.parametrize("parts", [2, 3, THREADS])
def test_every_part_once(parts: int) -> None:
    work = Work()
    work.run(parts * WORTH_A_THREAD)
    expected = [(*range(WORDS), part, parts) for part in range(parts)]
    assert sorted(work.called) == expected
    assert len(set(work.threads)) == parts, "each on a thread of its own"


def test_threads_are_those_of_torch() -> None:
    """After the first time, no thread is started for a call: torch's are there already."""
    torch.ones(1 << 22).exp_()
    Work().run(THREADS * WORTH_A_THREAD)
    before = _threads()
    for _ in range(5):
        Work().run(3 * WORTH_A_THREAD)
        torch.ones(1 << 22).exp_()
    assert _threads() == before


def _threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def test_one_part_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_openmp", lambda: b"")
    work = Work()
    work.run(THREADS * WORTH_A_THREAD)
    assert work.called == [(*range(WORDS), 0, 1)]


@pytest.mark.parametrize("part", range(THREADS))
def test_a_part_without_memory(part: int) -> None:
    with pytest.raises(MemoryError, match="fused kernel"):
        Work(failing=part).run(THREADS * WORTH_A_THREAD)
