"""Host memory that a snapshot is copied into: taken once, used again for every checkpoint."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import torch

from hyperslab.checkpoint.values import Tensors

TENSOR_ALIGNMENT = 64
"""Of a tensor in it [B]."""

HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
"""Fresh memory comes page by page, and in small ones that takes as long as four copies into it."""


class SnapshotMemory:
    """As many bytes as this rank's share of the state had at most.

    What it held before is gone with the next `hold`.
    """

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """How much it is [B]."""
        return self._room.nbytes

    def hold(self, files: dict[str, Tensors]) -> dict[str, Tensors]:
        """Copies; the tensors may change afterwards.

        Those of a CUDA device are under way until `wait`, but stand in the order of its work.
        """
        tensors = [tensor for part in files.values() for tensor in part.values()]
        cuda = any(tensor.is_cuda for tensor in tensors)
        size = sum(map(_padded, tensors))
        if size > self.nbytes:
            self._room = torch.empty(0, dtype=torch.uint8)  # not both at a time
            self._room = _pinned(size) if cuda else _plain(size)
        places = self._places(tensors)
        copies = {name: {key: next(places) for key in part} for name, part in files.items()}
        if cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return copies

    def wait(self) -> None:
        """Wait for the copies; whoever reads them calls it first."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def _places(self, tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        begin = 0
        for tensor in tensors:
            flat = self._room[begin : begin + tensor.nbytes].view(tensor.dtype)
            yield flat.view(tensor.shape).copy_(tensor, non_blocking=True)
            begin += _padded(tensor)


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
