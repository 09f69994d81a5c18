"""Mini-batches of every rank of a grid, one rank after the other (tier: no process)."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.data import Dataset, Parameters, Source, open
from hyperslab.data.sampler import Symmetry
from hyperslab.geometry import Box
from tests.data.numbered import own_threads, wait_for_threads
from tests.formats.opening import source_of
from tests.formats.universes import GRIDS, Seat, counts, folder, public, unit

S, N = 7, 11


@pytest.fixture(scope="module")
def universes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, list[Any]]:
    path = tmp_path_factory.mktemp("universes")
    volumes = folder(path, N)
    return source_of(path, Seat()), volumes


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    yield
    wait_for_threads()


def whole_epoch(
    source: Source, extents: dict[str, int], epoch: int = 0, start: int = 0, **how: Any
) -> Any:
    """Every step's global (x, y), put together from all ranks; float64 NaN where nobody wrote."""
    ranks = [open(source, seat, **how) for seat in Seat.all(**extents)]
    for step in zip(*(data.epoch(epoch, start) for data in ranks), strict=True):
        x = np.full(step[0][0].shape, np.nan)
        y = np.full(step[0][1].shape, np.nan)
        for part, target in step:
            x[part.box.slices()] = part.local.numpy()
            y[target.box.slices()] = target.local.numpy()
        yield x, y


@pytest.mark.parametrize("extents", GRIDS, ids=str)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_sample_once_and_alike_on_every_grid(
    universes: Any, extents: dict[str, int], batch_size: int
) -> None:
    source, volumes = universes
    how = {"batch_size": batch_size, "split": "all", "shuffle": True, "transform": None}
    order = open(source, Seat(), **how).schedule.batches(3)
    seen: Counter[int] = Counter()
    for samples, (x, y) in zip(order, whole_epoch(source, extents, 3, **how), strict=True):
        seen.update(samples)
        np.testing.assert_array_equal(x, np.stack([volumes[i] for i in samples]))
        np.testing.assert_array_equal(y, np.stack([unit(i) for i in samples]).astype("f4"))
    assert seen == Counter(range(N))


@pytest.mark.parametrize("extents", GRIDS, ids=str)
def test_augmentation_is_that_of_the_whole_volume(universes: Any, extents: dict[str, int]) -> None:
    source, volumes = universes
    how = {"batch_size": 4, "split": "all", "transform": None, "augment": True, "seed": 5}
    expected = [
        Symmetry.draw(source.shape, 5, 2, i).apply(volume) for i, volume in enumerate(volumes)
    ]
    assert any((a != b).any() for a, b in zip(expected, volumes, strict=True))
    got = np.concatenate([x for x, _ in whole_epoch(source, extents, 2, **how)])
    np.testing.assert_array_equal(got, np.stack(expected))
    again = np.concatenate([x for x, _ in whole_epoch(source, extents, 3, **how)])
    assert (again != got).any()


def test_subvolumes_of_one_universe_stay_in_one_split(tmp_path: Path) -> None:
    folder(tmp_path, 10, (6, 6, 6, 4))
    parts = {}
    for part in ("train", "validation", "test"):
        data = open(tmp_path, Seat(), batch_size=5, split=part, subvolume=3)
        assert data.shape == (4, 3, 3, 3)
        parts[part] = Counter(name.rsplit("_", 3)[0] for name in data.names())
    assert [len(part) for part in parts.values()] == [8, 1, 1]
    assert all(times == 8 for part in parts.values() for times in part.values())
    assert len(parts["train"] | parts["validation"] | parts["test"]) == 10


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_an_epoch_resumes(universes: Any, start: int) -> None:
    how = {"batch_size": 4, "split": "all", "shuffle": True, "augment": True}
    every = list(whole_epoch(universes[0], {"depth": 2}, 1, **how))
    rest = list(whole_epoch(universes[0], {"height": 3, "data": 2}, 1, start, **how))
    assert len(every) == 3
    assert len(rest) == 3 - start
    for (x, y), (x_, y_) in zip(every[start:], rest, strict=True):
        np.testing.assert_array_equal(x, x_)
        np.testing.assert_array_equal(y, y_)


@pytest.mark.parametrize("extents", GRIDS, ids=str)
def test_bytes_are_those_of_the_boxes(universes: Any, extents: dict[str, int]) -> None:
    total = 0
    for seat in Seat.all(**extents):
        data = open(universes[0], seat, batch_size=11, split="all", augment=True)
        ((x, _),) = data.epoch(0)
        assert data.bytes_read == x.local.numel() * 2
        total += data.bytes_read
    assert total == N * 4 * S**3 * 2


def test_what_comes_out(universes: Any) -> None:
    source, volumes = universes
    data = open(source, Seat(), batch_size=3)
    assert len(data) == 9
    assert (data.steps, data.shape) == (3, (4, S, S, S))
    assert data.targets == data.parameters.names == ("Omega_m", "sigma_8", "N_spec", "H_0")
    x, y = next(data.epoch(0))
    assert isinstance(x, hs.Sharded)
    assert isinstance(y, hs.Sharded)
    assert x.local.dtype == y.local.dtype == torch.float32
    first = volumes[source.names.index(data.names(0)[0])]
    torch.testing.assert_close(x.local[0], torch.from_numpy(np.log(first + 1.0)).float())
    assert data.names(0) != data.names(1)
    assert sorted(data.names(0)) == sorted(data.names(1))
    assert data.wait_seconds > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stored", ["int16", "uint16", "float32"])
