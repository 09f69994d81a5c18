"""Ranks that share a sample have to cut the same one (tier: a few gloo ranks)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch.utils.data import _utils as loading

import hyperslab as hs
from hyperslab.comm import AXES
from hyperslab.comm.collectives import AllGatheredInts
from tests.ranks import run_ranks

SHAPE = (2, 3, 4, 5, 6)


class Volumes(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1, 4, 4, 4), float(index))


def sampled(axes: dict[str, int], by_replica: bool) -> list[float]:
    """As Lightning and Accelerate do it by default: a sampler for each process."""
    grid = hs.Grid(**axes)
    count, number = grid.size, grid.rank
    if by_replica:
        count, number = grid.data, grid.coords["data"]
    sampler = DistributedSampler(Volumes(), count, number, shuffle=False)
    batch = "replica" if by_replica else "global"
    found = []
    for x in DataLoader(Volumes(), 2, sampler=sampler):
        found += hs.shard(x, grid, batch=batch).full()[:, 0, 0, 0, 0].tolist()
    return found


def test_the_sampler_of_data_parallelism_is_refused() -> None:
    with pytest.raises(hs.LayoutError) as caught:
        run_ranks(2, sampled, {"depth": 2}, False)
    message = str(caught.value)
    assert "rank 1 would hand in other values than rank 0" in message
    assert "ranks 0 and 1 share the samples of a tensor (2, 1, 4, 4, 4) torch.float32" in message
    assert "hyperslab.scatter(x, grid)" in message
    assert 'grid.coords["data"]' in message
    assert "check=False" in message


def test_a_sampler_that_knows_the_replica_gives_every_sample_once() -> None:
    found = run_ranks(4, sampled, {"data": 2, "width": 2}, True)
    assert found == [[0, 2, 1, 3, 4, 6, 5, 7]] * 4


class CutVolumes(Volumes):
    """Cuts its samples where it loads them."""

    def __init__(self, how: str) -> None:
        grid = hs.Grid(depth=2)
        self.cut = {
            "hyperslab.shard": lambda x: hs.shard(x, grid),
            "hyperslab.scatter": lambda x: hs.scatter(x, grid),
            "LoadedBoxes.join": lambda x: hs.boxes(grid, (1, 4, 4, 4)).join(x[:, :, :2]),
        }[how]

    def __getitem__(self, index: int) -> Any:
        return self.cut(super().__getitem__(index)[None])


def cut_in_a_worker(how: str) -> None:
    loading.MP_STATUS_CHECK_INTERVAL = 0.2  # [s] that a loader waits for workers which have failed
    data = CutVolumes(how)
    assert data[1].shape == (1, 1, 4, 4, 4)
    next(iter(DataLoader(data, None, num_workers=1, multiprocessing_context="fork")))


@pytest.mark.parametrize("how", ["hyperslab.shard", "hyperslab.scatter", "LoadedBoxes.join"])
def test_workers_of_a_loader_cut_nothing(how: str) -> None:
    """The ranks would wait for ever: what a worker returns is pickled, and a block is not."""
    with pytest.raises(hs.LayoutError, match=rf"{how} was called in a worker(?s:.*)in the loop"):
        run_ranks(2, cut_in_a_worker, how)


def handed_in(case: str, axes: dict[str, int], **asked: Any) -> Any:
    grid = hs.Grid(**axes)
    torch.manual_seed(0)
    x: Any = torch.randn(SHAPE)
    last = grid.rank == grid.size - 1
    if case == "shape" and last:
        x = x[:, :, :, :, :5]
    elif case == "type" and last:
        x = x.double()
    elif case == "none" and last:
        x = None
    elif case == "voxels" and last:
        x[1, 2, 3, 4, [1, 5]] = x[1, 2, 3, 4, [5, 1]].clone()
    elif case == "replicas":
        x += grid.coords["data"]
    elif case == "other half" and grid.coords["data"] == 1:
        x[0] = np.nan  # replica 1 computes the second sample alone
    elif case == "memory format" and last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    elif case == "gaps" and last:
        x = torch.stack([x, x], -1)[..., 0]
    elif case == "thin":
        x = x[:, :, :1]
    return hs.shard(x, grid, **asked).local.clone()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("shape", ["rank 0: (2, 3, 4, 5, 6) torch.float32", "rank 1: (2, 3, 4, 5, 5) torch.float"]),
        (
            "type",
            ["rank 0: (2, 3, 4, 5, 6) torch.float32", "rank 1: (2, 3, 4, 5, 6) torch.float64"],
        ),
        ("none", ["rank 1: no tensor"]),
        ("voxels", ["rank 1 would hand in other values than rank 0", "the shapes are equal"]),
        ("thin", ["cannot cut dim 2 (extent 1)"]),
    ],
)
def test_what_is_refused_on_every_rank(case: str, words: list[str]) -> None:
    for message in run_ranks(2, message_of, case, {"depth": 2}):
        assert all(word in message for word in words), message


def message_of(case: str, axes: dict[str, int]) -> str:
    with pytest.raises(hs.LayoutError) as caught:
        handed_in(case, axes)
    return str(caught.value)


@pytest.mark.parametrize("case", ["memory format", "gaps"])
def test_equal_samples_may_lie_otherwise_in_memory(case: str) -> None:
    run_ranks(3, handed_in, case, {"width": 3})


@pytest.mark.parametrize("case", ["replicas", "other half"])
def test_replicas_may_hold_different_samples(case: str) -> None:
    run_ranks(4, handed_in, case, {"data": 2, "depth": 2})


def test_only_the_replica_of_the_stranger_is_named() -> None:
    (message,) = set(run_ranks(4, message_of, "voxels", {"data": 2, "depth": 2}))
    assert "rank 3 would hand in other values than rank 2" in message
    assert "ranks 2 and 3 share" in message


def test_replicas_share_a_mini_batch_that_is_too_small_to_be_cut() -> None:
    (message,) = set(run_ranks(3, message_of, "replicas", {"data": 3}))
    assert "ranks 1 and 2 would hand in other values than rank 0" in message


def test_the_check_can_be_switched_off() -> None:
    first, second = run_ranks(2, unchecked)
    assert first == second == 0


def unchecked() -> int:
    grid = hs.Grid(depth=2)
    group = grid.group(AXES)
    assert group is not None
    sums = []
    before = type(group).sum_in_place
    try:
        type(group).sum_in_place = lambda *a: sums.append(a)  # type: ignore[assignment,method-assign]
        x = torch.full(SHAPE, float(grid.rank))
        assert (hs.shard(x, grid, check=False).local == grid.rank).all()
    finally:
        type(group).sum_in_place = before  # type: ignore[method-assign]
    return len(sums)


def gradient_of_part() -> None:
    """The serial gradient of each replica's own part."""
    grid = hs.Grid(data=2, depth=2)
    torch.manual_seed(grid.coords["data"])
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    whole = hs.shard(x, grid, batch="replica")
    assert whole.shape == (4, *SHAPE[1:])
    full = whole.full()
    place = 2 * grid.coords["data"]
    assert torch.equal(full[place : place + 2], x)
    (full.detach() * whole).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach())


