"""Describes tensors that ranks hand in to be cut, and checks that ranks share equal samples.

In reading order: digests of all bits of a tensor, about as fast as memory is read; comparisons
of what ranks state, whose outcome a CUDA device may owe for a while; `InputSpec`, shape and type
of a mini-batch, or of a replica's part of one, and how it is to be cut; `check_same_sample`.

Legend: a *statement* is what a rank says about the tensor that it hands in: its `InputSpec`, the
order in which its dims lie in memory, and a digest of the samples that this rank takes part in.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import xxhash
from torch.utils.data import get_worker_info

from hyperslab.comm import AllGatheredInts, Grid, per_grid
from hyperslab.comm.bootstrap import named
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Cut, Partition
from hyperslab.geometry.box import Interval
from hyperslab.kernels.random_bits import GOLDEN, mix64
from hyperslab.tensor.sharded import Sharded
from hyperslab.util.capture import do_beside

DIGEST_CHUNK = 1 << 22  # numbers of a tensor on a device that are looked at at once
_POSITIVE = (1 << 63) - 1
_LOW_BITS = (1 << 32) - 1
_DIGEST_FACTOR = 1000003  # so that it counts which tensor is which
_INTEGER_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Maps the size of an element [B] to a type; an element of the largest is two numbers."""


def memory_order(x: torch.Tensor) -> tuple[int, ...]:
    """Return the dims in the order in which they lie in memory without a gap, outermost first.

    Where there are gaps (a slice) or repetitions (an expanded tensor), as they are counted.

    >>> memory_order(torch.zeros(2, 3, 4, 5)), memory_order(torch.zeros(2, 3).t())
    ((0, 1, 2, 3), (1, 0))
    """
    counted = tuple(range(x.dim()))
    strides: tuple[int, ...] = x.stride()
    order = tuple(sorted(counted, key=lambda dim: (-strides[dim], dim)))
    return order if not x.is_contiguous() and x.permute(order).is_contiguous() else counted


def digest_in_memory(x: torch.Tensor, order: tuple[int, ...]) -> int:
    """Digest a tensor on the CPU, its dims taken in ``order``: XXH3, 63 bits.

    No copy is made where that is its `memory_order`.
    """
    flat = _bits(x.permute(order)).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(flat.data) & _POSITIVE


def digest_on_device(x: torch.Tensor) -> torch.Tensor:
    """Digest a tensor on any device; the number (int64) stays there.

    A sum of all elements' bits, each times a number of its place that looks random, modulo 2^64.
    The same on all devices: torch's own random numbers depend on the model of a GPU.
    """
    bits = _bits(x)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    places = torch.arange(1, min(DIGEST_CHUNK, len(bits)) + 1, device=x.device)
    weights = mix64(places * GOLDEN)
    for number, part in enumerate(bits.split(DIGEST_CHUNK)):
        values = part.to(torch.int64)
        if part.dtype == torch.int64:  # or the highest bit would count only with odd numbers
            values = values ^ ((values >> 32) & _LOW_BITS)
        total += (values * weights[: len(values)]).sum() * (2 * number + 1)  # wraps around
    return total


def digest_of_all(
    tensors: Iterable[torch.Tensor], device: torch.device
) -> tuple[int, torch.Tensor]:
    """Digest several tensors in their order: those on the CPU, and the others on ``device``."""
    on_host = 0
    on_device = torch.zeros((), dtype=torch.int64, device=device)
    for x in tensors:
        if x.device.type == "cpu":
            own = digest_in_memory(x.detach(), tuple(range(x.dim())))
            on_host = (on_host * _DIGEST_FACTOR + own) & _POSITIVE
        else:
            on_device = on_device * _DIGEST_FACTOR + digest_on_device(x)  # wraps around
    return on_host, on_device


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits as a flat tensor of integers, in the order of the dims."""
    x = x.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return x.contiguous().reshape(-1).view(_INTEGER_TYPES[x.element_size()])


LAG = 2  # comparisons that a device may owe

JudgeRows = Callable[[Sequence[Sequence[int]]], None]
"""Raises where the rows, by rank, do not agree."""


class Comparisons:
    """Keeps the comparisons of a grid that a device owes; on the CPU none is ever owed.

    On a CUDA device the first of a kind is waited for: a wrong sampler is found at the first step.
    A wait for each would keep the host from queueing work ahead; so later ones are looked at
    when the second one after them is made. Not earlier where they are here already: all ranks
    judge at the same place of the program, or one would raise while the others go on and wait.
    """

    def __init__(self) -> None:
        self._owed: deque[tuple[AllGatheredInts, JudgeRows]] = deque()
        self._known: set[Hashable] = set()
        self._seen: Counter[Hashable] = Counter()  # tensors, by kind

    def add(self, rows: AllGatheredInts, kind: Hashable, judge: JudgeRows) -> None:
        """Judge these rows, and those before them, now if they are the first of a kind."""
        self._owed.append((rows, judge))
        first = kind not in self._known
        self._known.add(kind)
        while self._owed and (first or self._owed[0][0].at_once or len(self._owed) > LAG):
            rows, judge = self._owed.popleft()
            judge(rows.read())

    def of_values(self, kind: Hashable) -> bool:
        """Count a tensor of a kind; tell if it is the 1st, 2nd, 4th, 8th ..., compared by values.

        On a CUDA device a digest is a dozen kernels for every 4 million numbers: of each 512³
        volume more than the steps' own kernels. A sampler that differs between ranks does so from
        the start.
        """
        self._seen[kind] += 1
        return self._seen[kind].bit_count() == 1


@per_grid
def comparisons_of(_grid: Grid) -> Comparisons:
    return Comparisons()


Batch = Literal["global", "replica", "none"]
"""Tells whether a tensor is the whole mini-batch, a replica's part of it, or has no batch dim."""

