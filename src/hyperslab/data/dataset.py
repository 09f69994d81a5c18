"""`Dataset`: mini-batches of `Sharded`, each rank with its own boxes."""

from __future__ import annotations

import atexit
import functools
import sys
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from hyperslab.comm import Grid
from hyperslab.data.batch_assembler import BatchAssembler
from hyperslab.data.prefetch import BackgroundQueue
from hyperslab.data.sampler import Schedule
from hyperslab.data.store.transport import GRACE
from hyperslab.data.to_device import DeviceCopy, InFlight
from hyperslab.data.transforms import Transform, decode
from hyperslab.errors import DataError
from hyperslab.formats.parameters import Parameters
from hyperslab.formats.source import Source
from hyperslab.tensor import Sharded

Batches = Generator[tuple[Sharded, Sharded], None, None]
Waiting = deque[tuple[int, Future[InFlight | None]]]
"""The steps that were asked for."""


class Dataset:
    """Samples of a `Source` in mini-batches over a grid; made by `hyperslab.open`."""

    def __init__(
        self,
        assembler: BatchAssembler,
        *,
        transform: Transform,
        prefetch: int,
        dtype: torch.dtype,
    ) -> None:
        self.transform, self.prefetch, self.dtype = transform, prefetch, dtype
        self.wait_seconds = 0.0
        """Time that the consumer has waited for data so far [s]."""
        self.at = 0
        """Steps of the epoch under way up to the mini-batch last shown, skipped ones too."""
        self.shown: tuple[int, ...] = ()
        """The samples of that mini-batch, by their place in `source.names`."""
        self._assembler = assembler
        self._copy = DeviceCopy(self.grid.device)
        self._queue: BackgroundQueue[InFlight | None] = BackgroundQueue(
            inline=self.source.collective
        )
        self._onward: tuple[int, Waiting] = (-1, deque())  # what was asked for of the next epoch
        self._closed = False
        self._at_exit = functools.partial(_leave, weakref.ref(self))
        atexit.register(self._at_exit)
        weakref.finalize(self, atexit.unregister, self._at_exit).atexit = False

    @property
    def source(self) -> Source:
        return self._assembler.boxes.source

    @property
    def grid(self) -> Grid:
        return self._assembler.boxes.grid

    @property
    def schedule(self) -> Schedule:
        return self._assembler.schedule

    def __len__(self) -> int:
        """The number of samples of this split."""
        return len(self.schedule.samples)

    @property
    def steps(self) -> int:
        """Steps per epoch; the last one may have a smaller mini-batch."""
        return self.schedule.steps

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (C, D, H, W) of a sample."""
        return self.source.shape

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the P targets; none where voxels have classes."""
        return self.source.parameters.names

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the voxels' classes, background first; none where there are targets."""
        return self.source.classes

    @property
    def parameters(self) -> Parameters:
        """The targets' names and physical ranges."""
        return self.source.parameters

    @property
    def bytes_read(self) -> int:
        """Bytes of the boxes of volumes and labels read from files so far, ahead or not [B]."""
        return self._assembler.reader.bytes_read

    @property
    def stored_bytes(self) -> int:
        """Bytes that this rank's store holds in memory now [B]."""
        return self._assembler.store.bytes

    @property
    def store_room(self) -> int:
        """The most that a rank's store will hold in memory [B]; the same on every rank."""
        return self._assembler.room

    @property
    def received_bytes(self) -> int:
        """Bytes of boxes that other ranks have sent to this one so far [B]."""
        return (
            self._assembler.transport.received_bytes if self._assembler.transport is not None else 0
        )

    def names(self, epoch: int = 0) -> list[str]:
        """The samples' names in the order in which the epoch shows them."""
        return [self.source.names[sample] for sample in self.schedule.order(epoch)]

    @property
    def shown_names(self) -> list[str]:
        """The names of the samples of the mini-batch last shown, without skipped ones."""
        return [self.source.names[sample] for sample in self.shown]

    def epoch(self, epoch: int, start: int = 0, *, onward: bool = False) -> Batches:
        """The mini-batches of an epoch from step ``start`` on, read in the background.

        Yields ``x`` (B, C, D, H, W) and the normalised targets ``y`` (B, P), float32 (float64 if
        ``dtype`` is), cut along the batch only. Where there are ``classes``, ``y`` is (B, D, H, W)
        int64, cut like ``x``. Every sample comes once; order and augmentation depend on seed and
        epoch alone, so that an epoch resumed at a step goes on as it would have. With ``onward``
        the next epoch is begun to be read while this one ends. Every rank asks for the same.

        Raises (at the step concerned):
            DataError: a file cannot be read or holds values that cannot be right.
            CommError: another rank died or did not answer in time.
        """
        self._check_open()
        if epoch < 0 or not 0 <= start <= self.steps:
            raise DataError(f"no step {start} of epoch {epoch}: an epoch has {self.steps} steps")
        return self._run(epoch, start, onward)

    def _run(self, epoch: int, start: int, onward: bool) -> Batches:
        waiting, ahead = self._begun(epoch, start)
        todo = self._todo(epoch, ahead, onward)
        try:
            for step in range(start, self.steps):
                self._check_open()
                self._ask(todo, waiting, 1 + self.prefetch)
                begin = time.perf_counter()
                in_flight = waiting[0][1].result()
                self.wait_seconds += time.perf_counter() - begin
                waiting.popleft()
                self.at = step + 1
                if in_flight is not None:
                    self.shown = in_flight.block.samples
                    yield self._finish(in_flight)
            self._ask(todo, waiting, self.prefetch)
            self._onward = (epoch + 1, waiting)
        except BaseException:
            self._cancel(waiting)
            if self._assembler.transport is None:
                self._queue.join(cancel=False)
            raise

    def _begun(self, epoch: int, start: int) -> tuple[Waiting, int]:
        """What was asked for of this epoch already, and the first step that was not."""
        (begun, waiting), self._onward = self._onward, (-1, deque())
        if begun == epoch and start == 0 and waiting:
            return waiting, waiting[-1][0] + 1
        self._cancel(waiting)
        return deque(), start

    def _todo(self, epoch: int, step: int, onward: bool) -> Iterator[tuple[int, int]]:
        yield from ((epoch, later) for later in range(step, self.steps))
        if onward:
            yield from ((epoch + 1, later) for later in range(self.steps))

    def _ask(self, todo: Iterator[tuple[int, int]], waiting: Waiting, depth: int) -> None:
        while len(waiting) < depth and (key := next(todo, None)) is not None:
            waiting.append((key[1], self._queue.submit(self._load, *key)))

    def _load(self, epoch: int, step: int) -> InFlight | None:
        block = self._assembler.load(epoch, step)
        return None if block is None else self._copy.send(block)

    def _finish(self, in_flight: InFlight) -> tuple[Sharded, Sharded]:
        block = self._copy.receive(in_flight)
        x = decode(block.values, self.shape, self.grid, self.transform, self.dtype)
        if block.kept and x.data_ptr() == block.values.data_ptr():
            x = x.clone()  # nobody must change what the store keeps
        y = block.targets.long() if self.classes else block.targets
        return (
            Sharded.from_local(x, block.partition, self.grid),
            Sharded.from_local(y, block.target_partition, self.grid),
        )

    def _cancel(self, waiting: Waiting) -> None:
        """Do not do what was asked for, unless other ranks wait for it."""
        if self._assembler.transport is None:
            for _, future in waiting:
                future.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise DataError("the data set was closed; open it again to read on")

    def close(self) -> None:
        """End what is under way and let go of files and memory; every rank calls this."""
        self._closed = True
        atexit.unregister(self._at_exit)
        transport = self._assembler.transport
        self._queue.join(cancel=transport is None)
        if transport is not None:
            transport.close()
        self._assembler.store.close()
        self.source.close()

    def leave(self) -> None:
        """What the end of the process does in place of a forgotten `close`; takes seconds at most.

        After an error nothing is waited for. A thread that still read or received while the
        interpreter goes would be aborted, and the process with it.
        """
        end = time.monotonic() + (0 if hasattr(sys, "last_value") else GRACE)
        transport = self._assembler.transport
        self._queue.join(cancel=transport is None, seconds=max(0, end - time.monotonic()))
        if transport is not None:
            transport.leave(end - time.monotonic())
        self._queue.join(cancel=True, seconds=1)

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None and self._assembler.transport is not None:
            self._assembler.transport.abandon()  # the other ranks may be anywhere
        self.close()


def _leave(which: weakref.ref[Dataset]) -> None:
    data = which()
    if data is not None:
        data.leave()
