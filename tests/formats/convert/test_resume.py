"""Stopped and run again: what is finished is kept, if it is of the same source (tier: no process).

One test kills a process in the middle.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import numpy as np
import pytest

from hyperslab.errors import DataError
from hyperslab.formats.convert import Outcome, Request, convert
from hyperslab.geometry import Box
from tests.forked import forked_commands
from tests.formats.opening import source_of
from tests.formats.universes import Seat, counts, folder, unit
from tests.formats.writers import npy
from tests.selection import in_gate

ROOT = Path(__file__).parents[3]
N = 4


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The same names in two sub-folders."""
    folder(tmp_path / "src", N)
    return tmp_path / "src"


def run(source: Path, out: Path, format: str = "hdf5", **how: Any) -> list[Outcome]:
    request = {key: how.pop(key) for key in ("cut", "width", "compression") if key in how}
    return convert(source, out, Request(format, **request), **how)  # type: ignore[arg-type]


def states(outcomes: list[Outcome]) -> list[str]:
    return [outcome.state for outcome in outcomes]


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All that a reader may see: when it was written, and what."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".jsonl", ".csv")]
    return {p.relative_to(folder).as_posix(): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


def stop_after(count: int) -> Callable[[Outcome], None]:
    seen: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        seen.append(outcome)
        if len(seen) == count:
            raise KeyboardInterrupt

    return done


@pytest.mark.parametrize(
    "format", in_gate(["hdf5", "zarr", "npy", "tfrecord", "lbann"], kept=["hdf5", "zarr"])
)
@pytest.mark.parametrize("width", in_gate([None, 7], kept=[7]))
def test_a_stopped_run_is_completed_to_the_same(
    tmp_path: Path, format: str, width: int | None
) -> None:
    folder(tmp_path / "src", N, (7, 7, 7, 4) if width is None else (14, 7, 7, 4))
    run(tmp_path / "src", tmp_path / "whole", format, width=width)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "src", out, format, width=width, done=stop_after(2))
    assert not (out / ".partial").exists()
    before = contents(out)
    outcomes = run(tmp_path / "src", out, format, width=width)
    assert states(outcomes) == ["kept", "kept", "converted", "converted"]
    after = contents(out)
    assert {name: after[name] for name in before} == before
    assert {name: data for name, (_, data) in after.items()} == {
        name: data for name, (_, data) in contents(tmp_path / "whole").items()
    }
    assert states(run(tmp_path / "src", out, format, width=width)) == ["kept"] * N
    assert contents(out) == after
    assert len(source_of(out, Seat()).names) == N * (1 if width is None else 2)


