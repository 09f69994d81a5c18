"""Full disks, wrong bytes, bad requests and dead workers (tier: no process)."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hyperslab.errors import DataError, HyperslabError, LayoutError
from hyperslab.formats.convert import Outcome, Request, convert
from hyperslab.formats.convert import run as work
from tests.forked import forked_commands
from tests.formats.opening import source_of
from tests.formats.scans import folder as scans_folder
from tests.formats.universes import Seat, counts, folder, public
from tests.simulate.test_universe_file import full_disk

ROOT = Path(__file__).parents[3]


def run(source: Path, out: Path, format: str = "hdf5", **how: Any) -> list[Outcome]:
    request = {key: how.pop(key) for key in ("cut", "width", "compression") if key in how}
    return convert(source, out, Request(format, **request), **how)  # type: ignore[arg-type]


def failed(outcomes: list[Outcome]) -> list[str]:
    return [outcome.reason for outcome in outcomes if outcome.state == "failed"]


@pytest.mark.parametrize("format", ["hdf5", "lbann", "zarr", "npy", "tfrecord"])
def test_a_full_disk_is_one_error_and_what_is_finished_stays(tmp_path: Path, format: str) -> None:
    folder(tmp_path / "src", 3, (10, 10, 10, 4))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "src", tmp_path / "out", format, done=interrupt)
    before = sorted(p for p in (tmp_path / "out").rglob("*"))
    words = rf"out: (a/univ_001 cannot be written as {format}|cannot be written): File too large"
    with pytest.raises(DataError, match=words), full_disk():
        run(tmp_path / "src", tmp_path / "out", format)
    assert sorted(p for p in (tmp_path / "out").rglob("*")) == before
    assert [o.state for o in run(tmp_path / "src", tmp_path / "out", format)] == [
        "kept",
        "converted",
        "converted",
    ]
    assert len(source_of(tmp_path / "out", Seat()).names) == 3


def test_a_full_disk_of_scans(tmp_path: Path) -> None:
    scans_folder(tmp_path / "src", 1, (1, 12, 12, 12))
    for i, format in enumerate(("hdf5", "zarr")):
        with (
            pytest.raises(DataError, match=f"volume-0 cannot be written as {format}"),
            full_disk(),
        ):
            run(tmp_path / "src", tmp_path / str(i), format)
        assert [p.name for p in (tmp_path / str(i)).iterdir()] == ["conversion.jsonl"]


def interrupt(outcome: Outcome) -> None:
    raise KeyboardInterrupt


ENDS = """
import resource, sys
from pathlib import Path
from hyperslab.formats.convert import Request, convert
from hyperslab.errors import DataError
resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))
try:
    convert(Path(sys.argv[1]), Path(sys.argv[2]), Request("hdf5"))
except DataError as error:
    print(error)
"""


def test_a_process_with_a_full_disk_ends_well(tmp_path: Path) -> None:
    """HDF5 alone would crash it at its end: it cannot close the file."""
    public(tmp_path / "src/u.hdf5", counts(0, (32, 32, 32, 4)))
    command = [sys.executable, "-c", ENDS, tmp_path / "src", tmp_path / "out"]
    with forked_commands():
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "out: u cannot be written as hdf5: File too large; finished files are kept" in done.stdout
    )


def test_wrong_bytes_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read back is compared, for every kind of thing that a file holds."""
    folder(tmp_path / "src", 1)
    scans_folder(tmp_path / "scans", 1)

    def spoilt(change: Callable[[Any], Any]) -> Callable[..., None]:
        def verify(scratch: Path, *how: Any) -> None:
            with h5py.File(next(scratch.rglob("*.hdf5")), "a") as file:
                change(file)
            checked(scratch, *how)

        return verify

    checked = work.verify_written
    for source, change, words in (
        ("src", lambda f: add(f["full"], (6, 3, 2, 1)), "checksum read back as"),
        ("src", lambda f: add(f["unitPar"], 2), "targets read back as"),
        (
            "src",
            lambda f: replace(f, "namePar", np.array([b"a", b"b", b"c", b"d"])),
            "parameters read",
        ),
        ("src", lambda f: replace(f, "full", f["full"][:6]), "shape read back as"),
        ("src", lambda f: replace(f, "full", f["full"][:].astype("u2")), "dtype read back as"),
        ("scans", lambda f: add(f["volume"], (0, 3, 2, 1)), "checksum read back as"),
        ("scans", flip_a_label, "checksum of the labels read back as"),
    ):
        monkeypatch.setattr(work, "verify_written", spoilt(change))
        (reason,) = failed(run(tmp_path / source, tmp_path / f"out-{source}"))
        assert words in reason
        assert sorted(p.name for p in (tmp_path / f"out-{source}").iterdir()) == [
            "conversion.jsonl"
        ]


