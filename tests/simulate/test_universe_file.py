"""One file: its layout, its chunks, and writes that fail (tier: no process)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest

from hyperslab.errors import DataError
from hyperslab.simulate import one_universe, universes
from hyperslab.simulate.parameters import draw_universe

REDSHIFTS = (0.0, 0.5, 1.5, 3.0)

CHECKSUM = 4
"""Of a chunk [B]."""


def written(folder: Path, size: int) -> Path:
    counts = np.random.default_rng(0).integers(0, 9, (size, size, size, 4)).astype(np.int16)
    path = universes.universe_path(folder, 0)
    one_universe.write_universe(
        path, counts, draw_universe(0, 0), REDSHIFTS, {"size": size, "seed": 0}
    )
    return path


@pytest.mark.parametrize(("size", "parts"), [(16, 2), (32, 4), (64, 8)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_box_is_read_without_the_rest(tmp_path: Path, size: int, parts: int, dim: int) -> None:
    with h5py.File(written(tmp_path, size)) as file:
        full = file["full"]
        box = [slice(0, size)] * 3
        box[dim] = slice(size // parts, 2 * size // parts)
        touched = list(full.iter_chunks((*box, slice(0, 4))))
        stored = [
            full.id.get_chunk_info_by_coord(tuple(s.start for s in _whole(c, full.chunks))).size
            for c in touched
        ]
        expected = size**3 * 4 * 2 / parts
        # a chunk is at most a quarter of the cube wide
        values = sum(stored) - CHECKSUM * len(stored)
        assert expected <= values <= expected * max(1, parts * full.chunks[0] / size)
        assert full.compression is None


def _whole(chunk: tuple[slice, ...], shape: tuple[int, ...]) -> list[slice]:
    starts = [s.start // n * n for s, n in zip(chunk, shape, strict=True)]
    return [slice(a, a + n) for a, n in zip(starts, shape, strict=True)]


def test_too_many_particles_in_a_voxel_are_refused() -> None:
    fits = np.full((1, 1, 1, 4), 32767, np.int32)
    assert one_universe.as_int16(fits, 0).max() == 32767
    with pytest.raises(DataError, match="universe 7: a voxel holds 32768 particles"):
        one_universe.as_int16(fits + 1, 7)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 2000 bytes; nor may the tests' own output."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_failing_write_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    message = r"cannot write .*univ_ics_000000\.hdf5: File too large"
    with pytest.raises(DataError, match=message), full_disk():
        written(tmp_path, 16)
    assert list(tmp_path.iterdir()) == []


def test_check_accepts_the_same_and_names_what_differs(tmp_path: Path) -> None:
    path = written(tmp_path, 6)
    universes.check_universe(path, {"size": 6, "seed": 0})
    with pytest.raises(DataError, match="made with seed = 0, not 1: delete it or"):
        universes.check_universe(path, {"size": 6, "seed": 1})
    with pytest.raises(DataError, match="made with steps = None, not 10"):
        universes.check_universe(path, {"size": 6, "seed": 0, "steps": 10})


@pytest.mark.parametrize("keep", [0, 100, 3000])
def test_check_refuses_a_truncated_file(tmp_path: Path, keep: int) -> None:
    path = written(tmp_path, 6)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="not a simulated universe"):
        universes.check_universe(path, {"size": 6, "seed": 0})
