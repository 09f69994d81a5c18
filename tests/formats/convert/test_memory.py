"""A conversion holds slabs, not volumes (tier: a child process)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.formats.universes import unit

ROOT = Path(__file__).parents[3]

PEAK = """
import sys
from pathlib import Path
import hyperslab.formats.writer as stream
from hyperslab.formats.convert import Request, convert

def peak():  # of this program alone: ru_maxrss knows that of the one that has started it, too
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))

stream.SLAB_BYTES = 2**21
src, out, format, width = sys.argv[1:]
def run(src, out):
    parts = (2, 2, 2) if int(width) else (8, 8, 8)
    cut = parts if format in ("hdf5", "zarr", "lbann") else None
    request = Request(format, cut, int(width) or None)
    assert [o.state for o in convert(Path(src), Path(out), request)] == ["converted"]

run(src + "/small", out + "/small")  # libraries and buffers
before = peak()
run(src + "/big", out + "/big")
print(peak() - before)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cube of 54 MiB, and a small one."""
    path = tmp_path_factory.mktemp("cubes")
    for name, width in (("small", 64), ("big", 192)):
        (path / name).mkdir()
        with h5py.File(path / name / "u.hdf5", "w") as file:
            cube = np.random.default_rng(0).integers(0, 9, (width, width, width, 4), np.int16)
            file["full"], file["unitPar"] = cube, unit(0)
    return path


LONG = ("hdf5", "lbann", "zarr", "npy")


@pytest.mark.parametrize(
    ("format", "width"),
    [
        ("tfrecord", 0),
        ("hdf5", 64),
        *(pytest.param(format, 0, marks=pytest.mark.long) for format in LONG),
    ],
)
def test_memory_is_that_of_slabs(source: Path, tmp_path: Path, format: str, width: int) -> None:
    command = [sys.executable, "-c", PEAK, source, tmp_path, format, str(width)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    # Of 54 MiB. Slabs are of 2 MiB, or a layer of chunks, 7 MiB, of which libraries have copies.
    layers = width == 0 and format in ("hdf5", "lbann", "zarr")
    assert int(done.stdout) < (3 if layers else 1) * 2**24