def add(dataset: Any, place: Any) -> None:
    dataset[place] += 1


def flip_a_label(file: Any) -> None:
    file["segmentation"][0, 0, 0, 0] = (file["segmentation"][0, 0, 0, 0] + 1) % 4


def replace(file: Any, key: str, value: Any) -> None:
    del file[key]
    file[key] = value


def test_folders_in_each_other(tmp_path: Path) -> None:
    folder(tmp_path / "src", 1)
    (tmp_path / "link").symlink_to(tmp_path / "src")
    for out in ("src", "src/out", ".", "link", "link/out"):
        with pytest.raises(
            DataError, match="one lies in the other; convert into a folder beside it"
        ):
            run(tmp_path / "src", tmp_path / out, "zarr")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "src"]
    assert [p.name for p in (tmp_path / "src").iterdir()] == ["a"]


def test_bad_requests(tmp_path: Path) -> None:
    folder(tmp_path / "src", 1)
    for how, words in (
        ({"format": "jpeg"}, "format 'jpeg': choose from hdf5, lbann"),
        ({"format": "npy", "compression": "gzip"}, "compression of npy: none, not gzip"),
        ({"compression": "zstd"}, "compression of hdf5: none, gzip, not zstd"),
        ({"format": "npy", "cut": (2, 2, 2)}, "npy files have no chunks"),
        ({"cut": (2, 2)}, "needs three numbers"),
        ({"cut": (2, 0, 1)}, "at least 1"),
        ({"workers": 0}, "0 workers: need at least 1"),
    ):
        with pytest.raises(DataError, match=words):
            run(tmp_path / "src", tmp_path / "out", **how)
    with pytest.raises(LayoutError, match="cannot cut 7 x 7 x 7 voxels into 8 x 1 x 1"):
        run(tmp_path / "src", tmp_path / "out", cut=(8, 1, 1))
    with pytest.raises(DataError, match="nowhere: does not exist"):
        run(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def die(*_: Any) -> None:
    os._exit(9)


def test_a_worker_that_dies_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "src", 2)
    monkeypatch.setattr(sys.modules["hyperslab.formats.convert.run"], "run", die)
    with pytest.raises(HyperslabError, match=r"a worker died.*fewer workers"):
        run(tmp_path / "src", tmp_path / "out", workers=2)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["conversion.jsonl"]


def test_two_workers_make_the_same(tmp_path: Path) -> None:
    folder(tmp_path / "src", 4)
    for workers in (1, 2):
        outcomes = run(tmp_path / "src", tmp_path / str(workers), workers=workers)
        assert [o.state for o in outcomes] == ["converted"] * 4
    one, other = (
        {p.relative_to(out): zlib.crc32(p.read_bytes()) for p in out.rglob("*.hdf5")}
        for out in (tmp_path / "1", tmp_path / "2")
    )
    assert one == other
    assert len(one) == 4


def test_zarr_says_so_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "src", 1)
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(HyperslabError, match=r'pip install "zarr.*"'):
        run(tmp_path / "src", tmp_path / "out", "zarr")
