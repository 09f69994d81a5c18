"""Chunks of Zarr that are missing, or links that lead elsewhere, are refused (tier: no process)."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperslab.errors import DataError
from hyperslab.formats.files import AccessPolicy
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.universes import Seat

SHAPE = (8, 8, 8, 4)
CHUNK = (4, 4, 4, 4)
WHOLE = Box((0, 0, 0, 0), (4, 8, 8, 8))


def values() -> Any:
    return np.arange(2048, dtype=np.int16).reshape(SHAPE)


def zarr_group(path: Path, **how: Any) -> Any:
    zarr = pytest.importorskip("zarr")
    group = zarr.create_group(path, zarr_format=3)
    array = group.create_array("full", shape=SHAPE, dtype="i2", chunks=CHUNK, **how)
    group.create_array("unitPar", data=np.array([0.5, -0.5]))
    return array


def test_zarr_chunks_that_are_missing_are_refused(tmp_path: Path) -> None:
    array = zarr_group(tmp_path / "a.zarr")
    with pytest.raises(DataError, match=r"a\.zarr: 'full' lacks the chunk c/0/0/0/0"):
        source_of(tmp_path, Seat())
    array[...] = values() + 1
    source = source_of(tmp_path, Seat())
    np.testing.assert_array_equal(source.read(0, WHOLE), np.moveaxis(values() + 1, -1, 0))
    (tmp_path / "a.zarr/full/c/1/1/0/0").unlink()
    half = Box((0, 0, 0, 0), (4, 4, 8, 8))
    assert source.read(0, half).any()
    with pytest.raises(DataError, match="lacks the chunk c/1/1/0/0"):
        source.read(0, WHOLE)


def test_zarr_chunks_that_may_be_missing_are_fill_values(tmp_path: Path) -> None:
    array = zarr_group(tmp_path / "a.zarr")  # Zarr's default: chunks of zeros are left out
    array[:4] = values()[:4] + 1
    with pytest.raises(DataError, match=r"lacks the chunk(.|\n)*data\.missing_chunks=true"):
        source_of(tmp_path, Seat())
    source = source_of(tmp_path, Seat(), allowed=AccessPolicy(missing_chunks=True))
    wanted = np.concatenate([values()[:4] + 1, np.zeros_like(values()[4:])])
    np.testing.assert_array_equal(source.read(0, WHOLE), np.moveaxis(wanted, -1, 0))


def test_zarr_shards_and_shapes(tmp_path: Path) -> None:
    array = zarr_group(tmp_path / "a.zarr", shards=SHAPE)
    array[...] = values() + 1
    source = source_of(tmp_path, Seat())
    np.testing.assert_array_equal(source.read(0, WHOLE), np.moveaxis(values() + 1, -1, 0))
    array.resize((800_000, 8, 8, 4))
    with pytest.raises(DataError, match="lacks the chunk c/1/0/0/0"):
        source_of(tmp_path, Seat(), "last")


def test_links_in_a_zarr_group_do_not_leave_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    zarr_group(folder / "a.zarr")[...] = values() + 1
    chunk = folder / "a.zarr/full/c/0/0/0/0"
    chunk.rename(tmp_path / "secret")
    chunk.symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=r"secret.* not in the folder"):
        source_of(folder, Seat())
    assert source_of(folder, Seat(), allowed=AccessPolicy(outside_files=True)).read(0, WHOLE).any()


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "no chunks": (
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 4, 4, 4]}}},
        r"'full' is stored in chunks of \(0, 4, 4, 4\) values",
    ),
    "many chunks": ({"shape": [1 << 27, 8, 8, 4]}, "lacks the chunk c/2/0/0/0"),
    "many words": ({"attributes": {"x": ["y" * 100] * 100_000}}, r"zarr\.json: has \d+ bytes"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_zarr_group_only_says_takes_no_memory(tmp_path: Path, lie: str) -> None:
    zarr_group(tmp_path / "a.zarr")[...] = values() + 1
    source_of(tmp_path, Seat())
    said, words = LIES[lie]
    file = tmp_path / "a.zarr" / "full" / "zarr.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **said}))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=rf"a\.zarr.*{words}"):
            source_of(tmp_path, Seat())
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
