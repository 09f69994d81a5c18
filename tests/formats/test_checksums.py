"""Written files carry checksums, and every reader compares them (tier: no process)."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.errors import DataError
from hyperslab.formats.convert import Request, convert
from hyperslab.geometry import Box
from hyperslab.simulate import one_universe, universes
from hyperslab.simulate.parameters import NAMES, draw_universe
from tests.formats.opening import source_of
from tests.formats.universes import Seat, counts
from tests.formats.writers import lits_hdf5, tfrecords
from tests.selection import in_gate

FORMATS = [("hdf5", "none"), ("hdf5", "gzip"), ("zarr", "none"), ("zarr", "zstd"), ("npy", "none")]


def flip(path: Path, place: int) -> None:
    """One bit; the time of the file stays, so that nothing else can tell."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def volume_file(folder: Path, format: str) -> Path:
    """Of the second sample, the file or a chunk."""
    if format == "zarr":
        chunks = sorted((folder / "univ_1.zarr" / "full" / "c").rglob("*"))
        return next(path for path in chunks if path.is_file())
    return folder / f"univ_1.{format}"


def place_in(path: Path) -> int:
    """Of a byte of the volume."""
    if path.suffix != ".hdf5":
        return path.stat().st_size // 2
    with h5py.File(path) as file:
        return int(file["full"].id.get_chunk_info(0).byte_offset) + 20


@pytest.mark.parametrize(("format", "compression"), FORMATS)
def test_a_bit_of_what_convert_writes(tmp_path: Path, format: str, compression: str) -> None:
    tfrecords(False)(tmp_path / "src")
    out = tmp_path / "out"
    request = Request(format, compression=compression)
    convert(tmp_path / "src", out, request)
    told = "first" if format == "npy" else None
    arguments = ["inspect", str(out), "--verify", *(["--channels", told] if told else [])]
    fine = CliRunner().invoke(app, arguments)
    assert fine.exit_code == 0, fine.output
    assert "read all 3 samples: 3 are fine, 0 damaged; 3 were also compared" in fine.output
    path = volume_file(out, format)
    flip(path, place_in(path))
    bad = CliRunner().invoke(app, arguments)
    assert bad.exit_code == 1
    assert "damaged: " in bad.output
    assert "univ_1" in bad.output
    assert "2 are fine, 1 damaged" in bad.output
    if format != "npy":  # which has no checksums of its own
        source = source_of(out, Seat())
        with pytest.raises(DataError, match="univ_1"):
            source.read(1, Box.whole(source.shape))
    with pytest.raises(DataError, match=r"univ_1.*is damaged: its checksum .*delete it"):
        convert(tmp_path / "src", out, request)


def test_what_fletcher_32_cannot_tell_the_journal_does(tmp_path: Path) -> None:
    """It sums words modulo FFFF: 0000 and FFFF are one to it."""
    tfrecords(False)(tmp_path / "src")
    out = tmp_path / "out"
    convert(tmp_path / "src", out, Request("hdf5"))
    path = out / "univ_1.hdf5"
    data = bytearray(path.read_bytes())
    with h5py.File(path) as file:
        start = int(file["full"].id.get_chunk_info(0).byte_offset)
    at = next(at for at in range(start, len(data), 2) if data[at : at + 2] == b"\0\0")
    data[at : at + 2] = b"\xff\xff"
    path.write_bytes(data)
    source = source_of(out, Seat())
    assert (source.read(1, Box.whole(source.shape)) == -1).sum() == 1, "as HDF5 has it"
    told = CliRunner().invoke(app, ["inspect", str(out), "--verify"])
    assert told.exit_code == 1
    assert "2 are fine, 1 damaged" in told.output


def test_plain_libraries_read_it(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    volumes = tfrecords(False)(tmp_path / "src")
    for format in ("hdf5", "zarr"):
        convert(tmp_path / "src", tmp_path / format, Request(format, compression="gzip"))
    with h5py.File(tmp_path / "hdf5/univ_1.hdf5") as file:
        assert file["full"].fletcher32
        assert file["unitPar"].fletcher32
        np.testing.assert_array_equal(np.moveaxis(file["full"][()], -1, 0), volumes[1])
    group = zarr.open_group(tmp_path / "zarr/univ_1.zarr", mode="r")
    np.testing.assert_array_equal(np.moveaxis(group["full"][...], -1, 0), volumes[1])


def test_simulated_universes(tmp_path: Path) -> None:
    path = tmp_path / "univ_ics_000000.hdf5"
    values = counts(0, (8, 8, 8, 4))
    drawn = draw_universe(0, 0, NAMES)
    one_universe.write_universe(path, values, drawn, (0.0, 0.5, 1.5, 3.0), {"size": 8})
    universes.check_universe(path, {"size": 8})
    with h5py.File(path) as file:
        place = file["full"].id.get_chunk_info(3).byte_offset
    flip(path, place + 10)
    with pytest.raises(DataError, match="not a simulated universe"):
        universes.check_universe(path, {"size": 8})
    source = source_of(tmp_path, Seat())
    with pytest.raises(DataError, match=r"univ_ics_000000.*cannot be read as HDF5"):
        source.read(0, Box.whole(source.shape))


@pytest.mark.parametrize("step", in_gate([23, 71], kept=[71]))
def test_headers_of_what_is_written_have_checksums(tmp_path: Path, step: int) -> None:
    """Every bit of the first KiB of a scan is either of no matter or missed."""
    lits_hdf5(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "out", Request("hdf5"))
    (tmp_path / "out" / "conversion.jsonl").unlink()
    path = tmp_path / "out" / "volume-0.hdf5"
    source = source_of(tmp_path / "out", Seat())
    whole = Box.whole(source.shape)
    before = source.read(0, whole)
    source.close()
    good = path.read_bytes()
    missed = 0
    for place in range(0, 1024, step):
        flip(path, place)
        try:
            found = source_of(tmp_path / "out", Seat())
            np.testing.assert_array_equal(found.read(0, whole), before)
            assert found.classes == source.classes
            found.close()
        except DataError:
            missed += 1
        path.write_bytes(good)
    assert missed > 345 / step
