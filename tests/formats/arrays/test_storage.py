"""What was never written, is missing or lies outside is refused and not read (tier: no process)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

import hyperslab as hs
from hyperslab.cli import app
from hyperslab.errors import DataError
from hyperslab.formats.files import STRICT, AccessPolicy, FileAccess
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.universes import Seat

SHAPE = (8, 8, 8, 4)
CHUNK = (4, 4, 4, 4)
WHOLE = Box((0, 0, 0, 0), (4, 8, 8, 8))


def values() -> Any:
    return np.arange(2048, dtype=np.int16).reshape(SHAPE)


def targets(file: h5py.File) -> None:
    file["unitPar"] = np.array([0.5, -0.5])


def plain(path: Path, key: str = "full", shape: tuple[int, ...] = SHAPE) -> Path:
    with h5py.File(path, "w") as file:
        file[key] = values()[tuple(slice(0, extent) for extent in shape)]
        targets(file)
    return path


def late(file: h5py.File, folder: Path) -> None:
    file.create_dataset("full", SHAPE, "i2")


def chunked(file: h5py.File, folder: Path) -> None:
    file.create_dataset("full", SHAPE, "i2", chunks=CHUNK)


def partly(file: h5py.File, folder: Path) -> None:
    file.create_dataset("full", SHAPE, "i2", chunks=CHUNK, compression="gzip")[:4] = 1


def gigantic(file: h5py.File, folder: Path) -> None:
    file.create_dataset("full", (8000, 8000, 8000, 4), "i2", chunks=CHUNK)[:4, :4, :4] = 1


def early(file: h5py.File, folder: Path, chunks: tuple[int, ...] | None = None) -> None:
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    if chunks:
        how.set_chunk(chunks)
    space = h5py.h5s.create_simple(SHAPE)
    h5py.h5d.create(file.id, b"full", h5py.h5t.NATIVE_INT16, space, how)


def early_chunked(file: h5py.File, folder: Path) -> None:
    early(file, folder, CHUNK)


def virtual(file: h5py.File, folder: Path, second: str = "b.raw", extent: int = 8) -> None:
    plain(folder / "a.raw")
    layout = h5py.VirtualLayout(SHAPE, "i2")
    layout[:4] = h5py.VirtualSource("a.raw", "full", SHAPE)[:4]
    if second:
        layout[4:] = h5py.VirtualSource(second, "full", SHAPE)[4:]
    file.create_virtual_dataset("full", layout)


def half_virtual(file: h5py.File, folder: Path) -> None:
    virtual(file, folder, "")


def thin_virtual(file: h5py.File, folder: Path) -> None:
    plain(folder / "b.raw", shape=(6, 8, 8, 4))
    virtual(file, folder)


def lacking_virtual(file: h5py.File, folder: Path) -> None:
    plain(folder / "b.raw", "other")
    virtual(file, folder)


def empty_virtual(file: h5py.File, folder: Path) -> None:
    with h5py.File(folder / "b.raw", "w") as other:
        chunked(other, folder)
    virtual(file, folder)


def own_virtual(file: h5py.File, folder: Path) -> None:
    virtual(file, folder, ".")


def raw_missing(file: h5py.File, folder: Path) -> None:
    file.create_dataset("full", SHAPE, "i2", external=[(str(folder / "gone.raw"), 0, 4096)])


def raw_short(file: h5py.File, folder: Path) -> None:
    (folder / "short.raw").write_bytes(b"\1" * 4000)
    file.create_dataset("full", SHAPE, "i2", external=[(str(folder / "short.raw"), 0, 4096)])


def bad_targets(file: h5py.File, folder: Path) -> None:
    file["full"] = values()
    del file["unitPar"]
    file.create_dataset("unitPar", (2,), "f8")


def many_targets(file: h5py.File, folder: Path) -> None:
    file["full"] = values()
    del file["unitPar"]
    file.create_dataset("unitPar", (10**9,), "f8", chunks=(10**6,))


def large_chunk(file: h5py.File, folder: Path) -> None:
    data = file.create_dataset("full", (512, 512, 512, 2), "i2", chunks=True, compression=4)
    shape = (512, 512, 512, 2)
    del file["full"]
    data = file.create_dataset("full", shape, "i2", chunks=shape, compression="gzip")
    data.id.write_direct_chunk((0, 0, 0, 0), b"not to be unpacked")


def ring(file: h5py.File, folder: Path) -> None:
    file["full"] = h5py.SoftLink("/other")
    file["other"] = h5py.SoftLink("/full")


NOT_THERE: dict[str, tuple[Callable[[h5py.File, Path], None], str]] = {
    "late": (late, "'full' was never written, or not all of it: none of"),
    "no chunk": (chunked, "'full' was never written, or not all of it: 0 of its 8 chunks"),
    "some chunks": (partly, "4 of its 8 chunks"),
    "a thousand times what is stored": (gigantic, "1 of its 8000000000 chunks"),
    "early": (early, "every voxel is the fill value"),
    "early, chunked": (early_chunked, "every voxel is the fill value"),
    "virtual, source missing": (virtual, "b.raw, which does not exist"),
    "virtual, half of it": (half_virtual, "only 1024 of 2048 values have a source"),
    "virtual, thin source": (thin_virtual, "takes more of 'full'"),
    "virtual, no such key": (lacking_virtual, "refers to 'full' of .*b.raw: cannot be read"),
    "virtual, source never written": (empty_virtual, "b.raw: 'full' was never written"),
    "virtual, of itself": (own_virtual, "is made of itself"),
    "external, missing": (raw_missing, "gone.raw, which does not exist"),
    "external, short": (raw_short, "cut short"),
    "targets": (bad_targets, "'unitPar' was never written"),
    "too many targets": (many_targets, "'unitPar' has 1000000000 values"),
    "a chunk of 512 MiB": (large_chunk, "packed in chunks of 512 MiB"),
    "a ring of links": (ring, "chain of too many links"),
}


@pytest.mark.parametrize("case", NOT_THERE)
def test_what_hdf5_would_give_as_zeros_is_refused(tmp_path: Path, case: str) -> None:
    make, words = NOT_THERE[case]
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        targets(file)
        make(file, tmp_path)
    with pytest.raises(DataError, match=words) as error:
        source_of(tmp_path, Seat(), "last")
    assert str(tmp_path / "a.hdf5") in str(error.value) or "b.raw" in words


def outside_link(file: h5py.File, other: str) -> None:
    file["full"] = h5py.ExternalLink(other, "full")


def outside_by_soft_link(file: h5py.File, other: str) -> None:
    file["there"] = h5py.ExternalLink(other, "/")
    file["full"] = h5py.SoftLink("there/full")


def outside_virtual(file: h5py.File, other: str) -> None:
    layout = h5py.VirtualLayout(SHAPE, "i2")
    layout[:] = h5py.VirtualSource(other, "full", SHAPE)
    file.create_virtual_dataset("full", layout)


def outside_raw(file: h5py.File, other: str) -> None:
    file.create_dataset("full", SHAPE, "i2", external=[(other + ".raw", 0, 4096)])


OUTSIDE = {
    "link": outside_link,
    "soft link": outside_by_soft_link,
    "virtual": outside_virtual,
    "raw": outside_raw,
}


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("case", OUTSIDE)
def test_files_elsewhere_are_read_only_if_allowed(
    tmp_path: Path, case: str, absolute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = plain(tmp_path / "secret.h5")
    values().tofile(f"{other}.raw")
    folder = tmp_path / "data"
    folder.mkdir()
    with h5py.File(folder / "a.hdf5", "w") as file:
        targets(file)
        OUTSIDE[case](file, str(other) if absolute else "../secret.h5")
    monkeypatch.chdir(folder)  # raw files are looked for from the working folder
    with pytest.raises(DataError, match=r"not in the folder.*\n.*outside_files=true") as error:
        source_of(folder, Seat())
    assert "secret.h5" in str(error.value)
    assert "a.hdf5" in str(error.value)
    with pytest.raises(DataError, match="outside_files"):
        hs.open(folder, hs.Grid(), batch_size=1)
    data = hs.open(folder, hs.Grid(), batch_size=1, split="all", outside_files=True, transform=None)
    with data:
        ((x, _),) = data.epoch(0)
        np.testing.assert_array_equal(x.full()[0], np.moveaxis(values(), -1, 0))
    inside = source_of(tmp_path, Seat(), format="hdf5", allowed=STRICT) if case == "link" else None
    if inside is not None:  # the folder above holds both
        np.testing.assert_array_equal(inside.read(0, WHOLE), np.moveaxis(values(), -1, 0))


def test_links_within_the_file_and_the_folder_stay_fine(tmp_path: Path) -> None:
    plain(tmp_path / "real.raw")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        group = file.create_group("group")
        group["volume"] = values()
        file["full"] = h5py.SoftLink("group/alias")
        group["alias"] = h5py.SoftLink("volume")
        targets(file)
    with h5py.File(tmp_path / "b.hdf5", "w") as file:
        file["full"] = h5py.ExternalLink("real.raw", "full")
        targets(file)
    os.symlink(tmp_path / "b.hdf5", tmp_path / "c.hdf5")
    source = source_of(tmp_path, Seat())
    for sample in range(3):
        np.testing.assert_array_equal(source.read(sample, WHOLE), np.moveaxis(values(), -1, 0))


@pytest.mark.parametrize("kind", ["virtual", "link"])
def test_sources_are_found_where_hdf5_finds_them(tmp_path: Path, kind: str) -> None:
    """Files that have been moved together, and files that are links to others beside theirs."""
    real = tmp_path / "real"
    moved = tmp_path / "moved"
    farm = tmp_path / "farm"
    real.mkdir()
    farm.mkdir()
    plain(real / "50%.raw")
    for name, source in (("a.hdf5", str(real / "50%.raw")), ("b.hdf5", "50%.raw")):
        with h5py.File(real / name, "w") as file:
            OUTSIDE[kind](file, source.replace("%", "%%") if kind == "virtual" else source)
            targets(file)
    real.rename(moved)
    (farm / "b.hdf5").symlink_to(moved / "b.hdf5")
    for folder, count in ((moved, 2), (farm, 1)):
        source = source_of(folder, Seat(), allowed=AccessPolicy(outside_files=folder == farm))
        for sample in range(count):
            np.testing.assert_array_equal(source.read(sample, WHOLE), np.moveaxis(values(), -1, 0))
    with pytest.raises(DataError, match=r"50%\.raw, which is not in the folder"):
        source_of(farm, Seat())


def test_a_source_that_goes_after_the_scan_is_missed(tmp_path: Path) -> None:
    plain(tmp_path / "b.raw")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        targets(file)
        virtual(file, tmp_path)
    source = source_of(tmp_path, Seat())
    assert source.read(0, WHOLE).any()
    source.close()
    (tmp_path / "b.raw").unlink()
    with pytest.raises(DataError, match=r"b\.raw, which does not exist"):
        source.read(0, WHOLE)


def test_a_virtual_data_set_can_be_inspected(tmp_path: Path) -> None:
    plain(tmp_path / "b.raw")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        targets(file)
        virtual(file, tmp_path)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path), "grid.depth=2"])
    assert result.exit_code == 0, result.output
    assert "x the file's" in result.output


def test_reach_knows_links_of_the_file_system(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "a").write_text("")
    FileAccess(tmp_path / "alias").check(Path("x"), "it", tmp_path / "data" / "a")
    (tmp_path / "data" / "way").symlink_to("/etc")
    with pytest.raises(DataError, match="not in the folder"):
        FileAccess(tmp_path / "data").check(Path("x"), "it", tmp_path / "data" / "way" / "passwd")
