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


ALONG_NO_DIM: dict[str, Callable[[Any], Any]] = {
    "sums": lambda x: [x.sum(0), x.mean(), x.prod(-1, keepdim=True), x.norm(p=2, dim=0)],
    "extrema": lambda x: [*x.max(0), *x.min(-1), x.amax(0), x.argmin(0), torch.max(x, x + 1)],
    "variances": lambda x: [torch.var(x, 0, unbiased=False), *torch.std_mean(x, 0, correction=0)],
    "orders": lambda x: [*x.sort(), *x.topk(1), *x.median(0), x.quantile(0.5, 0)],
    "scans": lambda x: [x.cumsum(0), *x.cummax(0), (x * 1).cumprod_(0)],
    "shares": lambda x: [x.softmax(0), F.normalize(x, dim=0), x.logsumexp(0)],
    "views": lambda x: [x.squeeze(0), x.unfold(0, 1, 1), x.expand(3), x.flatten()],
    "places": lambda x: [x.index_select(0, torch.tensor([0])), x.gather(0, torch.tensor(0))],
    "two": lambda x: [F.cosine_similarity(x, x * 2, dim=0), torch.tensor(2.0).expand_as(x)],
}
"""What torch lets one do along dim 0 of a tensor that has none."""


@pytest.mark.parametrize("name", ALONG_NO_DIM)
def test_a_number_has_a_dim_for_torch(name: str) -> None:
    serial, leaf = (torch.tensor(1.5, requires_grad=True) for _ in range(2))
    expected = ALONG_NO_DIM[name](serial)
    results: list[Any] = ALONG_NO_DIM[name](hs.shard(leaf, hs.Grid()))
    found = [y.full() if isinstance(y, hs.Sharded) else y for y in results]
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)
        assert got.dtype == want.dtype
    for values in (found, expected):
        sum(y.sum() for y in values if y.requires_grad).backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, serial.grad)
