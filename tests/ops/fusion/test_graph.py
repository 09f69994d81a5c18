"""What somebody holds of a chain is in the graph (tier: one rank)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs


def watched(axes: dict[str, int] | None, rest: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Gradients of what is between, which a hook, ``retain_grad`` and ``grad`` find afterwards."""
    torch.manual_seed(0)
    weight = torch.randn(4, 2, 3, 3, 3, requires_grad=True)
    x = torch.randn(2, 2, 12, 8, 8)
    y = F.conv3d(x if axes is None else hs.shard(x, hs.Grid(**axes)), weight, padding=1)
    h = F.batch_norm(y, None, None, training=True)
    out = (rest(h) ** 2).mean()
    seen: list[torch.Tensor] = []
    h.register_hook(lambda gradient: seen.append(gradient.detach().clone()))
    h.retain_grad()
    (asked,) = torch.autograd.grad(out, h, retain_graph=True)
    out.backward()
    assert seen
    kept = h.grad
    assert kept is not None
    return [t.full() if isinstance(t, hs.Sharded) else t for t in (asked, kept)]


RESTS: dict[str, Callable[[Any], Any]] = {
    "relu, convolution": lambda h: F.conv3d(F.relu(h), torch.ones(1, 4, 3, 3, 3)),
    "leaky, maximum": lambda h: F.max_pool3d(F.leaky_relu(h, 0.2), 2) * 1.5,
    "average": lambda h: F.avg_pool3d(h, 2) * 1.5,
}


@pytest.mark.parametrize("name", RESTS)
def test_what_somebody_holds_is_in_the_graph(name: str) -> None:
    for mine, theirs in zip(watched({}, RESTS[name]), watched(None, RESTS[name]), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-5


def test_what_was_taken_in_another_type_cannot_be_watched() -> None:
    """Average pooling gives float32 under autocast, the convolution behind it takes bfloat16."""
    x = hs.shard(torch.randn(1, 2, 8, 8, 8), hs.Grid())
    with torch.autocast("cpu", torch.bfloat16):
        h = F.avg_pool3d(F.conv3d(x, torch.randn(4, 2, 3, 3, 3, requires_grad=True)), 2)
        y = F.conv3d(h, torch.randn(2, 4, 1, 1, 1))
    with pytest.raises(hs.LayoutError, match="before the tensor is used"):
        h.retain_grad()
    with pytest.raises(hs.LayoutError, match="before the tensor is used"):
        torch.autograd.grad(y.float().sum(), h)
