"""Marks in a profile: what a rank waits for, and which layer runs; only while one is recorded.

Nothing of it is there otherwise: methods are replaced and hooks added for the profiled steps, and
taken back afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.profiler import record_function

from hyperslab.comm.communicator import GroupCommunicator, Pending
from hyperslab.comm.shared_memory.channels import Shared
from hyperslab.data.prefetch import Prefetcher
from hyperslab.train.profile.events import LAYER, MARK
from hyperslab.train.progress import Progress
from hyperslab.train.step_vote import Vote
from hyperslab.train.trainer import Trainer

Method = Callable[..., Any]
"""As a class has it."""


@contextmanager
def marks(model: nn.Module) -> Iterator[None]:
    """Open marks around every wait of this process and every submodule of ``model``."""
    with ExitStack() as stack:
        for owner, name, label in MARKED:
            stack.enter_context(_replaced(owner, name, label))
        stack.enter_context(_layers(model))
        yield


def _of_gradients(
    _own: Shared, _x: object, _ranks: object, what: str, *_: object, **__: object
) -> str | None:
    # Other sums through shared memory are a communicator's, which has its mark.
    return f"{MARK}gradients:{what}" if what == "the average of the gradients" else None


MARKED: tuple[tuple[type, str, Method], ...] = (
    (Pending, "__init__", lambda own, _g, _s, _r, what: f"{MARK}halos:{id(own)}:{what}"),
    (Pending, "wait", lambda own: f"{MARK}halos:{id(own)}:{own._what}"),
    (GroupCommunicator, "sum_in_place", lambda _own, _x, what: f"{MARK}statistics:{what}"),
    (Shared, "all_reduce", _of_gradients),
    (Shared, "average_shown", lambda _own, _sums, what, **_: f"{MARK}gradients:{what}"),
    (Prefetcher, "take", lambda *_: f"{MARK}data:a mini-batch"),
    (Trainer, "train_step", lambda *_: f"{MARK}framework:between operators"),
    (Progress, "record", lambda *_: f"{MARK}framework:the history"),
    (Vote, "result", lambda *_: f"{MARK}vote:the agreement about a step"),
)
"""Class, method, and what names the mark by the method's arguments; None is no mark."""


@contextmanager
def _replaced(owner: type, name: str, label: Method) -> Iterator[None]:
    original: Method = owner.__dict__[name]

    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        words = label(*args, **kwargs)
        with nullcontext() if words is None else record_function(words):
            return original(*args, **kwargs)

    setattr(owner, name, marked)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _layers(model: nn.Module) -> Iterator[None]:
    """A mark around each submodule's forward."""
    open_marks: list[record_function] = []
    hooks = []
    for name, module in model.named_modules():
        if name:
            begin = functools.partial(_begin, open_marks, f"{LAYER}{name}")
            hooks.append(module.register_forward_pre_hook(begin))
            end = functools.partial(_end, open_marks)
            hooks.append(module.register_forward_hook(end, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while open_marks:  # of a forward pass that an error ended
            _end(open_marks)


def _begin(open_marks: list[record_function], label: str, *_: object) -> None:
    mark = record_function(label)
    mark.__enter__()
    open_marks.append(mark)


def _end(open_marks: list[record_function], *_: object) -> None:
    open_marks.pop().__exit__(None, None, None)
