"""Recomputes activations in the backward pass, so that they are not kept until then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyperslab.errors import LayoutError
from hyperslab.ops.autograd import recut
from hyperslab.ops.slabs import DeferredJoin, Operands, SlabEpilogue, versions_of
from hyperslab.tensor import Sharded
from hyperslab.util.torch_internals import version_of

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLINGS = (nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool2d, nn.MaxPool3d)


Buffers = dict[tuple[nn.Module, str], torch.Tensor]
"""Holds buffers by their module and their name there."""

Modes = dict[nn.Module, bool]
"""Holds whether modules are in training mode."""


def recompute_stages(module: nn.Module) -> int:
    """Let a network keep the inputs of its stages only; in place, returns how many it has.

    A stage is an `nn.Sequential` that holds convolutions and has torch's own forward, or its part
    from one pooling to the next, with the layers that work in place behind that pooling. In the
    backward pass each stage runs forward again, through torch's own checkpointing, so that the
    gradients are the same numbers; it draws the same random numbers, and buffers (running
    statistics) are updated once. Names in the state dict do not change. Call it before
    `parallelize`.
    """
    count = 0
    for part in module.modules():
        # A subclass may have a forward of its own, which adds its input to what the layers make.
        own = getattr(part.forward, "__func__", None) is not nn.Sequential.forward
        convolves = isinstance(part, nn.Sequential) and any(
            isinstance(layer, _CONVOLUTIONS) for layer in part
        )
        if isinstance(part, nn.Sequential) and convolves and not own:
            part.forward = partial(_run_stages, part)  # type: ignore[method-assign]
            count += sum(isinstance(stage, _Stage) for stage in _stages(part))
    return count


def _run_stages(layers: nn.Sequential, input: Any) -> Any:
    """Run the layers that are there now: they may be replaced between two steps."""
    return _in_turn(_stages(layers), input)


def _in_turn(parts: Iterable[Callable[[Any], Any]], x: Any) -> Any:
    for part in parts:
        x = part(x)
    return x


def _recut(x: Sharded) -> tuple[Operands, Callable[..., Any] | None]:
    """Return what makes up ``x``, and what makes it again of that, which comes back as it was.

    Its block, which keeps its order in memory: torch's would be another copy, and slower
    convolutions. Of channels that are not joined yet, the operands.
    """
    if not isinstance(x.pending, DeferredJoin):
        x.force()
        x.share()
        return (x.block,), recut(x)
    x.force_readers()
    x.pending.bypassed()
    x.mark_as_bypassed("a stage that is recomputed joins in parts")
    tensors: Operands = x.pending.tensors
    join = x.pending.with_tensors(tensors)
    grid, policy = x.grid, x.policy
    partition = x.partition
    reordered = x.reordered

    def again(*tensors: torch.Tensor | None) -> Sharded:
        first = Sharded.from_local(*join.first_of(tensors), grid, policy)
        return first.will_be(join.with_tensors(tensors), partition, reordered=reordered)

    return tensors, again


class _Stage:
    """Some layers, one after the other, of which autograd keeps the input alone."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers

    def modes(self) -> Modes:
        return {module: module.training for layer in self.layers for module in layer.modules()}

    def versions(self) -> list[int]:
        return [version_of(p) for layer in self.layers for p in layer.parameters()]

    def buffers(self) -> Buffers:
        return {
            (module, name): buffer
            for module in self.modes()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        }

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
    _before: tuple[Buffers, Modes] = field(default_factory=lambda: ({}, {}))
    _kept: list[tuple[Buffers, Modes]] = field(default_factory=list)
    _weights: list[int] = field(default_factory=list)

    def __call__(self, *tensors: torch.Tensor | None) -> Any:
        versions = versions_of(tensors)
        y = self._result(tensors)
        if versions_of(tensors) != versions:
            raise self._refused(
                "changes its input in place, of which it has to be computed again\n    change a "
                "copy (x = x + 1 for x += 1)"
            )
        return y

    def _refused(self, why: str) -> LayoutError:
        first = type(self.stage.layers[0]).__name__
        return LayoutError(
            f'memory="recompute": the stage that begins with {first} {why}, or use another memory='
        )

    def _result(self, tensors: Operands) -> Any:
        if self.cut is None:
            return _in_turn(self.stage.layers, *tensors)
        y = _in_turn(self.stage.layers, self.cut(*tensors))
        if isinstance(y, Sharded):  # compute what is deferred: behind a stage nothing is recomputed
            if self.again and isinstance(y.pending, SlabEpilogue):
                y.pending.keep_only()
            y.force()
        return y

    def first_and_again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        self._before = _copies(self.stage.buffers()), self.stage.modes()
        self._weights = self.stage.versions()
        return nullcontext(), self

    def __enter__(self) -> None:
        """Begin to repeat the call, which happens as often as there are backward passes.

        Layers find their mode, and their buffers, as they were before the first run. What they
        change is dropped: the first run has updated statistics, and others may have done so since.
        """
        if self.stage.versions() != self._weights:
            raise self._refused(
                "has other parameters in its backward pass than it had before\n    call backward() "
                "before optimizer.step()"
            )
        self.again = True
        self._kept.append((self.stage.buffers(), self.stage.modes()))
        buffers, modes = self._before
        _put(_copies(buffers), modes)

    def __exit__(self, *error: Any) -> None:
        _put(*self._kept.pop())


def _copies(buffers: Buffers) -> Buffers:
    """Copy buffers; modules that share one share its copy."""
    copies = {id(buffer): buffer.detach().clone() for buffer in buffers.values()}
    return {place: copies[id(buffer)] for place, buffer in buffers.items()}


def _put(buffers: Buffers, modes: Modes) -> None:
    for (module, name), buffer in buffers.items():
        setattr(module, name, buffer)
    for module, training in modes.items():
        module.training = training


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
