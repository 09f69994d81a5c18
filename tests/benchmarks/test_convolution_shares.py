"""The shares of a block's kernels that distributed convolutions reach (tier: a few gloo ranks)."""

from __future__ import annotations

import pytest
import torch
from convolution_shares import SIDES, compare_convolutions
from passes import PASSES, measure_layer, print_parts
from passes import convolutions as convolutions_of_parts

import hyperslab as hs
from tests.ranks import run_ranks

pytestmark = pytest.mark.long

WIDTH = 16


def shares(dtype: torch.dtype) -> list[dict[str, object]]:
    return compare_convolutions(WIDTH, 2, 1, dtype)


def parts(dtype: torch.dtype) -> list[dict[str, object]]:
    grid = hs.Grid(depth=2)
    return [measure_layer(cut, grid, 1, dtype) for cut in convolutions_of_parts(WIDTH, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_layer_is_compared_with_both(dtype: torch.dtype) -> None:
    rows = run_ranks(2, shares, dtype)[0]
    assert [row["layer"] for row in rows][:2] == ["conv1", "conv2"]
    for row in rows:
        assert all(row[side][part]["min"] > 0 for side in SIDES for part in row["plain"])
        assert row["share"]["median"] > 0
        assert row["share of fastest"]["median"] > 0


def test_parts_are_compared_with_both(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_ranks(2, parts, torch.float32)[0]
    for row in rows:
        for side in SIDES:
            assert list(row[side]) == list(PASSES)
            assert row[side]["forward"]["min"] > 0
            assert (row[side]["backward-data"]["min"] > 0) == (row["layer"] != "conv1")
    print_parts("parts", rows)
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].split()[:4] == ["block", "time", "[ms]", "Gflop/s"]
    assert len(printed) == 4 + len(rows)
