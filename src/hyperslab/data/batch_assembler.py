"""`Supply`: the block of every mini-batch, from files or from the ranks that keep its boxes.

Legend: a *home* box is the one that a rank holds of every sample on the grid. Augmentation wants
another box of the file, the one that becomes it. Without augmentation the two are the same, and a
box only ever travels between ranks of the same position; with it, to where it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from hyperslab.data.augment import STILL, Symmetry
from hyperslab.data.batch import Block, Places
from hyperslab.data.reader import Reader
from hyperslab.data.sample_assembly import Assembly, part_of, send
from hyperslab.data.sampler import Schedule
from hyperslab.data.skip import Reasons, Skipped
from hyperslab.data.store.boxes import Piece, Store
from hyperslab.data.store.ownership import Owners, consumers
from hyperslab.data.store.transport import Courier
from hyperslab.errors import DataError
from hyperslab.geometry import Box

Read = dict[int, Piece]
"""By sample, the wanted box, read before it was agreed that it can be."""


class Supply:
    """Blocks for one rank; all its calls come from one thread, in the same order on all ranks.

    What the ``owners`` keep is read once and sent to where it is wanted. Everything else is read
    each time. With ``skipped``, what any rank cannot read is left out by all of them.
    """

    def __init__(
        self,
        reader: Reader,
        places: Places,
        schedule: Schedule,
        *,
        augment: bool,
        dtype: torch.dtype,
        owners: Owners,
        store: Store,
        room: int,
        courier: Courier | None,
        skipped: Skipped | None,
    ) -> None:
        self.reader, self.places, self.schedule = reader, places, schedule
        self.augment, self.dtype = augment, dtype
        self.owner, self.store, self.room = owners.replica, store, room
        self.courier, self.skipped = courier, skipped
        self._replica = places.grid.coords["data"]
        self._failed: Exception | None = None
        self._batches: tuple[int, list[list[int]]] = (-1, [])

    def load(self, epoch: int, step: int) -> Block | None:
        """The block of a step; None if all of its samples are skipped.

        Raises:
            DataError: a file cannot be read or holds values that cannot be right.
            CommError: another rank died or did not answer in time.
        """
        if self._failed is not None and self.courier is not None:
            raise self._failed  # the others wait for what this rank has not sent
        try:
            return self._load(epoch, step)
        except Exception as error:
            self._failed = error
            raise

    def _load(self, epoch: int, step: int) -> Block | None:
        """See `load`.

        Distribution scheme: 1. where samples may be skipped, read what this rank has to and agree
        with all others on what cannot be read; 2. expect what other ranks keep and this one wants;
        3. send what this rank keeps and others want; 4. copy or read the rest; 5. wait for what
        was expected, and for what was sent a step ago.
        """
        samples = self._batch(epoch, step)
        read: Read = {}
        if self.skipped is not None:
            samples = self.skipped.agree(samples, lambda left: self._try(epoch, left, read))
            if len(self.skipped.samples) == len(self.schedule.samples):
                raise DataError("no sample of this split can be read: all were left out")
            if not samples:
                return None
        mine = self.places.mine(len(samples))
        lone = self._lone(epoch, samples, mine)
        values, targets = self.places.empty(0 if lone is not None else len(mine))
        assemblies = []
        for slot, place in enumerate(mine if lone is None else ()):
            turn = self._turn(epoch, samples[place])
            room = Piece(values.numpy()[slot], targets.numpy()[slot])
            box = turn.stored(self.places.here, self.places.source.shape)
            assemblies.append(Assembly(box, turn, room))
            self._expect(assemblies[-1], (epoch, step, place), samples[place])
        self._send(epoch, step, samples)
        for place, assembly in zip(mine, assemblies, strict=False):
            self._complete(assembly, samples[place], read)
        for assembly in assemblies:
            assembly.finish()
        if lone is not None:
            values, targets = (torch.from_numpy(part)[None] for part in self._home(lone))
        if self.courier is not None:
            self.courier.settle()
        return self.places.block(values, targets, samples, self.dtype, kept=lone is not None)

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

    def _turn(self, epoch: int, sample: int) -> Symmetry:
        """Drawn from (seed, epoch, sample), so all ranks draw the same; labels are only flipped."""
        if not self.augment:
            return STILL
        source = self.places.source
        turns = not source.classes
        return Symmetry.draw(source.shape, self.schedule.seed, epoch, sample, turns=turns)

    def _home(self, sample: int) -> Piece:
        """This rank's home box of a sample that its replica keeps; read if it is not here yet."""
        piece = self.store.get(sample)
        if piece is None:
            piece = self.store.put(sample, self._read(sample, self.places.here))
        return piece

    def _read(self, sample: int, box: Box) -> Piece:
        voxels = Box(box.lo[1:], box.hi[1:])
        return Piece(self.reader.values(sample, box), self.reader.rest(sample, voxels))

    def _try(self, epoch: int, samples: Sequence[int], read: Read) -> Reasons:
        """Read what this rank has to of a mini-batch, and say of which samples it cannot."""
        mine = {samples[place] for place in self.places.mine(len(samples))}

        def attempt(sample: int) -> None:
            self._keep(sample)
            if sample in mine and sample not in self.owner and sample not in read:
                box = self._turn(epoch, sample).stored(self.places.here, self.places.source.shape)
                read[sample] = self._read(sample, box)

        return _reasons(samples, attempt)

    def _lone(self, epoch: int, samples: Sequence[int], mine: Sequence[int]) -> int | None:
        """The only sample that this rank computes, if it has it as it is wanted: no copy then."""
        if len(mine) != 1 or self.places.grid.device.type != "cpu":
            return None
        sample = samples[mine[0]]
        here = self.owner.get(sample) == self._replica and self._turn(epoch, sample) == STILL
        return sample if here else None

    def _others(self, replica: int, turn: Symmetry) -> Iterator[int]:
        """The ranks of a replica that may have, or want, a part of this rank's box."""
        if turn == STILL:
            yield self.places.twin(replica)
        else:
            yield from self.places.ranks(replica)

    def _expect(self, assembly: Assembly, key: tuple[int, ...], sample: int) -> None:
        replica = self.owner.get(sample)
        if replica is None:
            return
        for rank in self._others(replica, assembly.turn):
            part = self.places.home(rank).intersect(assembly.box)
            if rank != self.places.grid.rank and not part.empty:
                assert self.courier is not None
                assembly.expect(part, rank, self.courier, key)

    def _send(self, epoch: int, step: int, samples: Sequence[int]) -> None:
        here, me = self.places.here, self.places.grid.rank
        computed = consumers(len(samples), self.places.grid.data)
        for place, (sample, replicas) in enumerate(zip(samples, computed, strict=True)):
            if self.owner.get(sample) != self._replica:
                continue
            turn, piece = self._turn(epoch, sample), self._home(sample)
            for rank in (rank for replica in replicas for rank in self._others(replica, turn)):
                wanted = turn.stored(self.places.home(rank), self.places.source.shape)
                part = wanted.intersect(here)
                if rank != me and not part.empty:
                    assert self.courier is not None
                    what = f"epoch {epoch}, step {step}, sample {sample}"
                    send(piece, here, part, rank, self.courier, (epoch, step, place), what)

    def _complete(self, assembly: Assembly, sample: int, read: Read) -> None:
        """Fill in what is here, or has to be read for this step alone."""
        replica = self.owner.get(sample)
        if replica is None:
            ready = read.pop(sample, None)
            assembly.fill(self._read(sample, assembly.box) if ready is None else ready)
        elif replica == self._replica:
            part = self.places.here.intersect(assembly.box)
            if not part.empty:
                assembly.put(part, part_of(self._home(sample), self.places.here, part))


def _reasons(samples: Sequence[int], attempt: Callable[[int], None]) -> Reasons:
    """Why ``attempt`` fails, for the samples for which it does."""
    reasons = {}
    for sample in samples:
        try:
            attempt(sample)
        except DataError as error:
            reasons[sample] = str(error)
    return reasons
