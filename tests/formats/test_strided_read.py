"""Boxes of arrays in files, piece by piece, against numpy (tier: no process)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyperslab.formats import storage
from hyperslab.geometry import Box

FEW = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


@st.composite
def places(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    lo = [draw(st.integers(0, extent - 1)) for extent in shape]
    hi = [draw(st.integers(start + 1, extent)) for start, extent in zip(lo, shape, strict=True)]
    return tuple(shape), Box(tuple(lo), tuple(hi))


@FEW
@given(
    place=places(),
    dtype=st.sampled_from(["<i2", ">i2", "<f4", "u1"]),
    start=st.sampled_from([0, 1, 128]),
    gap=st.sampled_from([1, 8, 4096]),
    most=st.sampled_from([1, 40, 4 << 20]),
)
def test_the_values_are_the_arrays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: tuple[tuple[int, ...], Box],
    dtype: str,
    start: int,
    gap: int,
    most: int,
) -> None:
    monkeypatch.setattr(storage, "LARGEST_GAP", gap)
    monkeypatch.setattr(storage, "LARGEST_READ", most)
    shape, box = place
    array = np.random.default_rng(0).integers(0, 250, shape).astype(dtype)
    (tmp_path / "a").write_bytes(b"x" * start + array.tobytes())
    with opened(tmp_path / "a") as file:
        values = storage.read_strided(file, start, shape, array.dtype, box)
    assert values.dtype == array.dtype
    np.testing.assert_array_equal(values, array[box.slices()])
    outer, span = storage.plan_strided_read(shape, array.itemsize, box)
    wanted = box.size * array.itemsize
    assert wanted <= span * int(np.prod(box.shape[:outer]))
    assert span <= max(most, wanted)


SHAPE = (4, 16, 96, 96)
LAST = (16, 96, 96, 4)
CUTS = [
    (SHAPE, Box((0, 8, 0, 0), SHAPE), (1, 8 * 96 * 96 * 2)),
    (SHAPE, Box((0, 0, 48, 0), SHAPE), (2, 48 * 96 * 2)),
    (SHAPE, Box((0, 0, 0, 48), SHAPE), (0, 2 * (4 * 16 * 96 * 96) - 96)),
    (LAST, Box((8, 0, 0, 0), LAST), (0, 8 * 96 * 96 * 8)),
    (LAST, Box((0, 48, 0, 0), LAST), (1, 48 * 96 * 8)),
    (LAST, Box((0, 0, 48, 0), LAST), (0, 16 * 96 * 96 * 8 - 48 * 8)),
    ((512, 512, 512, 4), Box((0, 0, 0, 0), (512, 512, 256, 4)), (1, 511 * 4096 + 2048)),
]


@pytest.mark.parametrize(("stored", "box", "expected"), CUTS, ids=str)
def test_gaps_of_less_than_a_page_are_read_over(stored: Any, box: Box, expected: Any) -> None:
    assert storage.plan_strided_read(stored, 2, box) == expected


def test_the_system_may_give_less_than_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(6 * 5 * 4, dtype="<i2").reshape(6, 5, 4)
    (tmp_path / "a").write_bytes(array.tobytes())
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, rows, place: whole(file, [rows[0][:3]], place))
    for box in (Box((1, 1, 0), (5, 3, 4)), Box((0, 0, 1), (6, 5, 3)), Box((2, 0, 0), (4, 5, 4))):
        with opened(tmp_path / "a") as file:
            values = storage.read_strided(file, 0, array.shape, array.dtype, box)
        np.testing.assert_array_equal(values, array[box.slices()])


@pytest.mark.parametrize("size", [0, 7, 239])
def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path, size: int) -> None:
    (tmp_path / "a").write_bytes(b"\0" * size)
    with opened(tmp_path / "a") as file, pytest.raises(EOFError, match=f"ends at byte {size} "):
        storage.read_strided(file, 0, (6, 5, 4), np.dtype("<i2"), Box((0, 0, 0), (6, 5, 4)))


@pytest.mark.parametrize("box", [Box((0, 0, 0), (4, 4, 4)), Box((0, 0, 0), (4, 2, 2))], ids=str)
def test_bytes_are_never_taken_for_objects(tmp_path: Path, box: Box) -> None:
    """They would be addresses: the process would follow them wherever the file says."""
    (tmp_path / "a").write_bytes(bytes(range(128)) * 4)
    with opened(tmp_path / "a") as file, pytest.raises(ValueError, match="Python's objects"):
        storage.read_strided(file, 0, (4, 4, 4), np.dtype("O"), box)
