"""Boxes that ranks load themselves, and the mini-batch that they make (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hyperslab as hs
from tests.ranks import run_ranks

SHAPE = (2, 5, 6, 7)
WHOLE = np.random.default_rng(0).standard_normal((8, *SHAPE)).astype(np.float32)


class Item(NamedTuple):
    x: torch.Tensor
    labels: torch.Tensor


class Volumes(Dataset[Any]):
    """Reads nothing but a box of each."""

    def __init__(self, boxes: hs.LoadedBoxes) -> None:
        self.boxes = boxes

    def __len__(self) -> int:
        return len(WHOLE)

    def __getitem__(self, index: int) -> Any:
        x = torch.from_numpy(WHOLE[index][self.boxes.slices])
        assert tuple(x.shape) == self.boxes.shape
        y = torch.tensor([index, index / 2])
        return {"item": Item(x, (x[0] > 0).long()), "y": y, "number": torch.tensor(index), "n": "a"}


def loaded(axes: dict[str, int], workers: int = 0) -> Any:
    grid = hs.Grid(**axes)
    boxes = hs.boxes(grid, SHAPE)
    volumes = Volumes(boxes)
    sampler = grid.sampler(volumes, shuffle=True, seed=3)
    sampler.set_epoch(1)
    found = []
    loader = DataLoader(volumes, 4 // grid.data, sampler=sampler, num_workers=workers)
    for batch in boxes.over(loader):
        item = batch["item"]
        assert isinstance(item, Item)
        assert tuple(item.x.shape) == (4, *SHAPE)
        assert item.x.partition == grid.partition((4, *SHAPE))
        full = [t.full().numpy() for t in (item.x, item.labels, batch["y"], batch["number"])]
        assert batch["n"] == ["a"] * (4 // grid.data)
        found.append(full)
    return found


@pytest.mark.parametrize("axes", [{}, {"depth": 2}, {"data": 2, "width": 2}, {"data": 4}])
def test_boxes_make_the_mini_batch(axes: dict[str, int]) -> None:
    size = int(np.prod(list(axes.values())))
    for found in run_ranks(size, loaded, axes):
        shown = []
        for x, labels, y, numbers in found:
            assert np.array_equal(x, WHOLE[numbers])
            assert np.array_equal(labels, WHOLE[numbers][:, 0] > 0)
            assert np.array_equal(y[:, 0], numbers)
            shown.append(sorted(numbers.tolist()))
        assert sorted(number for step in shown for number in step) == list(range(8))
        generator = torch.Generator()
        generator.manual_seed(4)
        order = torch.randperm(8, generator=generator).tolist()
        assert shown == [sorted(order[:4]), sorted(order[4:])], "the same on every grid"


def test_workers_of_a_loader_read_boxes() -> None:
    (found,) = run_ranks(1, loaded, {}, 2)
    assert len(found) == 2


def handed_in(case: str) -> Any:
    grid = hs.Grid(data=2, depth=2)
    boxes = hs.boxes(grid, SHAPE)
    x: Any = torch.zeros(2, *boxes.shape)
    last = grid.rank == 3
    if case == "whole" or (case == "one whole" and last):
        x = torch.zeros(2, *SHAPE)
    elif case == "fewer" and last:
        x = x[:1]
    elif case == "type" and last:
        x = x.double()
    elif case == "none" and last:
        x = None
    elif case == "cut":
        x = boxes.join(x)
    elif case == "gradient":
        x.requires_grad_()
    try:
        boxes.join(x)
    except hs.LayoutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "everywhere", "words"),
    [
        ("whole", "(2, 2, 5, 6, 7) (these are whole samples), but a mini-batch of its boxes", ""),
        ("one whole", "", "rank 3 hands in (2, 2, 5, 6, 7)"),
        ("fewer", "the ranks hand in different tensors to be cut as one", ""),
        ("type", "rank 3: (2, 2, 5, 6, 7) torch.float64", ""),
        ("none", "", "what is handed in is no tensor"),
        ("cut", "already cut", ""),
        ("gradient", "require a gradient", ""),
    ],
)
def test_what_is_no_box_is_refused_on_every_rank(case: str, everywhere: str, words: str) -> None:
    found = run_ranks(4, handed_in, case)
    assert all(found)
    assert all(everywhere in message for message in found), found
    assert any(words in message for message in found), found


def other_targets() -> None:
    grid = hs.Grid(depth=2)
    boxes = hs.boxes(grid, SHAPE)
    x = torch.zeros(1, *boxes.shape)
    for _ in boxes.over([(x, torch.tensor([[float(grid.rank)]]))]):
        pass


def test_boxes_of_different_samples_show_in_their_targets() -> None:
    with pytest.raises(hs.LayoutError, match=r"rank 1 would hand in other values than rank 0"):
        run_ranks(2, other_targets)


def read(axes: dict[str, int], array: np.ndarray[Any, Any]) -> Any:
    grid = hs.Grid(**axes)
    boxes = hs.boxes(grid, SHAPE)
    part = array[(slice(grid.data), *boxes.slices)]
    try:
        return next(iter(boxes.over([torch.from_numpy(part[grid.coords["data"]][None])]))).full()
    except hs.LayoutError as error:
        return str(error)


GRIDS = [{}, {"depth": 2}, {"height": 2, "width": 2}, {"data": 2, "width": 2}]


@pytest.mark.parametrize("axes", GRIDS)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_field_of_other_channels_is_joined_whole(axes: dict[str, int], channels: int) -> None:
    size, batch = int(np.prod(list(axes.values()))), axes.get("data", 1)
    array = np.random.default_rng(1).standard_normal((batch, channels, *SHAPE[1:]))
    for full in run_ranks(size, read, axes, array):
        assert np.array_equal(full, array)


@pytest.mark.parametrize("axes", GRIDS)
@pytest.mark.parametrize("dim", [2, 3, 4])
@pytest.mark.parametrize("more", [-1, 1])
def test_no_part_of_an_array_of_other_extents_passes_for_a_box(
    axes: dict[str, int], dim: int, more: int
) -> None:
    shape = [2, *SHAPE]
    shape[dim] += more
    size = int(np.prod(list(axes.values())))
    found = run_ranks(size, read, axes, np.zeros(shape, np.float32))
    assert all(isinstance(message, str) for message in found), found
    assert any("a mini-batch of its boxes is (b, 2, " in message for message in found)


def without_channels() -> str:
    grid = hs.Grid(depth=2)
    with pytest.raises(hs.LayoutError, match=r"image \(C, H, W\)") as caught:
        hs.boxes(grid, SHAPE[1:])
    assert hs.boxes(grid, SHAPE[1:], channels=False).shape[1:] == SHAPE[2:]
    return str(caught.value)


def test_a_volume_without_channels_is_not_taken_for_an_image() -> None:
    for words in run_ranks(2, without_channels):
        assert "give the channels, too: (1, 5, 6, 7)" in words
