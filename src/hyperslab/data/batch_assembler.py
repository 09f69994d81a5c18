"""`BatchAssembler`: the local part of every mini-batch, from files or from ranks that keep it.

Legend: a *home* box is the one that a rank holds of every sample on the grid. Augmentation wants
another box of the file, the one that becomes it. Without augmentation the two are the same, and a
box only ever travels between ranks of the same position; with it, to where it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from hyperslab.data.augment import IDENTITY, Symmetry
from hyperslab.data.batch import BoxMap, LocalBatch
from hyperslab.data.reader import Reader
from hyperslab.data.sample_assembly import SampleAssembly, part_of, send
from hyperslab.data.sampler import Schedule
from hyperslab.data.skip import Reasons, Skipped
from hyperslab.data.store.boxes import SampleBox, Store
from hyperslab.data.store.ownership import Ownership, consumers
from hyperslab.data.store.transport import BoxTransport
from hyperslab.errors import DataError
from hyperslab.geometry import Box

Read = dict[int, SampleBox]
"""By sample, the wanted box, read before it was agreed that it can be."""


class BatchAssembler:
    """Blocks for one rank; all its calls come from one thread, in the same order on all ranks.

    What has an owner is read once and sent to where it is wanted. Everything else is read
    each time. With ``skipped``, what any rank cannot read is left out by all of them.
    """

    def __init__(
        self,
        reader: Reader,
        boxes: BoxMap,
        schedule: Schedule,
        *,
        augment: bool,
        dtype: torch.dtype,
        ownership: Ownership,
        store: Store,
        room: int,
        transport: BoxTransport | None,
        skipped: Skipped | None,
    ) -> None:
        self.reader, self.boxes, self.schedule = reader, boxes, schedule
        self.augment, self.dtype = augment, dtype
        self.owner, self.store, self.room = ownership.replica, store, room
        self.transport, self.skipped = transport, skipped
        self._replica = boxes.grid.coords["data"]
        self._failed: Exception | None = None
        self._batches: tuple[int, list[list[int]]] = (-1, [])

    def load(self, epoch: int, step: int) -> LocalBatch | None:
        """The block of a step; None if all of its samples are skipped.

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
        samples = self._batch(epoch, step)
        read: Read = {}
        if self.skipped is not None:
            samples = self.skipped.agree(samples, lambda left: self._read_ahead(epoch, left, read))
            if len(self.skipped.samples) == len(self.schedule.samples):
                raise DataError("no sample of this split can be read: all were left out")
            if not samples:
                return None
        mine = self.boxes.local_slots(len(samples))
        zero_copy = self._zero_copy_sample(epoch, samples, mine)
        values, targets = self.boxes.empty(0 if zero_copy is not None else len(mine))
        assemblies = []
        for slot, place in enumerate(mine if zero_copy is None else ()):
            augmentation = self._augmentation(epoch, samples[place])
            room = SampleBox(values.numpy()[slot], targets.numpy()[slot])
            box = augmentation.stored(self.boxes.own, self.boxes.source.shape)
            assemblies.append(SampleAssembly(box, augmentation, room))
            self._expect(assemblies[-1], (epoch, step, place), samples[place])
        self._send(epoch, step, samples)
        for place, assembly in zip(mine, assemblies, strict=False):
            self._complete(assembly, samples[place], read)
        for assembly in assemblies:
            assembly.finish()
        if zero_copy is not None:
            values, targets = (torch.from_numpy(part)[None] for part in self._home(zero_copy))
        if self.transport is not None:
            self.transport.settle()
        return self.boxes.block(values, targets, samples, self.dtype, kept=zero_copy is not None)

    def fill(self) -> None:
        """Read all that this rank keeps.

        Raises:
            DataError: see `load`.
        """
        for batch in self.schedule.batches(0):
            if self.skipped is None:
                for sample in batch:
                    self._keep(sample)
            else:
                self.skipped.agree(batch, lambda left: _reasons(left, self._keep))

    def _keep(self, sample: int) -> None:
        if self.owner.get(sample) == self._replica:
            self._home(sample)

    def _batch(self, epoch: int, step: int) -> list[int]:
        if self._batches[0] != epoch:
            self._batches = (epoch, self.schedule.batches(epoch))
        return self._batches[1][step]

    def _augmentation(self, epoch: int, sample: int) -> Symmetry:
        """Drawn from (seed, epoch, sample), so all ranks draw the same; labels are only flipped."""
        if not self.augment:
            return IDENTITY
        source = self.boxes.source
        turns = not source.classes
        return Symmetry.draw(source.shape, self.schedule.seed, epoch, sample, turns=turns)

    def _home(self, sample: int) -> SampleBox:
        """This rank's home box of a sample that its replica keeps; read if it is not here yet."""
        sample_box = self.store.get(sample)
        if sample_box is None:
            sample_box = self.store.put(sample, self._read(sample, self.boxes.own))
        return sample_box

    def _read(self, sample: int, box: Box) -> SampleBox:
        voxels = Box(box.lo[1:], box.hi[1:])
        return SampleBox(self.reader.values(sample, box), self.reader.target(sample, voxels))

    def _read_ahead(self, epoch: int, samples: Sequence[int], read: Read) -> Reasons:
        """Read what this rank has to of a mini-batch, and say of which samples it cannot."""
        mine = {samples[place] for place in self.boxes.local_slots(len(samples))}

        def attempt(sample: int) -> None:
            self._keep(sample)
            if sample in mine and sample not in self.owner and sample not in read:
                box = self._augmentation(epoch, sample).stored(
                    self.boxes.own, self.boxes.source.shape
                )
                read[sample] = self._read(sample, box)

        return _reasons(samples, attempt)

    def _zero_copy_sample(
        self, epoch: int, samples: Sequence[int], mine: Sequence[int]
    ) -> int | None:
        """The only sample that this rank computes, if it has it as it is wanted: no copy then."""
        if len(mine) != 1 or self.boxes.grid.device.type != "cpu":
            return None
        sample = samples[mine[0]]
        here = (
            self.owner.get(sample) == self._replica
            and self._augmentation(epoch, sample) == IDENTITY
        )
        return sample if here else None

    def _holders(self, replica: int, augmentation: Symmetry) -> Iterator[int]:
        """The ranks of a replica that may have, or want, a part of this rank's box."""
        if augmentation == IDENTITY:
            yield self.boxes.peer(replica)
        else:
            yield from self.boxes.ranks(replica)

    def _expect(self, assembly: SampleAssembly, key: tuple[int, ...], sample: int) -> None:
        replica = self.owner.get(sample)
        if replica is None:
            return
        for rank in self._holders(replica, assembly.augmentation):
            part = self.boxes.of(rank).intersect(assembly.box)
            if rank != self.boxes.grid.rank and not part.empty:
                assert self.transport is not None
                assembly.expect(part, rank, self.transport, key)

    def _send(self, epoch: int, step: int, samples: Sequence[int]) -> None:
        here, me = self.boxes.own, self.boxes.grid.rank
        computed = consumers(len(samples), self.boxes.grid.data)
        for place, (sample, replicas) in enumerate(zip(samples, computed, strict=True)):
            if self.owner.get(sample) != self._replica:
                continue
            augmentation, sample_box = self._augmentation(epoch, sample), self._home(sample)
            for rank in (
                rank for replica in replicas for rank in self._holders(replica, augmentation)
            ):
                wanted = augmentation.stored(self.boxes.of(rank), self.boxes.source.shape)
                part = wanted.intersect(here)
                if rank != me and not part.empty:
                    assert self.transport is not None
                    what = f"epoch {epoch}, step {step}, sample {sample}"
                    send(sample_box, here, part, rank, self.transport, (epoch, step, place), what)

    def _complete(self, assembly: SampleAssembly, sample: int, read: Read) -> None:
        """Fill in what is here, or has to be read for this step alone."""
        replica = self.owner.get(sample)
        if replica is None:
            ready = read.pop(sample, None)
            assembly.fill(self._read(sample, assembly.box) if ready is None else ready)
        elif replica == self._replica:
            part = self.boxes.own.intersect(assembly.box)
            if not part.empty:
                assembly.put(part, part_of(self._home(sample), self.boxes.own, part))


def _reasons(samples: Sequence[int], attempt: Callable[[int], None]) -> Reasons:
    """Why ``attempt`` fails, for the samples for which it does."""
    reasons = {}
    for sample in samples:
        try:
            attempt(sample)
        except DataError as error:
            reasons[sample] = str(error)
    return reasons
