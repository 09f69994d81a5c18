"""Assembles this rank's part of a mini-batch, of what is read, kept, or sent by other ranks.

A `Reader` reads boxes of a `Source`, checked and counted, and `ReadingThreads` do so several at a
time; a `SampleAssembly` puts one sample's box together; a `BatchAssembler` does so for every
mini-batch, in one order on all ranks, into a `LocalBatch`. A sample that any rank cannot read all
ranks leave out (`Skipped`).
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyperslab.comm.host_p2p import HostP2P, tag_of
from hyperslab.data.sampler import IDENTITY, Schedule, Symmetry
from hyperslab.data.store import BatchPlanner, SampleBox, SlotPlan, Store
from hyperslab.data.transforms import Transform
from hyperslab.errors import DataError
from hyperslab.formats.files import check_finite, read_box, reading
from hyperslab.formats.source import Array, Source
from hyperslab.formats.targets import check_classes
from hyperslab.geometry import Box, Partition
from hyperslab.util.page_locked import PageLockedBuffers


class Reader:
    """Reads boxes of ``source`` for one rank and refuses what ``transform`` cannot take."""

    def __init__(self, source: Source, transform: Transform) -> None:
        self.source = source
        self.transform = transform
        self.bytes_read = 0
        self._counting = threading.Lock()  # two epochs may be under way

    def read(self, sample: int, box: Box) -> SampleBox:
        """Returns the values of a box (C, d, h, w) and its target; errors as `values`."""
        values = self.values(sample, box)
        return SampleBox(values, self.target(sample, Box(box.lo[1:], box.hi[1:])))

    def values(self, sample: int, box: Box) -> Array:
        """Returns the values of ``box`` (C, d, h, w) in their storage type, not always contiguous.

        Values that cannot be read, or cannot be right, are a DataError.
        """
        dtype = np.dtype(self.source.dtype)
        self._count(box.size * dtype.itemsize)
        name = self.source.where(sample)
        values, where = read_box(self.source.read, sample, box, name, dtype)
        check_values(values, self.transform, where)
        return values

    def target(self, sample: int, box: Box) -> Array:
        """Returns the classes of the voxels of a box (d, h, w) uint8, or the numbers (P,) float64.

        Errors as `values`.
        """
        name = self.source.where(sample)
        if self.source.classes:
            self._count(box.size * self.source.label_bytes)
            labels, where = read_box(self.source.labels, sample, box, name)
            check_classes(labels, self.source.classes, where)
            return labels
        with reading(name):
            target = np.asarray(self.source.target(sample), np.float64)
        names = self.source.parameters.names
        if target.shape != (len(names),):
            raise DataError(
                f"{name}: has targets of shape {target.shape} but "
                f"{len(names)} parameters: {', '.join(names)}"
            )
        return target

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.bytes_read += nbytes


BoxToCome = Future[SampleBox]


class ReadingThreads:
    """Reads boxes on at most ``count`` threads for the one that puts mini-batches together.

    They begin with boxes in the order in which these are asked for. No more than ``count`` boxes
    are under way, or read and not yet taken, so that memory is bounded. A thread ends when there is
    nothing left to do, and is a daemon: a process that ends does not wait for a file system that
    does not answer.
    """

    def __init__(self, reader: Reader, count: int) -> None:
        self.reader = reader
        self.count = count
        self._asked: deque[tuple[BoxToCome, int, Box]] = deque()
        self._held = 0  # boxes under way, or read and not yet taken
        self._dropped: deque[None] = deque()  # one for each box of these that was dropped
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def ask(self, sample: int, box: Box) -> BoxToCome:
        """Asks for a box, which is taken or dropped later."""
        future = BoxToCome()
        with self._lock:
            self._asked.append((future, sample, box))
            self._start()
        return future

    def take(self, future: BoxToCome, sample: int, box: Box) -> SampleBox:
        """Returns a box that was asked for; one with which no thread has begun is read here.

        Raises what reading it raised.
        """
        if future.cancel():
            return self.reader.read(sample, box)
        try:
            return future.result()
        finally:
            with self._lock:
                self._held -= 1
                self._start()

    def drop(self, future: BoxToCome) -> None:
        """Forgets a box that was asked for, without a lock.

        It is called where an epoch is left, which the collector of garbage may do in any thread and
        within any other method.
        """
        if not future.cancel():
            future.add_done_callback(lambda _: self._dropped.append(None))

    def end(self, seconds: float | None = None) -> None:
        """Begins with no other box, and waits for those under way, so many seconds at most."""
        with self._lock:
            asked, threads = [*self._asked], self._threads - {threading.current_thread()}
            self._asked.clear()
        for future, _, _ in asked:
            future.cancel()
        end = None if seconds is None else time.monotonic() + seconds
        for thread in threads:
            thread.join(None if end is None else max(0, end - time.monotonic()))

    def _start(self) -> None:
        """Start a thread if one may have something to do; the caller has the lock."""
        self._count_dropped()
        if self._asked and max(self._held, len(self._threads)) < self.count:
            thread = threading.Thread(target=self._run, name="hyperslab-read", daemon=True)
            thread.start()  # it waits for the lock
            self._threads.add(thread)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            future, sample, box = job
            try:
                future.set_result(self.reader.read(sample, box))
            except BaseException as error:
                future.set_exception(error)
            del job, future  # or the box would live until the next one is read

    def _count_dropped(self) -> None:
        """Holds no longer what was dropped; the caller has the lock."""
        while self._dropped:
            self._dropped.pop()
            self._held -= 1

    def _next(self) -> tuple[BoxToCome, int, Box] | None:
        with self._lock:
            self._count_dropped()
            while self._asked and self._held < self.count:
                job = self._asked.popleft()
                if job[0].set_running_or_notify_cancel():
                    self._held += 1
                    return job
            self._threads.discard(threading.current_thread())
            return None


class BoxesAhead:
    """Holds the boxes of one mini-batch that were asked for, until they are taken or dropped.

    ``ready`` has those by sample that were taken before all ranks agreed that they can be read.
    """

    def __init__(self, threads: ReadingThreads, wanted: Iterable[tuple[int, Box]] = ()) -> None:
        self.ready: dict[int, SampleBox] = {}
        self._threads = threads
        self._asked = {each: threads.ask(*each) for each in dict.fromkeys(wanted)}
        self.samples = {sample for sample, _ in self._asked}

    def read(self, sample: int, box: Box) -> SampleBox:
        """Returns a box that was asked for, or reads it; raises as `Reader.read`."""
        future = self._asked.pop((sample, box), None)
        if future is None:
            return self._threads.reader.read(sample, box)
        return self._threads.take(future, sample, box)

    def drop(self) -> None:
        """Forgets what was not taken."""
        while self._asked:
            self._threads.drop(self._asked.popitem()[1])


def check_values(values: Array, transform: Transform, where: str) -> None:
    """Refuses values that cannot be right before they reach the network as NaN.

    They are NaN or infinite; negative where whole numbers are counts; or at or below the bound of
    the transform.
    """
    low, _ = check_finite(values, where)
    if not transform.signed and values.dtype.kind == "i" and low < 0:
        raise DataError(
            f"{where} holds negative counts, down to {low}\n    whole numbers of either sign are "
            "read where voxels have classes or with a window; others are stored as float32"
        )
    if low <= transform.above:
        raise DataError(f"{where} holds {low}, {transform.why}")


def os_bytes_read() -> int:
    """Counts what this process has read by system calls so far [B], from any file (Linux).

    Against `Dataset.bytes_read` it shows what the file format read beyond the boxes asked for.
    """
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


MESSAGE_WORDS = ("values", "labels or target")
"""The two messages of which a box consists."""


@dataclass(frozen=True, slots=True)
class TargetKind:
    """Defines how much of a sample's target goes with a box of the volume.

    ``count`` numbers (P,) go with every part of the sample, however it is augmented. Where it is
    None the target are the classes of the voxels (d, h, w), cut and augmented as the voxels are.
    """

    count: int | None

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.count is None else np.float64)

    def shape(self, voxels: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of what goes with so many voxels (d, h, w)."""
        return voxels if self.count is None else (self.count,)

    def part(self, target: Array, inside: tuple[slice, ...]) -> Array:
        """Returns a view of what goes with a part of the voxels."""
        return target[inside] if self.count is None else target

    def augmented(self, target: Array, augmentation: Symmetry) -> Array:
        """Returns the target of the augmented voxels; a view."""
        return augmentation.apply(target[None])[0] if self.count is None else target


