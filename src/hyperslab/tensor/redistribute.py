"""Cuts tensors over the grid and makes them whole again: shard, gather, and boxes of own loaders.

With `boxes` no rank ever holds a whole sample: a data set reads this rank's box, a `DataLoader`
makes mini-batches of boxes, and `LoadedBoxes.join` says what they are boxes of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hyperslab.comm import AllGatheredInts, Grid, all_reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box
from hyperslab.tensor.inputs import (
    Batch,
    InputSpec,
    box_held,
    check_same_sample,
    check_spec,
    compare_statements,
    comparisons_of,
    input_partition,
    refuse_workers,
)
from hyperslab.tensor.sharded import Sharded

_Slices = tuple[slice, ...]
_Axes = tuple[str, ...]


def gather(x: Sharded, axes: Sequence[str] | str) -> Sharded:
    """Return the same tensor, no longer cut along ``axes`` (names of the grid); differentiable.

    The ranks along those axes then hold equal copies and repeat each other's work: the
    documented way to run an operator that needs the whole extent.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    unknown = [name for name in names if name not in x.grid.extents]
    if unknown:
        raise LayoutError(f"no axis {unknown} in {x.grid}; axes are {', '.join(x.grid.extents)}")
    return x.redistribute(x.partition.without(names), f"gather along {', '.join(names)}")


class _Shard(torch.autograd.Function):
    """Cut out this rank's box of a tensor that all ranks of ``group`` hold.

    Backward: the gradient of the one tensor, equal on all of them: the average over the grid's
    ranks of the boxes' gradients put in their places, which is the serial gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, part: _Slices, grid: Grid, axes: _Axes
    ) -> torch.Tensor:
        ctx.part = part
        ctx.grid = grid
        ctx.axes = axes
        ctx.shape = tensor.shape
        block = tensor[part]
        # Not view_as, which gives a batch of one other strides: torch asks for them.
        return block.clone() if grid.size > 1 else torch.ops.aten.alias(block)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grid = ctx.grid
        if grid.size == 1:
            return gradient, None, None, None
        whole = gradient.new_zeros(ctx.shape)
        whole[ctx.part] = gradient
        group = grid.group(ctx.axes)
        whole = all_reduce_sum(whole, group, "the adjoint of shard") / grid.size
        return whole, None, None, None


def shard(
    tensor: torch.Tensor,
    grid: Grid,
    *,
    channels: bool = True,
    batch: Batch = "global",
    check: bool = True,
) -> Sharded:
    """Cut a full tensor, batch included, that every rank holds; differentiable. All ranks call it.

    This is for tests and small data: a data set from `hyperslab.open` never holds a whole sample.
    The axis data cuts the batch (dim 0); depth, height and width cut the dims after batch and
    channel. Pass ``channels=False`` if there is no channel dim, as in labels (batch, D, H, W).

    Ranks that share a sample each cut their own copy of it. They compare the copies, bit by bit,
    by a checksum in one small message, in the time of reading the tensor once. On a CUDA device a
    rank waits for that message only at the first tensor of a shape and type. It reads the outcome
    of a later comparison when it cuts the second next tensor. There the ranks compare shapes and
    types of all tensors, and the values of the 1st, 2nd, 4th, 8th ... of a shape and type.

    Args:
        tensor: the mini-batch.
        grid: the ranks.
        channels: whether dim 1 is one of channels.
        batch: ``"global"``: the tensor is the whole mini-batch, and each replica computes its
            part. ``"replica"``: it is the part of this rank's replica, as a sampler with
            ``num_replicas=grid.data, rank=grid.coords["data"]`` gives it; all parts have the same
            number of samples, and the result is `grid.data` times as long. ``"none"``: it is one
            volume without a batch dim, (channel, D, H, W), which torch's layers take as they do
            serially; the grid has ``data=1``.
        check: False sends no message and compares nothing.

    Raises:
        LayoutError: an extent has fewer elements than its axis has ranks, the ranks hand in
            tensors of different shapes or types, or ranks that share a sample different ones.
    """
    refuse_workers("hyperslab.shard", grid)
    form = InputSpec.of(tensor, channels=channels, batch=batch)
    if check:
        check_same_sample(tensor, form, grid)
    check_spec(form)
    partition = input_partition(form, grid)
    held = box_held(form, grid.coords["data"])
    part = partition.box(grid.coords).slices(held)
    axes = tuple(a for a in grid.extents if not form.of_replica or a != "data")
    return Sharded.from_local(_Shard.apply(tensor, part, grid, axes), partition, grid)


_OWN_DATA_PAGE = "docs/own-data.md, a DataLoader of your own"


@dataclass(frozen=True)
class LoadedBoxes:
    """Loads this rank's box of samples of ``sample_shape``; made by `boxes`."""

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
        """Return where it lies in a sample: ``array[boxes.slices]`` of NumPy, h5py or Zarr.

        The last box goes to an array's end, and channels are taken as they are, so that of an
        array of other extents no part passes for a box: `join` refuses it.
        """
        ends = zip(self.own.slices(), self.sample_shape, strict=True)
        found = tuple([slice(s.start, None if s.stop == n else s.stop) for s, n in ends])
        return (slice(None), *found[1:]) if self.channels else found

    @property
    def shape(self) -> tuple[int, ...]:
        return self.own.shape

    def join(self, local: torch.Tensor) -> Sharded:
        """Join the boxes (b, ...) of all ranks to a mini-batch (B, ...); all ranks call it.

        Each replica has the same number of samples, so B is b times `Grid.data`. Channels may
        differ from those of ``sample_shape``, as for a field to be predicted. The only copy is the
        one to the grid's device. The ranks compare shapes and types in one small message. They
        cannot see whether they hold boxes of the *same* samples: cut the targets by
        `hyperslab.shard`, which compares them bit by bit, or let `over` do it.

        Raises:
            LayoutError: it is not the box of this rank, or the ranks differ in type or in number.
        """
        refuse_workers("LoadedBoxes.join", self.grid)
        first = 1 + self.channels  # of the dims that are cut
        fits = isinstance(local, torch.Tensor) and local.dim() == 1 + len(self.shape)
        fits = fits and tuple(local.shape[first:]) == self.shape[first - 1 :]
        sample = (*local.shape[1:first], *self.sample_shape[first - 1 :]) if fits else ()
        form = InputSpec.of(local, channels=self.channels, batch="global")  # differs from any box's
        if fits and not isinstance(local, Sharded):
            form = InputSpec(form.dtype, (len(local), *sample), self.channels, True)
        rows = None
        if self.grid.has_values and self.grid.size > 1:
            rows = AllGatheredInts(
                self.grid, form.numbers(), None, "the comparison of the ranks' boxes"
            )
        check_spec(form)
        if not fits:
            raise LayoutError(self._misfit(tuple(local.shape)))
        if local.requires_grad:
            raise LayoutError(
                "boxes that require a gradient are not joined: the result is a mini-batch of data\n"
                "    call requires_grad_() of the result"
            )
        if rows is not None:
            comparisons_of(self.grid).add(rows, form, lambda found: compare_statements(found, ()))
        shape = (len(local) * self.grid.data, *sample)
        partition = self.grid.partition(shape, channels=self.channels)
        return Sharded.from_local(local.to(self.grid.device), partition, self.grid)

    def over(self, loader: Iterable[Any]) -> BoxLoader:
        """Wrap ``loader`` so that every tensor of its mini-batches is one of the whole mini-batch.

        A mini-batch may be nested in tuples, lists and dicts. Boxes of volumes, or (b, d, h, w) of
        labels, are joined; tensors of one or two dims (targets, numbers) are cut by
        `hyperslab.shard`, which compares them on the ranks of a replica; all else stays.

        Raises, when it is iterated:
            LayoutError: as `join` and `hyperslab.shard`; a tensor is neither.
        """
        return BoxLoader(self, loader)

    def joined(self, item: Any) -> Any:
        """Cut one mini-batch of a loader, as `over` does."""
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
            f"see {_OWN_DATA_PAGE}"
        )


