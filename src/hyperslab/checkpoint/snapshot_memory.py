"""Host memory that a snapshot is copied into: taken once, used again for every checkpoint.

Small tensors, and all that others than the optimizer may change, such as running statistics, are
copied at once. What only a step of the optimizer changes has time until the next one: a thread
copies it during the forward and backward pass, and the optimizer waits for that. A device copies in
the order of its work, so there nobody waits.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Set

import torch

from hyperslab.checkpoint.values import Tensors
from hyperslab.errors import CheckpointError

TENSOR_ALIGNMENT = 64
"""Of a tensor in it [B]."""

LATE = 256 << 10
"""The smallest tensor [B] that is copied by the thread."""

HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
"""Fresh memory comes page by page, and in small ones that takes as long as four copies into it."""

Copy = tuple[torch.Tensor, torch.Tensor, int]
"""Where to, of what, and how often that was changed so far."""


class SnapshotMemory:
    """As many bytes as this rank's share of the state had at most.

    What it held before is gone with the next `hold`. ``copied`` says that all is there.
    """

    def __init__(self) -> None:
        self.copied = threading.Event()
        self.copied.set()
        self._room = torch.empty(0, dtype=torch.uint8)
        self._on_device: torch.cuda.Event | None = None
        self._late: list[Copy] = []

    @property
    def nbytes(self) -> int:
        """How much it is [B]."""
        return self._room.nbytes

    def hold(self, files: dict[str, Tensors], late: Set[int]) -> dict[str, Tensors]:
        """Where the copies are, or will be after `finish`.

        ``late``: addresses of what only the optimizer changes; it has to wait for ``copied``.
        """
        tensors = [tensor for part in files.values() for tensor in part.values()]
        cuda = any(tensor.is_cuda for tensor in tensors)
        size = sum(map(_padded, tensors))
        if size > self.nbytes:
            self._room = torch.empty(0, dtype=torch.uint8)  # not both at a time
            self._room = _pinned(size) if cuda else _plain(size)
        places = self._places(tensors, late)
        copies = {name: {key: next(places) for key in part} for name, part in files.items()}
        if self._late:
            self.copied.clear()
        if cuda:
            self._on_device = torch.cuda.Event()
            self._on_device.record()
        return copies

    def finish(self) -> None:
        """Copy what is left, and wait for a device's copies; the thread that reads them calls it.

        Raises:
            CheckpointError: something else than the optimizer has changed a weight meanwhile.
        """
        late = self._late
        self._late = []
        try:
            for place, tensor, _ in late:
                place.copy_(tensor)
            if any(tensor._version != version for _, tensor, version in late):
                raise CheckpointError(
                    "weights were changed while they were copied, and not by optimizer.step()\n"
                    "    write checkpoints before the run goes on: checkpoint.background=false"
                )
        finally:
            self.copied.set()
        if self._on_device is not None:
            self._on_device.synchronize()
            self._on_device = None

    def _places(self, tensors: list[torch.Tensor], late: Set[int]) -> Iterator[torch.Tensor]:
        """Those that are copied at once come first: they touch as little fresh memory as can be."""
        at_once = 0
        later = sum(_padded(tensor) for tensor in tensors if not _waits(tensor, late))
        for tensor in tensors:
            waits = _waits(tensor, late)
            begin = later if waits else at_once
            flat = self._room[begin : begin + tensor.nbytes].view(tensor.dtype)
            place = flat.view(tensor.shape)
            if waits:
                self._late.append((place, tensor, tensor._version))
                later += _padded(tensor)
            else:
                place.copy_(tensor, non_blocking=True)
                at_once += _padded(tensor)
            yield place


def _waits(tensor: torch.Tensor, late: Set[int]) -> bool:
    return tensor.nbytes >= LATE and not tensor.is_cuda and tensor.data_ptr() in late


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT


def _pinned(size: int) -> torch.Tensor:
    """Of which a device copies by itself, while this thread goes on."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _plain(size: int) -> torch.Tensor:
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if HUGE_PAGES is not None:
        room.madvise(HUGE_PAGES)
    return torch.frombuffer(room, dtype=torch.uint8)