def target_kind(source: Source) -> TargetKind:
    """Returns that of labels where voxels have classes, else that of numbers."""
    return TargetKind(None if source.classes else len(source.parameters.names))


def part_of(whole: SampleBox, box: Box, part: Box, kind: TargetKind) -> SampleBox:
    """Views ``part`` of what holds ``box``."""
    inside = part.slices(box)
    return SampleBox(whole.values[inside], kind.part(whole.target, inside[1:]))


@dataclass
class SampleAssembly:
    """Puts the stored box that ``plan`` wants together, which becomes a slot of the mini-batch."""

    plan: SlotPlan
    slot: SampleBox
    kind: TargetKind
    _waiting: list[tuple[Callable[[], None], Array, Array]] = field(default_factory=list)
    _stored: SampleBox | None = None

    @property
    def box(self) -> Box:
        """Returns the box of the stored sample."""
        assert self.plan.transfer.wanted is not None
        return self.plan.transfer.wanted

    def _views(self, part: Box) -> SampleBox:
        """Views a part of the box as it is stored; where that is what is wanted, of the slot."""
        if self._stored is None and self.plan.augmentation == IDENTITY:
            self._stored = self.slot
        if self._stored is None:
            values = np.empty(self.box.shape, self.slot.values.dtype)
            target = np.empty(self.kind.shape(self.box.shape[1:]), self.slot.target.dtype)
            self._stored = SampleBox(values, target)
        return part_of(self._stored, self.box, part, self.kind)

    def expect(self, transport: HostP2P, epoch: int, step: int) -> None:
        """Begin to receive what other ranks keep of it; `BatchAssembler` has the other end."""
        for part in self.plan.transfer.receives:
            for word, view in enumerate(self._views(part.box)):
                out = view if view.flags.c_contiguous else np.empty(view.shape, view.dtype)
                tag = tag_of(epoch, step, self.plan.slot, word)
                self._waiting.append((transport.receive(out, part.rank, tag), out, view))

    def put(self, kept: SampleBox) -> None:
        """Fill in the part of it that this rank keeps, given the whole box that it keeps."""
        part = self.plan.transfer.kept
        if part is not None:
            assert self.plan.transfer.own is not None
            values = part_of(kept, self.plan.transfer.own, part, self.kind)
            for view, value in zip(self._views(part), values, strict=True):
                view[...] = value

    def finish(self) -> None:
        """Waits for all parts (see `HostP2P.receive`) and puts them, augmented, into the slot."""
        for wait, out, view in self._waiting:
            wait()
            if out is not view:
                view[...] = out
        if self._stored is not None and self._stored is not self.slot:
            self.fill(self._stored)

    def fill(self, stored: SampleBox) -> None:
        """Put the whole box, augmented, into the slot."""
        values, target = stored
        if self.plan.augmentation != IDENTITY:
            values = self.plan.augmentation.apply(values)
            target = self.kind.augmented(target, self.plan.augmentation)
        self.slot.values[...] = values
        self.slot.target[...] = target


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """Holds this rank's box of a mini-batch in its storage type, and its targets."""

    values: torch.Tensor  # (b, C, d, h, w)
    targets: torch.Tensor  # numbers (b, P) float64, or classes of the voxels (b, d, h, w) uint8
    partition: Partition  # of the values
    target_partition: Partition
    samples: tuple[int, ...]  # of the whole mini-batch
    kept: bool  # both are what the store keeps, or a source gave, and must not be changed
    arrived: torch.cuda.Event | None = None  # when both are on a CUDA device


