"""Files that say, or unpack to, far more than there is: every command names them, in little memory
(tier: a process that forks the commands, for the long run; `tests/formats/test_bounded.py` has each
lie in the gate)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.formats.arrays.test_zarr_bounded import group, rle
from tests.formats.test_bounded import LIES, WORDS, chunks, words_of_gigabytes, zeros_in_pieces

zarr = pytest.importorskip("zarr")

MOST = 512
"""The promise [MiB]."""

FORKS = """
import json, os, resource, sys, traceback
import h5py, nibabel
import hyperslab.cli, hyperslab.data, hyperslab.formats.convert, hyperslab.launch.crew
import hyperslab.launch.restarts, hyperslab.planner.auto, hyperslab.train.predict
from importlib import import_module
for name in ("inspect", "convert", "train", "predict", "plan"):
    import_module(f"hyperslab.cli.{name}")
for words in json.load(sys.stdin):
    with open("said", "w+") as said:
        if (pid := os.fork()) == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.argv = ["hyperslab", *words]
            code = 99
            try:
                hyperslab.cli.main()
                code = 0
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
            print("children", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, flush=True)
            sys.stderr.flush()
            os._exit(code)
        _, status, usage = os.wait4(pid, 0)
        words = open("said").read()
        children = int(words.rpartition("children ")[2])
        peak = max(usage.ru_maxrss, children)
        print(json.dumps([os.waitstatus_to_exitcode(status), peak, words]), flush=True)
"""


def scan_twice(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Two volumes, of which one is trained on and one validates."""

    def write(folder: Path) -> None:
        make(folder)
        for path in [*folder.iterdir()]:
            path.with_name(path.name.replace("-0", "-1")).symlink_to(path.name)

    return write


def universes(folder: Path) -> None:
    for name in ("a", "b"):
        chunks(folder / f"{name}.hdf5", 128, True, zeros_in_pieces(1700))


def packed(folder: Path) -> None:
    for name in ("a", "b"):
        chunks(folder / f"{name}.hdf5", 1024, True, zeros_in_pieces(2048))


def words(where: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in ("a", "b"):
            words_of_gigabytes(folder / f"{name}.hdf5", where)

    return write


def packed_zarr(folder: Path) -> None:
    """Chunks of 4 MiB that unpack to 2.5 GiB."""
    for name in ("a", "b"):
        shape = (128, 128, 128, 1)
        group(folder / f"{name}.zarr", shape, chunks=shape, compressors=[zarr.codecs.ZstdCodec()])
        place = folder / f"{name}.zarr/full/c/0/0/0"
        place.mkdir(parents=True)
        (place / "0").write_bytes(rle(2560 << 20))


FOLDERS: dict[str, Callable[[Path], None]] = {
    **{name: scan_twice(make) for name, (make, _) in LIES.items()},
    "an HDF5 chunk of 2 GiB": packed,
    "an HDF5 chunk that becomes 1.7 GiB": universes,
    "a Zarr chunk that becomes 2.5 GiB": packed_zarr,
    **{f"words in {where}": words(where) for where in WORDS},
}

ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)

NOT_READ = {
    ("inspect", "gzip of more"),
    ("inspect", "an HDF5 chunk that becomes 1.7 GiB"),
    ("inspect", "a Zarr chunk that becomes 2.5 GiB"),
    *(("predict", f"words in {where}") for where in WORDS),
}
"""Voxels behind headers that are right, and words that no prediction needs."""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="forks, and knows the unit of ru_maxrss")
def test_every_command_refuses_them_in_little_memory(tmp_path: Path) -> None:
    base = {
        "model": {"name": "unet3d", "channels": 4, "levels": 2},
        "data": {"synthetic": {"width": 8, "samples": 4, "channels": 1, "classes": 3}},
        "loss": "cross_entropy",
        "loggers": [],
        "epochs": 1,
        "device": "cpu",
        "output": "run",
    }
    base["data"] |= {"batch_size": 1, "counts": [2, 1, 1]}  # type: ignore[operator]
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    theirs = base | {"data": {"path": "x", "batch_size": 1, "counts": [1, 1, 0]}, "output": "new"}
    (tmp_path / "scans.yaml").write_text(yaml.safe_dump(theirs))
    cubes = {**theirs, "model": {"name": "cosmoflow"}, "loss": "mse"}
    (tmp_path / "cubes.yaml").write_text(yaml.safe_dump(cubes))
    (tmp_path / "aliases.yaml").write_text(f"{ALIASES}data: {{path: ., batch_size: 1}}\n")
    cases: list[tuple[str, list[str]]] = [("base", ["train", "base.yaml"])]
    for number, (name, make) in enumerate(FOLDERS.items()):
        folder = tmp_path / f"data-{number}"
        folder.mkdir()
        make(folder)
        recipe = "scans.yaml" if name in LIES else "cubes.yaml"
        path = folder.name
        cases += [
            (name, ["inspect", path]),
            (name, ["convert", path, f"out-{number}", "--workers", "1"]),
            (name, ["train", recipe, f"data.path={path}", f"output=new-{number}"]),
            (name, ["predict", "run", path, "--out", f"predicted-{number}"]),
        ]
        if name in LIES:
            lits = ["convert", "lits", path, f"lits-{number}", "--size", "32", "--workers", "1"]
            cases.append((name, lits))
    cases += [("aliases", [command, "aliases.yaml"]) for command in ("train", "plan", "inspect")]
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps([words for _, words in cases]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases), done.stderr
    assert found[0][0] == 0, found[0]
    peaks = {}
    for (name, words), (code, peak, said) in zip(cases[1:], found[1:], strict=True):
        peaks[" ".join(words)] = peak >> 10
        assert peak < MOST << 10, (name, words, peak >> 10)
        assert "Traceback" not in said, (name, words, said)
        if (words[0], name) in NOT_READ:
            assert code == 0, (name, words, said)
            continue
        assert code == 1, (name, words, said)
        named = [line for line in said.splitlines() if "data-" in line or "aliases.yaml" in line]
        assert 1 <= len(named) <= 2, (name, words, said)  # of each of two volumes, if it goes on
    print(peaks)
