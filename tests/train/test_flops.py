"""Floating-point operations of steps (tiers: one process; a few gloo ranks)."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hyperslab.train import flops
from hyperslab.train.flops import FlopCount, StepFlops, flop_formulas, measure_peak
from tests.ranks import run_ranks
from tests.train.universes import run, write_recipe


def test_a_convolution_and_its_gradients_by_hand() -> None:
    x = torch.randn(2, 3, 6, 6, 6, requires_grad=True)
    weight = torch.randn(5, 3, 3, 3, 3, requires_grad=True)
    once = 2 * (2 * 5 * 6**3) * (3 * 3**3)
    with FlopCount() as count:
        y = F.conv3d(x, weight, padding=1)
        assert count.flops == once
        y.sum().backward()
    assert count.flops == 3 * once


def test_what_has_no_formula_leaves_the_count_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*shapes: object, out_val: object) -> int:
        raise AssertionError(shapes, out_val)

    monkeypatch.setitem(flop_formulas(), torch.ops.aten.mm, refuse)
    a = torch.ones(2, 2)
    with FlopCount() as count:
        assert torch.equal(a @ a, 2 * a)
        torch.bmm(a[None], a[None])
    assert count.flops is None


def test_operators_of_higher_order_run() -> None:
    x = torch.ones(2, 2)
    with FlopCount() as count:
        y = torch.ops.higher_order.cond(x.sum() > 0, torch.neg, torch.abs, (x,))
    assert torch.equal(y, -x)
    assert count.flops is None


def test_a_rank_that_cannot_count_leaves_the_speed_unknown() -> None:
    flops = StepFlops(2, 50.0)
    flops.counted(None, 4)
    assert not flops.wanted
    assert flops.speed(4, 2.0) is None


def test_speed_and_share() -> None:
    flops = StepFlops(2, 50.0)
    assert flops.speed(4, 2.0) is None
    flops.counted(120, 4)
    assert flops.speed(4, 2.0) == 60
    assert flops.speed(2, 2.0) == 30
    assert flops.share(30) == 0.3
    assert StepFlops(1, None).share(30) is None


@pytest.mark.parametrize(("enough", "extents"), [(1e-9, {64}), (1e9, {64, 128, 256})])
def test_the_peak_is_that_of_a_product_of_matrices_that_is_long_enough(
    enough: float, extents: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    own = torch.mm

    def watched(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        seen.add(len(a))
        return own(a, b, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    monkeypatch.setattr(flops, "PEAK_EXTENTS", (64, 256))
    monkeypatch.setattr(flops, "LONG_PRODUCT", enough)
    assert measure_peak(torch.device("cpu"), "float32") > 0
    assert seen == extents


def history(recipe: Path) -> list[dict[str, str]]:
    with (recipe.with_suffix("") / "steps.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def flops_by_step(recipe: Path) -> list[float]:
    return [float(row["flops_per_second"]) * float(row["step_seconds"]) for row in history(recipe)]


def test_the_history_has_them_on_every_grid(tmp_path: Path, universes: Path) -> None:
    serial = write_recipe(tmp_path / "serial.yaml", universes)
    run(serial, "epochs=1")
    alone = flops_by_step(serial)
    assert alone[0] == pytest.approx(alone[1], rel=1e-6)
    assert alone[2] == pytest.approx(0.75 * alone[0], rel=1e-6), "three samples of four"
    assert history(serial)[0]["peak_share"] == ""
    cut = write_recipe(tmp_path / "cut.yaml", universes)
    run_ranks(2, run, cut, "epochs=1", "grid.depth=2", "peak=1e9")
    # Slabs and deep layers that both ranks compute come on top.
    assert 1 <= flops_by_step(cut)[0] / alone[0] < 1.5
    for row in history(cut):
        expected = float(row["flops_per_second"]) / 2e9
        assert float(row["peak_share"]) == pytest.approx(expected, rel=1e-6)
