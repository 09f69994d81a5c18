"""Traces one training step of one rank on any grid, without data and without other ranks.

A `Workload` is a step that can be traced on any grid; `trace_step` runs forward, backward and
the optimizer on tensors without memory, under the rules of a real step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hyperslab.errors import UnsupportedOp
from hyperslab.kernels.registry import choose_as_if_on
from hyperslab.parallel.parallelize import prepare
from hyperslab.planner.trace.recorder import Layers, TraceMode
from hyperslab.planner.trace.records import Trace
from hyperslab.planner.trace.unbacked_memory import UnbackedMemory
from hyperslab.planner.trace.virtual_grid import GradientBuckets, MessageJournal, VirtualGrid
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
    what autocast computes in, None without. ``batch_norm`` and ``until`` are as
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
    until: tuple[str, ...] = ()
    train: bool = True


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
    memory = UnbackedMemory()
    layers = Layers()
    recorder = TraceMode(memory, layers, scratch=device == "cpu")
    journal = MessageJournal(layers, lambda: recorder.stage)
    grid = VirtualGrid(extents, rank, journal)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(recorder)
        stack.enter_context(choose_as_if_on(device))
        step = _Step(workload, grid, memory, layers)
        step.build(stack)
        first = Trace(rank)
        if device == "cpu":
            step.run(first, recorder)  # which cuts the C library's heap into holes, too
        else:
            step.fill_gradients()
            step.update(first, recorder)
        trace = Trace(rank, optimizer_state=first.optimizer_state)
        recorder.trace = trace
        journal.trace = trace
        step.run(trace, recorder)
        trace.notes = journal.notes
    return trace


class _Step:
    """Holds a network on a virtual grid, with its input and its target."""

    def __init__(
        self, workload: Workload, grid: VirtualGrid, memory: UnbackedMemory, layers: Layers
    ) -> None:
        self.workload = workload
        self.grid = grid
        self.memory = memory
        self.layers = layers

    def build(self, stack: ExitStack) -> None:
        """Builds what is there before the step begins: network, optimizer, input and target."""
        work = self.workload
        self.model = work.build().train(work.train)
        self._forget_values()
        self.policy = prepare(
            self.model,
            self.grid,
            until=work.until,
            batch_norm=work.batch_norm,
            homes=GradientBuffers(),
        )
        if self.policy.scope is not None:
            stack.enter_context(self.policy.scope.running())
        stack.enter_context(self.layers.following(self.model))
        parameters = self.model.parameters
        self.optimizer = None if work.optimizer is None else work.optimizer(parameters())
        self.buckets = None
        if self.grid.size > 1:
            self.buckets = GradientBuckets(self.model, self.grid.size, self.grid.journal)
            self.buckets.watch(stack)
        self.x = self._cut(work.inputs, torch.float32)
        self.y = None
        if work.target is not None:
            self.y = self._cut(work.target, work.target_dtype, channels=work.target_channels)

    def _forget_values(self) -> None:
        """Takes the values of small parameters away, with which operators would run."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if not self.memory.has(tensor):
                tensor.data = self._empty(tensor.shape, tensor.dtype)

    def _cut(self, shape: tuple[int, ...], dtype: torch.dtype, *, channels: bool = True) -> Sharded:
        partition = self.grid.partition(shape, channels=channels)
        box = partition.box(self.grid.coords)
        block = self._empty(box.shape, dtype)
        return Sharded.from_local(block, partition, self.grid, self.policy)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        form = torch.empty(shape, dtype=dtype, device="meta")
        return self.memory.empty(tuple(shape), form.stride(), dtype)

    def run(self, trace: Trace, recorder: TraceMode) -> None:
        """Runs forward, backward and update."""
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        trace.parameters = sum(p.nbytes for p in self.model.parameters())
        trace.gradients = sum(p.nbytes for p in trainable)
        with counting_saved((*self.model.parameters(), *self.model.buffers()), trace):
            loss = self._forward()
        if loss.requires_grad:
            loss.backward()
        if self.buckets is not None:
            self.buckets.finish()
        self.update(trace, recorder)
        trace.peak = self.memory.peak
        trace.heap = self.memory.heap.expected

    def fill_gradients(self) -> None:
        """Fills gradients as after a backward pass, so that the optimizer makes its state."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)

    def update(self, trace: Trace, recorder: TraceMode) -> None:
        """Runs the optimizer's part of the step."""
        if self.optimizer is not None:
            before = self.memory.live
            recorder.optimizing = True
            try:
                self.optimizer.step()
            except UnsupportedOp as error:
                raise UnsupportedOp(
                    f"the optimizer {type(self.optimizer).__name__} looks at values in its step, "
                    "and a step that is traced has none\n    plan with another one: AdamW, SGD, ..."
                ) from error
            finally:
                recorder.optimizing = False
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
def counting_saved(excluded: tuple[torch.Tensor, ...], trace: Trace) -> Iterator[None]:
    """Counts what autograd keeps: each storage once, but for the ``excluded`` tensors'."""
    skip = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with DisableTorchFunctionSubclass():  # checkpointing keeps a `Sharded`
            storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    trace.saved = sum(kept.values())
