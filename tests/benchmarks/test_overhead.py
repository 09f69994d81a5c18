"""What operators cost beside their kernels: the parts that are told apart (tier: gloo ranks)."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from operator_cases import CHANNELS, DEPTH, WIDTH, cases
from overhead import Side, TimedGrid, above_plain, on_ranks

import hyperslab as hs
from tests.ranks import run_ranks


def measured(size: int, names: list[str]) -> dict[str, Any]:
    return on_ranks(argparse.Namespace(op=names, calls=2, rounds=1), size)


def test_alone_nobody_sends_a_message() -> None:
    (rows,) = run_ranks(1, measured, 1, ["conv3d", "batch_norm", "cross_entropy"])
    for passes in rows.values():
        for times in passes.values():
            assert times.message == 0
            assert min(times.plain, times.cut) > 0


def test_messages_are_told_apart() -> None:
    names = ["conv3d", "conv3d, uncut", "batch_norm", "relu"]
    rows, same = run_ranks(2, measured, 2, names)
    assert rows == same  # that of the slower rank
    sends = {name for name, passes in rows.items() if passes["forward"].message > 0}
    assert sends == {"conv3d", "batch_norm"}


def both_sides(name: str) -> bool:
    """Whether the plain side computes what the cut one does."""
    torch.manual_seed(0)
    grid = TimedGrid()
    case = cases()[name]
    x = hs.shard(torch.randn(1, case.channels, DEPTH, WIDTH, WIDTH), grid)
    cut = Side(case, x.local.detach().requires_grad_(), x)
    plain = Side(case, x.local.detach().requires_grad_())
    for a, b in zip(plain.weights, cut.weights, strict=True):
        a.data.copy_(b.data)
    return torch.allclose(plain.forward(), cut.forward(), atol=1e-5)


@pytest.mark.parametrize("name", sorted(cases().keys() - {"dropout"}))
def test_both_sides_compute_the_same(name: str) -> None:
    assert run_ranks(1, both_sides, name) == [True]
    assert cases()[name].channels in (CHANNELS, 3)


def test_rules_are_called_by_family() -> None:
    (families,) = run_ranks(1, above_plain, 1, 1)
    assert {"elementwise", "reductions", "views", "layers"} <= families.keys()
    assert sum(map(len, families.values())) > 500
    assert "torch.sigmoid" in families["elementwise"]
    assert "torch.Tensor.add_" not in families["elementwise"]
