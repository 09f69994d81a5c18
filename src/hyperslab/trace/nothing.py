"""Tensors that have an address but no memory: no page behind it is ever touched.

They are on the CPU as far as torch knows, so that dispatch, autocast, autograd and the choice of
kernels are those of a real run. (Torch's meta device has no autocast, and its fake tensors cannot
be subclasses such as `hyperslab.Sharded`.)
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence

import torch

from hyperslab.errors import HyperslabError
from hyperslab.trace.heap import ALIGNMENT, HeapBounds

ADDRESSES = 1 << 44  # [B] of addresses; an operating system may give less
ENOUGH = 1 << 30
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has no name for it before 3.14


class Nothing:
    """A range of addresses from which tensors without memory are made, and a count of their bytes.

    ``live`` [B] is what those tensors hold whose storage somebody still refers to, ``peak`` [B] the
    most that it has been. ``heap`` says how far the C library's heap would have grown.
    """

    def __init__(self) -> None:
        self._memory, self.size = _reserve()
        self._view = memoryview(self._memory)
        self.begin = torch.frombuffer(self._view, dtype=torch.uint8, count=1).data_ptr()
        self.heap = HeapBounds()
        self.live = 0
        self.peak = 0

    def empty(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor without memory.

        Raises:
            HyperslabError: it is larger than all addresses.
        """
        elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        nbytes = max(1, 0 if 0 in shape else elements) * dtype.itemsize
        buffer = self._take(nbytes)
        flat = torch.frombuffer(buffer, dtype=dtype)
        return flat.as_strided(tuple(shape), tuple(strides))

    def borrow(self, nbytes: int) -> None:
        """Take so much for the time of one operator."""
        if nbytes:
            self._take(nbytes)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage is one of these."""
        return 0 <= tensor.untyped_storage().data_ptr() - self.begin < self.size

    def _take(self, nbytes: int) -> memoryview:
        if nbytes > self.size:
            raise HyperslabError(
                f"a tensor of {nbytes / 2**30:.1f} GiB cannot be traced: this process may have no "
                f"more than {self.size / 2**30:.0f} GiB of addresses\n    trace where the limit of "
                "its address space is higher (ulimit -v)"
            )
        blocks = self.heap.take(nbytes)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        at = blocks[0][0] % (self.size - nbytes + 1) // ALIGNMENT * ALIGNMENT
        buffer = self._view[at : at + nbytes]  # some may overlap: nobody reads or writes them
        weakref.finalize(buffer, self._freed, nbytes, blocks).atexit = False
        return buffer

    def _freed(self, nbytes: int, blocks: tuple[tuple[int, int], tuple[int, int]]) -> None:
        self.live -= nbytes
        self.heap.give(blocks)


def _reserve() -> tuple[mmap.mmap, int]:
    """As many addresses as there are, without memory."""
    size = ADDRESSES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    while True:
        try:
            return mmap.mmap(-1, size, flags=flags), size
        except (OSError, OverflowError):
            size //= 2
            if size < ENOUGH:
                raise
