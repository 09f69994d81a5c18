"""Assembles this rank's part of a mini-batch, of what is read, kept, or sent by other ranks.

A `Reader` reads boxes of a `Source`, checked and counted; a `SampleAssembly` puts one sample's
box together; a `BatchAssembler` does so for every mini-batch, in one order on all ranks, into a
`LocalBatch`. A sample that any rank cannot read all ranks leave out (`Skipped`).
"""

from __future__ import annotations

import functools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyperslab.comm.host_p2p import HostP2P, ReceivingArray, tag_of
from hyperslab.data.augment import IDENTITY, Symmetry
from hyperslab.data.sampler import Schedule
from hyperslab.data.store import BatchPlanner, SampleBox, SampleBoxes, SlotPlan, Store
from hyperslab.data.transforms import Transform
from hyperslab.errors import DataError
from hyperslab.formats.files import as_stored, check_finite, check_shape, reading
from hyperslab.formats.source import Array, Source
from hyperslab.formats.targets import check_classes
from hyperslab.geometry import Box, Partition


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

        Raises:
            DataError: a file cannot be read or holds values that cannot be right.
        """
        self._count(box.size * np.dtype(self.source.dtype).itemsize)
        name = self.source.where(sample)
        with reading(name):
            values = np.asarray(self.source.read(sample, box))
        where = f"{name}: {box}"
        check_shape(values, box.shape, where)
        values = as_stored(values, np.dtype(self.source.dtype), where)
        check_values(values, self.transform, where)
        return values

    def labels(self, sample: int, box: Box) -> Array:
        """Returns the classes of the voxels of ``box`` (d, h, w) as uint8; errors as `values`."""
        self._count(box.size * self.source.label_bytes)
        name = self.source.where(sample)
        with reading(name):
            labels = np.asarray(self.source.labels(sample, box))
        where = f"{name}: {box}"
        check_shape(labels, box.shape, where)
        check_classes(labels, self.source.classes, where)
        return labels

    def target(self, sample: int, box: Box) -> Array:
        """The labels of a box (d, h, w) where voxels have classes, else the numbers (P,) float64.

        Errors as `values`.
        """
        if self.source.classes:
            return self.labels(sample, box)
        name = self.source.where(sample)
        with reading(name):
            target = np.asarray(self.source.target(sample), np.float64)
        names = self.source.parameters.names
        if target.shape != (len(names),):
            raise DataError(
                f"{name}: has targets of shape {target.shape} but "
                f"{len(names)} parameters: {', '.join(names)}"
            )
        return target

    def _count(self, size: int) -> None:
        with self._counting:
            self.bytes_read += size


def check_values(values: Array, transform: Transform, where: str) -> None:
    """Refuse values that cannot be right before they reach the network as NaN.

    Raises:
        DataError: NaN or infinite; negative integers where the transform takes them for counts; a
            value at or below the transform's bound.
    """
    low, _ = check_finite(values, where)
    if not transform.signed and values.dtype.kind == "i" and low < 0:
        raise DataError(f"{where} holds negative counts, down to {low}")
    if low <= transform.above:
        raise DataError(f"{where} holds {low}, {transform.why}")


def os_bytes_read() -> int:
    """Bytes that this process has read by system calls so far [B], from any file (Linux).

    Against `Dataset.bytes_read` it shows what the file format read beyond the boxes asked for.
    """
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


MESSAGE_WORDS = ("values", "labels or target")
"""The two messages of which a box consists."""


class TargetKind(ABC):
    """Defines the target of a sample: how much of it goes with a box of the volume."""

    dtype: np.dtype[Any]

    @abstractmethod
    def shape(self, voxels: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of what goes with so many voxels (d, h, w)."""

    @abstractmethod
    def part(self, target: Array, inside: tuple[slice, ...]) -> Array:
        """Returns a view of what goes with a part of the voxels."""

    @abstractmethod
    def augmented(self, target: Array, augmentation: Symmetry) -> Array:
        """Returns the target of the augmented voxels; a view."""


class LabelTarget(TargetKind):
    """The classes of the voxels (d, h, w): they are cut and augmented as the voxels are."""

    dtype = np.dtype(np.uint8)

    def shape(self, voxels: tuple[int, ...]) -> tuple[int, ...]:
        return voxels

    def part(self, target: Array, inside: tuple[slice, ...]) -> Array:
        return target[inside]

    def augmented(self, target: Array, augmentation: Symmetry) -> Array:
        return augmentation.apply(target[None])[0]


