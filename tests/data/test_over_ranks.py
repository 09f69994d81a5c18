"""What the ranks tell each other: the catalogue and means (tier: a few gloo ranks)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hyperslab as hs
from hyperslab.data import open
from tests.formats import scans
from tests.formats.universes import folder
from tests.ranks import run_ranks


def names_seen(path: Path) -> list[str]:
    """Only the first rank is given a folder that exists, so only it can have looked."""
    grid = hs.Grid(data=dist.get_world_size())
    mine = path if grid.is_main else path / "elsewhere"
    data = open(mine, grid, batch_size=2, split="all")
    assert len(list(data.epoch(0))) == 2
    return data.names()


def test_every_rank_has_the_catalogue_of_the_first(tmp_path: Path) -> None:
    folder(tmp_path, 3)
    assert run_ranks(3, names_seen, tmp_path) == [["a/univ_000", "a/univ_001", "b/univ_000"]] * 3


def splits_seen(path: Path) -> list[list[str]]:
    grid = hs.Grid(data=dist.get_world_size())
    halves = (0.5, 0.5, 0)
    sets = [
        open(path, grid, batch_size=1, fractions=halves, seed=seed, shuffle=False)
        for seed in range(4)
    ]
    return [data.names() for data in sets]


def test_every_rank_knows_the_parts_of_a_volume(tmp_path: Path) -> None:
    """The manifest of a conversion says which samples are parts of one."""
    folder(tmp_path, 3)
    parts = {"a": ["a/univ_000", "a/univ_001"], "b": ["b/univ_000"]}
    lines: list[dict[str, str]] = [{"format": "hdf5"}]
    lines += [{"name": name, "volume": of} for of, names in parts.items() for name in names]
    (tmp_path / "conversion.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    one, other = run_ranks(2, splits_seen, tmp_path)
    assert one == other
    assert all(names in parts.values() for names in one)


def opens(path: Path) -> str:
    with pytest.raises(hs.DataError) as caught:
        open(path, hs.Grid(depth=2), batch_size=1)
    return str(caught.value)


def test_every_rank_raises_what_the_first_found(tmp_path: Path) -> None:
    folder(tmp_path, 3)
    (tmp_path / "b/z.hdf5").write_text("nothing")
    one, other = run_ranks(2, opens, tmp_path)
    assert one == other
    assert "b/z.hdf5: cannot be read" in one


def means(path: Path, extents: dict[str, int]) -> torch.Tensor:
    data = open(path, hs.Grid(**extents), batch_size=3, split="all", transform="mean")
    ((x, y),) = data.epoch(0)
    assert y.full().shape == (3, 4)
    return x.full()


@pytest.mark.parametrize(
    "extents", [{"depth": 3}, {"data": 2, "width": 2}, {"data": 4, "height": 2}], ids=str
)
def test_a_mean_is_that_of_the_whole_sample(tmp_path: Path, extents: dict[str, int]) -> None:
    volumes = np.stack(folder(tmp_path, 3)).astype("f8")
    expected = volumes / volumes.mean((1, 2, 3, 4), keepdims=True)
    for x in run_ranks(int(np.prod([*extents.values()])), means, tmp_path, extents):
        torch.testing.assert_close(x, torch.from_numpy(expected).float())


def labelled(path: Path, extents: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    data = open(path, hs.Grid(**extents), batch_size=3, split="all", window=(-100, 400))
    ((x, y),) = data.epoch(0)
    return x.full(), y.full(), data.bytes_read


@pytest.mark.parametrize("extents", [{"depth": 2, "width": 2}, {"data": 2, "height": 3}], ids=str)
def test_labels_of_the_whole_sample(tmp_path: Path, extents: dict[str, int]) -> None:
    shape = (1, 7, 6, 5)
    scans.folder(tmp_path, 3, shape)
    volumes = np.stack([scans.hu(i, shape) for i in range(3)])
    expected = torch.from_numpy((volumes.astype("f4").clip(-100, 400) + 100) / 500)
    classes = torch.from_numpy(np.stack([scans.labels(i, shape[1:]) for i in range(3)])).long()
    results = run_ranks(int(np.prod([*extents.values()])), labelled, tmp_path, extents)
    assert sum(size for _, _, size in results) == volumes.size * 3
    for x, y, _ in results:
        torch.testing.assert_close(x, expected)
        assert torch.equal(y, classes)
