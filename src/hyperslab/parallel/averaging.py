"""Averages gradients over ranks, in either of two ways with one interface.

`Averaging` is the interface. `SharedGradients` does what DistributedDataParallel does for ranks
that share memory, where the gradients are kept, whole or in part; `BucketedGradients` has
DistributedDataParallel do it.
"""

from __future__ import annotations

import inspect
import queue
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from hyperslab.comm import Grid, Shown, log_once, shared_buffers, shared_channels
from hyperslab.comm.agreement import keeping_contact
from hyperslab.comm.rendezvous import settle
from hyperslab.geometry import Cut
from hyperslab.tensor.gradient_buffers import GradientBuffers
from hyperslab.util.capture import refuse_capture
from hyperslab.util.torch_internals import at_end_of_backward, version_of

Gradients = Literal["exact", "bf16"]
"""Says how gradients travel between machines: what `parallelize` may be told."""

GRADIENT_ALIGNMENT = 64  # [B] at which a gradient begins: a cache line
MOST_NAMES_LOGGED = 3


class Averaging:
    """Averages those gradients of a module that a backward pass brought.

    Parameters that no loss uses keep the ``.grad`` that they have, None mostly, as in serial torch.
    Those that the losses of some replicas use have no gradient, zero, from the others.

    ``owed``: parameters, by id, whose gradients accumulated without an average (``no_sync``);
    ``filling``: whether gradients are made here that no loss brought.
    """

    forward: Callable[..., Any]
    """Runs the module's forward, after which gradients will be averaged."""

    no_sync: Callable[[], AbstractContextManager[None]]
    """Lets gradients accumulate without communication within it."""

    def __init__(self, module: nn.Module, grid: Grid) -> None:
        self.module = module
        self.grid = grid
        self.owed: set[int] = set()
        self.filling = False
        self._said = False

    @property
    def synchronised(self) -> bool:
        """Tell whether the next forward's gradients will be averaged."""
        raise NotImplementedError

    def begin(self) -> None:
        """Begin a forward pass."""

    def collect(self, parameter: torch.Tensor, *, last: bool) -> None:
        """Take a gradient that a backward pass brought; the ``last`` of all has them averaged."""

    def finish(self, seen: set[int], averaged: Collection[int]) -> None:
        """End a backward pass that brought ``seen`` of the ``averaged`` parameters, by id."""
        raise NotImplementedError

    def missing(self, seen: Collection[int], averaged: Collection[int]) -> list[nn.Parameter]:
        """List the parameters to which a backward pass brought no gradient; the first is logged."""
        found = {
            name: p
            for name, p in self.module.named_parameters()
            if id(p) in averaged and id(p) not in seen
        }
        if not self._said:
            self._said = True
            names = [*found][:MOST_NAMES_LOGGED] + ["..."] * (len(found) > MOST_NAMES_LOGGED)
            log_once(
                self.grid,
                f"{len(found)} of {len(averaged)} parameters of {type(self.module).__name__} got "
                f"no gradient in a backward pass ({', '.join(names)}): their .grad stays as it is, "
                "as in serial torch",
            )
        return list(found.values())


# What a rank tells the others of a parameter.
NO_GRADIENT = 0  # no gradient
OLD_GRADIENT = 1  # one of earlier backward passes, averaged then
NEW_GRADIENT = 2  # one to which this backward pass has added
NEW_GRADIENT_IN_ROWS = 3  # NEW, and zero but for the rank's own rows


@dataclass(frozen=True, slots=True)
class _GradientSpan:
    """Locates a gradient: numbers ``begin`` to ``end`` of those of its type, ``row`` in a row.

    ``index``: of the byte that tells the others of it.
    """

    index: int
    dtype: int
    begin: int
    end: int
    row: int


