"""Blocks that are computed when somebody looks, or lie in memory in another order than serially.

[Note: pending] A rule may return a tensor whose block is not there yet: its `pending` says what it
will be. The next rule either takes that over, as a link of a chain, or is one that does not know of
it: then the block is computed first. What it will be computed from must stay as it is meanwhile, so
whoever else uses that tensor, its *source*, has the block computed before.

[Note: order] Convolutions on the CPU like channels last. Rules keep a block in that order, and mark
the tensor as `reordered`, where serial torch has it contiguous; whoever asks for ``local`` gets
torch's order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import Function

from hyperslab.errors import LayoutError
from hyperslab.tensor.autograd_functions import before_functions
from hyperslab.tensor.copies import TrackedTensor


class Promise(Protocol):
    """What a block will be."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the block."""

    @property
    def sources(self) -> Iterable[LazyTensor]:
        """The tensors that it is computed from."""

    @property
    def recomputable(self) -> bool:
        """Whether the block is to be computed once more, by who would keep it otherwise."""

    def value(self) -> torch.Tensor:
        """The block, with its graph."""


class LazyTensor(TrackedTensor):
    """A tensor whose block may be pending or reordered; see the notes."""

    pending: Promise | None = None
    readers: tuple[weakref.ref[LazyTensor], ...] = ()
    """The tensors that are pending and have this one for their source."""
    private = False
    """Nobody but the rules has seen its memory: it stays as it is until one of them changes it.

    The same on all ranks, also where a view is empty or a copy on some of them.
    """
    reordered = False
    bypassed = False
    """Somebody computed from what is pending here, in another type: no gradient comes through."""
    _own: torch.Tensor | None = None  # the block where it is not this tensor's memory
    _computed: tuple[Promise, int] | None = None  # from what, and the version that it has since

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
    def recipe(self) -> Promise | None:
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

    def defer(self, pending: Promise) -> None:
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
                self._own = _InRows.apply(self._block)
            self.reordered = False
        return self._block


class _InRows(torch.autograd.Function):
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


def _settled(cls: type[Function], values: tuple[Any, ...]) -> type[Function]:
    """Have what is pending computed before an autograd function takes it.

    ``torch.autograd.Function.apply`` (reentrant checkpointing is one) asks in C++, past
    ``__torch_function__``, whether its arguments need gradients: of a placeholder that none does.
    """
    for value in values:
        if isinstance(value, LazyTensor) and value.pending is not None:
            value.settle()
    return cls


before_functions(_settled)
