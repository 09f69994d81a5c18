"""What is logged where a map is too thin to be cut (tier: no process)."""

from __future__ import annotations

import logging

import pytest

import hyperslab as hs
from hyperslab.ops.placement import SHAPES_NAMED, log_thin


def test_shapes_of_scans_are_named_until_there_are_many(caplog: pytest.LogCaptureFixture) -> None:
    grid = hs.Grid()
    with caplog.at_level(logging.INFO, "hyperslab"):
        for depth in (1, 2, 1, *range(3, 30)):
            log_thin(grid, "conv3d: output", (depth, 6, 10), ("depth",), "; gathered there,")
        log_thin(grid, "conv3d: output", (30, 6, 10), ("width",), "; gathered there,")
    assert len(caplog.messages) == SHAPES_NAMED + 1
    assert caplog.messages[0].startswith("conv3d: output 1 x 6 x 10 is too thin to be cut along de")
    assert caplog.messages[SHAPES_NAMED - 1].endswith("; further shapes are not named")
    assert "along width of" in caplog.messages[-1]
