"""Volumes of more than 2^31 voxels, hardly any of which are in memory (tier: no process)."""

from __future__ import annotations

import math
import mmap
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.formats.files import AccessPolicy
from hyperslab.geometry import Box, Partition
from hyperslab.geometry.partition import Cut
from hyperslab.geometry.transfer import plan_transfers
from hyperslab.kernels import conv_in_c  # noqa: F401 - registers the operators
from hyperslab.kernels.random_bits import uniform_bits
from tests.formats.opening import source_of

FAR = 2**31
"""Elements that a signed number of 32 bits cannot count."""


def test_halos() -> None:
    extents = (1, 1, 2**16, 2**12, 2**12)
    cut = Partition(extents, (None, None, Cut.balanced("depth", 2**16, 2), None, None))
    owned = {rank: cut.box({"depth": rank}) for rank in range(2)}
    assert all(box.size == 2**39 for box in owned.values())
    wanted = {
        0: Box((0, 0, 0, 0, 0), (1, 1, 2**15 + 1, 2**12, 2**12)),
        1: Box((0, 0, 2**15 - 1, 0, 0), extents),
    }
    plan = plan_transfers(0, owned, wanted)
    boxes = [transfer.box for transfer in (*plan.sends, *plan.receives)]
    assert [(box.lo[2], box.size) for box in boxes] == [(2**15 - 1, 2**24), (2**15, 2**24)]


def test_files(tmp_path: Path) -> None:
    """Of files with holes a corner is read by its offset."""
    shape = (1, 1300, 1300, 1300)
    assert math.prod(shape) > FAR
    (tmp_path / "npy").mkdir()
    values = np.lib.format.open_memmap(tmp_path / "npy" / "a.npy", "w+", np.int16, shape)
    values[0, -1, -1, -3:] = [1, 2, 3]
    del values
    np.save(tmp_path / "npy" / "a.target.npy", np.ones(1))
    (tmp_path / "hdf5").mkdir()
    with h5py.File(tmp_path / "hdf5" / "a.hdf5", "w") as file:
        volume = file.create_dataset("full", shape, np.int16, chunks=(1, 100, 100, 1300))
        volume[0, -1, -1, -3:] = [1, 2, 3]
        file["unitPar"] = np.zeros(1)
        file["namePar"] = np.array([b"a"])
    for folder in ("npy", "hdf5"):
        allowed = AccessPolicy(missing_chunks=True)
        source = source_of(tmp_path / folder, hs.Grid(), channels="first", allowed=allowed)
        found = source.read(0, Box((0, 1299, 1298, 1296), (1, 1300, 1300, 1300)))
        source.close()
        assert found.ravel().tolist() == [0, 0, 0, 0, 0, 1, 2, 3]


def test_masks() -> None:
    """A number belongs to an element, whatever box it is drawn for, and not to its lower bits."""
    shape, first = (2**34, 3, 4), 2**33 + 5
    box = Box((first, 0, 0), (first + 3, 3, 4))
    drawn = uniform_bits(shape, box, 7, torch.device("cpu"))
    part = Box((first + 1, 1, 0), (first + 2, 3, 4))
    assert torch.equal(uniform_bits(shape, part, 7, torch.device("cpu")), drawn[1:2, 1:])
    near = Box((5, 0, 0), (8, 3, 4))
    assert not (uniform_bits(shape, near, 7, torch.device("cpu")) == drawn).any()


MAP_NORESERVE = 0x4000  # of Linux, which Python names from 3.13 on


def untouched(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until somebody writes there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    room = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    room.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(room, dtype=dtype)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs memory without pages")
def test_compiled_kernels() -> None:
    """The last elements of a block are those that a number of 32 bits would miss."""
    voxels = FAR // 8 + 1024
    x = untouched(8 * voxels, torch.bfloat16)
    x[-3 * 8 :] = 1.5
    sums = torch.ops.hyperslab.channel_sums(x.view(1, 1, 1, voxels, 8).movedim(-1, 1), 0)
    assert sums[0].tolist() == [4.5] * 8
    x = untouched(FAR + 4096, torch.bfloat16).view(1, 1, 2, 2, FAR // 4 + 1024)
    x[..., 1, 1, -1], x[..., 0, 1, -3] = 3, 4
    y, _ = torch.ops.hyperslab.chain_forward(x, None, 0.0, [2, 2, 2], True, False, torch.bfloat16)
    assert y.flatten()[-3:].tolist() == [0, 4, 3]
