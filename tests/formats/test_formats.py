"""Every format, against the arrays that were written (tier: no process, and two gloo ranks)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.data import Source, Subvolumes, open
from hyperslab.geometry import Box
from tests.data.test_dataset import whole_epoch
from tests.formats.arrays.test_hdf5 import assembled
from tests.formats.opening import source_of
from tests.formats.scans import labels
from tests.formats.universes import GRIDS, Seat, unit
from tests.formats.writers import FORMATS, N, split
from tests.ranks import run_ranks

CUTS = [*GRIDS, {"height": 2}, {"width": 2}, {"depth": 2, "height": 2, "width": 2}]


@pytest.fixture(scope="module", params=FORMATS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("format")
    volumes = FORMATS[request.param](path)
    return path, volumes


def assembled_labels(source: Source, sample: int, extents: dict[str, int]) -> Any:
    whole = np.full(source.shape[1:], 99, np.uint8)
    for seat in Seat.all(**extents):
        box = seat.partition((2, *source.shape)).box(seat.coords)
        box = Box(box.lo[2:], box.hi[2:])
        whole[box.slices()] = source.labels(sample, box)
    return whole


def test_boxes_are_those_of_the_whole(written: Any) -> None:
    path, volumes = written
    source = source_of(path, Seat())
    assert len(source.names) == len(set(source.names)) == len(volumes)
    for sample, volume in enumerate(volumes):
        assert source.shape == volume.shape
        assert source.dtype == volume.dtype
        whole = source.read(sample, Box.whole(source.shape))
        assert whole.tobytes() == np.ascontiguousarray(volume).tobytes()
        cuts = CUTS if sample == 0 else CUTS[sample % len(CUTS) :][:1]
        for extents in cuts:
            assert assembled(source, sample, extents).tobytes() == whole.tobytes(), extents
        if source.classes:
            expected = labels(sample, (1, *source.shape[1:]), 3)[0]
            for extents in cuts:
                np.testing.assert_array_equal(assembled_labels(source, sample, extents), expected)
        else:
            seed = sample if len(volumes) == N else 0
            np.testing.assert_array_equal(np.float32(source.target(sample)), np.float32(unit(seed)))
    source.close()


@pytest.mark.parametrize("extents", [{"depth": 2}, {"data": 2, "height": 2, "width": 2}], ids=str)
def test_epochs_are_alike_on_every_grid(written: Any, extents: dict[str, int]) -> None:
    path, volumes = written
    source = source_of(path, Seat())
    how = {"batch_size": 2, "split": "all", "shuffle": True, "transform": None, "seed": 3}
    order = open(source, Seat(), **how).schedule.batches(1)
    assert Counter(i for batch in order for i in batch) == Counter(range(len(volumes)))
    for start in (0, 1):
        batches = whole_epoch(source, extents, 1, start, **how)
        for samples, (x, _) in zip(order[start:], batches, strict=True):
            np.testing.assert_array_equal(x, np.stack([volumes[i] for i in samples]))


def test_bytes_of_boxes_are_counted(written: Any) -> None:
    path, _ = written
    source = source_of(path, Seat())
    ranks = [open(source, seat, batch_size=1, split="all") for seat in Seat.all(height=2, width=2)]
    for data in ranks:
        assert len(list(data.epoch(0))) == len(source.names)
    labelled = source.label_bytes / source.shape[0] if source.classes else 0
    voxels = np.prod(source.shape) * (source.dtype.itemsize + labelled)
    assert sum(data.bytes_read for data in ranks) == len(source.names) * voxels


def read_all(folder: str) -> list[Any]:
    """What this rank holds of each sample, with the box it says."""
    grid = hs.Grid(width=2)
    with hs.open(folder, grid, batch_size=1, split="all", transform=None) as data:
        return [(x.box, x.local.numpy()) for x, _ in data.epoch(0)]


def test_two_ranks_open_it_as_users_do(written: Any) -> None:
    path, volumes = written
    ranks = run_ranks(2, read_all, str(path))
    for rank in ranks:
        assert len(rank) == len(volumes)
        for volume, (box, values) in zip(volumes, rank, strict=True):
            np.testing.assert_array_equal(values, volume[None][box.slices()])


@pytest.mark.parametrize("dtype", ["int16", "float32"])
def test_lbanns_parts_are_our_subvolumes(tmp_path: Path, dtype: str) -> None:
    """The axes are the cube's, names count from the last one; parts stay in one split."""
    from tests.formats.universes import counts, public

    split(tmp_path / "parts", dtype, cubes=5)
    for seed in range(5):
        public(tmp_path / f"cubes/univ_a{seed}.hdf5", counts(seed, (10, 10, 10, 4), dtype), seed)
    parts = source_of(tmp_path / "parts", Seat())
    cubes = Subvolumes(source_of(tmp_path / "cubes", Seat()), 5)

    def turned(name: str) -> str:
        base, *place = name.rsplit("_", 3)
        return "_".join([base, *reversed(place)])

    assert sorted(parts.names) == sorted(cubes.names)
    for sample, name in enumerate(parts.names):
        twin = cubes.names.index(turned(name))
        assert parts.volume(sample) == cubes.volume(twin)
        box = Box((0, 1, 0, 2), (4, 3, 5, 4))
        assert parts.read(sample, box).tobytes() == cubes.read(twin, box).tobytes()
    names = [set(open(s, Seat(), batch_size=1, split="validation").names()) for s in (parts, cubes)]
    assert set(map(turned, names[0])) == names[1]
    assert len(names[0]) == 8
