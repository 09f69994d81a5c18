"""The fraction of a step that is not convolution: its parts are the step (tier: no process)."""

from __future__ import annotations

import pytest
from lassen import workload
from not_convolution import COLUMNS, cubes, fractions
from published import Run

from hyperslab.planner.machine import load_machine
from hyperslab.planner.trace import busiest, trace_step


@pytest.mark.parametrize(("ranks", "extents"), [(1, (1, 1, 1)), (8, (2, 2, 2)), (32, (4, 4, 2))])
def test_cubes(ranks: int, extents: tuple[int, ...]) -> None:
    assert tuple(cubes(ranks).values()) == extents


@pytest.mark.parametrize("name", ["lassen-v100", "laptop-2core"])
def test_the_parts_are_the_step(name: str) -> None:
    machine = load_machine(name)
    grid = cubes(8)
    found = {}
    for batch_norm in (False, True):
        run = Run("cosmoflow", 64, 1, 8, 8, batch_norm)
        kind = "cuda" if machine.device == "cuda" else "cpu"
        trace = trace_step(workload(run), grid, busiest(grid), kind)
        found[batch_norm] = fractions(trace, machine, 8)
        parts = sum(found[batch_norm].get(column, 0.0) for column in COLUMNS)
        assert parts == pytest.approx(found[batch_norm]["step"])
        assert 0 < found[batch_norm]["not convolution"] < 1
    assert found[True]["convolution"] == pytest.approx(found[False]["convolution"])
    assert found[True]["not convolution"] > found[False]["not convolution"]
