"""Recomputes activations in the backward pass, so that they are not kept until then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyperslab.ops.slab_inputs import DeferredJoin, Operands
from hyperslab.ops.slabs import SlabEpilogue
from hyperslab.tensor import Sharded
from hyperslab.util.torch_internals import BatchNorm

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLINGS = (nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool2d, nn.MaxPool3d)


def recompute_stages(module: nn.Module) -> int:
    """Let a network keep the inputs of its stages only; in place, returns how many it has.

    A stage is an `nn.Sequential` that holds convolutions, or its part from one pooling to the
    next, with the layers that work in place behind that pooling. In the backward pass each stage
    runs forward again, through torch's own checkpointing, so that the gradients are the same
    numbers; it draws the same random numbers, and running statistics are updated once. Names in
    the state dict do not change. Call it before `parallelize`.
    """
    count = 0
    for part in module.modules():
        if isinstance(part, nn.Sequential) and any(isinstance(m, _CONVOLUTIONS) for m in part):
            stages = tuple(_stages(part))
            part.forward = partial(_in_turn, stages)  # type: ignore[method-assign]
            count += sum(isinstance(stage, _Stage) for stage in stages)
    return count


def _in_turn(parts: Iterable[Callable[[Any], Any]], x: Any) -> Any:
    for part in parts:
        x = part(x)
    return x


def _recut(x: Sharded) -> tuple[Operands, Callable[..., Any]]:
    """Return what makes up ``x``, and what makes it again of that, which comes back as it was.

    Its block, which keeps its order in memory: torch's would be another copy, and slower
    convolutions. Of channels that are not joined yet, the operands.
    """
    join = None
    if isinstance(x.pending, DeferredJoin):
        x.force_readers()
        x.pending.bypassed()
        x.mark_as_bypassed("a stage that is recomputed joins in parts")
        tensors: Operands = x.pending.tensors
        join = x.pending.with_tensors(tensors)
    else:
        x.force()
        x.share()
        tensors = (x.block,)
    cut = partial(Sharded.from_local, grid=x.grid, policy=x.policy)
    partition = x.partition
    reordered = x.reordered

    def again(*tensors: torch.Tensor | None) -> Sharded:
        if join is not None:
            first = cut(*join.first_of(tensors))
            return first.will_be(join.with_tensors(tensors), partition, reordered=reordered)
        (block,) = tensors
        assert block is not None
        y = cut(block, partition)
        if reordered:
            y.mark_as_reordered()
        return y

    return tensors, again


class _Stage:
    """Some layers, one after the other, of which autograd keeps the input alone."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self.norms = [m for layer in layers for m in layer.modules() if isinstance(m, BatchNorm)]

    def __call__(self, x: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return _in_turn(self.layers, x)
        run = _Run(self)
        tensors: Operands = (x,)
        if isinstance(x, Sharded):
            tensors, run.cut = _recut(x)
        return checkpoint(run, *tensors, use_reentrant=False, context_fn=run.first_and_again)


@dataclass(slots=True)
class _Run:
    """Runs a stage once, and once more in its backward pass."""

    stage: _Stage
    cut: Callable[..., Any] | None = None
    again: bool = False
    _kept: list[AbstractContextManager[None]] = field(default_factory=list)

    def __call__(self, *tensors: torch.Tensor | None) -> Any:
        if self.cut is None:
            return _in_turn(self.stage.layers, *tensors)
        y = _in_turn(self.stage.layers, self.cut(*tensors))
        if isinstance(y, Sharded):  # compute what is deferred: behind a stage nothing is recomputed
            if self.again and isinstance(y.pending, SlabEpilogue):
                y.pending.keep_only()
            y.force()
        return y

    def first_and_again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self

    def __enter__(self) -> None:
        """Begin to repeat the call: as often as there are backward passes."""
        self.again = True
        self._kept.append(_keep_statistics(self.stage.norms))
        self._kept[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._kept.pop().__exit__(*error)


@contextmanager
def _keep_statistics(norms: Sequence[BatchNorm]) -> Iterator[None]:
    """Keep running statistics as they are: the first run has updated them."""
    momenta = [norm.momentum for norm in norms]
    counts = [norm.num_batches_tracked for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, momentum, count in zip(norms, momenta, counts, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked = count


def _stages(layers: nn.Sequential) -> Iterator[_Stage | nn.Module]:
    """Cut layers into stages; none begins in place, which would overwrite what is kept."""
    stage: list[nn.Module] = []
    ended = False
    for layer in layers:
        in_place = _begins_in_place(layer)
        if not stage and in_place:
            yield layer
            continue
        if ended and not in_place:
            yield _Stage(stage)
            stage = []
            ended = False
        stage.append(layer)
        ended = ended or isinstance(layer, _POOLINGS)
    if stage:
        yield _Stage(stage)


def _begins_in_place(layer: nn.Module) -> bool:
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    return bool(getattr(layer, "inplace", False))
