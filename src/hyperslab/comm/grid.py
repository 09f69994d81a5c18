"""Arranges all ranks as a grid, data x depth x height x width.

`per_grid` keeps what is made once for a grid and ends with it: plans, layouts, what has been
logged.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
import operator
import os
import socket
import sys
import weakref
import zlib
from collections.abc import Callable, Hashable, Sequence, Sized
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from hyperslab.comm.agreement import agree_on, all_gather, any_rank, keeping_contact, same_on_all
from hyperslab.comm.bootstrap import (
    enter_part,
    in_part,
    leave_part,
    own_rank,
    ranks_in,
    start_distributed,
    take_own_device,
    time_limit,
    world,
)
from hyperslab.comm.communicator import (
    Communicator,
    GroupCommunicator,
    communicator_of_part,
    communicators_of_world,
)
from hyperslab.comm.launchers import AXES
from hyperslab.comm.placement import (
    CUBE,
    axes_in_nodes,
    number_by_node,
    places,
    share_between_nodes,
)
from hyperslab.comm.placement import SPATIAL_AXES as SPATIAL_AXES
from hyperslab.comm.rendezvous import in_time, interleaved_nodes
from hyperslab.comm.shared_memory import connect_ranks
from hyperslab.errors import CommError, LayoutError
from hyperslab.geometry import Cut, Partition
from hyperslab.kernels.registry import TRITON_NEEDS, refuse_triton, triton_runs, why_triton_fails
from hyperslab.util.free_memory import keep_freed_memory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

G = TypeVar("G")
P = ParamSpec("P")
T = TypeVar("T")


MOST_KEPT = 4096
"""Limits what is kept of one function and one grid; a network has a few kinds of each call."""


def per_grid(make: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """Call ``make(grid, ...)`` once for each grid and each of its hashable, positional arguments.

    What it returned is kept as long as the grid is, which it must not refer to: a grid holds
    process groups, and they hold sockets. So this is no `functools.lru_cache`, which keeps its
    arguments. Arguments by name are no part of the key: they tell errors what the tensors were.
    """
    kept: dict[int, dict[tuple[Hashable, ...], T]] = {}

    @functools.wraps(make)
    def once(grid: G, *key: Any, **beside: Any) -> T:
        try:
            return kept[id(grid)][key]
        except KeyError:
            pass  # not here: an error of ``make`` did not come out of looking up
        value = cast(Callable[..., T], make)(grid, *key, **beside)
        if id(grid) not in kept:  # a WeakKeyDictionary takes twice the time in every operator
            weakref.finalize(grid, kept.pop, id(grid)).atexit = False
        known = kept.setdefault(id(grid), {})
        if len(known) >= MOST_KEPT:
            known.clear()
        known[key] = value
        return value

    return cast(Callable[Concatenate[G, P], T], once)


GRID_START = "the start of the grid"

log = logging.getLogger("hyperslab")


class Grid:
    """Arranges the ranks as a ``data x depth x height x width`` array, the same on every rank.

    The first grid waits for all ranks, which then agree on the memory that they share and connect
    a communicator for each purpose.

    ``data`` cuts the mini-batch over replicas, the other three cut every sample; the ranks
    that share one sample are a replica. ``Grid()`` alone is a serial run and needs no process
    group. Under torchrun, ``srun`` or ``mpirun`` the grid starts ``torch.distributed`` unless it
    runs already (NCCL for CUDA, gloo for the CPU). A rank then waits for another for at most
    ``timeout`` [s], by default torch's limit; an existing process group keeps its own limit.

    ``ranks`` lists the ranks of `torch.distributed` that form the grid, ascending: all by default;
    only the listed ones may make the grid. ``mesh``, a `torch.distributed.device_mesh.DeviceMesh`,
    does the same; its dims that have the names of axes give their extents, unless you give them.
    A process belongs to one set of ranks at a time: all its live grids have the same ranks.

    Raises:
        LayoutError: the product of the axes is not the number of ranks.
        RecipeError: the ranks ask for different grids, or have different versions.
        CommError: a rank died or did not come within the time limit.
        HyperslabError: an environment variable that tells this rank's number is missing or odd.
    """

    has_values = True
    """Tells whether its tensors have values: those of a step that is only traced have none."""

    looks_for_metrics = True
    """Tells whether metrics that add up over ranks are warned of once a tensor is gathered."""

    def __init__(
        self,
        *,
        data: int = 1,
        depth: int = 1,
        height: int = 1,
        width: int = 1,
        ranks: Sequence[int] | None = None,
        mesh: DeviceMesh | None = None,
        timeout: float | None = None,
    ) -> None:
        if mesh is not None:
            if ranks is not None:
                raise LayoutError("a grid takes its ranks from mesh= or from ranks=, not from both")
            (data, depth, height, width), ranks = _read_mesh(mesh, (data, depth, height, width))
        self.data = data
        self.depth = depth
        self.height = height
        self.width = width
        self.extents = dict(zip(AXES, (data, depth, height, width), strict=True))
        if any(extent < 1 for extent in self.extents.values()):
            raise LayoutError(f"every axis of a grid needs at least one rank: {self}")
        # Ranks that are named keep the numbers that they have.
        numbering = partial(number_by_node, extents=self.extents) if ranks is None else None
        start_distributed(timeout, {"grid": self.extents}, numbering=numbering)
        self._take_ranks(ranks)
        self.size = ranks_in()
        self.rank = own_rank()
        device = take_own_device()
        with keeping_contact(GRID_START):
            connect_ranks()
        self._communicators = communicators_of_world() if self.size > 1 else None
        self.device = device
        self.coords = self.coords_of(self.rank)
        self._groups: dict[tuple[str, ...], Communicator | None] = {}
        group = world()
        _ALIVE[self] = None if group is None else weakref.ref(group)
        if self.device.type == "cpu":
            keep_freed_memory()
        else:
            self._try_triton()

    def _try_triton(self) -> None:
        """Let the Triton kernels run on all ranks or on none: their results are not bit-equal.

        Distribution scheme: 1. every rank runs a small one, once a process; 2. all hear what went
        wrong on any of them.
        """
        own = why_triton_fails(self.device)
        if not any_rank(own is not None):
            return
        failures = all_gather(own)
        rank, why = next(((r, words) for r, words in enumerate(failures) if words), (0, None))
        if why is not None and triton_runs():
            refuse_triton()
            log_once(
                self,
                f"the fused kernels for GPUs do not run on rank {rank}: {why}\n    torch's own "
                f"operators compute in their place on all ranks, more slowly. {TRITON_NEEDS}",
                logging.WARNING,
            )

    def _take_ranks(self, ranks: Sequence[int] | None) -> None:
        """Enter the part of these ranks, or of all, as many as there are places.

        Raises:
            LayoutError: the ranks are not as many, not ascending, without this one, or others than
                those of a grid that is alive.
        """
        places = math.prod(self.extents.values())
        everybody = dist.get_world_size() if dist.is_initialized() else 1
        try:
            wanted = list(range(everybody) if ranks is None else map(operator.index, ranks))
        except TypeError:
            raise LayoutError(
                f"ranks={ranks!r}: a grid takes the numbers of its ranks, such as "
                f"ranks=range({places})"
            ) from None
        me = dist.get_rank() if dist.is_initialized() else 0
        if len(wanted) != places:
            other = f" (Grid(depth={everybody}) cuts the depth over all)" * (everybody > 1)
            part = f", or name the ranks that it has: ranks=range({places})" * (everybody > places)
            wrong = LayoutError(
                f"{self} has {places} places but there are {len(wanted)} ranks\n    start as many "
                f"ranks as the grid has places (torchrun --nproc-per-node {places} ...), "
                f"or change the grid{other}{part}"
            )
            if ranks is None:  # where all ask, a rank that asks for another grid is named
                _ask_for_a_while(self.extents)
            raise wrong
        if wanted != sorted({*wanted}) or wanted[0] < 0 or wanted[-1] >= everybody:
            raise LayoutError(
                f"ranks={wanted}: a grid takes ascending numbers of torch's {everybody} ranks\n"
                "    a mesh has them if its dims come in the order data, depth, height, width"
            )
        if me not in wanted:
            raise LayoutError(f"rank {me} makes a grid of ranks {wanted}, but is not one of them")
        whole = len(wanted) == everybody
        if in_part() or not whole:
            _refuse_other_parts(wanted, whole=whole)
        if not whole:
            enter_part(wanted, time_limit().total_seconds())
        else:
            leave_part()
        agree_on({"grid": self.extents}, GRID_START)

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

        Without ``channels`` the tensor is (batch, ...spatial), such as the class of every voxel.

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
            words = f"a {len(shape)}-d tensor has no dim for {idle}: ranks along them repeat work"
            if len(shape) == 3 + channels:
                words += (
                    '; a volume without a batch dim is cut by hyperslab.shard(..., batch="none")'
                )
                if channels:
                    words += (
                        ", one without channels, (batch, depth, height, width), by channels=False"
                    )
            log_once(self, words, logging.WARNING)
        return Partition(shape, tuple(self._cut(shape, d, axis) for d, axis in enumerate(axes)))

    def _cut(self, shape: tuple[int, ...], dim: int, axis: str | None) -> Cut | None:
        if axis is None or self.extents[axis] == 1:
            return None
        cut = Cut.balanced(axis, shape[dim], self.extents[axis])
        if not cut.thin:
            return cut
        if axis == "data":
            log_once(
                self,
                f"a mini-batch of {shape[dim]} is not cut over {cut.parts} replicas: each computes "
                "all of it",
                logging.WARNING,
            )
            return None
        remedy = f"use {axis}<={shape[dim]}"
        if shape[dim] == 1:
            remedy += ", or, if it is broadcast over space, the tensor as it is, equal on all ranks"
        raise LayoutError(
            f"cannot cut dim {dim} (extent {shape[dim]}) of a tensor {shape} into {cut.parts} "
            f"shards along {axis}\n    grid {self}\n    {remedy}"
        )

    def sampler(
        self, dataset: Sized, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> DistributedSampler[Any]:
        """Return a `DataLoader`'s sampler of this replica's samples, the same on all of its ranks.

        All ranks call it. Its order depends only on ``seed`` and on the epoch given to `set_epoch`,
        and is that of torch's DistributedSampler: a mini-batch of b on each replica is, all
        together, the next b samples a replica of one order, the same on every grid. One replica
        shows each sample, once an epoch. A loader's ``batch_size`` then counts the samples of one
        replica.

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
        count, over = len(dataset), len(dataset) % self.data
        if over and not drop_last:
            raise LayoutError(
                f"{count} samples cannot be dealt out evenly to {self.data} replicas: {over} "
                "would be left over, and no sample is shown twice\n    drop_last=True leaves "
                f"{over} out, others in each epoch if shuffled; or take a grid.data that divides "
                f"{count}"
            )
        if count < self.data:
            raise LayoutError(f"{count} samples are fewer than {self.data} replicas")
        return DistributedSampler(
            dataset,  # type: ignore[arg-type]
            num_replicas=self.data,
            rank=self.coords["data"],
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    @property
    def halos(self) -> Communicator:
        """Carries messages between any ranks: halos, and all else that an operator exchanges."""
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
        key = tuple(axes)
        if key not in self._groups:  # nearly always it is, in their order and without idle ones
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

    def process_group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return torch's group of the ranks that differ along these axes only.

        It is for libraries that add up over ranks themselves. Without axes it has this rank alone,
        because losses and `Sharded.full` cover the whole mini-batch on every rank. ``"data"`` is
        for values of a replica's own samples. All ranks ask for the same axes.

        Raises:
            LayoutError: there is no such axis.
        """
        if wrong := [axis for axis in axes if axis not in AXES]:
            raise LayoutError(f"a grid has no axis {wrong[0]!r}, but {', '.join(AXES)}")
        if not dist.is_initialized():
            return None
        wanted = self.group(axes)
        if wanted is None and self.size > 1:
            wanted = communicator_of_part([[rank] for rank in range(self.size)])
        return world() if wanted is None else cast(GroupCommunicator, wanted).group

    def log(self, message: str, level: int) -> None:
        """Log a message on the main rank."""
        if self.is_main:
            log.log(level, message)

    def same_on_all(self, number: int) -> bool:
        """Tell whether all ranks have the same number, such as the checksum of something larger."""
        return same_on_all(number)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(world())


def warn_of_metrics(grid: Grid) -> None:
    """Have metrics of torchmetrics that add up over ranks log so, once, when they do.

    Called at each gather of a whole tensor, which says nothing of where it goes.
    """
    if not grid.looks_for_metrics:
        return
    _grids_of_metrics(sys.modules["torchmetrics"].Metric).add(grid)


@functools.cache
def _grids_of_metrics(kind: Any) -> weakref.WeakSet[Grid]:
    """Have metrics of this class warn before they add up; return the grids that they look for."""
    grids: weakref.WeakSet[Grid] = weakref.WeakSet()
    sync = kind.sync

    @functools.wraps(sync)
    def warn_and_sync(metric: Any, *args: Any, **options: Any) -> None:
        if options.get("should_sync", True):
            for grid in grids:
                _warn_if_it_adds_up(grid, metric)
        sync(metric, *args, **options)

    kind.sync = warn_and_sync
    return grids


def warn_of_updated_metric(grid: Grid) -> None:
    """Log once if a metric of torchmetrics that adds up over ranks is being updated.

    Called where cut tensors give an ordinary one, it looks at who called.
    """
    kind = sys.modules["torchmetrics"].Metric
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Python keeps the values of a frame that was looked at: not of the user's, with volumes.
        if frame.f_globals.get("__name__", "").startswith("torchmetrics."):
            metric = frame.f_locals.get("self")
            if isinstance(metric, kind):
                _warn_if_it_adds_up(grid, metric)
                return
        frame = frame.f_back


def _warn_if_it_adds_up(grid: Grid, metric: Any) -> None:
    if metric.process_group is not None or not metric.sync_on_compute:
        return
    log_once(
        grid,
        f"{type(metric).__name__} of torchmetrics adds up over all ranks, and each has the whole "
        "of a mini-batch (of x.full(), and of what a cut tensor gives), so sums count every voxel "
        "once a rank: make it with process_group=grid.process_group()",
        logging.WARNING,
    )


_ALIVE: weakref.WeakKeyDictionary[Grid, weakref.ref[dist.ProcessGroup] | None]
_ALIVE = weakref.WeakKeyDictionary()
"""Has the group of each grid, for a process whose grids are of other ranks than before."""

ASK_LIMIT = 10.0
"""Limits how long [s] a rank whose grid has too few places hears what the others ask for."""


def _ask_for_a_while(extents: dict[str, int]) -> None:
    """Hear whether the other ranks, who are there, ask for another grid (`RecipeError`)."""
    with suppress(CommError):
        in_time(
            ASK_LIMIT,
            lambda: agree_on({"grid": extents}, GRID_START),
            lambda: CommError("the others make no grid of all ranks"),
        )


def _refuse_other_parts(ranks: Sequence[int], *, whole: bool) -> None:
    """Refuse to make a grid while one of other ranks is alive (`LayoutError`)."""
    gc.collect()  # a grid ends with the cycles that it is in
    for grid, reference in list(_ALIVE.items()):
        group = None if reference is None else reference()
        if group is None or group not in (world(), dist.group.WORLD):
            continue  # of torch's ranks before these
        theirs = dist.get_process_group_ranks(group)
        if theirs != list(ranks):
            raise LayoutError(
                f"this process has {grid} of the ranks {theirs}, and now makes a grid of "
                f"{'all ranks' if whole else list(ranks)}\n    delete the first one, with its "
                "tensors and networks (del), or make all grids of the same ranks"
            )


def _read_mesh(
    mesh: DeviceMesh, extents: tuple[int, int, int, int]
) -> tuple[tuple[int, int, int, int], list[int]]:
    """Return the extents and the ranks of a mesh.

    Raises:
        LayoutError: no extents are given and its dims are not named as axes, or in another order.
    """
    if not hasattr(mesh, "mesh"):
        raise LayoutError(f"mesh={mesh!r} is no DeviceMesh; see torch's init_device_mesh")
    ranks = mesh.mesh.flatten().tolist()
    if extents != (1, 1, 1, 1):
        return extents, ranks
    names = mesh.mesh_dim_names or ()
    if not names or not {*names} <= {*AXES}:
        raise LayoutError(
            f"a mesh with the dims {names or 'without names'} does not say how volumes are cut\n"
            f"    name them {', '.join(AXES)}, take a part that is (mesh['data', 'depth']), or "
            "give the extents too: Grid(mesh=mesh, depth=2)"
        )
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    cutting = [name for name in names if sizes[name] > 1]
    if cutting != sorted(cutting, key=AXES.index):
        raise LayoutError(
            f"a mesh with the dims {names} numbers its ranks in another order than a grid\n"
            f"    give its dims in the order {', '.join(AXES)}"
        )
    found = [sizes.get(axis, 1) for axis in AXES]
    return (found[0], found[1], found[2], found[3]), ranks


@per_grid
def hosts_of_ranks(_grid: Grid) -> tuple[str, ...]:
    """Return the machine of each rank; all ranks gather the names of theirs, once."""
    path = Path("/proc/sys/kernel/random/boot_id")  # tells machines of the same name apart
    boot = path.read_text() if path.exists() else os.getppid()
    return tuple(all_gather(f"{socket.gethostname()} {boot}"))


def log_nodes(grid: Grid, volume: Sequence[int] = CUBE) -> None:
    """Log which axes lie inside a node, where there are several; all ranks call this.

    With it, for a ``volume`` of depth, height and width, the share of halos between nodes.
    """
    hosts = hosts_of_ranks(grid)
    nodes = len({*hosts})
    if nodes == 1:
        return
    words = axes_in_nodes(grid.extents, [at for at, host in enumerate(hosts) if host == hosts[0]])
    if interleaved_nodes(hosts):  # of which a warning was given at the start
        words = "their ranks do not follow each other"
    if grid.size > grid.data:
        share = share_between_nodes(grid.extents, hosts, volume)
        words += f"; {share:.0%} of the halos' bytes travel between nodes"
        best = places(grid.extents, grid.size // nodes, volume) // (grid.size // nodes)
        least = share_between_nodes(grid.extents, best.tolist(), volume)
        if least < share:
            words += f", and {least:.0%} would if the recipe gave grid and data.shape"
    log_once(grid, f"{grid.size} ranks on {nodes} nodes: {words}")


@per_grid
def log_once(grid: Grid, message: str, level: int = logging.INFO) -> None:
    """Log a message once per grid, on the main rank.

    ``logging.WARNING`` is for a cost or a risk that the user can do something about.
    """
    grid.log(message, level)
