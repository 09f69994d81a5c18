"""TFRecords of Mathuriya et al. 2018: many samples a file (tier: no process)."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import hyperslab as hs
from hyperslab.data import open
from hyperslab.data.assemble import os_bytes_read
from hyperslab.errors import DataError
from hyperslab.formats.convert.run import Outcome, Request, convert
from hyperslab.formats.source import ScanOptions
from hyperslab.formats.tfrecord.source import Sc18Folder, TfRecordFolder
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.universes import GRIDS, Seat
from tests.formats.writers import example, mlperf, record

S = 6
LOW = np.array([0.25, 0.78, 0.9])
HIGH = np.array([0.35, 0.95, 1.0])


def cube(seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).poisson(8.0, (S, S, S)).astype(np.float64)


def labels(universe: int) -> NDArray[np.float64]:
    return np.random.default_rng(900 + universe).uniform(LOW, HIGH)


def sample(seed: int, universe: int, dtype: str = "<f8", **change: Any) -> bytes:
    features = {
        "label_raw": labels(universe).astype(dtype).tobytes(),
        "data_raw": cube(seed).astype(dtype).tobytes(),
    } | change
    return record(example(**{key: value for key, value in features.items() if value is not None}))


def write(folder: Path, counts: Sequence[int] = (64, 64, 5), dtype: str = "<f8") -> None:
    """Files 0.tfrecord and on; eight samples of a universe in a row, across files too."""
    folder.mkdir(parents=True, exist_ok=True)
    seed = 0
    for file, count in enumerate(counts):
        data = b"".join(sample(i, i // 8, dtype) for i in range(seed, seed + count))
        (folder / f"{file}.tfrecord").write_bytes(data)
        seed += count


@pytest.mark.parametrize("dtype", ["<f8", "<f4"])
def test_every_sample_of_every_file(tmp_path: Path, dtype: str) -> None:
    write(tmp_path, dtype=dtype)
    source = source_of(tmp_path, Seat())
    assert isinstance(source, Sc18Folder)
    assert source.names[:2] == ("0_000", "0_001")
    assert source.names[63:65] == ("0_063", "1_000")
    assert source.names[-1] == "2_004"
    assert len(source.names) == 133
    assert source.shape == (1, S, S, S)
    assert source.parameters.names == ("Omega_m", "sigma_8", "n_s")
    assert source.redshifts == (0.0,)
    for i in (0, 1, 63, 64, 132):
        whole = source.read(i, Box((0, 0, 0, 0), source.shape))
        assert whole.dtype == source.dtype == np.float32
        np.testing.assert_array_equal(whole[0], cube(i))
        part = source.read(i, Box((0, 1, 2, 0), (1, 4, 3, 5)))
        np.testing.assert_array_equal(part[0], cube(i)[1:4, 2:3, :5])
        exact = labels(i // 8).astype(dtype).astype(np.float64)
        unit = 2 * (exact - LOW) / (HIGH - LOW) - 1
        np.testing.assert_allclose(source.target(i), unit, atol=1e-12)
        np.testing.assert_allclose(source.parameters.physical(source.target(i)), exact)


def test_files_are_in_the_order_of_their_names_and_their_records_as_stored(tmp_path: Path) -> None:
    write(tmp_path, [2] * 11)
    names = source_of(tmp_path, Seat()).names
    assert [name for name in names if name.endswith("_000")][:3] == ["0_000", "1_000", "10_000"]
    source = source_of(tmp_path, Seat())
    place = names.index("10_001")
    np.testing.assert_array_equal(source.read(place, Box((0, 0, 0, 0), (1, S, S, S)))[0], cube(21))


def test_parts_of_a_universe_stay_in_one_split(tmp_path: Path) -> None:
    """Records do not say of which they are, but they have the same labels."""
    write(tmp_path, [20, 20, 20, 20])
    held = {}
    for split in ("train", "validation", "test"):
        with open(tmp_path, Seat(), batch_size=4, split=split, counts=(5, 2, 3)) as data:
            held[split] = {data.source.target(i).tobytes() for i in data.schedule.samples}
            assert len(data) == 8 * len(held[split])
    assert [len(part) for part in held.values()] == [5, 2, 3]
    assert len(set.union(*held.values())) == 10


def test_two_labels_and_others(tmp_path: Path) -> None:
    one = sample(0, 0, label_raw=np.array([0.3, 0.865]).tobytes())
    (tmp_path / "a.tfrecord").write_bytes(one)
    source = Sc18Folder.open_folder(tmp_path, ScanOptions())
    assert source.names == ("a",)
    assert source.parameters.names == ("Omega_m", "sigma_8")
    np.testing.assert_allclose(source.target(0), [0, 0], atol=1e-12)
    five = np.arange(5.0)
    (tmp_path / "a.tfrecord").write_bytes(sample(0, 0, label_raw=five.tobytes()))
    source = Sc18Folder.open_folder(tmp_path, ScanOptions())
    assert source.parameters.names == ("y0", "y1", "y2", "y3", "y4")
    np.testing.assert_array_equal(source.target(0), five)


@pytest.mark.parametrize("extents", GRIDS, ids=str)
def test_boxes_on_every_grid(tmp_path: Path, extents: dict[str, int]) -> None:
    write(tmp_path, [3, 4])
    for seat in Seat.all(**extents):
        data = open(tmp_path, seat, batch_size=7, split="all", transform=None)
        ((x, y),) = data.epoch(0)
        box = seat.partition((7, 1, S, S, S)).box(seat.coords)
        whole = np.stack([cube(i) for i in range(7)])[:, None]
        np.testing.assert_array_equal(x.local, whole[box.slices()])
        assert y.shape == (7, 3)


def test_a_box_is_read_without_the_rest(tmp_path: Path) -> None:
    write(tmp_path, [64])
    source = source_of(tmp_path, Seat())
    before = os_bytes_read()
    source.read(40, Box((0, 2, 0, 0), (1, 3, S, S)))
    read = os_bytes_read() - before  # with what the system says of it itself
    assert S * S * 8 <= read < S**3 * 8 / 3


def test_a_source_travels_to_another_process(tmp_path: Path) -> None:
    write(tmp_path, [3, 2])
    source = pickle.loads(pickle.dumps(source_of(tmp_path, Seat()))).alone(4)
    assert source.names == ("1_001",)
    assert source.where(0).endswith("1.tfrecord, record 1")
    np.testing.assert_array_equal(source.read(0, Box((0, 0, 0, 0), (1, S, S, S)))[0], cube(4))


def refused(folder: Path, data: bytes, **how: Any) -> str:
    write(folder, [2])
    (folder / "1.tfrecord").write_bytes(data)
    with pytest.raises(DataError) as caught:
        source_of(folder, Seat(), **how)
    return str(caught.value)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    good = sample(1, 1)
    one = "1.tfrecord, record 1: "
    words = f"{one}needs {2 * len(good)} bytes but its file has {2 * len(good) - 3}: it is trunc"
    assert words in refused(tmp_path / "cut", (good + good)[:-3])
    assert f"{one}is truncated: 5 bytes" in refused(tmp_path / "head", good + good[:5])
    assert "is truncated: 0 bytes" in refused(tmp_path / "empty", b"")
    sums = refused(tmp_path / "sum", good + b"\1" + good[1:])
    assert f"{one}is not a TFRecord, or is damaged: the sum of its length" in sums
    broken = refused(tmp_path / "message", good + record(b"\x0a\xff\xff\x03" + bytes(20)))
    assert f"{one}is damaged: tf.train.Example ends within a field" in broken
    assert "unpack it with gunzip" in refused(tmp_path / "gzip", gzip.compress(good))
    assert "has no 'data_raw' but" in refused(tmp_path / "key", sample(1, 1, data_raw=None))
    small = sample(1, 1, data_raw=np.zeros((4, 4, 4)).tobytes())
    words = "1.tfrecord, record 1: size is 512 but 1728 in 0.tfrecord"
    assert words in refused(tmp_path / "small", good + small)
    fewer = sample(1, 1, label_raw=np.zeros(2).tobytes())
    assert "labels is 2 but 3 in 0.tfrecord" in refused(tmp_path / "fewer", fewer)
    nan = sample(1, 1, label_raw=np.array([0.3, np.nan, 1]).tobytes())
    assert "needs finite numbers" in refused(tmp_path / "nan", nan)
    odd = sample(1, 1, label_raw=b"12345")
    assert "'label_raw' has 5 bytes" in refused(tmp_path / "odd", odd)


READS: dict[str, Callable[[Path], object]] = {
    "a volume": lambda folder: source_of(folder, Seat()).read(1, Box((0, 0, 0, 0), (1, S, S, S))),
    "an epoch": lambda folder: [*open(folder, Seat(), batch_size=3, split="all").epoch(0)],
    "a conversion": lambda folder: failed(convert(folder, folder.with_name("to"), Request("npy"))),
}


def failed(outcomes: Sequence[Outcome]) -> None:
    (reason,) = [one.reason for one in outcomes if one.state == "failed"]
    raise DataError(reason)


@pytest.mark.parametrize("place", ["length", "sum of the length", "voxels", "sum of the record"])
@pytest.mark.parametrize("read", READS)
def test_one_changed_bit_is_one_error_that_names_file_and_record(
    read: str, place: str, tmp_path: Path
) -> None:
    folder = tmp_path / "from"
    write(folder, [3])
    path = folder / "0.tfrecord"
    data = bytearray(path.read_bytes())
    size = len(data) // 3
    at = {"length": 0, "sum of the length": 8, "voxels": size // 2, "sum of the record": size - 1}
    data[size + at[place]] ^= 1
    path.write_bytes(data)
    words = "the sum of its length" if "length" in place else "the sum of its record"
    with pytest.raises(DataError, match=rf"0\.tfrecord, record 1: .*{words} does not fit"):
        READS[read](folder)


def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(sample(0, 0) + sample(1, 1))
    (tmp_path / "a_000.tfrecord").write_bytes(sample(2, 2))
    with pytest.raises(DataError, match="are samples of one name, 'a_000'"):
        source_of(tmp_path, Seat())


def test_what_is_no_cube_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(sample(0, 0, data_raw=b"0" * 100))
    with pytest.raises(DataError, match="'data_raw' has 100 bytes, not those of a cube"):
        source_of(tmp_path, Seat())


def test_a_bad_file_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, [3, 3])
    (tmp_path / "00.tfrecord").write_bytes(b"nothing of the sort")
    with open(tmp_path, Seat(), batch_size=6, split="all", on_error="skip") as data:
        assert len(data) == 6


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, [3])
    source = source_of(tmp_path, Seat())
    (tmp_path / "0.tfrecord").write_bytes(b"")
    with pytest.raises(DataError, match=r"0\.tfrecord"):
        source.read(1, Box((0, 0, 0, 0), (1, 1, 1, 1)))


def test_mlperfs_stay_what_they_were(tmp_path: Path) -> None:
    mlperf(tmp_path / "a.tfrecord", 0)
    assert isinstance(source_of(tmp_path, Seat()), TfRecordFolder)
    with pytest.raises(hs.DataError, match="has no 'data_raw'"):
        source_of(tmp_path, Seat(), None, "sc18")
