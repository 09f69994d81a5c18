"""Makes tensors that have an address but no memory, and counts the memory that they would take.

No page behind these tensors is ever touched. They are on the CPU as far as torch knows, so that
dispatch, autocast, autograd and the choice of kernels are those of a real run. (Torch's meta
device has no autocast, and its fake tensors cannot be subclasses such as `hyperslab.Sharded`.)

`Heap` simulates how far the C library's heap grows. On the CPU freed memory is kept for the
next activation (`hyperslab.comm.bootstrap`), so a rank's memory is as high as its heap has
ever grown, holes included. glibc takes the smallest hole into which a block and its alignment
fit, joins a hole with those beside it, and grows where there is none. What alignment leaves
over at both ends of a block becomes a small chunk; where such a chunk was given to a small
object, two holes cannot be joined. How often that happens depends on everything else that the
process allocates, so it is not simulated: `UNJOINED` allows for it.

`scratch_of` says what torch's convolutions take on the CPU while they run. oneDNN computes in
an order of its own, channels in groups of 16 with AVX-512 and of 8 without, and copies what is
contiguous into it: forward the result, and the input where its channels fill such groups; backward
the gradient of the result with that of the input (whose channels are filled up), or with the
input. Without AVX-512 it makes the gradient of the weights from the columns of one plane. For
small volumes torch takes im2col instead, a column for each output. Measured with torch 2.13 by
the highest memory of a process that calls one convolution, on processors of both kinds.
"""

from __future__ import annotations

import bisect
import math
import mmap
import weakref
from collections.abc import Sequence

import torch

from hyperslab.errors import HyperslabError
from hyperslab.kernels.conv_problem import IM2COL
from hyperslab.planner.records import Call, TensorSpec

ALIGNMENT = 64
UNJOINED = 1.2
"""How far a real heap grows over one whose holes are always joined.

With it the memory of 54 measured processes is 2.3 % off in the median, 11 % at worst (docs/log.md).
"""

CHUNK_HEADER = 16  # [B] of a chunk
ALIGNMENT_SPARE = 96  # [B] more than a block that glibc 2.36 looks for, to align it


