"""Shows a data set as mini-batches of `Sharded`, each rank with its own boxes.

Later steps are loaded in the background of the present one, and local batches are copied to
the device on a stream of their own, beside the step that runs.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from hyperslab.comm.host_p2p import ABANDONED_GRACE, LEAVE_GRACE, HostP2P
from hyperslab.data.assemble import BatchAssembler, BoxesAhead, LocalBatch
from hyperslab.data.transforms import decode
from hyperslab.errors import DataError
from hyperslab.tensor import Sharded
from hyperslab.util.page_locked import LentBuffers


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """Sets what is read ahead: ``depth`` mini-batches, of together at most ``bytes`` a rank [B].

    Raises:
        DataError: one of them is negative.
    """

    depth: int = 2
    bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if min(self.depth, self.bytes) < 0:
            raise DataError(
                f"prefetch={self.depth}, prefetch_bytes={self.bytes}: both need to be >= 0"
            )

    def batches(self, size: int, device: str) -> int:
        """Returns the mini-batches of ``size`` [B] that are read ahead for a kind of device.

        A GPU would wait for each that is not, so there it is one at least, unless none is wanted.
        """
        least = int(device == "cuda" and self.bytes > 0)
        return min(self.depth, max(self.bytes // size, least))


Step = tuple[int, int]
"""Epoch and step."""


@dataclass(eq=False, slots=True)
class StepJob:
    """Holds a step that was asked for, its boxes ahead, and its local batch to come."""

    step: Step
    boxes: BoxesAhead | None
    loaded: Future[LocalBatch | None]


@dataclass
class StepsAhead:
    """The steps that one pass over an epoch has asked for, and those that it will ask for."""

    waiting: deque[StepJob]
    todo: Iterator[Step]


class Prefetcher:
    """Loads the steps of epochs, ``depth`` of them ahead of the one that is used.

    They are loaded in the order in which they are asked for, by a thread, which ends when there are
    none left; where the ranks of a replica read together, by the one that asks.
    """

    def __init__(self, copy: DeviceCopy, depth: int) -> None:
        self.copy = copy
        self.assembler = copy.assembler
        self.steps = copy.assembler.schedule.steps
        self.depth = depth
        self.inline = copy.assembler.reader.source.collective
        self.promised = copy.assembler.transport is not None
        """Other ranks count on every step that was asked for, so none is cancelled."""
        self.wait_seconds = 0.0
        """Time for which `take` has waited so far [s]."""
        self._next = StepsAhead(deque(), iter(()))  # what was asked for of the next epoch
        self._jobs: deque[StepJob] = deque()
        self._thread: threading.Thread | None = None
        self._idle = True
        self._lock = threading.Lock()
        self._loading = threading.Lock()  # after an interrupt there may be two threads

    def begin(self, epoch: int, start: int, *, onward: bool) -> StepsAhead:
        """Yield an epoch's steps from ``start`` on; with ``onward`` those of the next follow."""
        waiting = self._next.waiting
        self._next = StepsAhead(deque(), iter(()))
        first = start
        if waiting and waiting[-1].step[0] == epoch and start == 0:
            first = waiting[-1].step[1] + 1
        else:
            self._cancel(waiting)
            waiting = deque()
        steps = ((epoch, step) for step in range(first, self.steps))
        later = ((epoch + 1, step) for step in range(self.steps if onward else 0))
        return StepsAhead(waiting, itertools.chain(steps, later))

    def take(self, ahead: StepsAhead) -> LocalBatch | None:
        """Returns what was loaded for the next step; later ones are asked for first."""
        self._ask(ahead, 1 + self.depth)
        begin = time.perf_counter()
        result = ahead.waiting[0].loaded.result()
        self.wait_seconds += time.perf_counter() - begin
        ahead.waiting.popleft()
        return result

    def hand_on(self, ahead: StepsAhead) -> None:
        """End the epoch: what is still asked for is of the next one."""
        self._ask(ahead, self.depth)
        self._next = ahead

    def drop(self, ahead: StepsAhead) -> None:
        """End the pass early: do not load what it has asked for, unless it is promised.

        What is under way is not waited for: where the collector of garbage ends the pass, this may
        be the thread that reads it, or one for which that waits.
        """
        self._cancel(ahead.waiting)

    def join(self, *, cancel: bool, seconds: float | None = None) -> None:
        """Wait until the steps are loaded; with ``cancel`` only for the one that is under way."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            jobs = [*self._jobs] if cancel else []
            thread = self._thread
        for job in jobs:
            self._cancel_step(job)
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        self.assembler.threads.end(None if end is None else max(0, end - time.monotonic()))

    def _cancel(self, waiting: deque[StepJob]) -> None:
        for job in () if self.promised else waiting:
            self._cancel_step(job)

    def _cancel_step(self, job: StepJob) -> None:
        if job.loaded.cancel() and job.boxes is not None:
            self.assembler.drop(job.boxes)

    def _ask(self, ahead: StepsAhead, count: int) -> None:
        """Ask for steps until so many are waited for; errors are raised where they are taken."""
        while len(ahead.waiting) < count and (step := next(ahead.todo, None)) is not None:
            boxes = self.assembler.ask(*step) if self.assembler.threads.count else None
            job = StepJob(step, boxes, Future())
            ahead.waiting.append(job)
            if self.inline:
                self._do(job)
                continue
            with self._lock:
                self._jobs.append(job)
                if self._idle:
                    # A daemon: a process that ends does not wait for a rank that will not answer.
                    # It is a method's, so that this object lives, and can be left at exit.
                    thread = threading.Thread(target=self._run, name="hyperslab-read", daemon=True)
                    thread.start()
                    # Not before: an interrupt would leave jobs that no thread does.
                    self._thread, self._idle = thread, False

    def _run(self) -> None:
        with self._loading:
            while True:
                with self._lock:
                    if not self._jobs:
                        self._idle = True
                        return
                    job = self._jobs.popleft()
                self._do(job)
                del job  # or its result would live until the next one comes

    def _do(self, job: StepJob) -> None:
        if not job.loaded.set_running_or_notify_cancel():
            return
        try:
            job.loaded.set_result(self.copy.start(*job.step, job.boxes))
        except BaseException as error:
            job.loaded.set_exception(error)


class DeviceCopy:
    """Copies what is assembled from page-locked memory to a CUDA device.

    On other devices local batches stay where they are.
    """

    def __init__(self, assembler: BatchAssembler) -> None:
        self.assembler = assembler
        self.device = assembler.planner.boxes.grid.device
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def start(self, epoch: int, step: int, ahead: BoxesAhead | None) -> LocalBatch | None:
        """Load the local batch of a step and begin to copy it; None where there is none.

        Called by the reading thread, which has no current device of its own.
        """
        batch = self.assembler.load(epoch, step, ahead)
        if batch is None or self.stream is None:
            return batch
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            values = batch.values.to(self.device, non_blocking=True)
            pinned = batch.targets.pin_memory()  # no copy if it is already
            targets = pinned.to(self.device, non_blocking=True)
            event = self.stream.record_event()
        for lent in (batch.values, batch.targets):
            self.assembler.buffers.copying(lent, event)
        return replace(batch, values=values, targets=targets, arrived=event)

    def finish(self, batch: LocalBatch) -> None:
        """Make the local batch safe to use on the current stream; called by the consumer."""
        if batch.arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(batch.arrived)
            # The memory was allocated on the copying stream, which may reuse it only afterwards.
            batch.values.record_stream(stream)
            batch.targets.record_stream(stream)


Pairs = Generator[tuple[Sharded, Sharded], None, None]
"""Mini-batches: x and y."""


class Dataset:
    """Samples of a `Source` in mini-batches over a grid; made by `hyperslab.open`."""

    def __init__(self, assembler: BatchAssembler, prefetch: int, dtype: torch.dtype) -> None:
        self.prefetch = prefetch
        self.dtype = dtype
        self.source = assembler.reader.source
        self.grid = assembler.planner.boxes.grid
        self.schedule = assembler.schedule
        self.transform = assembler.reader.transform.name
        """The transform of stored values, as `hyperslab.open` takes it."""
        self.shape = self.source.shape
        """The shape (C, D, H, W) of a sample; where they differ, that of the largest."""
        self.parameters = self.source.parameters
        """The targets' names and physical ranges."""
        self.targets = self.parameters.names
        """The names of the P targets; none where voxels have classes."""
        self.classes = self.source.classes
        """The names of the voxels' classes, background first; none where there are targets."""
        self.store_room = assembler.store_room
        """The most that a rank's store will hold in memory [B]; the same on every rank."""
        self.staging_room = assembler.staging_room
        """The most that it takes of the staging folder [B]; the same on every rank."""
        self.steps = self.schedule.steps
        """Steps per epoch; the last one may have a smaller mini-batch."""
        self.at = 0
        """Steps of the epoch under way up to the mini-batch last shown, skipped ones too."""
        self.shown: tuple[int, ...] = ()
        """The samples of that mini-batch, by their index in `source.names`."""
        self._assembler = assembler
        self._transport = assembler.transport
        self._transform = assembler.reader.transform
        self._target_dtype = torch.promote_types(dtype, torch.float32)
        if self.classes:
            self._target_dtype = torch.int64
        self._copy = DeviceCopy(assembler)
        self._prefetcher = Prefetcher(self._copy, prefetch)
        self._closed = False
        transport = None if self._transport is None else weakref.ref(self._transport)
        self._at_exit = functools.partial(_leave, weakref.ref(self._prefetcher), transport)
        atexit.register(self._at_exit)
        weakref.finalize(self._prefetcher, atexit.unregister, self._at_exit).atexit = False

    def __len__(self) -> int:
        """Returns how many samples an epoch shows: those of this split, repeated ones again."""
        return self.schedule.shown

    @property
    def wait_seconds(self) -> float:
        """Time that the consumer has waited for data so far [s]."""
        return self._prefetcher.wait_seconds

    @property
    def bytes_read(self) -> int:
        """Bytes of the boxes of volumes and labels read from files so far, ahead or not [B]."""
        return self._assembler.reader.bytes_read

    @property
    def stored_bytes(self) -> int:
        """Bytes that this rank's store holds in memory now [B]."""
        return self._assembler.store.bytes

    @property
    def received_bytes(self) -> int:
        """Bytes of boxes that other ranks have sent to this one so far [B]."""
        return 0 if self._transport is None else self._transport.received_bytes

    def names(self, epoch: int = 0) -> list[str]:
        """Returns the samples' names in the order in which the epoch shows them."""
        return [self.source.names[sample] for sample in self.schedule.order(epoch)]

    @property
    def shown_names(self) -> list[str]:
        """The names of the samples of the mini-batch last shown, without skipped ones."""
        return [self.source.names[sample] for sample in self.shown]

    def epoch(self, epoch: int, start: int = 0, *, onward: bool = False) -> Pairs:
        """Returns the mini-batches of an epoch from step ``start`` on, read in the background.

        Yields ``x`` (B, C, D, H, W) and the normalised targets ``y`` (B, P), float32 (float64 if
        ``dtype`` is), cut along the batch only. Where there are ``classes``, ``y`` is (B, D, H, W)
        int64, cut like ``x``. Every sample comes once, or as often as it is repeated; order and
        augmentation depend on seed and epoch alone, so that an epoch resumed at a step goes on as
        it would have. With ``onward`` the next epoch is begun to be read while this one ends. Every
        rank asks for the same.

        Raises (at the step concerned):
            DataError: a file cannot be read or holds values that cannot be right.
            CommError: another rank died or did not answer in time.
        """
        self._check_open()
        if epoch < 0 or not 0 <= start <= self.steps:
            raise DataError(f"no step {start} of epoch {epoch}: an epoch has {self.steps} steps")
        return self._run(epoch, start, onward)

    def _run(self, epoch: int, start: int, onward: bool) -> Pairs:
        ahead = self._prefetcher.begin(epoch, start, onward=onward)
        buffers = LentBuffers()
        try:
            for step in range(start, self.steps):
                self._check_open()
                pair = self._take(ahead, buffers)
                self.at = step + 1
                if pair is not None:
                    yield pair
                del pair  # or it would be there beside the next one
            self._prefetcher.hand_on(ahead)
        except BaseException:
            self._prefetcher.drop(ahead)
            raise

    def _take(self, ahead: StepsAhead, buffers: LentBuffers) -> tuple[Sharded, Sharded] | None:
        """Returns the next mini-batch; None where all of its samples are skipped."""
        batch = self._prefetcher.take(ahead)
        if batch is None:
            return None
        self.shown = batch.samples
        self._copy.finish(batch)
        shape = batch.partition.shape[1:]
        x = decode(batch.values, self._transform, self.dtype, shape, self.grid, buffers)
        if batch.kept and x.data_ptr() == batch.values.data_ptr():
            x = x.clone()  # nobody must change what the store keeps
        y = batch.targets.to(self._target_dtype, copy=batch.kept)
        return (
            Sharded.from_local(x, batch.partition, self.grid),
            Sharded.from_local(y, batch.target_partition, self.grid),
        )

    def decode(self, values: torch.Tensor) -> torch.Tensor:
        """Decodes this rank's stored values (b, C, d, h, w), on their device, for the network."""
        return decode(values, self._transform, self.dtype, self.shape, self.grid)

    def _check_open(self) -> None:
        if self._closed:
            raise DataError("the data set was closed; open it again to read on")

    def close(self) -> None:
        """End what is under way and let go of files and memory; every rank calls this."""
        self._closed = True
        atexit.unregister(self._at_exit)
        left = self._transport is not None and self._transport.abandoned
        self._prefetcher.join(
            cancel=self._transport is None, seconds=ABANDONED_GRACE if left else None
        )
        if self._transport is not None:
            self._transport.close()
        self._assembler.store.close()
        self.source.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._transport is not None:
            self._transport.abandon()  # the other ranks may be anywhere
        self.close()


def _leave(which: weakref.ref[Prefetcher], through: weakref.ref[HostP2P] | None) -> None:
    """Takes the place of a forgotten `close` when the process ends, in seconds at most.

    After an error nothing is waited for. A thread that still read or received while the
    interpreter goes would be aborted, and the process with it.
    """
    prefetcher = which()
    if prefetcher is None:
        return
    transport = None if through is None else through()
    end = time.monotonic() + (0 if hasattr(sys, "last_value") else LEAVE_GRACE)
    left = max(0, end - time.monotonic())
    prefetcher.join(cancel=transport is None, seconds=left)
    if transport is not None:
        transport.leave(end - time.monotonic())
    prefetcher.join(cancel=True, seconds=1)
