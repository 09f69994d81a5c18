"""Traces one training step of one rank on any grid, without data and without other ranks.

In reading order: a grid of ranks that are not there, whose messages and sums are written into a
`Journal`, and gradients in DistributedDataParallel's buckets; a `Workload`, which is a step that
can be traced on any grid; `trace_step`, which runs forward, backward and the optimizer on tensors
without memory, under the rules of a real step; the ranks that stand for all others.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from hyperslab.comm import AXES, Communicator, Grid
from hyperslab.comm.communicator import PeerTensor
from hyperslab.comm.placement import shape_of
from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.kernels.registry import choose_as_if_on
from hyperslab.parallel.averaging import Gradients
from hyperslab.parallel.offload import Load
from hyperslab.parallel.parallelize import Memory, prepare
from hyperslab.planner.recorder import Journal, TraceMode, spec_of
from hyperslab.planner.records import Exchange, Offload, Sum, TensorSpec, Trace, Wait
from hyperslab.planner.unbacked_memory import UnbackedMemory
from hyperslab.tensor import Sharded
from hyperslab.tensor.gradient_buffers import GradientBuffers
from hyperslab.util.free_memory import FreedMemory
from hyperslab.util.torch_internals import FIRST_BUCKET_BYTES, DisableTorchFunctionSubclass

Device = Literal["cpu", "cuda"]
Extents = Mapping[str, int]


class VirtualCommunicator:
    """Stands in for a communicator: what ranks would send is recorded."""

    def __init__(self, ranks: tuple[int, ...], rank: int, journal: Journal) -> None:
        self.ranks = ranks
        self._rank = rank
        self._journal = journal

    def rank(self) -> int:
        return self.ranks.index(self._rank)

    def size(self) -> int:
        return len(self.ranks)

    def exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
    ) -> _RecordedExchange:
        # As a real exchange does it: gloo and NCCL want contiguous memory.
        leaving = [piece.contiguous() for _, piece in sends]
        sent, received = (
            tuple((rank, tensor.nbytes) for rank, tensor in messages)
            for messages in (sends, receives)
        )
        event = Exchange(*self._journal.place, what, sent, received)
        self._journal.add(event)
        return _RecordedExchange(self._journal, event, leaving, receives)

    def sum_in_place(self, x: torch.Tensor, what: str) -> torch.Tensor:
        self._journal.add(Sum(*self._journal.place, what, "statistics", self.ranks, x.nbytes))
        return x


@dataclass(frozen=True, slots=True)
class _RecordedExchange:
    """Stands in for messages under way; their buffers stay as they are."""

    journal: Journal
    event: Exchange
    leaving: list[torch.Tensor]
    receives: Sequence[PeerTensor]

    def wait(self) -> list[torch.Tensor]:
        self.journal.add(Wait(self.event))
        self.leaving.clear()
        return [buffer for _, buffer in self.receives]


class VirtualGrid(Grid):
    """Stands in for a grid of which one rank is traced, without process groups."""

    has_values = False

    def __init__(
        self, extents: Mapping[str, int], rank: int = 0, journal: Journal | None = None
    ) -> None:
        self.extents = {axis: extents.get(axis, 1) for axis in AXES}
        if any(extent < 1 for extent in self.extents.values()):
            raise LayoutError(f"every axis of a grid needs at least one rank: {self}")
        self.data, self.depth, self.height, self.width = self.extents.values()
        self.size = math.prod(self.extents.values())
        self.rank = rank
        self.device = torch.device("cpu")
        self.coords = self.coords_of(rank)
        self.journal = Journal() if journal is None else journal
        self._groups = {}

    @functools.cached_property
    def _everybody(self) -> Communicator:
        # Not before it is asked for: a plan looks at thousands of grids, of a million ranks maybe.
        return VirtualCommunicator(tuple(range(self.size)), self.rank, self.journal)

    @property
    def halos(self) -> Communicator:
        return self._everybody

    def log(self, message: str, level: int) -> None:
        self.journal.notes.append(message)

    def same_on_all(self, number: int) -> bool:
        return True

    def barrier(self) -> None:
        return

    def _make_group(self, axes: tuple[str, ...]) -> Communicator | None:
        if not axes:
            return None
        # Those that differ from this rank along the axes only.
        places = itertools.product(*(range(self.extents[axis]) for axis in axes))
        ranks = [self.rank_of(self.coords | dict(zip(axes, at, strict=True))) for at in places]
        return VirtualCommunicator(tuple(ranks), self.rank, self.journal)


BUCKET_BYTES = 25 << 20  # [B] of DistributedDataParallel's buckets, but for the first one


class GradientBuckets:
    """Records how DistributedDataParallel would average gradients over virtual ranks.

    Its buckets are filled in the order in which gradients become ready (so it arranges them after
    the first step), and a full one leaves. They are always there: gradients are views of them.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], ranks: int, journal: Journal, sent: Gradients
    ) -> None:
        self.ranks = tuple(range(ranks))
        self.journal = journal
        self.rounds = sent == "bf16"
        self.filled = 0
        self.rounded = 0
        self.limit = FIRST_BUCKET_BYTES
        self.parameters = parameters
        self.views = {id(p): torch.empty_like(p) for p in parameters}

    def watch(self, stack: ExitStack) -> None:
        """Counts gradients as they become ready, until ``stack`` is closed."""
        for parameter in self.parameters:
            hook = parameter.register_post_accumulate_grad_hook(self._ready)
            stack.callback(hook.remove)

    def finish(self) -> None:
        """Sends the last bucket, as it is, at the end of a backward pass."""
        if self.filled:
            self._leave()
        self.limit = FIRST_BUCKET_BYTES

    def _leave(self) -> None:
        what = "the average of the gradients"
        place = self.journal.place
        self.journal.add(Sum(*place, what, "gradients", self.ranks, self.filled, self.rounded))
        self.filled = self.rounded = 0
        self.limit = BUCKET_BYTES

    def _ready(self, parameter: torch.Tensor) -> None:
        view = self.views[id(parameter)]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        self.filled += parameter.nbytes
        if self.rounds and parameter.dtype == torch.float32:
            self.rounded += parameter.nbytes
        if self.filled >= self.limit:
            self._leave()


