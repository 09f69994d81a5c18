"""Keeps the state of a cut tensor's block: deferred, reordered, or a copy of what would be a view.

[Note: copies] Where serial torch has a view a rule may return a copy. Nothing may change the one
without the other's notice: the copy cannot be changed in place, nor be used once its base was.

[Note: pending] A rule may return a tensor whose block is not there yet: its `pending` says what
it will be. The next rule either takes that over, as a link of a chain, or is one that does not
know of it: then the block is computed first. What it will be computed from must stay as it is
meanwhile, so any other use of that tensor, its *source*, has the block computed before.

[Note: order] Convolutions on the CPU like channels last. Rules keep a block in that order, and
mark the tensor as `reordered`, where serial torch has it contiguous; ``local`` gives torch's
order.

[Note: functions] Torch asks no ``__torch_function__`` when a ``torch.autograd.Function`` is
applied: `before_functions` says what happens before one runs, and `seeing_serial_gradients`
which gradients its backward sees.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import Function

from hyperslab.errors import LayoutError

PrepareFunction = Callable[[type[Function], tuple[Any, ...]], type[Function]]
"""From a function's class and all arguments of a call to the class that is applied."""

# Torch runs the backward pass of every device in a thread of its own.
_backward_state = threading.local()


def sees_serial_gradients() -> bool:
    """Whether who asks for a gradient inside a backward pass wants the serial one."""
    return getattr(_backward_state, "serial", False)


@contextmanager
def seeing_serial_gradients(serial: bool = True) -> Iterator[None]:
    """Within it `sees_serial_gradients` is ``serial``."""
    before = sees_serial_gradients()
    _backward_state.serial = serial
    try:
        yield
    finally:
        _backward_state.serial = before


