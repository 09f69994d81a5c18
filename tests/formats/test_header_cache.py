"""What is kept of the headers of files: never of another version of a file (tier: no process)."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hyperslab.data import open
from hyperslab.errors import DataError
from hyperslab.formats import header_cache
from hyperslab.formats.arrays import layouts, scan
from hyperslab.formats.arrays.hdf5 import HeaderChild
from hyperslab.formats.files import DataMap
from hyperslab.formats.source import ScanOptions
from tests.formats.universes import Seat, folder
from tests.header_children import SmallChild

N = 5


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(header_cache, "FEWEST", N)
    monkeypatch.setattr(header_cache, "TICK", 0)
    monkeypatch.setattr(SmallChild, "__call__", HeaderChild.__call__)  # keeps nothing itself
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder that was scanned once."""
    folder(tmp_path / "data", N)
    targets(tmp_path / "data")
    assert not [path for path in (tmp_path / "data").iterdir() if path.name.startswith(".")]
    return tmp_path / "data"


@pytest.fixture
def cache(data: Path, tmp_path: Path) -> Path:
    """The file that keeps the headers of it."""
    (found,) = (tmp_path / "cache/hyperslab/headers").iterdir()
    return found


class Read:
    """The names of files whose headers were read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        read = layouts.read_header

        def counted(path: Path, *how: Any) -> Any:
            self.names.append(path.name)
            return read(path, *how)

        patch.setattr(layouts, "read_header", counted)


@pytest.fixture
def read(data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Read]:
    return Read(monkeypatch)


def targets(path: Path, **how: Any) -> list[list[float]]:
    with open(path, Seat(), batch_size=1, split="all", **how) as found:
        return [found.source.target(n).tolist() for n in range(len(found.source.names))]


def first(data: Path) -> Path:
    return min(data.rglob("*.hdf5"))


def test_the_same_catalogue_without_reading(data: Path, read: Read, cache: Path) -> None:
    found = layouts.scan_layouts(data, ScanOptions())
    assert read.names == []
    cache.unlink()
    again = layouts.scan_layouts(data, ScanOptions())
    assert len(read.names) == N
    np.testing.assert_array_equal(found.targets, again.targets)
    for name in ("files", "volumes", "names", "stamps", "order", "parameters", "redshifts"):
        assert getattr(found, name) == getattr(again, name)


def in_place(file: Path) -> None:
    with h5py.File(file, "a") as opened:
        opened["unitPar"][...] = 0.25


def put_in_its_place(file: Path) -> None:
    shutil.copy(file, file.with_name("aside"))
    in_place(file.with_name("aside"))
    file.with_name("aside").replace(file)


@pytest.mark.parametrize("change", [in_place, put_in_its_place])
def test_a_changed_file_is_read_again_whatever_its_time_says(
    data: Path, read: Read, change: Any
) -> None:
    """Of the same size and with the old time, as `touch -r` and `cp -p` leave it."""
    file = first(data)
    then = file.stat()
    change(file)
    os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (then.st_size, then.st_mtime_ns)
    assert targets(data)[0] == [0.25] * 4
    assert read.names == [file.name]


def test_what_has_just_changed_is_not_kept(
    data: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header_cache, "TICK", 10**12)
    in_place(first(data))
    for _ in range(2):
        targets(data)
    assert read.names == [first(data).name] * 2


def test_files_that_come_and_go(data: Path, read: Read) -> None:
    file = first(data)
    shutil.copy(file, data / "one_more.hdf5")
    file.unlink()
    assert len(targets(data)) == N
    assert read.names == ["one_more.hdf5"]


def test_other_options_read_again(data: Path, read: Read) -> None:
    targets(data, missing_chunks=True)
    assert len(read.names) == N


@pytest.mark.parametrize(
    "harm",
    [
        lambda raw: raw[:-3],
        lambda raw: raw.replace(b"[", b"(", 5),
        lambda raw: raw.replace(b"0.", b"1.", 1),
        lambda _: b"",
        lambda _: b"\x80\x04cos\nsystem\n(S'false'\ntR.",
        lambda raw: raw[: raw.index(b"\n") + 1] + b"{}\n",
    ],
)
def test_a_damaged_cache_is_named_and_ignored(
    data: Path, read: Read, cache: Path, harm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = targets(data)
    cache.write_bytes(harm(cache.read_bytes()))
    assert targets(data) == expected
    assert len(read.names) == N
    assert [str(cache) in record.getMessage() for record in caplog.records] == [True]
    assert targets(data) == expected
    assert len(read.names) == N, "it was written again"


@pytest.mark.parametrize("mode", [0o777, 0o500])
def test_without_a_folder_of_the_users_own_nothing_is_kept(
    data: Path, read: Read, cache: Path, mode: int
) -> None:
    """One that others can write to, or that the user cannot."""
    cache.unlink()
    cache.parent.chmod(mode)
    for _ in range(2):
        targets(data)
    written = mode == 0o500 and os.geteuid() == 0  # to root all folders are open
    assert len(read.names) == (N if written else 2 * N)
    assert [*cache.parent.iterdir()] == ([cache] if written else [])
    cache.parent.chmod(0o700)


def test_a_link_in_its_place_is_not_followed(data: Path, cache: Path, tmp_path: Path) -> None:
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    in_place(first(data))
    assert targets(data)[0] == [0.25] * 4
    assert (tmp_path / "elsewhere").read_bytes() == before


def test_files_that_take_values_from_others_are_not_kept(data: Path, read: Read) -> None:
    """Their own stamps do not tell when the others change."""
    file = first(data)
    with h5py.File(file.parent / ".targets.h5", "w") as other:
        other["values"] = np.full(4, 0.5)
    with h5py.File(file, "a") as opened:
        del opened["unitPar"]
        opened["unitPar"] = h5py.ExternalLink(".targets.h5", "values")
    assert targets(data)[0] == [0.5] * 4
    with h5py.File(file.parent / ".targets.h5", "a") as other:
        other["values"][...] = 0.75
    assert targets(data)[0] == [0.75] * 4


def test_what_was_left_out_is_looked_at_again(data: Path, read: Read) -> None:
    first(data).write_bytes(b"nothing")
    for _ in range(2):
        assert len(targets(data, on_error="skip")) == N - 1
    assert read.names == [first(data).name] * 2
    with pytest.raises(DataError, match=first(data).name):
        targets(data)


def test_arrays_by_key_and_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed, plain = tmp_path / "keyed", tmp_path / "plain"
    for path in (keyed, plain):
        path.mkdir()
    for number in range(N):
        with h5py.File(keyed / f"{number}.h5", "w") as file:
            file["grid/delta"] = np.full((2, 3, 4), number, np.float32)
            file.attrs["omega"] = number / 7
        np.save(plain / f"{number}.npy", np.full((2, 3, 4), number, np.float32))
        np.save(plain / f"{number}.target.npy", np.array([number / 7]))
    said = DataMap(volume="grid/delta", targets=("/@omega",), columns=("omega",))
    scans = (
        lambda: scan.scan_arrays(keyed, ScanOptions(mapping=said)),
        lambda: scan.scan_npy(plain, (".npy",), ScanOptions()),
    )
    time.sleep(0.01)
    fresh = [one() for one in scans]
    monkeypatch.setattr(scan, "find_array", None)  # nobody opens a file
    for one, before in zip(scans, fresh, strict=True):
        again = one()
        np.testing.assert_array_equal(again.targets, before.targets)
        assert (again.volumes, again.stamps) == (before.volumes, before.stamps)


def test_few_files_leave_nothing(tmp_path: Path) -> None:
    folder(tmp_path / "few", N - 1)
    targets(tmp_path / "few")
    assert not (tmp_path / "cache").exists()
