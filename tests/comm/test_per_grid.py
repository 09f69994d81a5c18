"""What belongs to a grid ends with it (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.comm import Grid, log_once, per_grid
from hyperslab.errors import LayoutError
from tests.formats.universes import Seat
from tests.ranks import run_ranks


def test_made_once_for_each_grid_and_arguments() -> None:
    calls: list[tuple[int, int]] = []

    @per_grid
    def make(grid: Grid, number: int) -> list[int]:
        """Doubled."""
        calls.append((grid.rank, number))
        if number < 0:
            raise LayoutError("below zero")
        return [2 * number]

    first, second = Seat(0, depth=2), Seat(1, depth=2)
    assert make(first, 3) is make(first, 3)
    assert make(second, 3) == [6]
    assert make(first, 4) == [8]
    for _ in range(2):
        with pytest.raises(LayoutError, match="below zero"):
            make(first, -1)
    assert calls == [(0, 3), (1, 3), (0, 4), (0, -1), (0, -1)]
    assert make.__doc__ == "Doubled."


def test_a_notice_is_logged_once_for_a_grid_by_the_main_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    main, other = Seat.all(depth=2)
    with caplog.at_level(logging.INFO, "hyperslab"):
        for grid in (main, other, main):
            log_once(grid, "the ranks repeat work")
        log_once(Seat(), "the ranks repeat work")
        log_once(main, "something else")
    assert caplog.messages == ["the ranks repeat work"] * 2 + ["something else"]


def freed() -> bool:
    """Whether nothing holds a grid whose plans, layouts, notices and counters were in use."""
    grid = hs.Grid(depth=2)
    x = hs.shard(torch.randn(2, 2, 9, 6, 4, requires_grad=True), grid)
    conv = hs.parallelize(torch.nn.Conv3d(2, 2, 3, padding=1), grid)
    y = F.dropout(conv(x), 0.5)
    y = F.max_pool3d(F.interpolate(y, scale_factor=2), 3)
    y = F.adaptive_avg_pool3d(torch.cat([y, y], 1)[:, :, 1:], 2)
    y.sum().backward()
    log_once(grid, "in use")
    alive = weakref.ref(grid)
    del grid, x, y, conv
    gc.collect()
    return alive() is None


def test_a_grid_is_freed() -> None:
    assert run_ranks(2, freed) == [True, True]
