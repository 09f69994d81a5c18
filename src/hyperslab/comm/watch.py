"""Watches, from a thread, what a rank waits for on a GPU, and ends the wait if nothing comes.

Over gloo a wait has a limit and raises. Over NCCL the host waits for events of the device: the main
thread stands in C, where no signal handler runs and no limit counts, until torch's own watchdog
aborts the process without a word on which layer it was or who is missing. `Watch` looks at such a
wait once a second. Where another rank has failed, where a signal came, or where the limit is over,
it says so, aborts all process groups at once, so that the wait ends, and has the error raised
there. Where even that does not help it ends the process.

Legend: a *trace* is what torch's flight recorder has of the communicators of this rank, as
`nccl_trace` returns it: an entry for each operation, with its state and when it was begun.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hyperslab.comm.agreement import HEAR_LIMIT, ask_store, failure_of_others
from hyperslab.comm.bootstrap import named, own_rank, ranks_in
from hyperslab.comm.communicator import messages_begun, purposes_of_groups
from hyperslab.comm.rendezvous import Deadline
from hyperslab.errors import CommError, HyperslabError, Stopped
from hyperslab.util import torch_internals

log = logging.getLogger(__name__)

LOOK_EVERY = 1.0
"""Sets how often [s] the thread looks."""

ANSWER_EVERY = 3
"""Sets at which look the thread sees whether another rank asks how far this one is."""

SIGNAL_GRACE = 25.0
"""Limits how long [s] a wait goes on after a signal, behind which a kill comes: Slurm's in 30 s."""

URGENT = (signal.SIGTERM, signal.SIGINT)

ABORT_GRACE = 10.0
"""Limits how long [s] the main thread takes to come back after all groups have been aborted."""

SHARE_OF_LIMIT = 0.8
"""Lets our words come before torch's watchdog, which counts from when a message was queued."""

ASKED = "watch asks"

Trace = Mapping[str, Any]


