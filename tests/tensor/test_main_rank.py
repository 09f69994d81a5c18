"""A volume from all ranks to the main one (tier: a few gloo ranks)."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.tensor import Sharded
from hyperslab.tensor.root_rank import gather_to_main
from tests.ranks import RankError, run_ranks

SHAPE = (1, 2, 5, 7, 6)
GRIDS: list[dict[str, int]] = [{}, {"depth": 2}, {"depth": 3, "width": 2}, {"data": 2, "height": 2}]


def whole(dtype: str) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 100, SHAPE).astype(dtype)


def from_all_ranks(axes: dict[str, int], dtype: str) -> np.ndarray[Any, Any] | None:
    grid = hs.Grid(**axes)
    partition = grid.partition(SHAPE)  # one sample is not cut by data: replicas hold copies
    block = np.ascontiguousarray(whole(dtype)[partition.box(grid.coords).slices()])
    return gather_to_main(Sharded.from_local(torch.from_numpy(block), partition, grid))


@pytest.mark.parametrize("axes", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", ["int16", "uint8", "float32"])
def test_from_all_ranks(axes: dict[str, int], dtype: str) -> None:
    main, *others = run_ranks(math.prod(axes.values()), from_all_ranks, axes, dtype)
    np.testing.assert_array_equal(main, whole(dtype))
    assert main is not None
    assert main.dtype == dtype
    assert others == [None] * len(others)


def without_the_others() -> None:
    grid = hs.Grid(depth=3)
    grid.barrier()
    if grid.rank == 2:
        os._exit(7)
    partition = grid.partition(SHAPE)
    local = torch.zeros(partition.box(grid.coords).shape)
    gather_to_main(Sharded.from_local(local, partition, grid))


def test_the_main_rank_names_the_rank_that_died() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(3, without_the_others)
    caught.match("CommError: rank 0 lost contact with rank 2 during the gather of a volume to the")