_MOST_DIMS = 8  # that a statement has room for


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Shape and type of a tensor and how it is to be cut; ``dtype`` is a checksum of its name."""

    dtype: int
    shape: tuple[int, ...]
    channels: bool
    of_replica: bool
    batched: bool = True

    def __str__(self) -> str:
        if self.dtype in _NOT_CUTTABLE:
            return _NOT_CUTTABLE[self.dtype]
        words = [f"{self.shape} {_DTYPES.get(self.dtype, 'of an unknown type')}"]
        words += [] if self.channels else ["channels=False"]
        words += ['batch="replica"'] if self.of_replica else []
        words += [] if self.batched else ['batch="none"']
        return ", ".join(words)

    def numbers(self) -> list[int]:
        """Return the specification as integers, equally many for each."""
        options = [self.channels, self.of_replica, self.batched]
        head = [self.dtype, *options, len(self.shape), *self.shape]
        return [*head, *[0] * (_MOST_DIMS - len(self.shape))]

    @classmethod
    def of(cls, tensor: object, *, channels: bool, batch: Batch) -> InputSpec:
        """Describe what a rank passes, a tensor or not."""
        if batch not in get_args(Batch):
            raise LayoutError(f"batch={batch!r}: use one of {', '.join(get_args(Batch))}")
        if not isinstance(tensor, torch.Tensor):
            return NO_TENSOR
        if isinstance(tensor, Sharded):
            return CUT_ALREADY
        if tensor.dim() > _MOST_DIMS:
            return TOO_MANY_DIMS
        shape = tuple(tensor.shape)
        return cls(_dtype_code(tensor.dtype), shape, channels, batch == "replica", batch != "none")

    @property
    def can_be_cut(self) -> bool:
        """Tell whether it is that of an ordinary tensor."""
        return self.dtype not in _NOT_CUTTABLE

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    def samples(self, data: int, grid: Grid) -> Interval:
        """Return the interval of samples that a rank at place ``data`` of that axis computes."""
        count = self.shape[0] if self.shape else 1
        if self.of_replica or not self.batched:
            return 0, count
        cut = Cut.balanced("data", count, grid.data)
        return (0, count) if cut.thin else cut.interval(data)

    @classmethod
    def read(cls, row: Sequence[int]) -> InputSpec:
        dtype, channels, of_replica, batched, dims = row[:5]
        shape = tuple(row[5 : 5 + dims])
        return cls(dtype, shape, bool(channels), bool(of_replica), bool(batched))


SPEC_INTS = 5 + _MOST_DIMS  # numbers of a form in a row
_NOT_COMPARED = -1  # in place of the order of dims
NO_TENSOR = InputSpec(0, (), channels=True, of_replica=False)
CUT_ALREADY = InputSpec(1, (), channels=True, of_replica=False)
TOO_MANY_DIMS = InputSpec(2, (), channels=True, of_replica=False)


def refuse_workers(name: str, grid: Grid) -> None:
    """Refuse what ranks exchange messages in, in a process that loads samples for one of them."""
    if grid.size > 1 and get_worker_info() is not None:
        raise LayoutError(
            f"{name} was called in a worker of a DataLoader, but the ranks themselves have to call "
            "it: they exchange messages in it\n    call it in the loop, on what the loader yields"
        )


def check_spec(form: InputSpec, what: str = "what is handed in") -> None:
    """Refuse ``what`` where it is no tensor that can be cut (`LayoutError`)."""
    if not form.can_be_cut:
        raise LayoutError(
            f"{what} is {form}, which cannot be cut\n    hand in an ordinary tensor, batch "
            "included; for one that is already cut use redistribute or gather"
        )


def input_partition(form: InputSpec, grid: Grid) -> Partition:
    """Return how the mini-batch is cut of which a rank passes this part."""
    shape = form.shape
    if form.of_replica and shape:
        shape = (shape[0] * grid.data, *shape[1:])
    return grid.partition(shape, channels=form.channels, batch=form.batched)


def box_held(form: InputSpec, data: int) -> Box:
    """Return the box of the mini-batch that a rank at place ``data`` of that axis passes."""
    whole = Box.whole(form.shape)
    if not form.of_replica or not form.shape:
        return whole
    first = data * form.shape[0]
    return Box((first, *whole.lo[1:]), (first + form.shape[0], *whole.hi[1:]))


def describe_specs(forms: Mapping[int, InputSpec]) -> list[str]:
    """Return a line for each specification that ranks have, with the ranks that have it."""
    holders: dict[InputSpec, list[int]] = {}
    for rank, form in forms.items():
        holders.setdefault(form, []).append(rank)
    return [f"{named(ranks)}: {form}" for form, ranks in holders.items()]


def _dtype_code(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())


_NOT_CUTTABLE = {
    NO_TENSOR.dtype: "no tensor",
    CUT_ALREADY.dtype: "a tensor that is already cut",
    TOO_MANY_DIMS.dtype: f"a tensor of more than {_MOST_DIMS} dims",
}
_DTYPES = {
    _dtype_code(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)
}


_COMPARISON = "the comparison of the ranks' samples"
_SAME_SAMPLE_REMEDY = (
    "    let one rank hand its tensor out: hyperslab.scatter(x, grid)\n"
    "    or give all ranks of a replica the same samples: the same seeds for NumPy, Python and "
    'torch, and\n    DistributedSampler(data, grid.data, grid.coords["data"]) with '
    'hyperslab.shard(x, grid, batch="replica")'
)


def check_same_sample(tensor: torch.Tensor, form: InputSpec, grid: Grid) -> None:
    """Check on all ranks that those which share samples hold the same ones."""
    if grid.has_values and grid.size > 1:
        do_beside(functools.partial(_compare_samples, tensor, form, grid), _COMPARISON)


def _compare_samples(tensor: torch.Tensor, form: InputSpec, grid: Grid) -> None:
    samples = torch.zeros(())
    if form.can_be_cut:
        lo, hi = form.samples(grid.coords["data"], grid)
        plain = tensor.detach().as_subclass(torch.Tensor)
        samples = plain[lo:hi] if form.shape else plain
    counted = tuple(range(samples.dim()))
    on_cpu = grid.device.type == "cpu"
    order: tuple[int, ...] | None = memory_order(samples) if on_cpu else counted
    if not on_cpu and not comparisons_of(grid).of_values(form):
        # Shapes and types are still compared: every rank sends a message, whatever its own form.
        samples = samples.new_zeros(())
        order = None
    rows = _gather_statements(samples, form, order, grid)
    if on_cpu and len({row[SPEC_INTS] for row in rows.read()}) > 1:
        # Again, in an order that does not depend on memory.
        rows = _gather_statements(samples, form, counted, grid)
    sharers: dict[object, list[int]] = {}  # the ranks that compute the same samples
    for rank in range(grid.size):
        data = grid.coords_of(rank)["data"]
        key = data if form.of_replica else form.samples(data, grid)
        sharers.setdefault(key, []).append(rank)
    judge = functools.partial(compare_statements, sharers=[*sharers.values()])
    comparisons_of(grid).add(rows, form, judge)


def _gather_statements(
    samples: torch.Tensor, form: InputSpec, order: tuple[int, ...] | None, grid: Grid
) -> AllGatheredInts:
    """Gather what ranks state; ``order`` is None where nobody compares the samples' values now."""
    place = _NOT_COMPARED if order is None else sum(dim << 4 * i for i, dim in enumerate(order))
    numbers = [*form.numbers(), place]
    last = None
    if samples.device.type == "cpu":
        numbers.append(digest_in_memory(samples, order or ()))
    else:
        last = digest_on_device(samples)
    return AllGatheredInts(grid, numbers, last, _COMPARISON)


