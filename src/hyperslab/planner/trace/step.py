"""Traces one training step of one rank on any grid, without data and without other ranks.

A `Workload` is a step that can be traced on any grid; `trace_step` runs forward, backward and
the optimizer on tensors without memory, under the rules of a real step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hyperslab.errors import UnsupportedOp
from hyperslab.kernels.registry import choose_as_if_on
from hyperslab.parallel.parallelize import Memory, prepare
from hyperslab.planner.trace.recorder import Journal, TraceMode
from hyperslab.planner.trace.records import Trace
from hyperslab.planner.trace.unbacked_memory import UnbackedMemory
from hyperslab.planner.trace.virtual_grid import GradientBuckets, VirtualGrid
from hyperslab.tensor import Sharded
from hyperslab.tensor.gradient_buffers import GradientBuffers
from hyperslab.util.torch_internals import DisableTorchFunctionSubclass

Device = Literal["cpu", "cuda"]
Extents = Mapping[str, int]


@dataclass(frozen=True)
class Workload:
    """Describes a step that can be traced on any grid.

    ``build`` makes the network, which is called with ``inputs`` (N, C, D, H, W), the global
    mini-batch; ``loss`` takes its result and a target of the shape and type ``target``, whose dim 1
    is channels (``target_channels``) or is not; without a loss the sum is differentiated.
    ``optimizer`` takes the parameters; None: the step ends with the gradients. ``precision`` is
    what autocast computes in, None without. ``batch_norm``, ``memory`` and ``until`` are as
    `hyperslab.parallelize` takes them.
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


def trace_step(
    workload: Workload, extents: Extents, rank: int = 0, device: Device = "cpu"
) -> Trace:
    """Traces what ``rank`` does in a step on a grid with these extents.

    It is a later step than the first, in which the optimizer makes its state.

    The rules that run are those of a real step, on tensors without memory. ``device`` chooses the
    kernels: what runs on a GPU is traced without one.

    Raises:
        LayoutError: the grid does not go with the shapes.
        UnsupportedOp: an operator has no rule for cut tensors, or reads values.
    """
    journal = Journal()
    step = _Step(workload, VirtualGrid(extents, rank, journal), UnbackedMemory())
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(TraceMode(step.memory, journal, scratch=device == "cpu"))
        stack.enter_context(choose_as_if_on(device))
        step.build(stack)
        first = Trace(rank)
        if device == "cpu":
            step.run(first)  # which cuts the C library's heap into holes, too
        else:
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
            homes=GradientBuffers(),
        )
        if self.policy.scope is not None:
            stack.enter_context(self.policy.scope.running())
        stack.enter_context(self.grid.journal.layers.following(self.model))
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = None
        if work.optimizer is not None:
            self.optimizer = work.optimizer(self.model.parameters())
        self.buckets = None
        if self.grid.size > 1:
            self.buckets = GradientBuckets(self.trainable, self.grid.size, self.grid.journal)
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