class Watch:
    """Watches the waits of this process's main thread; on one rank or the CPU nobody starts it.

    ``limit`` [s] is that of the process groups. ``abort`` ends all groups, ``leave`` the process.
    """

    def __init__(
        self,
        limit: float,
        *,
        abort: Callable[[], None] = torch_internals.abort_groups,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.limit = SHARE_OF_LIMIT * limit
        self._abort = abort
        self._leave = leave
        self._waiting: tuple[float, str] | None = None
        self._signal: tuple[float, int] | None = None
        self._error: HyperslabError | None = None
        self._answered = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look, until this ends; the main thread calls it."""
        ears, mouth = socket.socketpair()
        for end in (ears, mouth):
            end.setblocking(False)
        ended = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(ended, ears), name="hyperslab watch", daemon=True
        )
        # Python's own handler notes a signal between two bytecodes; this is written to at once.
        store = torch_internals.default_store() if ranks_in() > 1 else None
        before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            ended.set()
            thread.join()
            ears.close()
            mouth.close()
            del store  # the main rank's serves the others, also after its groups are aborted

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Watch a wait for ``what``, such as "the vote on step 7".

        Raises:
            CommError: it took too long, or another rank failed meanwhile.
            Stopped: a signal came, and the wait did not end.
        """
        self._waiting = (time.monotonic(), what)
        try:
            yield
        except Exception as problem:
            if self._error is not None:  # aborted groups raise whatever they do
                raise self._error from problem
            raise
        finally:
            self._waiting = None
        if self._error is not None:
            raise self._error

    def _run(self, ended: threading.Event, ears: socket.socket) -> None:
        looks = itertools.count()
        while not ended.wait(LOOK_EVERY):
            with suppress(BlockingIOError):
                heard = [number for number in ears.recv(64) if number in URGENT]
                if heard and self._signal is None:
                    self._signal = (time.monotonic(), heard[0])
            due = not self._answered and next(looks) % ANSWER_EVERY == 0
            if due and ask_store(lambda store: store.check([ASKED])):
                self._answer()
            error = self._problem()
            if error is not None:
                self._end(error, ended)
                return

    def _problem(self) -> HyperslabError | None:
        """Return why the wait that is under way is to end; None while it may go on."""
        waiting = self._waiting
        if waiting is None:
            return None
        since, what = waiting
        now = time.monotonic()
        if self._signal is not None and now - max(since, self._signal[0]) > SIGNAL_GRACE:
            number = self._signal[1]
            name = signal.Signals(number).name
            words = f"stopped by {name} during {what}, which did not end in {SIGNAL_GRACE:g} s"
            return Stopped(number, f"{words}\n    go on from the last checkpoint with --resume")
        if now - since > HEAR_LIMIT and (said := failure_of_others()) is not None:
            return CommError(said)
        if now - since > self.limit:
            return CommError(self._words(what, now - since))
        return None

    def _words(self, what: str, seconds: float) -> str:
        """Say what is open here and who is behind, after all ranks have been asked."""
        self._answer()
        ask_store(lambda store: store.set(ASKED, "1"))
        trace = torch_internals.nccl_trace()
        Deadline(6 * LOOK_EVERY).poll(lambda: len(_positions()) == ranks_in())
        return describe_wait(
            f"{named([own_rank()])} waited {seconds:.0f} s for {what}",
            trace,
            purposes_of_groups(),
            messages_begun(),
            _positions(),
            ranks_in(),
        )

    def _answer(self) -> None:
        """Let the others know how far this rank is in each communicator."""
        said = json.dumps(position(torch_internals.nccl_trace()))
        ask_store(lambda store: store.set(f"watch says {own_rank()}", said))
        self._answered = True

    def _end(self, error: HyperslabError, ended: threading.Event) -> None:
        self._error = error
        log.error("%s", error)
        self._abort()
        if not Deadline(ABORT_GRACE).poll(lambda: self._waiting is None or ended.is_set()):
            self._leave(error.code if isinstance(error, Stopped) else 1)


def _positions() -> dict[int, dict[str, int]]:
    """Return how far each rank is that has said so."""

    def said(key: str) -> bytes | None:
        return ask_store(lambda store: store.get(key) if store.check([key]) else None)

    words = {rank: said(f"watch says {rank}") for rank in range(ranks_in())}
    return {rank: json.loads(one) for rank, one in words.items() if one is not None}


def position(trace: Trace) -> dict[str, int]:
    """Return how many operations this rank has begun, by communicator.

    >>> position({"entries": [{"pg_name": ("0", "all"), "op_id": 4, "state": "completed"}]})
    {'0': 4}
    """
    found: dict[str, int] = {}
    for entry in trace.get("entries", ()):
        name = entry["pg_name"][0]
        found[name] = max(found.get(name, 0), entry["op_id"])
    return found


def describe_wait(
    wait: str,
    trace: Trace,
    purposes: Mapping[str, str],
    begun: Sequence[tuple[int, str]],
    positions: Mapping[int, Mapping[str, int]],
    ranks: int,
) -> str:
    """Say which communicator and layer a wait hangs at, and which rank is behind.

    Args:
        wait: who waits for what.
        trace: this rank's.
        purposes: what each communicator is for.
        begun: when [ns] this rank began each message of late, and what for.
        positions: how far ranks are that answered.
        ranks: how many there are.
    """
    entries = [one for one in trace.get("entries", ()) if one["state"] != "completed"]
    lines = [wait]
    behind: list[int] = []
    if entries:
        first = min(entries, key=lambda one: one["time_created_ns"])
        name = first["pg_name"][0]
        purpose = purposes.get(name, first["pg_name"][1] or name)
        layers = [what for when, what in begun if when <= first["time_created_ns"]]
        layer = f", {layers[-1]}" if layers else ""
        lines.append(
            f"the communicator for {purpose} is open: {first['profiling_name']} number "
            f"{first['op_id']} is {first['state']}{layer}"
        )
        counts = {rank: said.get(name, 0) for rank, said in positions.items()}
        most = max(counts.values(), default=0)
        behind = [rank for rank, count in sorted(counts.items()) if count < most]
        if behind:
            number = counts[behind[0]]
            lines.append(f"{named(behind)} began {number} of its operations, others {most}")
    silent = [rank for rank in range(ranks) if rank not in positions]
    if silent:
        lines.append(f"nothing was heard from {named(silent)}")
    if not entries:
        lines.append("torch's flight recorder has nothing open: TORCH_FR_BUFFER_SIZE=2000 keeps it")
    elif not behind and not silent:
        lines.append(
            "all ranks have begun the same operations: the network between them, or a device, hangs"
        )
    return "\n    ".join([*lines, "go on from the last checkpoint with --resume"])