def compare_statements(rows: Sequence[Sequence[int]], sharers: Sequence[Sequence[int]]) -> None:
    """Compare the ranks' statements; ``sharers`` are to hold the same samples."""
    forms = [InputSpec.read(row) for row in rows]
    if len(set(forms)) > 1:
        raise LayoutError(
            "the ranks hand in different tensors to be cut as one\n"
            + "".join(f"    {words}\n" for words in describe_specs(dict(enumerate(forms))))
            + "    hand in tensors of one shape and type on every rank: of an uneven last "
            "mini-batch too\n    (drop_last=True), or let one rank hand its tensor out: "
            "hyperslab.scatter(x, grid)"
        )
    for ranks in sharers:
        # A rank that caught an error may be at another count than the others.
        looked = [rank for rank in ranks if rows[rank][SPEC_INTS] != _NOT_COMPARED]
        first = looked[0] if looked else ranks[0]
        strangers = [
            rank for rank in looked if rows[rank][SPEC_INTS + 1] != rows[first][SPEC_INTS + 1]
        ]
        if strangers:
            raise LayoutError(
                f"{named(strangers)} would hand in other values than rank {first}, "
                "with which they share a sample; the shapes are equal\n"
                f"    {named(ranks)} share the samples of a tensor {forms[first]}\n"
                f"{_SAME_SAMPLE_REMEDY}\n    check=False switches this comparison off"
            )