def test_the_record(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", cut=(2, 1, 1))
    asked, *lines = (tmp_path / "out/conversion.jsonl").read_text().splitlines()
    assert json.loads(asked)["format"] == "hdf5"
    assert json.loads(asked)["cut"] == [2, 1, 1]
    assert len(lines) == N
    for i, line in enumerate(map(json.loads, lines)):
        name = f"{'ab'[i // 2]}/univ_00{i % 2}"
        assert line["name"] == line["source"] == name
        assert line["target"] == unit(i).tolist()
        stored = counts(i, (7, 7, 7, 4)).astype("<i2")  # in the order of the public files
        assert line["crc32c"] == f"{google_crc32c.value(stored.tobytes()):08x}"
        file = tmp_path / f"out/{name}.hdf5"
        assert line["files"] == {f"{name}.hdf5": file.stat().st_size}
        assert list(line["stamps"]) == [f"{name}.hdf5"]


def test_a_copied_source_is_the_same(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copyfile)
    before = contents(tmp_path / "out")
    assert states(run(tmp_path / "copy", tmp_path / "out")) == ["kept"] * N
    assert contents(tmp_path / "out") == before
    record = (tmp_path / "out/conversion.jsonl").read_text().splitlines()
    assert len(record) == 1 + 2 * N  # with the new dates: they are not read the next time
    assert states(run(tmp_path / "copy", tmp_path / "out")) == ["kept"] * N
    assert (tmp_path / "out/conversion.jsonl").read_text().splitlines() == record


def change_a_voxel(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["full"][3, 2, 1, 0] += 1


def change_a_target(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["unitPar"][2] = 0.125


@pytest.mark.parametrize(
    ("change", "word"), [(change_a_voxel, "crc32c"), (change_a_target, "target")]
)
def test_a_changed_source_is_named_and_the_others_are_kept(
    source: Path, tmp_path: Path, change: Callable[[Path], None], word: str
) -> None:
    run(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    change(source / "a/univ_001.hdf5")
    outcomes = run(source, tmp_path / "out")
    (failed,) = (o for o in outcomes if o.state == "failed")
    for words in ("a/univ_001.hdf5: has changed since 'a/univ_001'", f"({word} was", "delete that"):
        assert words in failed.reason
    assert sorted(states(outcomes)) == ["failed", "kept", "kept", "kept"]
    assert contents(tmp_path / "out") == before
    (tmp_path / "out/a/univ_001.hdf5").unlink()
    assert sorted(states(run(source, tmp_path / "out"))) == ["converted", "kept", "kept", "kept"]
    one, other = (source_of(path, Seat()) for path in (source, tmp_path / "out"))
    assert (
        one.read(1, Box.whole(one.shape)).tobytes() == other.read(1, Box.whole(one.shape)).tobytes()
    )
    assert one.target(1).tolist() == other.target(1).tolist()


def test_a_target_in_the_table_of_the_source(tmp_path: Path) -> None:
    npy("last")(tmp_path / "src")
    run(tmp_path / "src", tmp_path / "out", "npy")
    table = (tmp_path / "src/targets.csv").read_text()
    (tmp_path / "src/targets.csv").write_text(table.replace("v2,-", "v2,"))
    outcomes = run(tmp_path / "src", tmp_path / "out", "npy")
    assert sorted(states(outcomes)) == ["failed", "kept", "kept"]
    (tmp_path / "out/v2.npy").unlink()
    assert sorted(states(run(tmp_path / "src", tmp_path / "out", "npy"))) == [
        "converted",
        "kept",
        "kept",
    ]
    one, other = (source_of(tmp_path / name, Seat()) for name in ("src", "out"))
    assert [one.target(i).tolist() for i in range(3)] == [
        other.target(i).tolist() for i in range(3)
    ]


def test_a_finished_file_that_was_cut_short_is_named(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    path = tmp_path / "out/b/univ_000.hdf5"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"b/univ_000.hdf5: has \d+ bytes but had .*delete it"):
        run(source, tmp_path / "out")


def test_another_conversions_folder_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out)
    before = contents(out)
    for how, words in (
        ({"cut": (2, 1, 1)}, r"cut None, not \[2, 1, 1\]"),
        ({"format": "zarr"}, "format hdf5, not zarr"),
        ({"width": 7}, "subvolumes None, not 7"),
        ({"compression": "gzip"}, "compression none, not gzip"),
    ):
        with pytest.raises(DataError, match=f"out: was converted with {words}: convert into"):
            run(source, out, **how)
    folder(tmp_path / "other", 2, (6, 6, 6, 4))
    with pytest.raises(DataError, match=r"with shape \[4, 7, 7, 7\], not \[4, 6, 6, 6\]"):
        run(tmp_path / "other", out)
    shutil.copytree(source / "a", tmp_path / "third/z")
    with pytest.raises(DataError, match=r"was made of a/univ_000.hdf5, which is not in .*third"):
        run(tmp_path / "third", out)
    assert contents(out) == before


def test_a_folder_of_something_else_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").touch()
    with pytest.raises(
        DataError, match=r"out: holds 'thesis.tex', which no conversion has written"
    ):
        run(source, out)
    assert [p.name for p in out.iterdir()] == ["thesis.tex"]
    (out / "thesis.tex").unlink()
    (out / ".DS_Store").touch()
    run(source, out)
    record = (out / "conversion.jsonl").read_text().splitlines(keepends=True)
    for old, new in (('files": {"a/univ_000', 'files": {"a/univ_009'), ('"target"', '"aim"')):
        (out / "conversion.jsonl").write_text("".join(record).replace(old, new))
        with pytest.raises(DataError, match=r"conversion.jsonl: is not a record of a conversion"):
            run(source, out)
    long = "".join(record).replace('"stamps": {"a/univ_000', f'"stamps": {{"{"x" * 3000}')
    (out / "conversion.jsonl").write_text(long)
    with pytest.raises(DataError, match=r"was made of xxx.*, which is not in"):
        run(source, out)
    (out / "a/univ_000.hdf5").rename(out / "a/univ_000.bak")
    (out / "conversion.jsonl").write_text(
        "".join(line for line in record if "b/univ_001" not in line)
    )
    with pytest.raises(
        DataError, match=r"b/univ_001.hdf5: no conversion has written it: remove it"
    ):
        run(source, out)
    (out / "conversion.jsonl").write_text("{}\nnonsense\n")
    with pytest.raises(DataError, match=r"conversion.jsonl: is not a record of a conversion"):
        run(source, out)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file: is not a folder"):
        run(source, tmp_path / "file")


def test_a_line_that_a_killed_run_began_is_dropped(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    path = tmp_path / "out/conversion.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    (tmp_path / "out/b/univ_001.hdf5").unlink()
    assert sorted(states(run(source, tmp_path / "out"))) == ["converted", "kept", "kept", "kept"]
    assert path.read_bytes() == whole
    path.write_bytes(whole[:9])  # not even the first line
    for name in "ab":
        shutil.rmtree(tmp_path / "out" / name)
    assert states(run(source, tmp_path / "out")) == ["converted"] * N


def test_two_runs_at_once(source: Path, tmp_path: Path) -> None:
    def another(outcome: Outcome) -> None:
        with pytest.raises(DataError, match="out: another conversion into it is under way"):
            run(source, tmp_path / "out")

    assert states(run(source, tmp_path / "out", done=another)) == ["converted"] * N


KILLED = """
import sys, time
from pathlib import Path
import hyperslab.formats.convert.run as work
from hyperslab.formats.convert import Request, convert

verify = work.verify_written
def slow(*how):
    if Path(sys.argv[2], "a/univ_001.hdf5").exists():
        time.sleep(100)  # the third is written and not verified
    verify(*how)

work.verify_written = slow
convert(Path(sys.argv[1]), Path(sys.argv[2]), Request("hdf5"))
"""


def test_a_killed_run_leaves_nothing_that_looks_finished(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with forked_commands():
        process = subprocess.Popen([sys.executable, "-c", KILLED, source, out], cwd=ROOT)
    with process:
        end = time.monotonic() + 60
        while not list(out.glob(".partial/2/b/*.hdf5")):
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert list(out.glob(".partial/2/b/univ_000.hdf5"))
    left = source_of(out, Seat())
    assert list(left.names) == ["a/univ_000", "a/univ_001"]
    expected = np.moveaxis(counts(1, (7, 7, 7, 4)), -1, 0)
    assert left.read(1, Box.whole(left.shape)).tobytes() == expected.tobytes()
    assert states(run(source, out)) == ["kept", "kept", "converted", "converted"]
    assert not (out / ".partial").exists()
    assert len(source_of(out, Seat()).names) == N
    assert sorted(p.name for p in (out / "b").iterdir()) == ["univ_000.hdf5", "univ_001.hdf5"]
