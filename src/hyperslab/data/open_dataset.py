"""Opens a data set: from a path and a few words to a `Dataset`.

Keywords become policies in one place, `open`; `build_assembler` then wires what the store
keeps on this grid and the `BatchAssembler` that follows.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from hyperslab.comm import Grid, log_once
from hyperslab.comm.agreement import all_gather, broadcast_from_main, collective_try, same_on_all
from hyperslab.comm.grid import hosts_of_ranks
from hyperslab.comm.host_p2p import HostP2P
from hyperslab.comm.rendezvous import name_ranks
from hyperslab.data import sampler
from hyperslab.data.assemble import BatchAssembler, Reader, ReadingThreads, Skipped, target_kind
from hyperslab.data.dataset import Dataset, PrefetchPolicy
from hyperslab.data.store import (
    BatchPlanner,
    SampleBoxes,
    Store,
    deal_samples,
    disk_budget,
    memory_budget,
    stores_in_use,
    whole_samples,
)
from hyperslab.data.transforms import LowHigh, Transform, check_name, transform_of
from hyperslab.errors import DataError, LayoutError
from hyperslab.formats.files import AccessPolicy, DataMap
from hyperslab.formats.registry import Driver, sources_of
from hyperslab.formats.source import ScanOptions, Source
from hyperslab.formats.views import Padded, selected
from hyperslab.util.free_memory import share_the_heap

Mode = Literal["direct", "store", "preload", "sample"]


@dataclass(frozen=True, slots=True)
class StorePolicy:
    """Chooses the boxes that a rank keeps.

    ``mode``: ``"direct"`` reads every box when it is its turn. ``"store"`` keeps what was read in
    memory, so that after epoch 0 nothing is read again; the ranks send each other what they keep.
    ``"preload"`` fills the store before the first step. ``"sample"`` is for comparison, figure 5 of
    Oyama et al. 2020: one rank of a replica reads a whole sample, keeps that, and sends all ranks
    their boxes. ``budget``: what each rank's store may take of its memory [B]; by default its part
    of half of what is free. What does not fit is read again in each epoch. ``staging``: a folder
    on a disk of the node for what does not fit. ``staging_budget``: what each rank may take of it
    [B]; by default its part of nine tenths of what is free.

    Raises:
        DataError: no such mode, a negative budget, a budget or staging without a store, or a
            staging budget without staging.
    """

    mode: Mode = "store"
    budget: int | None = None
    staging: str | os.PathLike[str] | None = None
    staging_budget: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise DataError(f"mode={self.mode!r}: choose from {', '.join(get_args(Mode))}")
        for name in ("budget", "staging_budget"):
            if (getattr(self, name) or 0) < 0:
                raise DataError(f"{name}={getattr(self, name)}: needs to be >= 0")
        if self.staging_budget is not None and self.staging is None:
            raise DataError("staging_budget belongs to a staging folder: give staging=, too")
        if self.mode == "direct" and (self.budget is not None or self.staging is not None):
            raise DataError(
                'budget and staging belong to the store: give mode="store", "preload" or "sample"'
            )

    @property
    def folder(self) -> Path | None:
        """Returns the staging folder; None where there is none."""
        return None if self.staging is None else Path(self.staging)


log = logging.getLogger("hyperslab")

NONLINEAR = 1e-3
"""The share of its range by which a physical value may be off the line without a word."""


def open(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Source,
    grid: Grid,
    *,
    batch_size: int,
    split: str = "train",
    splits: sampler.Splits | None = None,
    fractions: Sequence[float] = (0.8, 0.1, 0.1),
    counts: sampler.SplitCounts | None = None,
    folders: bool = False,
    repeat: int = 1,
    seed: int = 0,
    shuffle: bool | None = None,
    format: str | None = None,
    channels: Literal["first", "last"] | None = None,
    driver: Driver | None = None,
    mapping: DataMap | None = None,
    redshifts: Sequence[float] | None = None,
    targets: Sequence[str] | None = None,
    subvolume: int | None = None,
    multiple: int | None = None,
    transform: str | None = "auto",
    window: LowHigh | None = None,
    augment: bool = False,
    dtype: torch.dtype = torch.float32,
    store: Mode | StorePolicy = "direct",
    mode: Mode | None = None,
    budget: int | None = None,
    staging: str | os.PathLike[str] | None = None,
    prefetch: int | PrefetchPolicy = 2,
    prefetch_bytes: int | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    outside_files: bool = False,
    missing_chunks: bool = False,
) -> Dataset:
    """Opens a folder of samples (or several, or a `Source`); every rank calls this alike.

    A folder has universes with their parameters, or scans with a class for every voxel, in HDF5,
    Zarr v3, .npy, TFRecord or NIfTI files: names, keys and first bytes tell (docs/formats.md).

    Args:
        batch_size: samples per step over the whole grid.
        split: ``"train"``, ``"validation"``, ``"test"`` (dealt out by ``seed`` and ``fractions``,
            whole volumes at a time, or by a list of the data) or ``"all"``.
        splits: the samples of each split, `Listed` or `Folds`, in place of a random choice.
        counts: (train, validation, test) volumes in place of fractions; ``None`` for train takes
            the rest.
        folders: the splits are the sub-folders ``train``, ``validation`` and ``test``, as in
            MLPerf's data; fractions and counts are ignored.
        repeat: how often an epoch shows every sample, each time in another order and augmented
            anew.
        shuffle: a new order each epoch; by default for ``"train"`` only.
        format: the name of a registered format, such as ``"hdf5"`` or ``"lbann"`` (HDF5 with
            reversed spatial dims); needed only if a folder holds several.
        channels: where the channel dim is stored; needed only if the shape does not tell.
        driver: ``"mpio"`` reads HDF5 files collectively, under ``mpirun`` and with an MPI build of
            h5py; by default each rank reads by itself.
        mapping: which files and arrays are volumes, and where their targets are, see `DataMap`:
            keys in HDF5, Zarr or .npz, many volumes in one array, a table of parameters.
        redshifts: the redshifts of the channels to read, in this order; by default all.
        targets: the names of the targets to use, in this order; by default all.
        subvolume: cut each volume into cubes of this width, see `Subvolumes`.
        multiple: round the extents of every volume up to multiples of it, see `Padded`; the added
            voxels hold 0, or the lower end of the window, and are background.
        transform: ``"log1p"``, ``"mean"`` (x / mean(x)) or ``None``. ``"auto"`` is ``"log1p"`` of
            counts, and ``None`` where voxels have classes or a window is given.
        window: (low, high) in the unit of the volumes (HU): clip to it, then scale it to [0, 1].
            Takes the place of a transform.
        augment: flip and permute the axes at random; if voxels have classes, only flip. It is meant
            for training.
        dtype: the type of ``x``.
        store: which boxes are kept in memory, a `StorePolicy` or its mode: ``"direct"`` keeps
            nothing, ``"store"`` keeps the boxes that it reads, ``"preload"`` reads all of them now,
            ``"sample"`` keeps whole samples, for comparison.
        mode, budget, staging: the fields of a `StorePolicy`, one by one; ``budget`` in bytes.
        prefetch: how much is read ahead, a `PrefetchPolicy` or its number of mini-batches.
        prefetch_bytes: the bytes of a `PrefetchPolicy`.
        on_error: ``"stop"`` raises when a sample cannot be read; ``"skip"`` leaves it out, on all
            ranks and from then on, and logs it.
        outside_files: HDF5 files and Zarr groups may take values from files outside of the folder,
            by external links, external storage or as virtual data sets. Their author then
            chooses which files of yours are read.
        missing_chunks: take the fill value for chunks that an HDF5 file or a Zarr group does not
            store. Many programs omit chunks of zeros; but a chunk that was lost looks the same.

    Raises:
        DataError: the folder or a file in it is not what it should be, or an argument.
        LayoutError: the volumes are too small to be cut for this grid, or into sub-volumes.
    """
    # Here, and nowhere else, keywords become policies; what follows knows these alone.
    store_policy = _store_policy(store, mode, budget, staging)
    if prefetch_bytes is not None and isinstance(prefetch, PrefetchPolicy):
        raise DataError(f"{prefetch=} already sets prefetch_bytes; give one of them")
    if not isinstance(prefetch, PrefetchPolicy):
        most = PrefetchPolicy().bytes if prefetch_bytes is None else prefetch_bytes
        prefetch = PrefetchPolicy(prefetch, most)
    split_policy = sampler.SplitPolicy(split, splits, tuple(fractions), counts, folders, seed)
    refuse = Refused() if on_error == "skip" else None
    allowed = AccessPolicy(outside_files, missing_chunks)
    options = ScanOptions(channels, format, refuse, allowed, mapping)
    check_name(transform)
    if channels not in ("first", "last", None) or on_error not in ("stop", "skip"):
        raise DataError(f"{channels=}, {on_error=}: see hyperslab.open")
    if batch_size < 1 or seed < 0:
        raise DataError(f"{batch_size=}, {seed=}: the first needs to be >= 1, the other >= 0")
    if repeat < 1:
        raise DataError(f"{repeat=}: needs to be >= 1")
    if isinstance(path, Source):
        source = path
    else:
        roots = [path] if isinstance(path, str | os.PathLike) else path
        source = sources_of(roots, grid, options, driver)
        if refuse is not None:
            kept = len(source.names)
            broadcast_from_main(lambda: refuse.check(kept))
    if any(asked is not None for asked in (redshifts, targets, subvolume)):
        source = selected(source, redshifts, targets, subvolume)
    chosen = transform_of(source.classes, transform, window)
    if multiple is not None:
        source = Padded(source, multiple, chosen.lowest)
        if transform in ("mean", "log1p_mean"):
            raise DataError(
                f'{multiple=} changes the mean by which transform="{transform}" divides'
            )
    _check_alike(
        samples=(tuple(source.names), tuple(source.shape), str(source.dtype)),
        shapes=tuple(map(tuple, source.shapes)),
        batch_size=batch_size,
        split=(replace(split_policy, seed=0), repeat),
        selection=(source.redshifts, source.parameters.names),
        seed=seed,
        shuffle=shuffle,
        transform=(transform, window, dtype),
        augment=augment,
        mode=(replace(store_policy, staging=store_policy.staging and ""), on_error),
    )
    check_cut(source, grid, batch_size)
    if source.parameters.misfit > NONLINEAR:
        log_once(
            grid,
            "physical parameters are not linear in the targets (off by "
            f"{source.parameters.misfit:.1%} of their range): errors in physical units are "
            "approximate",
            logging.WARNING,
        )
    samples = tuple(split_policy.samples(source))
    shuffled = split == "train" if shuffle is None else shuffle
    schedule = sampler.Schedule(samples, batch_size, seed, shuffled, repeat)
    depth, left = _depth(prefetch, source, grid, min(batch_size, schedule.shown))
    assembler = build_assembler(
        source,
        grid,
        schedule,
        transform=chosen,
        augment=augment,
        policy=store_policy,
        skip=on_error == "skip",
        read_ahead=left,
    )
    return Dataset(assembler, depth, dtype)


def _store_policy(
    store: Mode | StorePolicy,
    mode: Mode | None,
    budget: int | None,
    staging: str | os.PathLike[str] | None,
) -> StorePolicy:
    """Returns the policy of `open`'s arguments."""
    fields = {"budget": budget, "mode": mode, "staging": staging}
    said = [name for name, value in fields.items() if value is not None]
    if said and (isinstance(store, StorePolicy) or (store != "direct" and mode is not None)):
        raise DataError(f"{store=} already sets {', '.join(said)}; give one of them")
    if isinstance(store, StorePolicy):
        return store
    return StorePolicy(store if mode is None else mode, budget, staging)