@pytest.mark.parametrize("transform", ["log1p", "mean", None])
def test_transforms(tmp_path: Path, dtype: torch.dtype, stored: str, transform: str | None) -> None:
    volume = counts(0, (5, 5, 5, 2), stored)
    public(tmp_path / "a.h5", volume)
    public(tmp_path / "b.h5", np.zeros_like(volume))  # has no mean to be divided by
    exact = np.moveaxis(volume, -1, 0).astype("f8")
    exact = {"log1p": np.log(exact + 1), "mean": exact / exact.mean(), None: exact}[transform]
    how: Any = {"split": "all", "transform": transform, "dtype": dtype}
    x, y = next(open(tmp_path, Seat(), batch_size=2, **how).epoch(0))
    assert x.local.dtype == dtype
    assert y.local.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {"rtol": 1e-12, "atol": 0} if dtype == torch.float64 else {}
    expected = torch.from_numpy(np.stack([exact, 0 * exact])).to(dtype)
    torch.testing.assert_close(x.local, expected, **tolerance)


class Recorder(Source):
    """Says which samples were asked for, and may fail at one."""

    def __init__(self) -> None:
        self.names = [str(i) for i in range(10)]
        self.shape, self.dtype = (1, 2, 2, 2), np.dtype("int16")
        self.parameters = Parameters.normalised(["a"])
        self.asked: list[int] = []
        self.broken = -1

    def read(self, sample: int, box: Box) -> Any:
        self.asked.append(sample)
        if sample == self.broken:
            raise hs.DataError(f"sample {sample} is broken")
        return np.full(box.shape, sample, self.dtype)

    def target(self, sample: int) -> Any:
        return np.array([sample])


def test_reading_is_ahead_and_bounded() -> None:
    for depth in (0, 1, 3):
        source = Recorder()
        batches = open(source, Seat(), batch_size=1, split="all", prefetch=depth).epoch(0)
        assert source.asked == []
        for step, _ in enumerate(itertools.islice(batches, 4)):
            while len(source.asked) < step + 1 + depth:  # pytest's time limit would end it
                threading.Event().wait(0.001)
            assert source.asked == list(range(step + 1 + depth))
        batches.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_surfaces_at_its_step(prefetch: int) -> None:
    source = Recorder()
    source.broken = 4
    batches = open(source, Seat(), batch_size=2, split="all", prefetch=prefetch).epoch(0)
    assert [y.local.flatten().tolist() for _, y in itertools.islice(batches, 2)] == [[0, 1], [2, 3]]
    with pytest.raises(hs.DataError, match="sample 4 is broken"):
        next(batches)
    assert list(batches) == []


def test_the_thread_ends_however_the_epoch_is_left() -> None:
    class Slow(Recorder):
        def read(self, sample: int, box: Box) -> Any:
            time.sleep(0.2 if len(self.asked) == 1 else 0)
            return super().read(sample, box)

    data = open(Slow(), Seat(), batch_size=1, split="all")

    batches = data.epoch(0)
    next(batches)
    assert len(own_threads()) == 1
    batches.close()
    wait_for_threads()
    for _ in data.epoch(0):
        break
    wait_for_threads()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the loop is what is interrupted
        for _ in data.epoch(0):
            raise KeyboardInterrupt
    wait_for_threads()
    assert len(list(data.epoch(1))) == 10


def test_an_interrupt_while_waiting_ends_the_thread() -> None:
    class Interrupting(Recorder):
        def read(self, sample: int, box: Box) -> Any:
            main = threading.main_thread().ident
            assert main is not None
            if sample == 1:
                signal.pthread_kill(main, signal.SIGINT)
            return super().read(sample, box)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup ignores interrupts
    try:
        with pytest.raises(KeyboardInterrupt):
            list(open(Interrupting(), Seat(), batch_size=1, split="all", prefetch=0).epoch(0))
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_closed_data_set_holds_no_file(universes: Any) -> None:
    source, _ = universes
    with open(source, Seat(), batch_size=2) as data:
        assert isinstance(data, Dataset)
        list(data.epoch(0))
        assert source.reader._open
    assert not source.reader._open


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gets_what_the_processor_gets(universes: Any) -> None:
    how: Any = {"batch_size": 2, "split": "all", "augment": True}
    seat = Seat(height=2)
    on_cpu = list(open(universes[0], seat, **how).epoch(0))
    seat.device = torch.device("cuda", torch.cuda.current_device())
    for expected, got in zip(on_cpu, open(universes[0], seat, **how).epoch(0), strict=True):
        for a, b in zip(expected, got, strict=True):
            assert b.local.device.type == "cuda"
            torch.testing.assert_close(a.local, b.local.cpu())
