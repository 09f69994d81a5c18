"""What a rank hands in to be cut: a mini-batch, or its replica's part of one."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from hyperslab.comm import Grid
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Cut, Partition
from hyperslab.geometry.box import Interval
from hyperslab.tensor.sharded import Sharded

Batch = Literal["global", "replica", "none"]
"""Whether a tensor is the whole mini-batch, a replica's part of it, or has no batch dim."""

_DIMS = 8  # that a statement has room for


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and type of a tensor and how it is to be cut; ``dtype`` is a checksum of its name."""

    dtype: int
    shape: tuple[int, ...]
    channels: bool
    of_replica: bool
    batched: bool = True

    def __str__(self) -> str:
        if self.dtype in _NO_TENSORS:
            return _NO_TENSORS[self.dtype]
        words = [f"{self.shape} {_DTYPES.get(self.dtype, 'of an unknown type')}"]
        words += [] if self.channels else ["channels=False"]
        words += ['batch="replica"'] if self.of_replica else []
        words += [] if self.batched else ['batch="none"']
        return ", ".join(words)

    def numbers(self) -> list[int]:
        """For a row: as many for every form."""
        options = [self.channels, self.of_replica, self.batched]
        head = [self.dtype, *options, len(self.shape), *self.shape]
        return [*head, *[0] * (_DIMS - len(self.shape))]

    @classmethod
    def of(cls, tensor: object, *, channels: bool, batch: Batch) -> Form:
        """Of what a rank hands in, a tensor or not.

        Raises:
            LayoutError: no such ``batch``.
        """
        if batch not in get_args(Batch):
            raise LayoutError(f"batch={batch!r}: use one of {', '.join(get_args(Batch))}")
        if not isinstance(tensor, torch.Tensor):
            return NO_TENSOR
        if isinstance(tensor, Sharded):
            return CUT_ALREADY
        if tensor.dim() > _DIMS:
            return TOO_MANY_DIMS
        shape = tuple(tensor.shape)
        return cls(_code(tensor.dtype), shape, channels, batch == "replica", batch != "none")

    @property
    def can_be_cut(self) -> bool:
        """Whether it is that of an ordinary tensor."""
        return self.dtype not in _NO_TENSORS

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type that `dtype` names."""
        return _DTYPES[self.dtype]

    def samples(self, data: int, grid: Grid) -> Interval:
        """Of the tensor those that a rank at place ``data`` of that axis computes."""
        count = self.shape[0] if self.shape else 1
        if self.of_replica or not self.batched:
            return 0, count
        cut = Cut.balanced("data", count, grid.data)
        return (0, count) if cut.thin else cut.interval(data)

    @classmethod
    def read(cls, row: Sequence[int]) -> Form:
        """The adjoint of `numbers`."""
        dtype, channels, of_replica, batched, dims = row[:5]
        shape = tuple(row[5 : 5 + dims])
        return cls(dtype, shape, bool(channels), bool(of_replica), bool(batched))


FORM = 5 + _DIMS  # numbers of a form in a row
NO_TENSOR = Form(0, (), channels=True, of_replica=False)
CUT_ALREADY = Form(1, (), channels=True, of_replica=False)
TOO_MANY_DIMS = Form(2, (), channels=True, of_replica=False)


def check_form(form: Form, what: str = "what is handed in") -> None:
    """Raises:
    LayoutError: ``what`` is no tensor that can be cut.
    """
    if not form.can_be_cut:
        raise LayoutError(
            f"{what} is {form}, which cannot be cut\n    hand in an ordinary tensor, batch "
            "included; for one that is already cut use redistribute or gather"
        )


def partition_of(form: Form, grid: Grid) -> Partition:
    """How the mini-batch is cut, of which a rank hands in this.

    Raises:
        LayoutError: an extent has fewer elements than its axis has ranks, or there is no batch dim
            for the data axis.
    """
    shape = form.shape
    if form.of_replica and shape:
        shape = (shape[0] * grid.data, *shape[1:])
    return grid.partition(shape, channels=form.channels, batch=form.batched)


def part_held(form: Form, data: int) -> Box:
    """The box of the mini-batch that a rank at place ``data`` of that axis hands in."""
    whole = Box.whole(form.shape)
    if not form.of_replica or not form.shape:
        return whole
    first = data * form.shape[0]
    return Box((first, *whole.lo[1:]), (first + form.shape[0], *whole.hi[1:]))


def forms_in_words(forms: Mapping[int, Form]) -> list[str]:
    """By rank: which ones have which."""
    holders: dict[Form, list[int]] = {}
    for rank, form in forms.items():
        holders.setdefault(form, []).append(rank)
    return [f"{ranks_in_words(ranks)}: {form}" for form, ranks in holders.items()]


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Of many only the first ones.

    >>> ranks_in_words([3]), ranks_in_words([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    words = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"


def _code(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())


_NO_TENSORS = {
    NO_TENSOR.dtype: "no tensor",
    CUT_ALREADY.dtype: "a tensor that is already cut",
    TOO_MANY_DIMS.dtype: f"a tensor of more than {_DIMS} dims",
}
_DTYPES = {_code(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