def test_gradient_of_a_replicas_part() -> None:
    run_ranks(4, gradient_of_part)


def parts_of_different_lengths() -> str:
    grid = hs.Grid(data=2)
    with pytest.raises(hs.LayoutError) as caught:
        hs.shard(torch.zeros(2 - grid.rank, 3), grid, batch="replica")
    return str(caught.value)


def test_parts_of_different_lengths() -> None:
    (message,) = set(run_ranks(2, parts_of_different_lengths))
    assert 'rank 0: (2, 3) torch.float32, batch="replica"' in message
    assert "drop_last=True" in message


def augmented() -> None:
    """NumPy's generators of the ranks differ before `parallelize`."""
    grid = hs.Grid(depth=2)
    np.random.seed(grid.rank)  # noqa: NPY002 - what data sets use
    random.seed(grid.rank)
    hs.shard(torch.from_numpy(np.random.rand(*SHAPE)), grid)  # noqa: NPY002


def test_augmentation_by_numpy() -> None:
    with pytest.raises(hs.LayoutError, match="hand in other values"):
        run_ranks(2, augmented)


def rows() -> list[list[int]]:
    grid = hs.Grid(data=3)
    found = AllGatheredInts(grid, [grid.rank, -(1 << 62)], torch.tensor(7 * grid.rank), "a test")
    assert found.at_once
    return found.read()


def test_rows_of_all_ranks() -> None:
    expected = [[rank, -(1 << 62), 7 * rank] for rank in range(3)]
    assert run_ranks(3, rows) == [expected] * 3


def test_an_unknown_batch() -> None:
    with pytest.raises(hs.LayoutError, match="batch='own': use"):
        hs.shard(torch.zeros(1, 1, 4), hs.Grid(), batch="own")  # type: ignore[arg-type]


@pytest.mark.parametrize("what", [None, 3, np.zeros((1, 1, 4))])
def test_no_tensor_on_one_rank(what: object) -> None:
    with pytest.raises(hs.LayoutError, match="is no tensor, which cannot be cut"):
        hs.shard(what, hs.Grid())  # type: ignore[arg-type]
