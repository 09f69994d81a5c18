"""What is refused, and how it is said (tier: no process)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hyperslab as hs
from hyperslab.data import open
from hyperslab.geometry import Box
from tests.data.test_dataset import Recorder
from tests.formats.opening import source_of
from tests.formats.universes import Seat, counts, folder, public, unit

BAD_VALUES = [
    ("int16", -3, "log1p", "negative counts, down to -3"),
    ("int16", -3, None, "negative counts"),
    ("float32", np.nan, None, "NaN or infinite"),
    ("float32", np.inf, None, "NaN or infinite"),
    ("float32", -np.inf, "log1p", "NaN or infinite"),
    ("float32", -1, "log1p", "holds -1.0, whose log1p"),
]


@pytest.mark.parametrize(("dtype", "value", "transform", "message"), BAD_VALUES)
def test_a_bad_value_is_an_error_for_the_rank_that_reads_it(
    tmp_path: Path, dtype: str, value: float, transform: Any, message: str
) -> None:
    for i in range(3):
        public(tmp_path / f"u{i}.hdf5", counts(i, (6, 6, 6, 4), dtype))
    bad = counts(9, (6, 6, 6, 4), dtype)
    bad[5, 0, 0, 1] = value
    public(tmp_path / "bad.hdf5", bad)
    how: Any = {"batch_size": 1, "split": "all", "transform": transform}
    ranks = [open(tmp_path, Seat(), **how).source, *Seat.all(depth=2)]
    assert len(list(open(ranks[0], ranks[1], **how).epoch(0))) == 4
    with pytest.raises(hs.DataError, match=f"bad.hdf5.*Box.*{message}"):
        list(open(ranks[0], ranks[2], **how).epoch(0))


@pytest.mark.parametrize(
    ("name", "words"), [("b.hdf5", "is a link to nowhere"), ("sub/c.h5", "is a folder, not an")]
)
def test_what_has_the_name_of_a_file_and_is_none_is_named(
    tmp_path: Path, name: str, words: str
) -> None:
    public(tmp_path / "a.hdf5", counts(0, (6, 6, 6, 4)))
    (tmp_path / ".hidden.hdf5").symlink_to("nowhere")
    (tmp_path / "d.hdf5.partial").mkdir()
    assert len(open(tmp_path, Seat(), batch_size=1, split="all")) == 1
    bad = tmp_path / name
    if name == "b.hdf5":
        bad.symlink_to("nowhere")
    else:
        bad.mkdir(parents=True)
    with pytest.raises(hs.DataError, match=f"{bad}: {words}"):
        open(tmp_path, Seat(), batch_size=1, split="all")


def test_a_file_damaged_inside_is_named(tmp_path: Path) -> None:
    volume = counts(0, (8, 8, 8, 4))
    public(tmp_path / "u.hdf5", volume, full=None)
    with h5py.File(tmp_path / "u.hdf5", "a") as file:
        whole = file.create_dataset("full", data=volume, chunks=(4, 8, 8, 4), compression="gzip")
        chunk = whole.id.get_chunk_info(1)
    raw = bytearray((tmp_path / "u.hdf5").read_bytes())
    raw[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"\xff" * chunk.size
    (tmp_path / "u.hdf5").write_bytes(raw)
    data = open(tmp_path, Seat(), batch_size=1, split="all")
    with pytest.raises(hs.DataError, match=r"u\.hdf5: cannot be read"):
        next(data.epoch(0))


def test_what_cannot_be_cut_or_makes_no_sense_is_refused_at_once(tmp_path: Path) -> None:
    folder(tmp_path, 11)
    source = source_of(tmp_path, Seat())
    with pytest.raises(hs.LayoutError, match=r"univ_000\.hdf5.*extent 7.*8 shards along height"):
        open(source, Seat(height=8), batch_size=1)
    with pytest.raises(hs.LayoutError, match="sub-volumes of 3"):
        open(source, Seat(), batch_size=1, subvolume=3)
    for bad in ({"batch_size": 0}, {"prefetch": -1}, {"seed": -1}, {"transform": "log"},
                {"channels": "middle"}, {"split": "dev"}):  # fmt: skip
        with pytest.raises(hs.DataError):
            open(source, Seat(), **({"batch_size": 1} | bad))  # type: ignore[arg-type]
    data = open(source, Seat(), batch_size=4)
    with pytest.raises(hs.DataError, match="no step 4 of epoch 0: an epoch has 3 steps"):
        data.epoch(0, 4)


def test_a_source_that_gives_another_shape_is_refused() -> None:
    class Wrong(Recorder):
        def read(self, sample: int, box: Box) -> Any:
            return np.zeros((1, 1, 1, 1), self.dtype)

    with pytest.raises(hs.DataError, match=r"sample '0'.*was read as \(1, 1, 1, 1\)"):
        next(open(Wrong(), Seat(), batch_size=1, split="all").epoch(0))


def test_a_curved_parameter_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(4):
        public(tmp_path / f"{i}.h5", counts(i, (4, 4, 4, 2)), i, physPar=unit(i) ** 2)
    with caplog.at_level(logging.WARNING, "hyperslab"):
        open(tmp_path, Seat(), batch_size=1)
    assert "not linear" in caplog.text
