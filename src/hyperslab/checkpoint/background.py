"""Writes a checkpoint while the run goes on: one at a time, on a thread of every rank.

Steps of a checkpoint:

1. Every rank copies its share of the state into host memory (see `SnapshotMemory`). That is all
   that the run waits for, and of large weights only the next `optimizer.step()` does.
2. The thread writes the files, and agrees with those of the other ranks over a process group that
   nothing else uses: so no message of a step waits for one of a checkpoint, and ranks need not be
   at the same step.
3. Before the next checkpoint, and at the end, the run waits for what is left of it and hears of
   errors; all ranks hear the same.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from hyperslab.checkpoint.snapshot import SnapshotMemory
from hyperslab.comm.agreement import Group
from hyperslab.comm.bootstrap import GroupReference, make_group, ranks_in
from hyperslab.errors import CheckpointError, CommError, reason

WRITE_TIMEOUT = datetime.timedelta(hours=1)
"""A rank may write so much longer than another; one that dies is noticed at once."""

PATIENCE_IF_LOST = 5.0
"""A run that lost a rank waits so long [s] for what is being written: it may never end."""


WriteFiles = Callable[[Group, CheckpointError | None], None]
"""Works on the thread, given the group of all threads and what went wrong here before."""


class BackgroundWriter:
    """Writes what it is given on a thread; ``memory`` holds it meanwhile."""

    def __init__(self) -> None:
        self.memory = SnapshotMemory()
        self._group: GroupReference | None = None
        self._thread: threading.Thread | None = None
        self._hook: RemovableHandle | None = None
        self._error: BaseException | None = None

    def start(self, write: WriteFiles, optimizer: torch.optim.Optimizer) -> None:
        """Begin to write; every rank calls it. `wait` comes before."""
        assert self._thread is None
        self._hook = optimizer.register_step_pre_hook(self.await_copies)
        if self._group is None and ranks_in() > 1:
            group = make_group(backend="gloo", timeout=WRITE_TIMEOUT)
            dist.barrier(group)  # nobody must leave it while others still connect to it
            self._group = GroupReference(group)
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until it is written, or for so long; all ranks raise the error of any."""
        if self._thread is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            return
        self._thread = None
        if self._hook is not None:
            self._hook.remove()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def await_copies(self, *_: Any) -> None:
        """Wait until the weights may be changed; whoever changes them calls it before."""
        self.memory.copied.wait()

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Finishes writing what is begun inside, after an error, too; raises as `wait`."""
        try:
            yield
        except BaseException as error:
            lost = isinstance(error, (CommError, RuntimeError, KeyboardInterrupt))
            try:
                self.wait(PATIENCE_IF_LOST if lost else None)
            except Exception as other:  # whatever writing has raised must not hide the first error
                error.add_note(f"also: {other}")
            raise
        self.wait()

    def _run(self, write: WriteFiles) -> None:
        problem = None
        try:
            self.memory.finish()
        except CheckpointError as error:
            problem = error
        except Exception as error:  # such as a device's: the other ranks have to hear of it, too
            problem = CheckpointError(reason(error))
        try:
            write(None if self._group is None else self._group("a checkpoint"), problem)
        except BaseException as error:  # a thread would end with it as if all were written
            self._error = error
