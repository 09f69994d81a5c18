"""Lends the memory in which a module's gradients are averaged to the passes that make them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from hyperslab.geometry import Cut
from hyperslab.util.torch_internals import (
    accumulation_hooks,
    backward_hooks,
    version_of,
    will_execute_node,
)


@dataclass(slots=True)
class _Buffer:
    parameter: weakref.ref[torch.Tensor]  # a tensor that comes after it may have its id
    gradient: torch.Tensor
    made: tuple[int, Cut | None] | None = None  # its version when it was made here, and its rows
    shown: weakref.ref[torch.Tensor] | None = None  # what the parameter's gradient was at last


class GradientBuffers:
    """Holds the memory in which gradients are averaged, by parameter.

    A backward pass that makes the gradient of a parameter may write it into its buffer and return
    that, where a copy would follow. Nobody else may see a buffer before its gradient is there: not
    ``torch.autograd.grad``, no gradient that accumulates or that somebody kept.

    ``owned``: the module's parameters, by id, with or without such memory.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        self.owned = frozenset(map(id, parameters))
        self._buffers: dict[int, _Buffer] = {}
        self._averaged = False

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a buffer, which has the parameter's shape, strides and type."""
        self._buffers[id(parameter)] = _Buffer(weakref.ref(parameter), gradient)

    def begin(self, *, averaged: bool) -> None:
        """Begin a forward pass whose gradients will be averaged, or only accumulate."""
        for buffer in self._buffers.values():
            buffer.made = None
        self._averaged = averaged

    def lend(self, parameter: torch.Tensor, accumulating: Node) -> torch.Tensor | None:
        """Return the buffer for what this backward pass accumulates; None if others would see it.

        It holds anything. ``accumulating`` is the node that accumulates the parameter's gradient.
        """
        buffer = self._buffers.get(id(parameter))
        if buffer is None or buffer.parameter() is not parameter or buffer.made is not None:
            return None
        if not self._averaged or not parameter.requires_grad or parameter.grad is not None:
            return None
        if _has_user_hooks(parameter) or not _accumulates(accumulating):
            return None
        _let_go(buffer, parameter)
        return buffer.gradient.data  # with a version of its own

    def made(self, parameter: torch.Tensor, gradient: torch.Tensor, rows: Cut | None) -> None:
        """Note that what `lend` gave holds the gradient; ``rows``: it is zero but for a rank's own.

        Those of the rank at ``i`` of the axis of ``rows``, in its interval ``i`` of the first dim.
        """
        self._buffers[id(parameter)].made = version_of(gradient), rows

    def copy_in(self, parameter: torch.Tensor) -> Cut | None:
        """Copy an accumulated gradient into its buffer; return the rows of `made` if it is that.

        Hooks, and a second use of the parameter, may have made another gradient of it.
        """
        gradient = parameter.grad
        buffer = self._buffers[id(parameter)]
        assert gradient is not None
        made, buffer.made = buffer.made, None
        if gradient.data_ptr() != buffer.gradient.data_ptr():
            _let_go(buffer, parameter)
            buffer.gradient.copy_(gradient)
            gradient = buffer.gradient.data
            parameter.grad = gradient
            made = None
        buffer.shown = weakref.ref(gradient)
        return made[1] if made is not None and version_of(gradient) == made[0] else None

    def bring_back(self, parameter: torch.Tensor, version: int) -> bool:
        """Copy in a gradient that a hook replaced after `copy_in`; tell whether it is as then."""
        gradient = parameter.grad
        if gradient is None:
            return False
        if gradient.data_ptr() != self._buffers[id(parameter)].gradient.data_ptr():
            self.copy_in(parameter)
            return False
        return version_of(gradient) == version

    def stay(self, parameter_id: int) -> bool:
        """Copy in the gradient of a parameter to which this pass brings none; tell if it has one.

        Else others may write a gradient into the buffer, which nobody here sees.
        """
        buffer = self._buffers[parameter_id]
        parameter = buffer.parameter()
        if parameter is None:
            return False
        if parameter.grad is None:
            _let_go(buffer, parameter)
            return False
        self.copy_in(parameter)
        return True

    def attach(self, parameter_id: int) -> None:
        """Give a parameter without a gradient the one that others wrote into its buffer."""
        buffer = self._buffers[parameter_id]
        parameter = buffer.parameter()
        if parameter is not None and parameter.grad is None:
            parameter.grad = buffer.gradient.data
            buffer.shown = weakref.ref(parameter.grad)


def _let_go(buffer: _Buffer, parameter: torch.Tensor) -> None:
    """Give an earlier step's gradient memory of its own: somebody may have kept it."""
    shown, buffer.shown = buffer.shown, None
    kept = None if shown is None else shown()
    if kept is not None and kept is not parameter.grad:
        kept.data = kept.detach().clone()


def _has_user_hooks(parameter: torch.Tensor) -> bool:
    """Tell whether users' hooks see its gradient before it is averaged: to keep or change it.

    One hook after it has accumulated is always there: it has the gradient averaged.
    """
    return bool(backward_hooks(parameter)) or len(accumulation_hooks(parameter) or ()) > 1


def _accumulates(node: Node) -> bool:
    """Tell whether the present backward pass ends in ``parameter.grad``, not in a result."""
    try:
        return will_execute_node(node)
    except RuntimeError:  # torch.autograd.grad
        return False
