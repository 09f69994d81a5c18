"""Autograd functions: what happens before they run, and what gradients their backward sees.

Torch asks no ``__torch_function__`` when a function is applied.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import Function

Prepare = Callable[[type[Function], tuple[Any, ...]], type[Function]]
"""From a function's class and all arguments of a call to the class that is applied."""

_state = threading.local()  # torch runs the backward of every device in a thread of its own


def sees_serial_gradients() -> bool:
    """Whether who asks for a gradient inside a backward pass wants the serial one."""
    return getattr(_state, "serial", False)


@contextmanager
def seeing_serial_gradients(serial: bool = True) -> Iterator[None]:
    """Within it `sees_serial_gradients` is ``serial``."""
    before = sees_serial_gradients()
    _state.serial = serial
    try:
        yield
    finally:
        _state.serial = before


def before_functions(prepare: Prepare) -> None:
    """Have it called at every ``torch.autograd.Function.apply``; what is named last comes first."""
    apply = inspect.getattr_static(Function, "apply").__func__

    @functools.wraps(apply)
    def run(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return apply(prepare(cls, (*args, *kwargs.values())), *args, **kwargs)

    # Torch has no hook for it: what every function inherits is replaced.
    Function.apply = classmethod(run)  # type: ignore[assignment,method-assign]
