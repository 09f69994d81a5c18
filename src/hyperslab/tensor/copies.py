"""Copies where serial torch has views: nothing may change the one without the other's notice."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from hyperslab.errors import LayoutError


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


class _Base:
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

    _base_of_copy: _Base | None = None
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
        self._base_of_copy = base._base_of_copy or _Base(base._block)

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