def before_functions(prepare: PrepareFunction) -> None:
    """Have it called at every ``torch.autograd.Function.apply``; what is named last comes first."""
    apply = inspect.getattr_static(Function, "apply").__func__

    @functools.wraps(apply)
    def run(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return apply(prepare(cls, (*args, *kwargs.values())), *args, **kwargs)

    # Torch has no hook for it: what every function inherits is replaced.
    Function.apply = classmethod(run)  # type: ignore[assignment,method-assign]


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    with DisableTorchFunctionSubclass():
        return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _changes(block: torch.Tensor) -> list[int]:
    """How often rules changed an inference tensor's memory, of which torch keeps no version."""
    storage: Any = block.untyped_storage()
    if not hasattr(storage, "_hyperslab_changes"):
        storage._hyperslab_changes = [0]
    changes: list[int] = storage._hyperslab_changes
    return changes


class _BaseOfCopy:
    """The block of which serial torch would have a view."""

    def __init__(self, block: torch.Tensor) -> None:
        self._changes = _changes(block) if block.is_inference() else None
        self._counter = block.detach()
        self._counter.data = block.new_empty(0)  # shares the version counter, but no memory
        self._version = self._now

    @property
    def _now(self) -> int:
        return self._counter._version if self._changes is None else self._changes[0]

    @property
    def changed(self) -> bool:
        """Whether it was changed in place since."""
        return self._now != self._version


class TrackedTensor(torch.Tensor):
    """A tensor that knows whether serial torch would have a view here, and of what."""

    _base_of_copy: _BaseOfCopy | None = None
    is_crop = False
    """A view that leaves elements of a cut dim away; on some ranks none: blocks look whole."""

    @property
    def _block(self) -> torch.Tensor:
        with DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def _check_base_of_copy(self, what: object) -> None:
        """Refuse the use of a copy whose base was changed since."""
        if self._base_of_copy is not None and self._base_of_copy.changed:
            raise LayoutError(
                f"{what} is a copy where serial torch has a view, and the tensor that it was taken "
                "from was changed in place since\n    use the operator that returns a new tensor "
                "(inplace=False) there, or clone() what was taken before"
            )

    def mark_as_copy(self, base: TrackedTensor) -> None:
        """Say that this is a copy of a part of ``base`` where serial torch would have a view.

        From now on it cannot be changed in place, nor be used once ``base`` was: the one would
        show in the other.
        """
        self._base_of_copy = base._base_of_copy or _BaseOfCopy(base._block)

    @property
    def is_copy(self) -> bool:
        """Whether serial torch would have a view here; see `mark_as_copy`."""
        return self._base_of_copy is not None

    def note_change(self) -> None:
        """Say that a rule changed this tensor in place, where torch does not count it."""
        block = self._block
        if block.is_inference():
            _changes(block)[0] += 1

    def _pass_on_to(self, other: TrackedTensor) -> None:
        """A view of a copy or of a crop is one as well."""
        if (self._base_of_copy is not None or self.is_crop) and _share_memory(self, other):
            other._base_of_copy = self._base_of_copy
            other.is_crop = self.is_crop


class Deferred(Protocol):
    """What a block will be."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the block."""

    @property
    def sources(self) -> Iterable[DeferredTensor]:
        """The tensors that it is computed from."""

    @property
    def recomputable(self) -> bool:
        """Whether the block is to be computed once more, by who would keep it otherwise."""

    def value(self) -> torch.Tensor:
        """The block, with its graph."""


class DeferredTensor(TrackedTensor):
    """A tensor whose block may be pending or reordered; see the notes."""

    pending: Deferred | None = None
    readers: tuple[weakref.ref[DeferredTensor], ...] = ()
    """The tensors that are pending and have this one for their source."""
    private = False
    """Nobody but the rules has seen its memory: it stays as it is until one of them changes it.

    The same on all ranks, also where a view is empty or a copy on some of them.
    """
    reordered = False
    bypassed = False
    """Somebody computed from what is pending here, in another type: no gradient comes through."""
    _own: torch.Tensor | None = None  # the block where it is not this tensor's memory
    _computed: tuple[Deferred, int] | None = None  # from what, and the version that it has since

    @property
    def _block(self) -> torch.Tensor:
        if self.pending is not None:
            self._compute()
        if self._own is not None:
            return torch.ops.aten.alias(self._own)  # without a graph where none is wanted
        with DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def settle(self) -> None:
        """Compute what is pending here, and what this tensor is the source of."""
        self.settle_readers()
        if self.pending is not None:
            self._compute()

    def settle_readers(self) -> None:
        """Compute what this tensor is the source of."""
        readers, self.readers = self.readers, ()
        for reader in readers:
            pending = reader()
            if pending is not None:
                pending.settle()

    def _compute(self) -> None:
        """Become what is pending; the object stays the same, whoever refers to it."""
        assert self.pending is not None
        pending = self.pending
        recomputable = pending.recomputable
        with torch.inference_mode(False):  # put off outside of it, looked at inside
            value = pending.value()
            self.pending = None
            self.become(value)
        if recomputable:
            self._computed = (pending, value._version)

    def become(self, value: torch.Tensor) -> None:
        """Have another block from now on: what an operator in place makes of it.

        For a `private` tensor. Torch would note the change in a view of this tensor, and copy the
        whole gradient for it, twice.
        """
        # Who looks first may do so under no_grad.
        self._own = None
        self._computed = None
        with DisableTorchFunctionSubclass(), torch.set_grad_enabled(value.requires_grad):
            try:
                torch._C._swap_tensor_impl(self, value.as_subclass(type(self)))
            except RuntimeError:  # torch's profiler knows the old one
                self._own = value

    def check_on_path(self, what: str) -> None:
        """Refuse to watch gradients that do not come through here.

        Raises:
            LayoutError: what used this tensor did so in another type, before it was computed.
        """
        if self.bypassed:
            raise LayoutError(
                f"{what}: the gradient does not come through this tensor, which an operator under "
                "autocast took in another type\n    call it before the tensor is used"
            )

    @property
    def recipe(self) -> Deferred | None:
        """What the block was computed from, or will be, if nobody has changed it since."""
        if self.pending is not None:
            return self.pending
        if self._computed is None:
            return None
        pending, version = self._computed
        with DisableTorchFunctionSubclass():
            return pending if self._block._version == version else None

    @property
    def replaceable(self) -> bool:
        """Whether an operator in place may give it another block: nobody would miss the old one.

        Only where gradients are wanted.
        """
        with DisableTorchFunctionSubclass():
            wanted = torch.is_grad_enabled() and self._block.requires_grad
            return self.private and wanted and not self.retains_grad

    def defer(self, pending: Deferred) -> None:
        """Have this tensor's block computed later; it has no memory until then."""
        for source in pending.sources:
            alive = tuple(reader for reader in source.readers if reader() is not None)
            source.readers = (*alive, weakref.ref(self))
        self.pending = pending
        self.private = True

    def _in_serial_order(self) -> torch.Tensor:
        """The block as serial torch has it in memory; from now on this tensor's own, too."""
        if self.reordered:
            inference = self._block.is_inference()
            with torch.set_grad_enabled(not inference), DisableTorchFunctionSubclass():
                self._own = _ToContiguous.apply(self._block)
            self.reordered = False
        return self._block


class _ToContiguous(torch.autograd.Function):
    """Contiguous memory by the compiled kernel, in a fraction of the time of torch's copy.

    The gradient stays in the order in which it comes: whoever wants another one knows why.
    """

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.hyperslab.reorder(x, False, x.dtype)
        return y

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _force_arguments(cls: type[Function], values: tuple[Any, ...]) -> type[Function]:
    """Have what is pending computed before an autograd function takes it.

    ``torch.autograd.Function.apply`` (reentrant checkpointing is one) asks in C++, past
    ``__torch_function__``, whether its arguments need gradients: of a placeholder that none does.
    """
    for value in values:
        if isinstance(value, DeferredTensor) and value.pending is not None:
            value.settle()
    return cls


before_functions(_force_arguments)
