"""Lends host memory again and again, page-locked at exactly the size that is asked for or not.

The C library gives large blocks back to the system, or leaves holes that the next one does not fit:
fresh pages at every step, or a process that grows.

A CUDA device copies from and to such memory by itself. Torch's own pinned memory is rounded up to
the next power of two, so that a batch or a snapshot of 9 GiB takes 16; here fresh memory is mapped
and registered. That takes long, so `PageLockedBuffers` keeps what batches have been given.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from hyperslab.util.torch_internals import count_storage_users

HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
"""Fresh memory comes page by page, and in small ones that takes as long as four copies into it."""

LARGE = 8 << 20
"""Size [B] from which on memory is mapped; torch's own, which is at hand, for smaller ones."""


def fresh_memory(nbytes: int) -> mmap.mmap:
    """Maps memory that nothing has touched."""
    room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if HUGE_PAGES is not None:
        room.madvise(HUGE_PAGES)
    return room


def page_locked(nbytes: int) -> torch.Tensor:
    """Returns so many bytes that are page-locked; torch's own where CUDA does not register them."""
    if nbytes < LARGE:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    # It ends before the map, to which it refers: what is unmapped cannot be unregistered.
    memory = (ctypes.c_char * nbytes).from_buffer(fresh_memory(nbytes))
    address = ctypes.addressof(memory)
    cuda = torch.cuda.cudart()
    if int(cuda.cudaHostRegister(address, nbytes, 0)) != 0:
        with suppress(AttributeError):  # or the next kernel would be blamed for this
            ctypes.CDLL(None).cudaGetLastError()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass(slots=True, eq=False)
class _Buffer:
    """Keeps one buffer: how many hold its memory if nobody has it, and when a device copied it."""

    memory: torch.Tensor
    holders: int
    copied: torch.cuda.Event | None = None

    @property
    def free(self) -> bool:
        """Tells if nobody has it, not as an array either, and no device copies it."""
        lent = count_storage_users(self.memory.untyped_storage()) > self.holders
        return not lent and (self.copied is None or self.copied.query())


class LentBuffers:
    """Lends tensors; their memory is free again when they are gone."""

    kept = 0
    """Buffers that wait for their next use beside the one that is lent."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def make(self, nbytes: int) -> torch.Tensor:
        """Returns so many bytes of memory that is new; the C library's for few of them."""
        if nbytes < LARGE:
            return torch.empty(nbytes, dtype=torch.uint8)
        return torch.frombuffer(fresh_memory(nbytes), dtype=torch.uint8)

    def lend(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor without values."""
        nbytes = math.prod(shape) * dtype.itemsize
        free = [one for one in self._buffers if one.free]
        fitting = next((one for one in free if one.memory.nbytes == nbytes), None)
        memory = self.make(nbytes) if fitting is None else fitting.memory
        # Samples of many shapes would leave one buffer each.
        gone = [fitting, *free[: max(0, len(free) - self.kept)]]
        self._buffers = [one for one in self._buffers if one not in gone]
        self._buffers.append(_Buffer(memory, 0))
        self._buffers[-1].holders = count_storage_users(memory.untyped_storage())
        return memory.view(dtype).view(*shape)


class PageLockedBuffers(LentBuffers):
    """Lends page-locked tensors, whose memory is not free either until it was copied."""

    kept = 8

    def make(self, nbytes: int) -> torch.Tensor:
        return page_locked(nbytes)

    def copying(self, tensor: torch.Tensor, copied: torch.cuda.Event) -> None:
        """Says when the device has copied a tensor; of one that was not lent it does nothing."""
        for one in self._buffers:
            if one.memory.data_ptr() == tensor.data_ptr():
                one.copied = copied
