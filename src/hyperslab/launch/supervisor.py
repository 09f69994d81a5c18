"""The ranks of one launch: started together, watched, and all ended."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from hyperslab.errors import HyperslabError, reason
from hyperslab.launch.environment import shared_environment
from hyperslab.launch.failures import CODES, RankEnd
from hyperslab.launch.guard import PAUSE
from hyperslab.launch.process_group import ProcessGroup
from hyperslab.launch.rank_process import RankProcess
from hyperslab.memory_file import MemoryFile
from hyperslab.train.step import heeded_signals

SETTLE = 2.0
"""How long [s] the others have to end by themselves after one failed: they say what they saw."""

AFTER_TERM = 5.0
"""How long [s] they have after SIGTERM."""


class Supervisor:
    """Starts ranks, passes signals on to them, and waits until all have ended.

    ``limit`` [s] is how long a rank may be stopped; ``patience`` [s] how long the ranks have to end
    after a signal, or after one of them has ended because of one.

    ``ends`` is how each one ended, by rank; ``signal`` the first one that came to this process, or
    0.
    """

    def __init__(self, *, limit: float, patience: float) -> None:
        self.limit = limit
        self.patience = patience
        self.ranks: list[RankProcess] = []
        self.ends: dict[int, RankEnd] = {}
        self.signal = 0
        self._ordered = math.inf  # when the first one ended in order, or a signal came
        self._broken = math.inf  # when the first one failed
        self._told = False  # all have got SIGTERM

    def run(self, arguments: Sequence[str], folders: Sequence[Path], *, silent: bool) -> None:
        """Run ``python arguments...`` on one rank a folder, where its output goes.

        Raises:
            RecipeError: a folder cannot be written.
            HyperslabError: a process cannot be started.
        """
        with ExitStack() as stack:
            stack.enter_context(self._passing_on())
            try:
                group = ProcessGroup()
                stack.callback(group.close)
                store = stack.enter_context(MemoryFile())
            except OSError as error:
                raise HyperslabError(f"cannot start ranks: {reason(error)}") from None
            stack.callback(self._kill_all)
            environment = shared_environment(os.environ, len(folders), store.path)
            for rank, folder in enumerate(folders):
                process = RankProcess(
                    rank,
                    arguments,
                    environment,
                    folder=folder,
                    group=group.id,
                    store=store,
                    silent=silent,
                )
                self.ranks.append(process)
            if self.signal:
                self._send(self.signal)  # it may have come before some of them
            while self._look():
                group.keep_guarded()
                self._press()
                time.sleep(PAUSE)

    def _look(self) -> bool:
        """Note who has ended, and how; returns whether anybody is left."""
        now = time.monotonic()
        for rank in self.ranks:
            if rank.alive:
                rank.look()
            elif rank.rank not in self.ends:
                end = self.ends[rank.rank] = rank.end()
                if end.exitcode in CODES:
                    self._ordered = min(self._ordered, now)
                elif end.exitcode != 0:
                    self._broken = min(self._broken, now)
        if self.signal:
            self._ordered = min(self._ordered, now)
        return len(self.ends) < len(self.ranks)

    def _press(self) -> None:
        """End those that are frozen, and all where it is time."""
        now = time.monotonic()
        for rank in self._alive():
            if rank.stopped is not None and now - rank.stopped > self.limit:
                rank.kill(f"it has been stopped for {self.limit:g} s")
        deadline = min(self._ordered + self.patience, self._broken + SETTLE)
        if now > deadline and not self._told:
            self._send(signal.SIGTERM)
            self._told = True
        if now > deadline + AFTER_TERM:
            for rank in self._alive():
                rank.kill("it is stopped" if rank.stopped is not None else "it did not end")

    def _alive(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.alive and not rank.overdue]

    def _send(self, number: int) -> None:
        for rank in self._alive():
            rank.send(number)

    def _kill_all(self) -> None:
        """What is left, whatever went wrong here."""
        for rank in self.ranks:
            if rank.rank not in self.ends:
                rank.send(signal.SIGKILL)
                self.ends[rank.rank] = rank.end()

    @contextmanager
    def _passing_on(self) -> Iterator[None]:
        """Inside, signals that end a run go to the ranks; the first one is noted."""

        def handler(number: int, _frame: FrameType | None) -> None:
            self.signal = self.signal or number
            self._send(number)

        before = {number: signal.signal(number, handler) for number in heeded_signals()}
        try:
            yield
        finally:
            for number, action in before.items():
                signal.signal(number, action)