@dataclass(frozen=True)
class NumberTarget(TargetKind):
    """The numbers (P,) of a sample: they go with every part of it, however it is augmented."""

    count: int
    dtype = np.dtype(np.float64)

    def shape(self, voxels: tuple[int, ...]) -> tuple[int, ...]:
        return (self.count,)

    def part(self, target: Array, inside: tuple[slice, ...]) -> Array:
        return target

    def augmented(self, target: Array, augmentation: Symmetry) -> Array:
        return target


def target_kind(source: Source) -> TargetKind:
    """Labels where voxels have classes, else numbers."""
    return LabelTarget() if source.classes else NumberTarget(len(source.parameters.names))


def part_of(whole: SampleBox, box: Box, part: Box, kind: TargetKind) -> SampleBox:
    """Views ``part`` of what holds ``box``."""
    inside = part.slices(box)
    return SampleBox(whole.values[inside], kind.part(whole.target, inside[1:]))


@dataclass
class SampleAssembly:
    """The stored ``box`` becomes, by ``augmentation``, a ``slot`` of the mini-batch."""

    box: Box
    augmentation: Symmetry
    slot: SampleBox
    kind: TargetKind
    _waiting: list[tuple[ReceivingArray, Array, Array]] = field(default_factory=list)
    _stored: SampleBox | None = None

    @property
    def stored(self) -> SampleBox:
        """Room for the box as it is stored; where that is what is wanted, the slot itself."""
        if self._stored is None and self.augmentation == IDENTITY:
            self._stored = self.slot
        if self._stored is None:
            values = np.empty(self.box.shape, self.slot.values.dtype)
            target = np.empty(self.kind.shape(self.box.shape[1:]), self.slot.target.dtype)
            self._stored = SampleBox(values, target)
        return self._stored

    def expect(self, part: Box, peer: int, transport: HostP2P, key: tuple[int, int, int]) -> None:
        """Begin to receive a part from another rank; ``key`` is epoch, step and slot."""
        for word, view in enumerate(part_of(self.stored, self.box, part, self.kind)):
            out = view if view.flags.c_contiguous else np.empty(view.shape, view.dtype)
            receiving = transport.receive(out, peer, tag_of(*key, word))
            self._waiting.append((receiving, out, view))

    def put(self, part: Box, kept: SampleBox) -> None:
        """Fill in a part that this rank keeps."""
        views = part_of(self.stored, self.box, part, self.kind)
        for view, value in zip(views, kept, strict=True):
            view[...] = value

    def finish(self) -> None:
        """Wait for all parts and put them, augmented, into the slot.

        Raises:
            CommError: see `Receiving.wait`.
        """
        for receiving, out, view in self._waiting:
            receiving.wait()
            if out is not view:
                view[...] = out
        if self._stored is not None and self._stored is not self.slot:
            self.fill(self._stored)

    def fill(self, stored: SampleBox) -> None:
        """Put the whole box, augmented, into the slot."""
        if self.augmentation == IDENTITY:
            self.slot.values[...] = stored.values
            self.slot.target[...] = stored.target
            return
        self.slot.values[...] = self.augmentation.apply(stored.values)
        self.slot.target[...] = self.kind.augmented(stored.target, self.augmentation)


def send_part(
    part: SampleBox, peer: int, transport: HostP2P, key: tuple[int, int, int], sample: int
) -> None:
    """Begin to send a part of what this rank keeps; the other end of `SampleAssembly.expect`."""
    epoch, step, _ = key
    for word, view in enumerate(part):
        what = f"epoch {epoch}, step {step}, sample {sample}: {MESSAGE_WORDS[word]}"
        transport.send(np.ascontiguousarray(view), peer, tag_of(*key, word), what)


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """Holds this rank's box (b, C, d, h, w) of a mini-batch in its storage type, and its targets.

    These are numbers (b, P) float64 or the classes of the voxels (b, d, h, w) as uint8. ``kept``:
    both are the store's own, which must not be changed.
    """

    values: torch.Tensor
    targets: torch.Tensor
    partition: Partition  # of the values
    target_partition: Partition
    samples: tuple[int, ...] = ()  # of the whole mini-batch
    kept: bool = False


