"""One rule for several operators (tier: no process)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.ops.overloads import overloads_of, register_each
from hyperslab.tensor.dispatch import RULES

CALLED: list[tuple[Callable[..., Any], int]] = []


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Callable[..., Any], Any]]:
    """The op table, from which the entries of a test are taken out again."""
    before = dict(RULES)
    CALLED.clear()
    yield RULES
    RULES.clear()
    RULES.update(before)


def test_forms_begin_with_the_function() -> None:
    assert overloads_of("amax") == (torch.amax, torch.Tensor.amax)
    assert overloads_of("scatter_") == (torch.Tensor.scatter_,)
    assert overloads_of("softmax")[0] is torch.softmax
    assert F.softmax in overloads_of("softmax")
    assert overloads_of("no such operator") == ()


def test_a_rule_gets_the_operator_and_its_dims(rules: dict[Callable[..., Any], Any]) -> None:
    @register_each(
        "kron", torch.inner, (torch.vdot, torch.Tensor.vdot), family="user", dims=["dim"]
    )
    def rule(operator: Callable[..., Any], input: hs.Sharded, dim: int = -1) -> hs.Sharded:
        """Says who was called."""
        CALLED.append((operator, dim))
        return input

    x = hs.shard(torch.zeros(2, 3, 4), hs.Grid())
    for function in (torch.kron, torch.Tensor.kron, torch.inner, torch.Tensor.vdot):
        assert hs.Sharded.__torch_function__(function, (hs.Sharded,), (x,)) is x
    assert [(f, 2) for f in (torch.kron, torch.kron, torch.inner, torch.vdot)] == CALLED
    assert torch.Tensor.inner not in rules
    assert rules[torch.inner].doc == "Says who was called."
    assert rules[torch.inner].run.__module__ == __name__