class BoxLoader:
    """Wraps a `DataLoader`, so that its mini-batches are cut tensors; see `LoadedBoxes.over`."""

    def __init__(self, boxes: LoadedBoxes, loader: Iterable[Any]) -> None:
        self.boxes = boxes
        self.loader = loader

    @property
    def sampler(self) -> Any:
        """Return the loader's sampler, which has to be told the epoch: ``sampler.set_epoch(n)``."""
        return self.loader.sampler  # type: ignore[attr-defined]

    def __len__(self) -> int:
        """Return the number of mini-batches of an epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return map(self.boxes.joined, self.loader)


def boxes(grid: Grid, shape: Sequence[int], *, channels: bool = True) -> LoadedBoxes:
    """Return the box that this rank reads of every sample of ``shape``: (C, D, H, W), or (C, H, W).

    A plain data set reads ``array[boxes.slices]`` of its files; `LoadedBoxes.join`, or
    `LoadedBoxes.over` a `DataLoader`, makes the mini-batch from these parts.

    Args:
        grid: the ranks.
        shape: of one sample, without the batch.
        channels: False if the first dim is a spatial one, as for labels (D, H, W).

    Raises:
        LayoutError: an extent has fewer elements than its axis has ranks, or an image is to be cut
            along the depth.
    """
    if channels and len(shape) == 3 and grid.depth > 1:
        raise LayoutError(
            f"{tuple(shape)} is an image (C, H, W), which {grid} cannot cut along the depth\n    "
            f"of a volume give the channels, too: {(1, *shape)}; of labels (D, H, W) channels=False"
        )
    return LoadedBoxes(grid, tuple(shape), channels)
