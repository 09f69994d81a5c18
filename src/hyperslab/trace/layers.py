"""Which submodule an operator belongs to, in the forward pass and in the backward pass."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


class Layers:
    """Follows the calls of a module's submodules.

    Autograd numbers its nodes in the order in which they are made. So the numbers at which the
    forward pass entered and left submodules tell for every node of the backward pass where it was
    made.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._names: list[str] = []

    @contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for name, part in module.named_modules():
                if part is not module:
                    self._follow(part, name, stack)
            yield

    def _follow(self, part: nn.Module, name: str, stack: ExitStack) -> None:
        def enter(*_: Any) -> None:
            self._stack.append(name)
            self._mark()

        def leave(*_: Any) -> None:
            self._stack.pop()
            self._mark()

        stack.callback(part.register_forward_pre_hook(enter, prepend=True).remove)
        stack.callback(part.register_forward_hook(leave, always_call=True).remove)

    def _mark(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._numbers.append(torch._C._autograd._get_sequence_nr())
            self._names.append(self._stack[-1] if self._stack else "")

    @property
    def current(self) -> str:
        """The innermost submodule at work, "" outside of all."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._names[at] if 0 <= at < len(self._names) else ""