def _depth(policy: PrefetchPolicy, source: Source, grid: Grid, count: int) -> tuple[int, int]:
    """Counts the mini-batches to read ahead, and the bytes beside them for other boxes.

    Logs it if they are fewer than asked.
    """
    if source.collective:
        return 0, 0
    replicas = 1 if count < grid.data else grid.data
    size = -(-count // replicas) * sample_bytes(source, grid)  # [B] that a rank holds at most
    depth = policy.batches(size, grid.device.type)
    if depth < policy.depth:
        log_once(
            grid,
            f"{depth} mini-batches of {size / 2**20:.1f} MiB a rank are read ahead, not "
            f"{policy.depth}: more would pass prefetch_bytes={policy.bytes}",
        )
    return depth, policy.bytes - depth * size


MOST_READING = 4
"""The most threads of a rank that read at a time: a file system has many ranks to serve."""


def reading_threads(source: Source, grid: Grid, size: int, room: int) -> int:
    """Counts the threads that read for the one that puts mini-batches together.

    They are as many as a rank has cores, and as have ``room`` [B] for a box of ``size`` each. None
    are needed where there would be one, as where the format reads one box at a time.
    """
    if not source.concurrent:
        return 0
    ranks = max(Counter(hosts_of_ranks(grid)).values())  # of a machine
    cores = (os.cpu_count() or 1) // ranks
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = min(cores, len(os.sched_getaffinity(0)))
    count = min(cores, MOST_READING, room // size)
    return count if count > 1 else 0


class Refused:
    """Names the files that are left out when a folder is scanned."""

    def __init__(self) -> None:
        self.errors: list[DataError] = []

    def __call__(self, error: DataError) -> None:
        log.warning("left out: %s", error)
        self.errors.append(error)

    def check(self, kept: int) -> None:
        """Refuses to go on with the smaller part of a folder: the first file may be the odd one."""
        if len(self.errors) > kept:
            raise DataError(
                f"{len(self.errors)} files were left out and only {kept} kept, so something else "
                f"is wrong; the first one: {self.errors[0]}"
            )


def _check_alike(**arguments: object) -> None:
    """Refuses a seed of each rank's own, say: it would mix boxes of different samples."""
    sums = {name: zlib.crc32(repr(value).encode()) for name, value in arguments.items()}
    if same_on_all(zlib.crc32(repr(sums).encode())):
        return
    found = all_gather(sums)
    differ = [name for name in sums if len({theirs[name] for theirs in found}) > 1]
    if differ:
        others = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
        raise DataError(
            f"the ranks open this data set with different {', '.join(differ)}; give every rank the "
            f"same arguments\n    different from rank 0: {name_ranks(others)}"
        )


def build_assembler(
    source: Source,
    grid: Grid,
    schedule: sampler.Schedule,
    *,
    transform: Transform,
    augment: bool,
    policy: StorePolicy,
    skip: bool,
    read_ahead: int,
) -> BatchAssembler:
    """Builds what assembles the mini-batches of a data set; every rank calls it.

    With ``"preload"`` the store is filled. Boxes of ``read_ahead`` [B] may be read beside others.
    """
    whole = policy.mode == "sample"
    if whole and source.collective:
        raise DataError('mode="sample" reads a sample on one rank, the driver on all of a replica')
    boxes = SampleBoxes(grid, source)
    size = sample_bytes(source, grid, whole=whole)
    # What has one sum may be packed in one piece, and is then unpacked as a whole.
    volume = math.prod(source.whole_shape) * np.dtype(source.dtype).itemsize
    read_at_once = max(size, volume) if source.summed_whole else size
    kept = _kept(grid, schedule, policy, size, boxes)
    make = functools.partial(Store, kept.mine, kept.in_memory, size, policy.folder)
    store = make() if policy.folder is None else collective_try(make)
    stores_in_use(grid).add(store)
    travels = policy.mode != "direct" and (grid.data > 1 or augment or whole)
    transport = None
    if grid.size > 1 and (travels or skip):
        # Turned boxes come from other positions, and what is skipped all ranks agree on.
        transport = HostP2P(grid, same_position=not (augment or skip or whole))

    def draw(shape: tuple[int, ...], *key: int) -> sampler.Symmetry:
        return sampler.Symmetry.draw(shape, schedule.seed, *key, turns=not source.classes)

    share_the_heap()  # or each box that is read is of fresh pages
    assembler = BatchAssembler(
        schedule,
        BatchPlanner(boxes, kept.owner, draw if augment else None, whole=whole),
        ReadingThreads(
            Reader(source, transform),
            reading_threads(source, grid, read_at_once, read_ahead),
        ),
        kind=target_kind(source),
        store=store,
        store_room=min(kept.most, kept.in_memory) * size,
        staging_room=max(0, kept.most - kept.in_memory) * (size + Store.slack),
        transport=transport,
        skipped=Skipped(source, transport) if skip else None,
    )
    if policy.mode == "preload":
        begin = time.perf_counter()
        collective_try(assembler.fill)
        seconds = time.perf_counter() - begin
        read = _gib(assembler.reader.bytes_read)
        log_once(grid, f"the store was filled: {read} a rank in {seconds:.1f} s")
    return assembler


def check_cut(source: Source, grid: Grid, batch_size: int) -> None:
    """Checks the cut now, not to fail in the background.

    The volumes of a mini-batch have one shape, and each as many voxels along a side as the grid has
    ranks.
    """
    sampler.check_one_shape(source, batch_size)
    seen = set()
    for sample in range(len(source.shapes) or 1):
        shape = tuple(source.shape_of(sample))
        if shape in seen:
            continue
        seen.add(shape)
        try:
            grid.partition((batch_size, *shape))
        except LayoutError as error:
            raise LayoutError(f"{source.where(sample)}: {error}") from error


def sample_bytes(source: Source, grid: Grid, *, whole: bool = False) -> int:
    """Computes the most that a rank holds of one sample, its target included [B].

    That is its box, or ``whole`` the sample.
    """
    kind = target_kind(source)
    shape = source.shape if whole else SampleBoxes(grid, source).largest.shape
    values = math.prod(shape) * np.dtype(source.dtype).itemsize
    return values + math.prod(kind.shape(tuple(shape[1:]))) * kind.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Kept:
    """Says what is kept where."""

    owner: Mapping[int, int]  # of a sample, as `BatchPlanner` takes it
    mine: Sequence[int]  # those for which this rank's store has room
    in_memory: int  # the first ones of these; the others are on disk
    most: int  # samples that any rank keeps


def _kept(
    grid: Grid, schedule: sampler.Schedule, policy: StorePolicy, size: int, boxes: SampleBoxes
) -> Kept:
    """Deals out who keeps what, boxes of ``size`` [B] or whole samples."""
    if policy.mode == "direct":
        return Kept({}, (), 0, 0)
    budget = memory_budget(grid) if policy.budget is None else policy.budget
    in_memory = budget // size
    capacity = in_memory
    if policy.folder is not None:
        disk = policy.staging_budget
        disk = disk_budget(policy.folder, grid) if disk is None else disk
        capacity += disk // (size + Store.slack)
    count = len(schedule.samples)
    if policy.mode == "sample":
        # What does not fit has a rank, too, which reads it each time.
        every = deal_samples(schedule, grid.data, -(-count // grid.data))
        keepers, me = whole_samples(every, boxes.maps[0]), grid.rank
    else:
        keepers, me = deal_samples(schedule, grid.data, capacity), grid.coords["data"]
    owner = {sample: keeper for keeper, part in enumerate(keepers) for sample in part}
    parts = [part[:capacity] for part in keepers]
    lengths = list(map(len, parts))
    words = _words(lengths, count, in_memory, size, budget)
    log_once(grid, words, logging.INFO if sum(lengths) == count else logging.WARNING)
    return Kept(owner, parts[me], in_memory, max(lengths))


def _words(lengths: Sequence[int], count: int, in_memory: int, size: int, budget: int) -> str:
    kept = sum(lengths)
    memory = sum(min(length, in_memory) for length in lengths)
    most = min(max(lengths), in_memory)
    words = f"the store keeps {memory} of {count} samples in memory, {_gib(most * size)} a rank"
    if kept > memory:
        words += f", and {kept - memory} on disk, {_gib((max(lengths) - most) * size)} a rank"
    if count > kept:
        words += (
            f"; {count - kept} do not fit into the budget of {_gib(budget)} a rank and are read "
            "again in each epoch"
        )
    return words


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.2f} MiB"