class BatchAllocator:
    """Makes room for the local batches of a data set; on CUDA, page-locked.

    The samples of a mini-batch are of one shape.
    """

    def __init__(self, source: Source, boxes: SampleBoxes, kind: TargetKind) -> None:
        self.source = source
        self.boxes = boxes
        self.grid = boxes.grid
        maps = boxes.by_shape.values()
        self.target_shapes = {found.shape: kind.shape(found.own.shape[1:]) for found in maps}
        self.whole_targets = {found.shape: kind.shape(found.shape[1:]) for found in maps}
        self.value_dtype = _torch_dtype(source.dtype)
        self.target_dtype = _torch_dtype(kind.dtype)
        self.pinned = self.grid.device.type == "cuda"

    def empty(self, samples: list[int], count: int) -> LocalBatch:
        """Room for the ``count`` samples of a mini-batch that this rank computes."""
        boxes = self.boxes.maps[samples[0]]
        shape = boxes.own.shape
        values = torch.empty((count, *shape), dtype=self.value_dtype, pin_memory=self.pinned)
        targets = torch.empty(
            (count, *self.target_shapes[boxes.shape]),
            dtype=self.target_dtype,
            pin_memory=self.pinned and self.source.classes != (),
        )
        return self._batch(values, targets, samples, kept=False)

    def around(self, samples: list[int], box: SampleBox) -> LocalBatch:
        """Returns the only sample that this rank computes, where the store has it: no copy."""
        values = torch.from_numpy(box.values)[None]
        return self._batch(values, torch.from_numpy(box.target)[None], samples, kept=True)

    def _batch(
        self, values: torch.Tensor, targets: torch.Tensor, samples: list[int], *, kept: bool
    ) -> LocalBatch:
        count = len(samples)
        shape = self.boxes.maps[samples[0]].shape
        partition = self.grid.partition((count, *shape))
        channels = not self.source.classes
        cut = self.grid.partition((count, *self.whole_targets[shape]), channels=channels)
        return LocalBatch(values, targets, partition, cut, tuple(samples), kept)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


log = logging.getLogger("hyperslab")

Reasons = dict[int, str]
"""Errors by sample that this rank cannot read."""


class Skipped:
    """The samples that are left out, from the step on at which they could not be read."""

    def __init__(self, source: Source, transport: HostP2P | None) -> None:
        self.source = source
        self.transport = transport
        self.samples: set[int] = set()

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


BoxesRead = dict[int, SampleBox]
"""Boxes by sample that were read before it was agreed that all ranks can."""


