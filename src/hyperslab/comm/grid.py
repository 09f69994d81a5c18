"""Arranges all ranks as a grid, data x depth x height x width.

`per_grid` keeps what is made once for a grid and ends with it: plans, layouts, what has been
logged. `ReplicaSampler` gives all ranks that share a sample the same ones.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
import zlib
from collections.abc import Callable, Hashable, Sequence, Sized
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from hyperslab.comm.agreement import agree_on, keeping_contact, same_on_all
from hyperslab.comm.bootstrap import keep_freed_memory, start_distributed, take_own_device
from hyperslab.comm.communicator import (
    Communicator,
    GroupCommunicator,
    communicator_of_part,
    communicators_of_world,
)
from hyperslab.comm.shared_memory import connect_ranks
from hyperslab.errors import LayoutError
from hyperslab.geometry import Cut, Partition

G = TypeVar("G")
P = ParamSpec("P")
T = TypeVar("T")


def per_grid(make: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """Call ``make(grid, ...)`` once for each grid and each of its hashable, positional arguments.

    What it returned is kept as long as the grid is, which it must not refer to: a grid holds
    process groups, and they hold sockets. So this is no `functools.lru_cache`, which keeps its
    arguments.
    """
    kept: dict[int, dict[tuple[Hashable, ...], T]] = {}

    @functools.wraps(make)
    def once(grid: G, *key: Any) -> T:
        try:
            return kept[id(grid)][key]
        except KeyError:
            pass  # not here: an error of ``make`` did not come out of looking up
        value = cast(Callable[..., T], make)(grid, *key)
        if id(grid) not in kept:  # a WeakKeyDictionary takes twice the time in every operator
            weakref.finalize(grid, kept.pop, id(grid)).atexit = False
        kept.setdefault(id(grid), {})[key] = value
        return value

    return cast(Callable[Concatenate[G, P], T], once)


class ReplicaSampler(DistributedSampler[Any]):
    """Every ``replicas``-th sample from the ``replica``-th on; made by `Grid.sampler`.

    A mini-batch of b on each replica is, all together, the next b times ``replicas`` samples of
    one order, which is that of torch's DistributedSampler: the same on every grid.
    """

    def __init__(
        self,
        dataset: Sized,
        replicas: int,
        replica: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        over = len(dataset) % replicas
        if over and not drop_last:
            raise LayoutError(
                f"{len(dataset)} samples cannot be dealt out evenly to {replicas} replicas: {over} "
                "would be left, and no sample is shown twice\n    drop_last=True leaves "
                f"{over} out, others in each epoch if shuffled; or take grid.data that divides "
                f"{len(dataset)}"
            )
        if len(dataset) < replicas:
            raise LayoutError(f"{len(dataset)} samples are fewer than {replicas} replicas")
        super().__init__(
            dataset,  # type: ignore[arg-type]
            num_replicas=replicas,
            rank=replica,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )


AXES = ("data", "depth", "height", "width")
"""Lists the axes of the grid, outermost first: neighbours in width have neighbouring ranks."""

SPATIAL_AXES = AXES[1:]
"""Lists the axes that cut volumes."""

GRID_START = "the start of the grid"

log = logging.getLogger("hyperslab")


class Grid:
    """Arranges the ranks as a ``data x depth x height x width`` array, the same on every rank.

    The first one waits for all ranks, which then agree on the memory that they share and connect
    a communicator for each purpose.

    ``data`` cuts the mini-batch over replicas, the other three cut every sample; the ranks
    that share one sample are a replica. ``Grid()`` alone is a serial run and needs no process
    group. Under torchrun, ``srun`` or ``mpirun`` the grid starts ``torch.distributed`` if nobody
    has (NCCL for CUDA, gloo for the CPU), where a rank waits for another as long as ``timeout``
    [s], by default torch's limit; an existing process group is used as it is, with its own limit.

    Raises:
        LayoutError: the product of the axes is not the number of ranks.
        RecipeError: the ranks ask for different grids, or have different versions.
        CommError: a rank died or did not come within the time limit.
        HyperslabError: an environment variable that says which rank this is is missing or odd.
    """

    has_values = True
    """Tells whether its tensors have values: those of a step that is only traced have none."""

    def __init__(
        self,
        *,
        data: int = 1,
        depth: int = 1,
        height: int = 1,
        width: int = 1,
        timeout: float | None = None,
    ) -> None:
        self.data = data
        self.depth = depth
        self.height = height
        self.width = width
        self.extents = dict(zip(AXES, (data, depth, height, width), strict=True))
        if any(extent < 1 for extent in self.extents.values()):
            raise LayoutError(f"every axis of a grid needs at least one rank: {self}")
        start_distributed(timeout, {"grid": self.extents})
        agree_on({"grid": self.extents}, GRID_START)
        distributed = dist.is_initialized()
        self.size = dist.get_world_size() if distributed else 1
        self.rank = dist.get_rank() if distributed else 0
        if math.prod(self.extents.values()) != self.size:
            raise LayoutError(
                f"{self} has {math.prod(self.extents.values())} places but there are "
                f"{self.size} ranks\n    start as many ranks as the grid has places "
                f"(torchrun --nproc-per-node {math.prod(self.extents.values())} ...), "
                "or change the grid"
            )
        device = take_own_device()
        with keeping_contact(GRID_START):
            connect_ranks()
        self._communicators = communicators_of_world() if self.size > 1 else None
        self.device = device
        self.coords = self.coords_of(self.rank)
        self._groups: dict[tuple[str, ...], Communicator | None] = {}
        if self.device.type == "cpu":
            keep_freed_memory()

    def __repr__(self) -> str:
        return f"Grid({', '.join(f'{axis}={n}' for axis, n in self.extents.items())})"

    @property
    def is_main(self) -> bool:
        """Tell whether this is the rank that prints and writes for all."""
        return self.rank == 0

    def coords_of(self, rank: int) -> dict[str, int]:
        """Return the position of a rank on the grid."""
        coords: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, coords[axis] = divmod(rank, self.extents[axis])
        return {axis: coords[axis] for axis in AXES}

    def rank_of(self, coords: dict[str, int]) -> int:
        """Return the rank at a position of the grid."""
        rank = 0
        for axis in AXES:
            rank = rank * self.extents[axis] + coords[axis]
        return rank

    def partition(
        self, shape: Sequence[int], *, channels: bool = True, batch: bool = True
    ) -> Partition:
        """Return how a tensor (batch, channel, ...spatial) or (batch, feature) is cut on this grid.

        Without ``channels`` it is (batch, ...spatial): the class of every voxel, say.

        The batch dim is cut by ``data``; the last dims by ``depth``, ``height``, ``width`` in
        the order of their names (an image is cut by height and width). A mini-batch smaller than
        the data axis is not cut: all replicas then compute the same samples.

        Without ``batch`` it has no such dim: (channel, ...spatial), or (...spatial).

        Raises:
            LayoutError: a spatial extent has fewer elements than the axis has ranks, or there is no
                batch dim for the data axis.
        """
        shape = tuple(shape)
        if not batch:
            if self.data > 1:
                raise LayoutError(
                    f"a tensor {shape} without a batch dim cannot be cut over {self}, of which "
                    f"data={self.data} ranks share a mini-batch\n    use data=1, or x.unsqueeze(0)"
                )
            with_batch = self.partition((1, *shape), channels=channels)
            return with_batch.without_dim(0)
        axes: list[str | None] = ["data", *[None] * (len(shape) - 1)][: len(shape)]
        spatial = max(0, min(3, len(shape) - 1 - channels))
        if spatial:
            axes[-spatial:] = AXES[-spatial:]
        idle = [a for a in AXES[1:] if self.extents[a] > 1 and a not in axes]
        if idle and spatial:
            words = f"a {len(shape)}-d tensor has no dim for {idle}: these ranks repeat work"
            if len(shape) == 3 + channels:
                words += (
                    '; a volume without a batch dim is cut by hyperslab.shard(..., batch="none")'
                )
            log_once(self, words)
        return Partition(shape, tuple(self._cut(shape, d, axis) for d, axis in enumerate(axes)))

    def _cut(self, shape: tuple[int, ...], dim: int, axis: str | None) -> Cut | None:
        if axis is None or self.extents[axis] == 1:
            return None
        cut = Cut.balanced(axis, shape[dim], self.extents[axis])
        if not cut.thin:
            return cut
        if axis == "data":
            log_once(self, f"a mini-batch of {shape[dim]} is not cut over {cut.parts} replicas")
            return None
        raise LayoutError(
            f"cannot cut dim {dim} (extent {shape[dim]}) of a tensor {shape} into {cut.parts} "
            f"shards along {axis}\n    grid {self}\n    use {axis}<={shape[dim]}"
        )

    def sampler(
        self, dataset: Sized, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> ReplicaSampler:
        """Return a `DataLoader`'s sampler of this replica's samples, the same on all of its ranks.

        All ranks call it. Its order depends on ``seed`` and on the epoch that `set_epoch` was told
        and on nothing else, and is that of torch's DistributedSampler. Every sample is shown once
        an epoch, by one replica. A loader's ``batch_size`` is then of one replica.

        Raises:
            LayoutError: the samples cannot be dealt out evenly and ``drop_last`` is not set; the
                ranks ask for different things.
        """
        asked = (len(dataset), shuffle, seed, drop_last)
        if not same_on_all(zlib.crc32(repr(asked).encode())):
            raise LayoutError(
                f"the ranks ask for different samplers, this one for {asked[0]} samples, "
                f"{shuffle=}, {seed=}, {drop_last=}\n    give every rank the same data set and "
                "the same arguments"
            )
        return ReplicaSampler(
            dataset,
            self.data,
            self.coords["data"],
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    @property
    def halos(self) -> Communicator:
        """Carries messages between any ranks: halos, and whatever else an operator exchanges."""
        assert self._communicators is not None
        return self._communicators.halos

    @property
    def gradients(self) -> GroupCommunicator:
        """Averages gradients over all ranks, behind the backward pass."""
        assert self._communicators is not None
        return self._communicators.gradients

    def group(self, axes: Sequence[str]) -> Communicator | None:
        """Return the communicator for sums over ranks that differ only along ``axes``.

        ``None`` when that is this rank alone. Every rank must ask for the same axes in the same
        order (the same program does), because making a group involves all ranks.
        """
        key = tuple(axis for axis in AXES if axis in axes and self.extents[axis] > 1)
        if key not in self._groups:
            self._groups[key] = self._make_group(key)
        return self._groups[key]

    def _make_group(self, axes: tuple[str, ...]) -> Communicator | None:
        if not axes:
            return None
        count = math.prod(self.extents[axis] for axis in axes)
        if count == self.size:
            assert self._communicators is not None
            return self._communicators.statistics
        ranks = np.arange(self.size).reshape(*self.extents.values())
        last = range(-len(axes), 0)
        ranks = np.moveaxis(ranks, [AXES.index(axis) for axis in axes], last)
        return communicator_of_part(ranks.reshape(-1, count).tolist())

    def warn(self, message: str) -> None:
        """Log a message on the main rank."""
        if self.is_main:
            log.warning(message)

    def same_on_all(self, number: int) -> bool:
        """Tell whether all ranks have the same number, such as the checksum of something larger."""
        return same_on_all(number)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


@per_grid
def log_once(grid: Grid, message: str) -> None:
    """Log a message once per grid, on the main rank."""
    grid.warn(message)