class SharedGradients(Averaging):
    """Averages a module's gradients over ranks of one machine, as DistributedDataParallel does.

    Every ``.grad`` lies in memory that all ranks map. When the last gradient of a backward
    pass is there, each rank averages its share of the numbers, in place: nothing is sent. A rank
    of the CPU has no other core that could do it meanwhile. Of a layer whose filters ranks share
    only the rank that has them reads its gradient. What a pass brought on some ranks alone (the
    branch that one replica's samples took) is zero on the others.
    """

    synchronised = True

    def __init__(
        self,
        module: nn.Module,
        body: nn.Module,
        buffers: Sequence[torch.Tensor],
        grid: Grid,
        homes: GradientBuffers,
    ) -> None:
        """``buffers`` are bytes, by rank: as many as `bytes_needed`, and one of each parameter."""
        super().__init__(module, grid)
        self.forward = body.forward
        self.homes = homes
        self._parts: list[list[torch.Tensor]] = []  # of each dtype, by rank
        self._places: dict[int, _GradientSpan] = {}  # in the order of memory
        self._rows: dict[int, Cut] = {}
        self._collected: list[tuple[torch.Tensor, int]] = []  # with the version of its gradient
        coords = [grid.coords_of(rank) for rank in range(grid.size)]
        self._ranks = {  # at each place along an axis
            axis: [[rank for rank, at in enumerate(coords) if at[axis] == i] for i in range(extent)]
            for axis, extent in grid.extents.items()
        }
        parameters = _trainable(self.module)
        begin = 0
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            of_dtype = [p for p in parameters if p.dtype == dtype]
            end = begin + bytes_needed(of_dtype)
            self._parts.append([buffer[begin:end].view(dtype) for buffer in buffers])
            self._make_homes(of_dtype, self._parts[-1][grid.rank])
            begin = end
        self._nbytes = begin + len(self._places)
        self._told = [buffer[begin : self._nbytes] for buffer in buffers]

    @staticmethod
    def of(
        module: nn.Module, body: nn.Module, grid: Grid, homes: GradientBuffers
    ) -> SharedGradients | None:
        """Share a module's gradients, whose forward ``body`` runs; None without the memory for it.

        All ranks call this.
        """
        parameters = _trainable(module)
        buffers = shared_buffers(bytes_needed(parameters) + len(parameters))
        return None if buffers is None else SharedGradients(module, body, buffers, grid, homes)

    def _make_homes(self, parameters: Sequence[nn.Parameter], whole: torch.Tensor) -> None:
        begin = 0
        for parameter in parameters:
            home = whole[begin : begin + parameter.numel()]
            if torch.ops.aten.is_non_overlapping_and_dense(parameter):
                home = home.as_strided(parameter.shape, parameter.stride())
            self.homes.add(parameter, home.view(parameter.shape))
            end = begin + bytes_needed([parameter]) // parameter.element_size()
            row = parameter.numel() // max(1, parameter.shape[0]) if parameter.dim() else 1
            place = _GradientSpan(len(self._places), len(self._parts) - 1, begin, end, row)
            self._places[id(parameter)] = place
            begin = end

    def begin(self) -> None:
        self.homes.begin(averaged=self.synchronised)
        self._rows.clear()
        self._collected.clear()

    def collect(self, parameter: torch.Tensor, *, last: bool) -> None:
        """Move a gradient to where it is averaged, unless it was made or accumulated there."""
        rows = self.homes.copy_in(parameter)
        assert parameter.grad is not None
        self._collected.append((parameter, version_of(parameter.grad)))
        if rows is not None and parameter.stride(0) * parameter.shape[0] == parameter.numel():
            self._rows[id(parameter)] = rows
        if last:
            self.average()
            self.owed.clear()

    def finish(self, seen: set[int], averaged: Collection[int]) -> None:
        for parameter in self.missing(seen, averaged):
            if id(parameter) in self.owed and parameter.grad is not None:
                self.collect(parameter, last=False)
        self.average()

    def average(self) -> None:
        """Average, once all gradients of this rank's backward pass have been collected."""
        shared = shared_channels()
        assert shared is not None
        what = "the average of the gradients"
        for parameter, version in self._collected:
            if not self.homes.bring_back(parameter, version):
                self._rows.pop(id(parameter), None)
        self._tell({id(parameter) for parameter, _ in self._collected})
        self._collected.clear()  # what a module keeps of a step is no tensor of it
        shared.average_shown(self._sums(), what, nbytes=self._nbytes)

    def _tell(self, collected: Collection[int]) -> None:
        """Write down what this rank has of every parameter, where the others look when all met."""
        told = []
        for key in self._places:
            if key in collected:
                told.append(NEW_GRADIENT_IN_ROWS if key in self._rows else NEW_GRADIENT)
            else:
                told.append(OLD_GRADIENT if self.homes.stay(key) else NO_GRADIENT)
        self._told[self.grid.rank].copy_(torch.tensor(told, dtype=torch.uint8))

    def _sums(self) -> Iterator[Shown]:
        """Yield what is averaged, by what all ranks have told.

        A hook of one rank alone, say, may have made another gradient of one that is in rows.
        """
        everybody = range(self.grid.size)
        all_told = torch.stack(self._told).T.tolist()
        for number, parts in enumerate(self._parts):
            adjacent: list[_GradientSpan] = []  # of gradients that come from all ranks
            for key, place in self._places.items():
                if place.dtype != number:
                    continue
                told = all_told[place.index]
                in_rows = min(told) == NEW_GRADIENT_IN_ROWS
                if max(told) >= NEW_GRADIENT and min(told) > NO_GRADIENT and not in_rows:
                    adjacent.append(place)
                    continue
                yield from _from_ranks(parts, adjacent, everybody)
                adjacent.clear()
                if in_rows:
                    yield from self._from_owners(parts, place, self._rows[key])
                elif max(told) >= NEW_GRADIENT:
                    ranks = [rank for rank in everybody if told[rank] > NO_GRADIENT]
                    yield from _from_ranks(parts, [place], ranks)
                    self.homes.attach(key)
            yield from _from_ranks(parts, adjacent, everybody)

    def _from_owners(
        self, parts: Sequence[torch.Tensor], place: _GradientSpan, rows: Cut
    ) -> Iterator[Shown]:
        """Show each interval of rows, which come from the ranks that have it."""
        for (lo, hi), ranks in zip(rows.intervals, self._ranks[rows.axis], strict=True):
            begin = place.begin + lo * place.row
            end = place.begin + hi * place.row
            yield Shown([part[begin:end] for part in parts], ranks)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate without communication within it."""
        before = self.synchronised
        self.synchronised = False
        try:
            yield
        finally:
            self.synchronised = before


def _from_ranks(
    parts: Sequence[torch.Tensor], adjacent: Sequence[_GradientSpan], ranks: Sequence[int]
) -> Iterator[Shown]:
    """Show gradients that lie one after the other; other ranks have none."""
    if adjacent:
        begin = adjacent[0].begin
        end = adjacent[-1].end
        yield Shown([part[begin:end] for part in parts], ranks)


def bytes_needed(parameters: Sequence[torch.Tensor]) -> int:
    """Return the size of their gradients [B], each on cache lines of its own.

    >>> bytes_needed([torch.zeros(3), torch.zeros(17)])
    192
    """
    return sum(-(-p.nbytes // GRADIENT_ALIGNMENT) * GRADIENT_ALIGNMENT for p in parameters)


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


_DDP_OPTIONS = inspect.signature(DistributedDataParallel).parameters
# Every rank computes the same running statistics: nobody's have to be sent. Torch 2.13 renamed the
# option, and the old name warns.
_NO_BUFFER_SYNC: dict[str, Any] = {
    next(o for o in ("forward_sync_buffers", "broadcast_buffers") if o in _DDP_OPTIONS): False
}


class BucketedGradients(Averaging):
    """Has DistributedDataParallel average a module's gradients, while the backward pass runs."""

    def __init__(self, module: nn.Module, body: nn.Module, grid: Grid, sent: Gradients) -> None:
        super().__init__(module, grid)
        self.ddp = DistributedDataParallel(
            body,
            process_group=grid.gradients.group,
            gradient_as_bucket_view=True,
            init_sync=False,  # done, for expanded buffers too
            **_NO_BUFFER_SYNC,
        )
        if shared_channels() is not None and grid.device.type == "cpu":
            self.ddp.register_comm_hook(grid.gradients, _average_hook)
        elif sent == "bf16":
            self.ddp.register_comm_hook(RoundedAverages(grid.gradients.group), _round_hook)
        self.forward = self.ddp.forward
        self.no_sync = self.ddp.no_sync

    @property
    def synchronised(self) -> bool:
        return self.ddp.require_backward_grad_sync

    def finish(self, seen: set[int], averaged: Collection[int]) -> None:
        """Bring zeros to the others, for DistributedDataParallel waits for all of them.

        These are -0.0, which any other number turns into +0.0: what is still -0.0 after the average
        nobody has used, and no message has to tell. From then on they count as ``seen``:
        it averages once for each forward pass.
        """
        missing = self.missing(seen, averaged)
        without = [p for p in missing if p.grad is None]
        frozen = [p for p in missing if not p.requires_grad]
        self.filling = True
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            zeros = [
                p.new_full((), complex(-0.0, -0.0) if p.is_complex() else -0.0).expand_as(p)
                for p in missing
            ]
            torch.autograd.backward(missing, zeros)
        finally:
            self.filling = False
            for parameter in frozen:
                parameter.requires_grad_(False)
        if self.grid.data > 1 and without:  # the ranks of a replica run the same program
            refuse_capture(
                "the question which parameters the losses of other replicas used",
                "run this step eagerly, or freeze the parameters that no loss uses",
            )
            used = torch.stack([_was_used(p.grad) for p in without if p.grad is not None])
            without = [p for p, other in zip(without, used.tolist(), strict=True) if not other]
        for parameter in without:
            parameter.grad = None
        seen.update(averaged)


