"""Fields in files of their own, told apart by the numbers in their names (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.errors import DataError
from hyperslab.formats import DataMap
from hyperslab.formats.arrays.source import Fields, numbers_of_volume
from tests.formats.arrays.test_mapped import VALUES, N
from tests.formats.opening import source_of


def opened(path: Path, **said: Any) -> Fields:
    source = source_of(path, hs.Grid(), mapping=DataMap(**said))
    assert isinstance(source, Fields)
    return source


def test_fields_of_labelled_volumes_go_by_the_numbers_of_their_patterns(tmp_path: Path) -> None:
    for number in range(N):
        for field in ("z0", "z1.5"):
            (tmp_path / field).mkdir(exist_ok=True)
            labels = (VALUES[number] > 0.5).astype(np.uint8)
            np.savez(tmp_path / field / f"run_{number}", x=VALUES[number], y=labels)
    said = {"volume": "x", "labels": "y", "classes": ("void", "halo")}
    patterns = ("z0/run_*.npz", "z1.5/*")
    assert opened(tmp_path, fields=patterns, **said).names == tuple(
        f"z0/run_{number}" for number in range(N)
    )
    (tmp_path / "z0" / "run_0.npz").rename(tmp_path / "z0" / "run_9.npz")
    with pytest.raises(DataError, match="are not two fields of one volume"):
        opened(tmp_path, fields=patterns, **said)


@pytest.mark.parametrize(
    ("name", "pattern", "numbers"),
    [
        ("z1/run3_0007", "z1/run*_*.npy", ["3", "0007"]),
        ("z1/run3/12", "z1/*", ["3", "12"]),  # 12 is a row
        ("f2_31", "z2/f2_*", ["31"]),
        ("f2_31", "f[0-9]_31", ["2"]),
        ("a/2_5", "", ["2", "5"]),
        ("other_5", "run2_*", ["5"]),
    ],
)
def test_numbers_of_volumes(name: str, pattern: str, numbers: list[str]) -> None:
    assert numbers_of_volume(name, pattern) == numbers
