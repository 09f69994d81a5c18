"""`open`: from a path and a few words to a `Dataset`."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch

from hyperslab.comm import Grid
from hyperslab.comm.agreement import from_main, same_on_all
from hyperslab.data.build import Mode, StorePolicy, build_assembler
from hyperslab.data.dataset import Dataset
from hyperslab.data.sampler import Schedule, samples_of
from hyperslab.data.transforms import TRANSFORMS, Transform, Window, check_window
from hyperslab.errors import DataError, LayoutError
from hyperslab.formats.parameters import Parameters
from hyperslab.formats.registry import Driver, Format, source_of
from hyperslab.formats.source import Source
from hyperslab.formats.subvolumes import Subvolumes

log = logging.getLogger("hyperslab")

NONLINEAR = 1e-3
"""The share of its range by which a physical value may be off the line without a word."""


def open(
    path: str | os.PathLike[str] | Source,
    grid: Grid,
    *,
    batch_size: int,
    split: str = "train",
    seed: int = 0,
    shuffle: bool | None = None,
    channels: Literal["first", "last"] | None = None,
    format: Format | None = None,
    transform: str | None = "auto",
    window: Window | None = None,
    augment: bool = False,
    subvolume: int | None = None,
    driver: Driver | None = None,
    mode: Mode = "direct",
    budget: int | None = None,
    staging: str | os.PathLike[str] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    prefetch: int = 2,
    prefetch_bytes: int = 1 << 30,
    fractions: Sequence[float] = (0.8, 0.1, 0.1),
    dtype: torch.dtype = torch.float32,
) -> Dataset:
    """Open a folder of samples (or a `Source`); every rank calls this alike.

    Universes with their parameters or scans with a class for every voxel, in HDF5, Zarr v3, .npy,
    TFRecord or NIfTI files: names, keys and first bytes tell (docs/formats.md).

    Args:
        batch_size: samples per step over the whole grid.
        split: ``"train"``, ``"validation"``, ``"test"`` (dealt out by ``seed`` and ``fractions``,
            whole volumes at a time) or ``"all"``.
        shuffle: a new order each epoch; by default for ``"train"`` only.
        channels: where the channel dim is stored; needed only where the shape does not tell.
        format: ``"hdf5"``, ``"lbann"`` (HDF5 with reversed spatial dims), ``"npy"``,
            ``"tfrecord"``, ``"zarr"`` or ``"nifti"``; needed only where there are several.
        transform: ``"log1p"``, ``"mean"`` (x / mean(x)) or ``None``. ``"auto"`` is ``"log1p"`` of
            counts, and ``None`` where voxels have classes or a window is given.
        window: (low, high) in the unit of the volumes (HU): clip to it, then scale it to [0, 1].
            Takes the place of a transform.
        augment: flip and permute the axes at random; where voxels have classes, flip only. Meant
            for training.
        subvolume: cut each volume into cubes of this width, see `Subvolumes`.
        driver: ``"mpio"`` reads HDF5 files collectively, under ``mpirun`` and with an MPI build of
            h5py; by default each rank reads by itself.
        mode: ``"direct"`` reads every box when it is its turn. ``"store"`` keeps what was read in
            memory, so that after epoch 0 nothing is read again; the ranks send each other what
            they keep. ``"preload"`` fills the store now.
        budget: what each rank's store may take of its memory [B]; by default its part of half of
            what is free. What does not fit is read again in each epoch.
        staging: a folder on a disk of the node for what does not fit into the budget.
        on_error: ``"stop"`` raises when a sample cannot be read; ``"skip"`` leaves it out, on all
            ranks and from then on, and says so.
        prefetch: mini-batches read ahead; each rank holds one more of its boxes for each.
        prefetch_bytes: what each rank may hold of them [B].
        dtype: of ``x``.

    Raises:
        DataError: the folder or a file in it is not what it should be, or an argument.
        LayoutError: the volumes are too small to be cut for this grid, or into sub-volumes.
    """
    if transform not in (*TRANSFORMS, "auto") or channels not in ("first", "last", None):
        raise DataError(f"transform={transform!r}, channels={channels!r}: see hyperslab.open")
    if batch_size < 1 or min(prefetch, prefetch_bytes, seed, budget or 0) < 0:
        raise DataError(
            f"{batch_size=}, {prefetch=}, {prefetch_bytes=}, {seed=}, {budget=}: the first needs "
            "to be >= 1, the others >= 0"
        )
    if mode not in get_args(Mode) or on_error not in ("stop", "skip"):
        raise DataError(f"{mode=}, {on_error=}: see hyperslab.open")
    if mode == "direct" and (budget is not None or staging is not None):
        raise DataError('budget and staging are of the store: say mode="store" or "preload"')
    if isinstance(path, Source):
        source = path
    else:
        refuse = Refused() if on_error == "skip" else None
        source = source_of(os.fspath(path), grid, channels, format, refuse, driver)
        if refuse is not None:
            kept = len(source.names)
            from_main(lambda: refuse.check(kept))
    if subvolume is not None:
        source = Subvolumes(source, subvolume)
    _check_alike(
        samples=(tuple(source.names), tuple(source.shape), str(source.dtype)),
        batch_size=batch_size,
        split=(split, tuple(fractions)),
        seed=seed,
        shuffle=shuffle,
        transform=(transform, window, dtype),
        augment=augment,
        mode=(mode, budget, staging is None, on_error),
    )
    _check_cut(source, grid, batch_size)
    _check_line(source.parameters, grid)
    chosen = transform_of(source.classes, transform, window)
    assembler = build_assembler(
        source,
        grid,
        _schedule(source, split, fractions, batch_size, seed, shuffle),
        transform=chosen,
        augment=augment,
        dtype=dtype,
        policy=StorePolicy(mode, budget, None if staging is None else Path(staging)),
        skip=on_error == "skip",
    )
    block = assembler.boxes.block_bytes(min(batch_size, len(assembler.schedule.samples)))
    ahead = 0 if source.collective else min(prefetch, prefetch_bytes // block)
    if ahead < prefetch and not source.collective:
        grid.notice(
            f"{ahead} mini-batches of {block / 2**20:.1f} MiB a rank are read ahead, not "
            f"{prefetch}: more would pass prefetch_bytes={prefetch_bytes}"
        )
    return Dataset(assembler, transform=chosen, prefetch=ahead, dtype=dtype)


class Refused:
    """Names the files that are left out when a folder is scanned."""

    def __init__(self) -> None:
        self.errors: list[DataError] = []

    def __call__(self, error: DataError) -> None:
        log.warning("left out: %s", error)
        self.errors.append(error)

    def check(self, kept: int) -> None:
        """Refuse to go on with the smaller part of a folder: the first file may be the odd one.

        Raises:
            DataError: more files were left out than kept.
        """
        if len(self.errors) > kept:
            raise DataError(
                f"{len(self.errors)} files were left out and only {kept} kept, so something else "
                f"is wrong; the first one: {self.errors[0]}"
            )


def transform_of(classes: Sequence[str], transform: str | None, window: Window | None) -> Transform:
    """What is done to stored values, given the names of the voxels' classes, if they have any.

    Raises:
        DataError: a transform and a window are given, or the window is none.
    """
    if window is None:
        counts = None if classes else "log1p"
        return counts if transform == "auto" else transform
    if transform not in ("auto", None):
        raise DataError(f"{transform=} and {window=} are two transforms; give one of them")
    return check_window(window)


def _schedule(
    source: Source,
    which: str,
    fractions: Sequence[float],
    batch_size: int,
    seed: int,
    shuffle: bool | None,
) -> Schedule:
    volumes = [source.volume(sample) for sample in range(len(source.names))]
    samples = samples_of(volumes, which, fractions, seed)
    return Schedule(
        tuple(samples), batch_size, seed, which == "train" if shuffle is None else shuffle
    )


def _check_alike(**arguments: object) -> None:
    """Refuse a seed of each rank's own, say: it would mix boxes of different samples."""
    differ = [
        name
        for name, value in arguments.items()
        if not same_on_all(zlib.crc32(repr(value).encode()))
    ]
    if differ:
        raise DataError(
            f"the ranks open this data set with different {', '.join(differ)}; give every rank the "
            "same arguments"
        )


def _check_cut(source: Source, grid: Grid, batch_size: int) -> None:
    """Fail now and not in the background."""
    try:
        grid.partition((batch_size, *source.shape))
    except LayoutError as error:
        raise LayoutError(f"{source.where(0)}: {error}") from error


def _check_line(parameters: Parameters, grid: Grid) -> None:
    if parameters.misfit > NONLINEAR:
        grid.notice(
            f"physical parameters are not linear in the targets (off by {parameters.misfit:.1%} of "
            "their range): errors in physical units are approximate"
        )