def _average_hook(gradients, bucket):  # type: ignore[no-untyped-def]
    """DistributedDataParallel's hook, which must not have annotations as strings."""
    if bucket.buffer().is_sparse:
        return allreduce_hook(gradients.group, bucket)
    # A quarter of gloo's time. Nothing is lost by waiting: a rank of the CPU has no other core that
    # could send meanwhile.
    mean = bucket.buffer().div_(gradients.size())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients.sum_in_place(mean, "the average of the gradients"))
    return done


def average_rounded(gradients: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Average float32 gradients of the ranks of ``group``, in place, by messages of bfloat16.

    Inexact, and the same bits on every rank. Half of what an exact average sends:

    1. Round this rank's gradients to bfloat16 and send each rank its share of the numbers.
    2. Add up the share that is this rank's in float32, in the order of ranks, divide the sum by
       the number of ranks and round it to bfloat16.
    3. Gather the shares of all.
    """
    ranks = dist.get_world_size(group)
    flat = gradients.view(-1)
    padded = flat.new_zeros(-(-len(flat) // ranks) * ranks, dtype=torch.bfloat16)
    padded[: len(flat)] = flat
    shares = torch.empty_like(padded)
    # As bytes, for not every release of gloo has the type.
    sent, received = padded.view(torch.uint8), shares.view(torch.uint8)
    dist.all_to_all_single(received, sent, group=group)
    first, *others = shares.view(ranks, -1)
    total = first.float()  # not zero plus it: -0.0 says that nobody has used a parameter
    for other in others:
        total += other
    mean = total.div_(ranks).bfloat16()
    dist.all_gather_into_tensor(sent, mean.view(torch.uint8), group=group)
    flat.copy_(padded[: len(flat)])


class RoundedAverages:
    """Averages buckets of gradients one after the other, on a thread, by `average_rounded`.

    Those of other types than float32 are averaged exactly. The thread ends with this object.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_work_off, args=(self._waiting,), daemon=True).start()
        weakref.finalize(self, self._waiting.put, None)

    def begin(self, gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Begin to average a bucket in place; the end of the backward pass waits for it."""
        group = self._group
        averaged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        outcome: Future[None] = Future()

        def average() -> None:
            with keeping_contact("the average of the gradients"):
                if gradients.dtype == torch.float32 and not gradients.is_sparse:
                    average_rounded(gradients, group)
                else:
                    gradients.div_(dist.get_world_size(group))
                    dist.all_reduce(gradients, group=group)

        def work() -> None:
            settle(outcome, average)
            averaged.set_result(gradients)

        self._waiting.put(work)
        # DistributedDataParallel would not understand an error: it is raised before it looks.
        at_end_of_backward(outcome.result)
        return averaged


def _work_off(waiting: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Run what is put into a queue, until it is None."""
    while (work := waiting.get()) is not None:
        work()
        del work  # with the gradients


def _round_hook(averages, bucket):  # type: ignore[no-untyped-def]
    """DistributedDataParallel's hook, which must not have annotations as strings."""
    return averages.begin(bucket.buffer())


def _was_used(average: torch.Tensor) -> torch.Tensor:
    """Tell whether anything but -0.0 has entered it."""
    numbers = torch.view_as_real(average) if average.is_complex() else average
    return numbers.signbit().logical_not().any()
