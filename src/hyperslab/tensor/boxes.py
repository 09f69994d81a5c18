"""`boxes`: which part of every sample a rank loads itself, and the mini-batch that the parts make.

With them no rank ever holds a whole sample: a data set reads this rank's box, a `DataLoader` makes
mini-batches of boxes, and `LoadedBoxes.join` says what they are boxes of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hyperslab.comm import Grid
from hyperslab.comm.rows import Rows
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box
from hyperslab.tensor.inputs.comparisons import comparisons_of
from hyperslab.tensor.inputs.handed_in import Form, check_form
from hyperslab.tensor.inputs.same_sample import compare
from hyperslab.tensor.redistribute import shard
from hyperslab.tensor.sharded import Sharded

_PAGE = "docs/own-data.md, a DataLoader of your own"


@dataclass(frozen=True)
class LoadedBoxes:
    """This rank's box of samples of ``sample_shape``; made by `boxes`."""

    grid: Grid
    sample_shape: tuple[int, ...]
    channels: bool = True
    own: Box = field(init=False)

    def __post_init__(self) -> None:
        partition = self.grid.partition(
            (self.grid.data, *self.sample_shape), channels=self.channels
        )
        box = partition.box(self.grid.coords)
        object.__setattr__(self, "own", Box(box.lo[1:], box.hi[1:]))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it lies in a sample: ``array[boxes.slices]`` of NumPy, h5py or Zarr."""
        return self.own.slices()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box."""
        return self.own.shape

    def join(self, local: torch.Tensor) -> Sharded:
        """The mini-batch (B, ...) of which this rank holds the boxes (b, ...); all ranks call it.

        Each replica has as many samples, so that B is b times `Grid.data`. Nothing is copied but
        to the grid's device. The ranks compare shapes and types in one small message; that they
        hold boxes of the *same* samples they cannot see: cut the targets by `hyperslab.shard`,
        which compares them bit by bit, or let `over` do it.

        Raises:
            LayoutError: it is not the box of this rank, or the ranks differ in type or in number.
        """
        fits = isinstance(local, torch.Tensor) and tuple(local.shape[1:]) == self.shape
        form = Form.of(local, channels=self.channels, batch="global")  # differs from any box's
        if fits and not isinstance(local, Sharded):
            form = Form(form.dtype, (len(local), *self.sample_shape), self.channels, True)
        rows = None
        if self.grid.has_values and self.grid.size > 1:
            rows = Rows(self.grid, form.numbers(), None, "the comparison of the ranks' boxes")
        check_form(form)
        if not fits:
            raise LayoutError(self._misfit(tuple(local.shape)))
        if local.requires_grad:
            raise LayoutError(
                "boxes that require a gradient are not joined: the result is a mini-batch of data\n"
                "    call requires_grad_() of the result"
            )
        if rows is not None:
            comparisons_of(self.grid).add(rows, form, lambda found: compare(found, ()))
        shape = (len(local) * self.grid.data, *self.sample_shape)
        partition = self.grid.partition(shape, channels=self.channels)
        return Sharded.from_local(local.to(self.grid.device), partition, self.grid)

    def over(self, loader: Iterable[Any]) -> LoaderOfBoxes:
        """What ``loader`` yields, with every tensor as one of the whole mini-batch.

        Of a mini-batch, which may be nested in tuples, lists and dicts: boxes are joined, of
        volumes or (b, d, h, w) of labels; tensors of one or two dims (targets, numbers) are cut by
        `hyperslab.shard`, which compares them on the ranks of a replica; all else stays.

        Raises, when it is iterated:
            LayoutError: as `join` and `hyperslab.shard`; a tensor is neither.
        """
        return LoaderOfBoxes(self, loader)

    def joined(self, item: Any) -> Any:
        """What `over` makes of one mini-batch of a loader."""
        if isinstance(item, torch.Tensor):
            return self._tensor(item)
        if isinstance(item, Mapping):
            return {key: self.joined(value) for key, value in item.items()}
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*map(self.joined, item))
        if isinstance(item, Sequence) and not isinstance(item, str | bytes):
            return type(item)(map(self.joined, item))  # type: ignore[call-arg]
        return item

    def _tensor(self, tensor: torch.Tensor) -> Sharded:
        if tensor.dim() <= 2:
            return shard(tensor, self.grid, batch="replica")
        labels = self.channels and tensor.dim() == len(self.shape)
        if labels and tuple(tensor.shape[1:]) == self.shape[1:]:
            return LoadedBoxes(self.grid, self.sample_shape[1:], channels=False).join(tensor)
        return self.join(tensor)

    def _misfit(self, shape: tuple[int, ...]) -> str:
        whole = " (these are whole samples)" if shape[1:] == self.sample_shape else ""
        return (
            f"rank {self.grid.rank} hands in {shape}{whole}, but a mini-batch of its boxes is "
            f"(b, {', '.join(map(str, self.shape))}): {self.own} of samples {self.sample_shape} on "
            f"{self.grid}\n    read array[boxes.slices]; whole samples are cut by hyperslab.shard; "
            f"see {_PAGE}"
        )


class LoaderOfBoxes:
    """A `DataLoader` whose mini-batches are cut tensors; made by `LoadedBoxes.over`."""

    def __init__(self, boxes: LoadedBoxes, loader: Iterable[Any]) -> None:
        self.boxes = boxes
        self.loader = loader

    @property
    def sampler(self) -> Any:
        """That of the loader, which wants to be told the epoch: ``sampler.set_epoch(n)``."""
        return self.loader.sampler  # type: ignore[attr-defined]

    def __len__(self) -> int:
        """Mini-batches of an epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return map(self.boxes.joined, self.loader)


def boxes(grid: Grid, shape: Sequence[int], *, channels: bool = True) -> LoadedBoxes:
    """The box that this rank reads of every sample of ``shape``: (C, D, H, W), or (C, H, W).

    A plain data set reads ``array[boxes.slices]`` of its files; `LoadedBoxes.join`, or
    `LoadedBoxes.over` a `DataLoader`, makes the mini-batch of which these are parts.

    Args:
        grid: the ranks.
        shape: of one sample, without the batch.
        channels: False where the first dim is a spatial one, as of labels (D, H, W).

    Raises:
        LayoutError: an extent has fewer elements than its axis has ranks.
    """
    return LoadedBoxes(grid, tuple(shape), channels)