log = logging.getLogger("hyperslab")

Reasons = dict[int, str]
"""Errors by sample that this rank cannot read."""


@dataclass
class Skipped:
    """The samples that are left out, from the step on at which they could not be read."""

    source: Source
    transport: HostP2P | None
    samples: set[int] = field(default_factory=set)

    def agree(self, samples: Sequence[int], attempt: Callable[[list[int]], Reasons]) -> list[int]:
        """Keeps those of ``samples`` that all ranks can read.

        ``attempt`` reads what this rank has to of a mini-batch. When a sample is left out the
        others move up, to other ranks too, which then have to read them: so it is done again.

        Distribution scheme: 1. each rank attempts; 2. the union of all ranks' reasons.
        """
        while True:
            left = [sample for sample in samples if sample not in self.samples]
            reasons = attempt(left)
            if self.transport is not None and self.transport.any(bool(reasons)):
                reasons = {k: v for part in self.transport.gather(reasons) for k, v in part.items()}
            if not reasons:
                return left
            for sample, reason in reasons.items():
                self.samples.add(sample)
                if self.transport is None or self.transport.rank == 0:
                    name = self.source.names[sample]
                    log.warning("sample %r is left out from here on: %s", name, reason)


@dataclass(eq=False)
class BatchAssembler:
    """Loads the local batches of one rank, on one thread and in one order on all ranks.

    What has an owner is read once and sent to where it is wanted. Everything else is read each
    time. Any thread may `ask` for a mini-batch before, in the same order, and has to `drop` what it
    does not `load`.
    """

    schedule: Schedule
    planner: BatchPlanner
    threads: ReadingThreads
    kind: TargetKind
    store: Store
    store_room: int  # the most that the store of any rank will hold in memory [B]
    staging_room: int  # and on disk [B]
    transport: HostP2P | None
    skipped: Skipped | None  # what any rank cannot read is left out by all
    _failed: Exception | None = None
    _to_keep: set[int] = field(default_factory=set)  # samples that were asked for

    def __post_init__(self) -> None:
        self._batches = functools.lru_cache(2)(self.schedule.batches)

    @property
    def reader(self) -> Reader:
        """Returns what reads for this rank."""
        return self.threads.reader

    def ask(self, epoch: int, step: int) -> BoxesAhead:
        """Has threads begin to read what `load` will need."""
        wanted = []
        gone = set() if self.skipped is None else self.skipped.samples
        samples = [sample for sample in self._batches(epoch)[step] if sample not in gone]
        for plan in self.planner.plan(self.schedule.pass_of(epoch, step), samples):
            box = self.planner.kept_box(plan.sample) if plan.keeps else plan.transfer.wanted
            if box is not None and self._will_read(plan):
                wanted.append((plan.sample, box))
        return BoxesAhead(self.threads, wanted)

    def _will_read(self, plan: SlotPlan) -> bool:
        """Tells if a box has yet to be read; one that will be kept is asked for once."""
        if not plan.keeps:
            return plan.reads
        # In this order, for another thread keeps a box before it is no longer to be kept.
        if plan.sample in self._to_keep or self.store.holds(plan.sample):
            return False
        if self.store.has_room(plan.sample):
            self._to_keep.add(plan.sample)
        return True

    def drop(self, ahead: BoxesAhead) -> None:
        """Forgets what was asked for and is not taken."""
        self._to_keep.difference_update(ahead.samples)
        ahead.drop()

    def load(self, epoch: int, step: int, ahead: BoxesAhead | None) -> LocalBatch | None:
        """Returns the local batch of a step; None if all of its samples are skipped.

        ``ahead`` is what `ask` returned for it, if it was asked for.

        Raises:
            DataError: a file cannot be read or holds values that cannot be right.
            CommError: another rank died or did not answer in time.
        """
        ahead = ahead or BoxesAhead(self.threads)
        try:
            if self._failed is not None and self.transport is not None:
                raise self._failed  # the others wait for what this rank has not sent
            return self._load(epoch, step, ahead)
        except Exception as error:
            self._failed = error
            raise
        finally:
            self.drop(ahead)

    def _load(self, epoch: int, step: int, ahead: BoxesAhead) -> LocalBatch | None:
        """Loads a local batch, as `load` says.

        Distribution scheme: 1. where samples may be skipped, read what this rank has to and agree
        with all others on what cannot be read; 2. expect what other ranks keep and this one wants;
        3. send what this rank keeps and others want; 4. copy or read the rest; 5. wait for what
        was expected, and for what was sent a step ago.
        """
        samples = self._batches(epoch)[step]
        turn = self.schedule.pass_of(epoch, step)  # a repeated sample is augmented anew
        if self.skipped is not None:
            samples = self.skipped.agree(samples, lambda left: self._read_all(turn, left, ahead))
            if len(self.skipped.samples) == len(self.schedule.samples):
                raise DataError("no sample of this split can be read: all were left out")
            if not samples:
                return None
        plans = self.planner.plan(turn, samples)
        computed = [plan for plan in plans if plan.transfer.wanted is not None]
        alone = len(computed) == 1 and self._lies_as_wanted(computed[0])
        batch: LocalBatch | None = None
        assemblies: list[SampleAssembly] = []
        if not alone:
            batch = self._empty_batch(samples, len(computed))
            slots = zip(computed, batch.values.numpy(), batch.targets.numpy(), strict=True)
            for plan, *slot in slots:
                assemblies.append(SampleAssembly(plan, SampleBox(*slot), self.kind))
                if self.transport is not None:
                    assemblies[-1].expect(self.transport, epoch, step)
        kept = {plan.slot: self._send(epoch, step, plan, ahead) for plan in plans if plan.keeps}
        for assembly in assemblies:
            plan = assembly.plan
            if plan.reads:
                assembly.fill(self._read(plan, ahead))
            elif plan.keeps:
                assembly.put(kept[plan.slot])
        for assembly in assemblies:
            assembly.finish()
        if alone:
            (plan,) = computed
            box = self._read(plan, ahead) if plan.reads else kept[plan.slot]
            types = (self.reader.source.dtype, self.kind.dtype)
            values, target = (
                torch.from_numpy(np.require(array, dtype, ["C", "W"]))[None]
                for array, dtype in zip(box, types, strict=True)
            )
            batch = self._batch(values, target, samples, kept=True)
        if self.transport is not None:
            self.transport.settle()
        return batch

    def fill(self) -> None:
        """Reads all that this rank keeps; raises as `load`."""
        mine = self.planner.keeps
        batches = self.schedule.batches(0)
        ours = filter(mine, itertools.chain(*batches)) if self.threads.count else ()
        ahead = BoxesAhead(self.threads, ((each, self.planner.kept_box(each)) for each in ours))
        keep = functools.partial(self._keep, ahead=ahead)
        try:
            for batch in batches:
                if self.skipped is None:
                    for sample in filter(mine, batch):
                        keep(sample)
                else:
                    self.skipped.agree(batch, lambda left: _failures(filter(mine, left), keep))
        finally:
            ahead.drop()
            self.threads.end()

    def _read_all(self, turn: int, samples: Sequence[int], ahead: BoxesAhead) -> Reasons:
        """Read what this rank has to of a mini-batch, and say of which samples it cannot."""
        plans = {plan.sample: plan for plan in self.planner.plan(turn, samples)}

        def attempt(sample: int) -> None:
            plan = plans[sample]
            if sample in ahead.ready:
                return
            if plan.keeps:
                ahead.ready[sample] = self._keep(sample, ahead)
            elif plan.reads:
                ahead.ready[sample] = self._read(plan, ahead)

        return _failures(list(plans), attempt)

    def _keep(self, sample: int, ahead: BoxesAhead) -> SampleBox:
        """Returns what this rank keeps of a sample; it is read if it is not here."""
        box = self.planner.kept_box(sample)
        return self.store.keep(sample, functools.partial(ahead.read, sample, box))

    def _read(self, plan: SlotPlan, ahead: BoxesAhead) -> SampleBox:
        """Reads what this rank computes of a sample, if it was not read before."""
        assert plan.transfer.wanted is not None
        if plan.sample in ahead.ready:
            return ahead.ready.pop(plan.sample)
        return ahead.read(plan.sample, plan.transfer.wanted)

    def _lies_as_wanted(self, plan: SlotPlan) -> bool:
        """Says if a mini-batch of this sample alone is what is kept or read of it, not a copy.

        On a device batches are page-locked, which neither of both is.
        """
        if self._pinned or plan.augmentation != IDENTITY:
            return False
        return plan.reads or (plan.keeps and plan.transfer.own == plan.transfer.wanted)

    @functools.cached_property
    def buffers(self) -> PageLockedBuffers:
        """Returns what page-locked batches are lent from, made where the first one is."""
        return PageLockedBuffers()

    @property
    def _pinned(self) -> bool:
        return self.planner.boxes.grid.device.type == "cuda"

    def _empty_batch(self, samples: list[int], count: int) -> LocalBatch:
        """Makes room for the ``count`` samples of a mini-batch that this rank computes."""
        shape = self.planner.boxes.maps[samples[0]].own.shape
        values = self._empty((count, *shape), self.reader.source.dtype, pinned=self._pinned)
        targets = self._empty(
            (count, *self.kind.shape(shape[1:])),
            self.kind.dtype,
            pinned=self._pinned and self.kind.count is None,
        )
        return self._batch(values, targets, samples, kept=False)

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, pinned: bool) -> torch.Tensor:
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        return self.buffers.lend(shape, kind) if pinned else torch.empty(shape, dtype=kind)

    def _batch(
        self, values: torch.Tensor, targets: torch.Tensor, samples: list[int], *, kept: bool
    ) -> LocalBatch:
        """Makes a local batch; the samples of a mini-batch are of one shape."""
        count = len(samples)
        boxes = self.planner.boxes
        shape = boxes.maps[samples[0]].shape
        partition = boxes.grid.partition((count, *shape))
        channels = self.kind.count is not None
        cut = boxes.grid.partition((count, *self.kind.shape(shape[1:])), channels=channels)
        return LocalBatch(values, targets, partition, cut, tuple(samples), kept)

    def _send(self, epoch: int, step: int, plan: SlotPlan, ahead: BoxesAhead) -> SampleBox:
        """Begin to send what others want of a sample that this rank keeps; what it keeps."""
        kept = ahead.ready.pop(plan.sample, None) or self._keep(plan.sample, ahead)
        for part in plan.transfer.sends:
            assert self.transport is not None
            assert plan.transfer.own is not None
            views = part_of(kept, plan.transfer.own, part.box, self.kind)
            for word, view in enumerate(views):
                tag = tag_of(epoch, step, plan.slot, word)
                what = f"epoch {epoch}, step {step}, sample {plan.sample}: {MESSAGE_WORDS[word]}"
                self.transport.send(np.ascontiguousarray(view), part.rank, tag, what)
        return kept


def _failures(samples: Iterable[int], attempt: Callable[[int], object]) -> Reasons:
    """Says why ``attempt`` fails, for the samples for which it does."""
    reasons = {}
    for sample in samples:
        try:
            attempt(sample)
        except DataError as error:
            reasons[sample] = str(error)
    return reasons