@dataclass(frozen=True, slots=True)
class _RecordedStore:
    """Records activations that are offloaded: they take no memory until they are loaded."""

    memory: UnbackedMemory
    journal: Journal

    def move(self, tensor: torch.Tensor) -> Load:
        spec = spec_of(tensor)
        self._record(spec)

        def load() -> torch.Tensor:
            self._record(spec)
            return self.memory.empty(spec.shape, spec.strides, spec.dtype)

        return load

    def _record(self, spec: TensorSpec) -> None:
        self.journal.add(Offload(*self.journal.place, spec.nbytes))


GIVEN_BACK_FROM = 1 << 25
"""Bytes of a block from which on it is given back when it is freed, where activations go to a file.

Smaller ones leave holes between what stays (`FreedMemory`).
"""


@dataclass(frozen=True)
class Workload:
    """Describes a step that can be traced on any grid.

    ``build`` makes the network, which is called with ``inputs`` (N, C, D, H, W), the global
    mini-batch; ``loss`` takes its result and a target of the shape and type ``target``, whose dim 1
    is channels (``target_channels``) or is not; without a loss the sum is differentiated.
    ``optimizer`` takes the parameters; None: the step ends with the gradients. ``precision`` is
    what autocast computes in, None without. ``batch_norm``, ``memory``, ``until`` and
    ``gradients`` are as `hyperslab.parallelize` takes them.
    """

    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    target: tuple[int, ...] | None = None
    target_dtype: torch.dtype = torch.float32
    target_channels: bool = True
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] | None = None
    precision: torch.dtype | None = None
    batch_norm: str = "grid"
    memory: Memory = "none"
    until: tuple[str, ...] = ()
    gradients: Gradients = "exact"


def trace_step(
    workload: Workload,
    extents: Extents,
    rank: int = 0,
    device: Device = "cpu",
    most: float = math.inf,
) -> Trace:
    """Traces what ``rank`` does in a step on a grid with these extents.

    It is a later step than the first, in which the optimizer makes its state.

    The rules that run are those of a real step, on tensors without memory. ``device`` chooses the
    kernels: what runs on a GPU is traced without one.

    Raises:
        LayoutError: the grid does not go with the shapes.
        UnsupportedOp: an operator has no rule for cut tensors, or reads values.
        TooLargeError: at some moment all tensors take more than ``most`` [B].
    """
    journal = Journal()
    memory = UnbackedMemory(most)
    if workload.memory == "offload" and device == "cpu":
        memory = UnbackedMemory(most, GIVEN_BACK_FROM, FreedMemory.MOST_HOLES)
    step = _Step(workload, VirtualGrid(extents, rank, journal), memory)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(TraceMode(step.memory, journal, scratch=device == "cpu"))
        stack.enter_context(choose_as_if_on(device))
        # Parameters, inputs and the optimizer are there before the step: they count for its peak.
        step.build(stack)
        first = Trace(rank)
        if device == "cpu":
            step.run(first)  # which cuts the C library's heap into holes, too
        else:
            # Torch's allocator of GPU memory is not simulated: an update alone makes the state.
            for parameter in step.trainable:
                parameter.grad = torch.empty_like(parameter)
            step.update(first)
        trace = journal.trace = Trace(rank, optimizer_state=first.optimizer_state)
        step.run(trace)
        trace.notes = journal.notes
    return trace


