"""Hooks of a backward pass see and change what they do serially (tier: a few gloo ranks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from tests.ranks import run_ranks
from tests.selection import by_rotation

COVERS = {"autograd": {"register_hook"}}

GRIDS = {2: [{"depth": 2}, {"data": 2}], 4: [{"data": 2, "width": 2}, {"depth": 4}]}


class Network(nn.Module):
    """Lets a test set hooks on its layers, and look at what is between them."""

    def __init__(self, *, recomputed: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Conv3d(2, 4, 3, padding=1)
        self.norm = nn.InstanceNorm3d(4)
        self.last = nn.Linear(4, 3)
        self.recomputed = recomputed
        self.watch: Callable[[Any], Any] = lambda h: None

    def body(self, x: Any) -> Any:
        return torch.tanh(self.norm(self.first(x)))

    def forward(self, x: Any) -> Any:
        if self.recomputed is None:
            h = self.body(x)
        else:
            h = checkpoint(self.body, x, use_reentrant=self.recomputed)
        self.watch(h)
        return self.last(h.mean((2, 3, 4)))


def limited(gradient: Any) -> Any:
    """Takes the largest away, which no block knows alone."""
    return gradient.clamp(max=0.5 * gradient.max()) + gradient.norm()


def of_tensor(net: Network, seen: list[Any]) -> None:
    def watch(h: Any) -> None:
        h.register_hook(seen.append)
        h.register_hook(limited)
        h.mean().register_hook(seen.append)

    net.watch = watch


def of_module(net: Network, seen: list[Any]) -> None:
    net.norm.register_full_backward_hook(lambda m, before, after: (limited(before[0]),))
    net.norm.register_full_backward_hook(lambda m, before, after: (before[0] + after[0].max(),))
    net.first.register_full_backward_hook(lambda m, before, after: seen.extend([*before, *after]))


def before_module(net: Network, seen: list[Any]) -> None:
    net.norm.register_full_backward_pre_hook(lambda m, after: (limited(after[0]),))
    net.last.register_full_backward_pre_hook(lambda m, after: seen.extend(after))


KINDS: dict[str, Callable[[Network, list[Any]], None]] = {
    "tensor": of_tensor,
    "module": of_module,
    "before module": before_module,
}


def gradients(
    kind: str, recomputed: bool | None, axes: dict[str, int] | None
) -> dict[str, torch.Tensor]:
    """Everything that hooks saw, and all gradients at the end."""
    torch.manual_seed(0)
    net = Network(recomputed=recomputed).double()
    x = torch.randn(4, 2, 5, 4, 6, dtype=torch.float64, requires_grad=True)
    seen: list[Any] = []
    KINDS[kind](net, seen)
    given: Any = x
    if axes is not None:
        grid = hs.Grid(**axes)
        hs.parallelize(net, grid)
        given = hs.shard(x, grid)
    F.mse_loss(net(given), torch.ones(4, 3, dtype=torch.float64)).backward()
    found = {f"seen {i}": v for i, v in enumerate(seen)}
    found |= {name: p.grad for name, p in net.named_parameters()} | {"input": x.grad}
    return {k: v.full() if isinstance(v, hs.Sharded) else v for k, v in found.items()}


def compare_hooks(kind: str, recomputed: bool | None, axes: dict[str, int]) -> None:
    serial = gradients(kind, recomputed, None)
    torch.testing.assert_close(gradients(kind, recomputed, axes), serial)
    assert any(name.startswith("seen") for name in serial)


@pytest.mark.parametrize(("kind", "recomputed"), by_rotation(KINDS, [None, False, True]))
def test_hooks_see_serial_gradients(kind: str, recomputed: bool | None) -> None:
    for ranks, grids in GRIDS.items():
        for axes in grids:
            run_ranks(ranks, compare_hooks, kind, recomputed, axes)


def hook_that_is_refused() -> None:
    net = nn.Sequential(nn.Conv3d(1, 1, 1))
    net[0].register_full_backward_hook(lambda m, before, after: (*before, *after))
    x = hs.shard(torch.randn(2, 1, 4, 4, 4, requires_grad=True), hs.Grid(depth=2))
    net(x).sum().backward()


def test_a_hook_returns_as_many_gradients_as_it_sees() -> None:
    with pytest.raises(RuntimeError, match="invalid number of grad_input"):
        run_ranks(2, hook_that_is_refused)