class BatchAssembler:
    """Local batches of one rank; all its calls come from one thread, in one order on all ranks.

    What has an owner is read once and sent to where it is wanted. Everything else is read each
    time. With ``skipped``, what any rank cannot read is left out by all of them. ``store_room``:
    the most that the store of any rank will hold in memory [B].
    """

    def __init__(
        self,
        schedule: Schedule,
        planner: BatchPlanner,
        reader: Reader,
        *,
        kind: TargetKind,
        allocator: BatchAllocator,
        store: Store,
        store_room: int,
        transport: HostP2P | None,
        skipped: Skipped | None,
    ) -> None:
        self.schedule = schedule
        self.planner = planner
        self.reader = reader
        self.kind = kind
        self.allocator = allocator
        self.store = store
        self.store_room = store_room
        self.transport = transport
        self.skipped = skipped
        self._on_cpu = planner.boxes.grid.device.type == "cpu"
        self._failed: Exception | None = None
        self._batches: tuple[int, list[list[int]]] = (-1, [])

    def load(self, epoch: int, step: int) -> LocalBatch | None:
        """Returns the local batch of a step; None if all of its samples are skipped.

        Raises:
            DataError: a file cannot be read or holds values that cannot be right.
            CommError: another rank died or did not answer in time.
        """
        if self._failed is not None and self.transport is not None:
            raise self._failed  # the others wait for what this rank has not sent
        try:
            return self._load(epoch, step)
        except Exception as error:
            self._failed = error
            raise

    def _load(self, epoch: int, step: int) -> LocalBatch | None:
        """See `load`.

        Distribution scheme: 1. where samples may be skipped, read what this rank has to and agree
        with all others on what cannot be read; 2. expect what other ranks keep and this one wants;
        3. send what this rank keeps and others want; 4. copy or read the rest; 5. wait for what
        was expected, and for what was sent a step ago.
        """
        samples = self._samples(epoch, step)
        turn = self.schedule.pass_of(epoch, step)  # a repeated sample is augmented anew
        ready: BoxesRead = {}
        if self.skipped is not None:
            samples = self._readable(self.skipped, turn, samples, ready)
            if not samples:
                return None
        plans = self.planner.plan(turn, samples)
        computed = [plan for plan in plans if plan.transfer.wanted is not None]
        alone = self._zero_copy_plan(computed)
        batch: LocalBatch | None = None
        assemblies: list[SampleAssembly] = []
        if alone is None:
            batch = self.allocator.empty(samples, len(computed))
            assemblies = self._expect(epoch, step, batch, computed)
        kept = {plan.slot: self._send(epoch, step, plan) for plan in plans if plan.keeps}
        for assembly, plan in zip(assemblies, computed, strict=False):
            self._complete(assembly, plan, kept.get(plan.slot), ready)
        for assembly in assemblies:
            assembly.finish()
        if alone is not None:
            batch = self.allocator.around(samples, kept[alone.slot])
        if self.transport is not None:
            self.transport.settle()
        return batch

    def fill(self) -> None:
        """Read all that this rank keeps.

        Raises:
            DataError: see `load`.
        """
        for batch in self.schedule.batches(0):
            mine = [sample for sample in batch if self.planner.keeps(sample)]
            if self.skipped is None:
                for sample in mine:
                    self._keep(sample)
            else:
                self.skipped.agree(batch, self._try_to_keep)

    def _try_to_keep(self, samples: Sequence[int]) -> Reasons:
        mine = [sample for sample in samples if self.planner.keeps(sample)]
        return _failures(mine, self._keep)

    def _samples(self, epoch: int, step: int) -> list[int]:
        if self._batches[0] != epoch:
            self._batches = (epoch, self.schedule.batches(epoch))
        return self._batches[1][step]

    def _readable(
        self, skipped: Skipped, turn: int, samples: list[int], ready: BoxesRead
    ) -> list[int]:
        """Returns the samples of a mini-batch that all ranks can read; some are then ``ready``."""
        found = skipped.agree(samples, lambda left: self._read_ahead(turn, left, ready))
        if len(skipped.samples) == len(self.schedule.samples):
            raise DataError("no sample of this split can be read: all were left out")
        return found

    def _read_ahead(self, turn: int, samples: Sequence[int], ready: BoxesRead) -> Reasons:
        """Read what this rank has to of a mini-batch, and say of which samples it cannot."""
        plans = {plan.sample: plan for plan in self.planner.plan(turn, samples)}

        def attempt(sample: int) -> None:
            plan = plans[sample]
            if plan.keeps:
                self._keep(sample)
            elif plan.reads and sample not in ready:
                ready[sample] = self._read(plan)

        return _failures(list(plans), attempt)

    def _keep(self, sample: int) -> SampleBox:
        """This rank's own box of a sample that its replica keeps; read if it is not here yet."""
        own = self.planner.boxes.maps[sample].own
        return self.store.keep(sample, functools.partial(self.reader.read, sample, own))

    def _read(self, plan: SlotPlan) -> SampleBox:
        assert plan.transfer.wanted is not None
        return self.reader.read(plan.sample, plan.transfer.wanted)

    def _zero_copy_plan(self, computed: Sequence[SlotPlan]) -> SlotPlan | None:
        """Returns the only sample that this rank computes, if it keeps that as it is wanted."""
        if len(computed) != 1 or not self._on_cpu:
            return None
        (plan,) = computed
        return plan if plan.keeps and plan.augmentation == IDENTITY else None

    def _expect(
        self, epoch: int, step: int, batch: LocalBatch, computed: Sequence[SlotPlan]
    ) -> list[SampleAssembly]:
        """Begin to receive what other ranks keep of the samples that this one computes."""
        values = batch.values.numpy()
        targets = batch.targets.numpy()
        assemblies = []
        for number, plan in enumerate(computed):
            assert plan.transfer.wanted is not None
            room = SampleBox(values[number], targets[number])
            assembly = SampleAssembly(plan.transfer.wanted, plan.augmentation, room, self.kind)
            for part in plan.transfer.receives:
                assert self.transport is not None
                key = (epoch, step, plan.slot)
                assembly.expect(part.box, part.rank, self.transport, key)
            assemblies.append(assembly)
        return assemblies

    def _send(self, epoch: int, step: int, plan: SlotPlan) -> SampleBox:
        """Begin to send what others want of a sample that this rank keeps; what it keeps."""
        kept = self._keep(plan.sample)
        for part in plan.transfer.sends:
            assert self.transport is not None
            own = self.planner.boxes.maps[plan.sample].own
            box = part_of(kept, own, part.box, self.kind)
            send_part(box, part.rank, self.transport, (epoch, step, plan.slot), plan.sample)
        return kept

    def _complete(
        self,
        assembly: SampleAssembly,
        plan: SlotPlan,
        kept: SampleBox | None,
        ready: BoxesRead,
    ) -> None:
        """Fill in what is here, or has to be read for this step alone."""
        if plan.reads:
            box = ready.pop(plan.sample, None)
            assembly.fill(self._read(plan) if box is None else box)
            return
        part = plan.transfer.kept
        if kept is not None and part is not None:
            own = self.planner.boxes.maps[plan.sample].own
            assembly.put(part, part_of(kept, own, part, self.kind))


def _failures(samples: Sequence[int], attempt: Callable[[int], object]) -> Reasons:
    """Why ``attempt`` fails, for the samples for which it does."""
    reasons = {}
    for sample in samples:
        try:
            attempt(sample)
        except DataError as error:
            reasons[sample] = str(error)
    return reasons
