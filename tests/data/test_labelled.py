"""Mini-batches of volumes with a class for every voxel (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.data import Source, open
from hyperslab.data.sampler import Symmetry
from hyperslab.geometry import Box
from tests.data.test_dataset import whole_epoch
from tests.formats.opening import source_of
from tests.formats.scans import CLASSES, folder, hu, labels, lbann, scan
from tests.formats.universes import GRIDS, Seat, counts, public

N, SHAPE = 5, (1, 7, 6, 5)


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Source:
    path = tmp_path_factory.mktemp("scans")
    folder(path, N)
    return source_of(path, Seat())


@pytest.mark.parametrize("extents", GRIDS, ids=str)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_labels_are_cut_like_the_volume(
    scans: Source, extents: dict[str, int], batch_size: int
) -> None:
    how: Any = {"batch_size": batch_size, "split": "all", "shuffle": True}
    order = open(scans, Seat(), **how).schedule.batches(2)
    for samples, (x, y) in zip(order, whole_epoch(scans, extents, 2, **how), strict=True):
        np.testing.assert_array_equal(x, np.stack([hu(i, SHAPE) for i in samples]))
        np.testing.assert_array_equal(y, np.stack([labels(i, SHAPE[1:]) for i in samples]))
    for seat in Seat.all(**extents):
        x, y = next(open(scans, seat, **how).epoch(0))
        assert isinstance(y, hs.Sharded)
        assert y.local.dtype == torch.int64
        assert y.shape == (x.shape[0], *x.shape[2:])
        assert y.partition == seat.partition(tuple(y.shape), channels=False)
        assert y.box.lo == x.box.lo[:1] + x.box.lo[2:]
        assert y.box.hi == x.box.hi[:1] + x.box.hi[2:]


@pytest.mark.parametrize("extents", GRIDS, ids=str)
def test_a_flip_takes_the_labels_along(tmp_path: Path, extents: dict[str, int]) -> None:
    cube = (1, 6, 6, 6)  # where it may turn nothing but might
    folder(tmp_path, N, cube)
    source = source_of(tmp_path, Seat())
    how: Any = {"batch_size": 2, "split": "all", "augment": True, "seed": 3}
    steps = list(whole_epoch(source, extents, 1, **how))
    x, y = (np.concatenate(parts) for parts in zip(*steps, strict=True))
    turns = [Symmetry.draw(cube, 3, 1, i, turns=False) for i in range(N)]
    assert {turn.order for turn in turns} == {(0, 1, 2)}
    assert len({turn.flipped for turn in turns}) > 2
    for i, turn in enumerate(turns):
        np.testing.assert_array_equal(x[i], turn.apply(hu(i, cube)))
        np.testing.assert_array_equal(y[i], turn.apply(labels(i, cube))[0])


def test_flips_are_all_eight_and_no_turn() -> None:
    drawn = [Symmetry.draw((1, 4, 4, 4), 0, i, turns=False) for i in range(200)]
    assert {turn.order for turn in drawn} == {(0, 1, 2)}
    assert len({turn.flipped for turn in drawn}) == 8


@pytest.mark.parametrize("extents", GRIDS, ids=str)
def test_bytes_of_labels_count(scans: Source, extents: dict[str, int]) -> None:
    total = 0
    for seat in Seat.all(**extents):
        data = open(scans, seat, batch_size=N, split="all", augment=True)
        ((x, y),) = data.epoch(0)
        assert data.bytes_read == x.local.numel() * 2 + y.local.numel()
        total += data.bytes_read
    assert total == N * 7 * 6 * 5 * 3


@pytest.mark.parametrize("start", [0, 1, 2])
def test_an_epoch_resumes_on_another_grid(scans: Source, start: int) -> None:
    how: Any = {"batch_size": 2, "split": "all", "shuffle": True, "augment": True}
    every = list(whole_epoch(scans, {"depth": 2}, 1, **how))
    rest = list(whole_epoch(scans, {"height": 3, "data": 2}, 1, start, **how))
    assert len(rest) == len(every) - start
    for (x, y), (x_, y_) in zip(every[start:], rest, strict=True):
        np.testing.assert_array_equal(x, x_)
        np.testing.assert_array_equal(y, y_)


def test_what_a_labelled_data_set_says(scans: Source) -> None:
    data = open(scans, Seat(), batch_size=2)
    assert data.classes == CLASSES
    assert data.targets == ()
    assert data.shape == SHAPE
    assert data.transform is None
    x, y = next(data.epoch(0))
    assert x.local.dtype == torch.float32
    assert not y.requires_grad


def test_sub_volumes_have_their_labels(tmp_path: Path) -> None:
    folder(tmp_path, 2, (1, 4, 6, 2))
    data = open(tmp_path, Seat(), batch_size=1, split="all", subvolume=2)
    assert (data.classes, len(data)) == (CLASSES, 12)
    index = data.names().index("volume-1_1_2_0")
    x, y = list(data.epoch(0))[index]
    np.testing.assert_array_equal(x.local[0], hu(1, (1, 4, 6, 2))[:, 2:, 4:])
    np.testing.assert_array_equal(y.local[0], labels(1, (4, 6, 2))[2:, 4:])
    assert data.bytes_read == 12 * 8 * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stored", ["int16", "uint16", "float32"])
def test_a_window(tmp_path: Path, dtype: torch.dtype, stored: str) -> None:
    volume = abs(hu(0, SHAPE)).astype("f8") if stored == "uint16" else hu(0, SHAPE)
    scan(tmp_path / "a.h5", volume=volume.astype(stored))
    data = open(tmp_path, Seat(), batch_size=1, split="all", window=(-200, 250), dtype=dtype)
    ((x, _),) = data.epoch(0)
    expected = torch.from_numpy((volume.astype("f8").clip(-200, 250) + 200) / 450).to(dtype)
    torch.testing.assert_close(x.local[0], expected)
    assert (x.local.min() >= 0) & (x.local.max() <= 1)


def test_a_window_and_universes(tmp_path: Path) -> None:
    public(tmp_path / "u.hdf5", counts(0, (6, 6, 6, 4)))
    how: Any = {"batch_size": 1, "split": "all"}
    ((x, _),) = open(tmp_path, Seat(), window=(0, 2), transform=None, **how).epoch(0)
    expected = torch.from_numpy(np.moveaxis(counts(0, (6, 6, 6, 4)), -1, 0)).clamp(0, 2) / 2
    torch.testing.assert_close(x.local[0], expected)
    assert open(tmp_path, Seat(), **how).transform == "log1p"
    for bad in [(2, 0), (1, 1), (0, np.inf), (np.nan, 1), (1,), (1, 2, 3), 4, ("a", "b")]:
        with pytest.raises(hs.DataError, match="needs two numbers"):
            open(tmp_path, Seat(), window=bad, **how)  # type: ignore[arg-type]
    with pytest.raises(hs.DataError, match="are two transforms"):
        open(tmp_path, Seat(), window=(0, 1), transform="mean", **how)


@pytest.mark.parametrize("channels", [1, 2])
def test_the_files_of_lbann(tmp_path: Path, channels: int) -> None:
    shape = (channels, 7, 6, 5)
    lbann(tmp_path / "a.hdf5", 4, shape)
    data = open(tmp_path, Seat(), batch_size=1, split="all")
    assert data.classes == ("background", "liver", "tumour")
    ((x, y),) = data.epoch(0)
    np.testing.assert_array_equal(x.local[0], hu(4, shape))
    np.testing.assert_array_equal(y.local[0], labels(4, shape[1:], 3))
    assert data.bytes_read == 2 * 4 * channels * 7 * 6 * 5
    data.close()
    assert not data.source.reader._open  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", ">i4", "int64", "float64", ">f4"])
def test_every_type_of_label(tmp_path: Path, dtype: str) -> None:
    scan(tmp_path / "a.h5", segmentation=labels(0, SHAPE).astype(dtype))
    source = source_of(tmp_path, Seat())
    box = Box((1, 2, 0), (4, 6, 3))
    got = source.labels(0, box)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, labels(0, SHAPE)[0][box.slices()])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gets_what_the_processor_gets(scans: Source) -> None:
    how: Any = {"batch_size": 2, "split": "all", "augment": True, "window": (-100, 400)}
    seat = Seat(height=2)
    on_cpu = list(open(scans, seat, **how).epoch(0))
    seat.device = torch.device("cuda", torch.cuda.current_device())
    for expected, got in zip(on_cpu, open(scans, seat, **how).epoch(0), strict=True):
        for a, b in zip(expected, got, strict=True):
            assert b.local.device.type == "cuda"
            torch.testing.assert_close(a.local, b.local.cpu())