class Heap:
    """Simulates a heap that grows from address 0; ``top`` is the highest so far."""

    def __init__(self) -> None:
        self.top = 0
        self._holes: list[tuple[int, int]] = []  # size, begin; sorted
        self._size_at: dict[int, int] = {}  # of the hole that begins there
        self._size_before: dict[int, int] = {}  # of the hole that ends there

    def take(self, nbytes: int) -> tuple[int, int]:
        """Takes a block for so many bytes: its begin and its size.

        >>> heap = Heap()
        >>> first, second = heap.take(1000), heap.take(100)
        >>> heap.give(*first)
        >>> heap.take(500)[0] == first[0], heap.take(1000)[0] > second[0]
        (True, True)
        """
        size = -(-(nbytes + CHUNK_HEADER) // ALIGNMENT) * ALIGNMENT
        at = bisect.bisect_left(self._holes, (size + ALIGNMENT_SPARE, 0))
        if at == len(self._holes):
            # The heap grows; the last hole, if it reaches the top, becomes a part of the block.
            last = self._size_before.get(self.top, 0)
            if last:
                self._remove(last, self.top - last)
            begin = self.top - last
            self.top = max(self.top, begin + size + ALIGNMENT_SPARE)
            self._add(self.top - begin - size, begin + size)
            return begin, size
        hole, begin = self._holes[at]
        self._remove(hole, begin)
        self._add(hole - size, begin + size)
        return begin, size

    def give(self, begin: int, size: int) -> None:
        """Frees a block, which becomes one hole with those beside it."""
        after = self._size_at.get(begin + size)
        if after is not None:
            self._remove(after, begin + size)
            size += after
        before = self._size_before.get(begin)
        if before is not None:
            self._remove(before, begin - before)
            begin -= before
            size += before
        self._add(size, begin)

    def _add(self, size: int, begin: int) -> None:
        bisect.insort(self._holes, (size, begin))
        self._size_at[begin] = size
        self._size_before[begin + size] = size

    def _remove(self, size: int, begin: int) -> None:
        del self._holes[bisect.bisect_left(self._holes, (size, begin))]
        del self._size_at[begin]
        del self._size_before[begin + size]


_HAS_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
_ONEDNN_GROUP = 16 if _HAS_AVX512 else 8  # channels
_BACKWARD = "aten.convolution_backward.default"
_FORWARD = ("aten.convolution.default", "aten.mkldnn_convolution.default")


def scratch_of(call: Call, result: object, *, to_onednn: bool) -> int:
    """Computes a call's scratch memory [B]; ``to_onednn``: oneDNN is asked for by name.

    ``result`` is the form of what the call returns.
    """
    if call.name == _BACKWARD:
        gradient, x, weight, *_ = call.tensors()
        mask = call.arguments[10]
        assert isinstance(mask, tuple)
        if not to_onednn and _uses_im2col(x):
            return sum(map(bool, mask[:2])) * _im2col_bytes(x, weight, gradient)
        if x.channels_last:
            return 0
        groups = -(-x.shape[1] // _ONEDNN_GROUP)
        filled = x.nbytes * groups * _ONEDNN_GROUP // x.shape[1]
        of_data = gradient.nbytes + filled - x.nbytes if mask[0] else 0
        of_weight = 0
        if mask[1] and not _HAS_AVX512:
            planes = gradient.shape[0] * gradient.shape[2]
            of_weight = _im2col_bytes(x, weight, gradient) // max(1, planes)
        elif mask[1] and _reordered_bytes(x):
            of_weight = gradient.nbytes + x.nbytes
        return max(of_data, of_weight)
    if call.name in _FORWARD:
        x, weight, *_ = call.tensors()
        assert isinstance(result, TensorSpec)
        if not to_onednn and call.name == _FORWARD[0] and _uses_im2col(x):
            return _im2col_bytes(x, weight, result)
        return 0 if x.channels_last else result.nbytes + _reordered_bytes(x)
    return 0


def _uses_im2col(x: TensorSpec) -> bool:
    small = len(x.shape) == 5 and math.prod(x.shape[:4]) <= IM2COL
    return small and x.dtype == torch.float32 and not x.channels_last


def _im2col_bytes(x: TensorSpec, weight: TensorSpec, out: TensorSpec) -> int:
    taps = math.prod(weight.shape[2:])
    columns = x.shape[0] * x.shape[1] * taps * math.prod(out.shape[2:])
    return 0 if taps == 1 else columns * x.dtype.itemsize


def _reordered_bytes(x: TensorSpec) -> int:
    return x.nbytes if x.shape[1] % _ONEDNN_GROUP == 0 else 0


MOST_ADDRESSES = 1 << 44  # [B] of addresses; an operating system may give less
FEWEST_ADDRESSES = 1 << 30
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has no name for it before 3.14


class TooLargeError(Exception):
    """Ends a trace whose tensors take more memory than they may."""


class UnbackedMemory:
    """Makes tensors from addresses without memory, and counts their bytes.

    ``live`` [B] is what those tensors hold whose storage somebody still refers to, ``peak`` [B] the
    most that it has been, and ``most`` [B] what it may become. ``heap`` [B] estimates the most that
    the C library would have taken for them; blocks from ``mapped_from`` [B] on are given back when
    they are freed, but for ``most_holes`` [B] of them.
    """

    def __init__(
        self, most: float = math.inf, mapped_from: float = math.inf, most_holes: int = 0
    ) -> None:
        self.most = most
        self.mapped_from = mapped_from
        self.most_holes = most_holes
        self._memory, self.size = _reserve_addresses()
        self._view = memoryview(self._memory)
        self.begin = torch.frombuffer(self._view, dtype=torch.uint8, count=1).data_ptr()
        self._heap = Heap()
        self._mapped = 0
        self._most_mapped = 0
        self.live = 0
        self.peak = 0
        self.heap = 0

    def empty(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Makes a tensor without memory.

        Raises:
            HyperslabError: it is larger than all addresses.
            TooLargeError: all together are larger than they may be.
        """
        elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        nbytes = max(1, 0 if 0 in shape else elements) * dtype.itemsize
        buffer = self._take(nbytes)
        flat = torch.frombuffer(buffer, dtype=dtype)
        return flat.as_strided(tuple(shape), tuple(strides))

    def borrow(self, nbytes: int) -> None:
        """Takes so much memory for the time of one operator."""
        if nbytes:
            self._take(nbytes)

    def has(self, tensor: torch.Tensor) -> bool:
        """Tells if a tensor's storage is one of these."""
        return 0 <= tensor.untyped_storage().data_ptr() - self.begin < self.size

    def _take(self, nbytes: int) -> memoryview:
        if nbytes > self.size:
            raise HyperslabError(
                f"a tensor of {nbytes / 2**30:.1f} GiB cannot be traced: this process may have no "
                f"more than {self.size / 2**30:.0f} GiB of addresses\n    trace where the limit of "
                "its address space is higher (ulimit -v)"
            )
        if self.live + nbytes > self.most:
            raise TooLargeError
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        place = None
        if nbytes < self.mapped_from:
            place = self._heap.take(nbytes)
        else:
            self._mapped += nbytes
            self._most_mapped = max(self._most_mapped, self._mapped)
        holes = min(self.most_holes, self._most_mapped)
        self.heap = max(self.heap, int(UNJOINED * self._heap.top) + self._mapped + holes)
        first = self._heap.top if place is None else place[0]
        at = first % (self.size - nbytes + 1) // ALIGNMENT * ALIGNMENT
        buffer = self._view[at : at + nbytes]  # some may overlap: nobody reads or writes them
        weakref.finalize(buffer, self._freed, nbytes, place).atexit = False
        return buffer

    def _freed(self, nbytes: int, place: tuple[int, int] | None) -> None:
        self.live -= nbytes
        if place is None:
            self._mapped -= nbytes
        else:
            self._heap.give(*place)


def _reserve_addresses() -> tuple[mmap.mmap, int]:
    """Reserves as many addresses as there are, without memory."""
    size = MOST_ADDRESSES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    while True:
        try:
            return mmap.mmap(-1, size, flags=flags), size
        except (OSError, OverflowError):
            size //= 2
            if size < FEWEST_ADDRESSES:
                raise