class _Step:
    """Holds a network on a virtual grid, with its input and its target."""

    def __init__(self, workload: Workload, grid: VirtualGrid, memory: UnbackedMemory) -> None:
        self.workload = workload
        self.grid = grid
        self.memory = memory

    def build(self, stack: ExitStack) -> None:
        """Builds what is there before the step begins: network, optimizer, input and target."""
        work = self.workload
        self.model = work.build().train()
        for tensor in self._own():
            if not self.memory.has(tensor):  # a small one with values, with which operators run
                tensor.data = self._empty(tensor.shape, tensor.dtype)
        self.policy = prepare(
            self.model,
            self.grid,
            until=work.until,
            batch_norm=work.batch_norm,
            memory=work.memory,
            homes=GradientBuffers(self.model.parameters()),
            move=_RecordedStore(self.memory, self.grid.journal).move,
        )
        # Of a replica that is cut: as a parallelised module has it open while it runs.
        if self.policy.scope is not None:
            stack.enter_context(self.policy.scope.running())
        stack.enter_context(self.grid.journal.layers.following(self.model))
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = None
        if work.optimizer is not None:
            self.optimizer = work.optimizer(self.model.parameters())
        self.buckets = None
        if self.grid.size > 1:
            self.buckets = GradientBuckets(
                self.trainable, self.grid.size, self.grid.journal, self.workload.gradients
            )
            self.buckets.watch(stack)
        self.x = self._cut(work.inputs, torch.float32)
        self.y = None
        if work.target is not None:
            self.y = self._cut(work.target, work.target_dtype, channels=work.target_channels)

    def _own(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _cut(self, shape: tuple[int, ...], dtype: torch.dtype, *, channels: bool = True) -> Sharded:
        partition = self.grid.partition(shape, channels=channels)
        block = self._empty(partition.box(self.grid.coords).shape, dtype)
        return Sharded.from_local(block, partition, self.grid, self.policy)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        form = torch.empty(shape, dtype=dtype, device="meta")
        return self.memory.empty(shape, form.stride(), dtype)

    def run(self, trace: Trace) -> None:
        """Runs forward, backward and update."""
        trace.parameters = sum(p.nbytes for p in self.model.parameters())
        trace.gradients = sum(p.nbytes for p in self.trainable)
        with _saved_storages(self._own()) as saved:
            loss = self._forward()
        trace.saved = sum(saved.values())
        if loss.requires_grad:
            loss.backward()
        if self.buckets is not None:
            self.buckets.finish()
        self.update(trace)
        trace.peak = self.memory.peak
        trace.heap = self.memory.heap

    def update(self, trace: Trace) -> None:
        """Runs the optimizer's part of the step."""
        if self.optimizer is not None:
            before = self.memory.live
            self.grid.journal.optimizing = True
            try:
                self.optimizer.step()
            except UnsupportedOp as error:
                raise UnsupportedOp(
                    f"the optimizer {type(self.optimizer).__name__} looks at values in its step, "
                    "and a step that is traced has none\n    plan with another one: AdamW, SGD, ..."
                ) from error
            finally:
                self.grid.journal.optimizing = False
            trace.optimizer_state += self.memory.live - before
        self.model.zero_grad()

    def _forward(self) -> torch.Tensor:
        work = self.workload
        kind = self.x.device.type
        dtype = work.precision or torch.bfloat16
        with torch.autocast(kind, dtype, enabled=work.precision is not None):
            prediction = self.model(self.x)
            if work.loss is None:
                return prediction.sum()
            return work.loss(prediction, self.y)


@contextmanager
def _saved_storages(excluded: Sequence[torch.Tensor]) -> Iterator[dict[int, int]]:
    """Collects what autograd keeps, sizes [B] by address, but for the ``excluded`` tensors'."""
    skip = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with DisableTorchFunctionSubclass():  # checkpointing keeps a `Sharded`
            storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def positions(extents: Mapping[str, int]) -> list[int]:
    """Lists one rank for each kind of position: first, inside or last along each axis that cuts.

    A rank has no neighbour on one side or has both, along each axis; those of one kind do the same
    work but for shards that are one element smaller: the first ranks of an axis have the larger
    ones. All are of the first replica.

    >>> positions({"data": 2, "depth": 5, "width": 2})
    [0, 1, 2, 3, 8, 9]
    """
    _, *spatial = shape_of(extents)
    # One rank of an axis has no neighbour, two have one each, of more the inner ones have two.
    places = [sorted({0, min(1, extent - 1), extent - 1}) for extent in spatial]
    return [_rank_at((0, *at), extents) for at in itertools.product(*places)]


def busiest(extents: Mapping[str, int]) -> int:
    """Finds the first rank of those with most neighbours and, among them, largest shards."""
    _, *spatial = shape_of(extents)
    return _rank_at((0, *(int(extent > 2) for extent in spatial)), extents)


def _rank_at(place: Sequence[int], extents: Mapping[str, int]) -> int:
    return int(np.ravel_multi_index(place, shape_of(extents)))
