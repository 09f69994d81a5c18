"""`BatchAssembler`: the local part of every mini-batch, from files or from ranks that keep it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from hyperslab.comm.host import BoxTransport
from hyperslab.data.augment import IDENTITY
from hyperslab.data.batch import BatchAllocator, LocalBatch
from hyperslab.data.reader import Reader
from hyperslab.data.sample_assembly import SampleAssembly, TargetKind, part_of, send
from hyperslab.data.sampler import Schedule
from hyperslab.data.skip import Reasons, Skipped
from hyperslab.data.store.boxes import SampleBox, Store
from hyperslab.data.store.plan import BatchPlanner, SlotPlan
from hyperslab.errors import DataError

BoxesRead = dict[int, SampleBox]
"""By sample, the wanted box, read before it was agreed that it can be."""


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
        transport: BoxTransport | None,
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
        """The local batch of a step; None if all of its samples are skipped.

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
        return _reasons(mine, self._keep)

    def _samples(self, epoch: int, step: int) -> list[int]:
        if self._batches[0] != epoch:
            self._batches = (epoch, self.schedule.batches(epoch))
        return self._batches[1][step]

    def _readable(
        self, skipped: Skipped, turn: int, samples: list[int], ready: BoxesRead
    ) -> list[int]:
        """The samples of a mini-batch that all ranks can read; some are then ``ready``."""
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

        return _reasons(list(plans), attempt)

    def _keep(self, sample: int) -> SampleBox:
        """This rank's own box of a sample that its replica keeps; read if it is not here yet."""
        own = self.planner.boxes.maps[sample].own
        return self.store.keep(sample, functools.partial(self.reader.read, sample, own))

    def _read(self, plan: SlotPlan) -> SampleBox:
        assert plan.transfer.wanted is not None
        return self.reader.read(plan.sample, plan.transfer.wanted)

    def _zero_copy_plan(self, computed: Sequence[SlotPlan]) -> SlotPlan | None:
        """The only sample that this rank computes, if it keeps that as it is wanted."""
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
            send(box, part.rank, self.transport, (epoch, step, plan.slot), plan.sample)
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


def _reasons(samples: Sequence[int], attempt: Callable[[int], object]) -> Reasons:
    """Why ``attempt`` fails, for the samples for which it does."""
    reasons = {}
    for sample in samples:
        try:
            attempt(sample)
        except DataError as error:
            reasons[sample] = str(error)
    return reasons
