"""Whoever looks at a pending tensor finds what serial torch has (tier: one rank, then two)."""

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

COVERS = {"elementwise": {"relu", "leaky_relu"}}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1),
        nn.BatchNorm3d(4),
        nn.LeakyReLU(0.1),
        nn.MaxPool3d(2),
        nn.Conv3d(4, 6, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool3d(2),
        nn.Conv3d(6, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv3d(4, 2, 1),
    )


class Twice(torch.autograd.Function):
    """A user's own function, which torch calls without asking the tensor's class."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def plain(model: nn.Module, x: Any) -> Any:
    return model(x)


def with_full_hooks(model: nn.Module, x: Any) -> Any:
    model[9].inplace = False  # type: ignore[index]  # torch allows no change behind such a hook
    for part in model.modules():
        part.register_full_backward_hook(lambda module, before, after: None)
    return model(x)


def with_forward_hooks(model: nn.Module, x: Any) -> Any:
    def hook(module: nn.Module, args: Any, y: Any) -> Any:
        assert y.dtype in (torch.float32, torch.float64)
        assert y.requires_grad
        return y + 0.5 if isinstance(module, nn.LeakyReLU) else None

    for part in list(model):  # type: ignore[call-overload]
        part.register_forward_hook(hook)
    return model(x)


def with_tensor_hooks(model: nn.Module, x: Any) -> Any:
    model[9].inplace = False  # type: ignore[index]  # a hook sees what the tensor is at the end
    for part in model:  # type: ignore[attr-defined]
        x = part(x)
        x.register_hook(lambda gradient: gradient * 1.5)
    return x


def in_pieces(model: nn.Module, x: Any) -> Any:
    """What comes between is kept and looked at afterwards."""
    kept = []
    for part in model:  # type: ignore[attr-defined]
        x = part(x)
        kept.append(x)
    return x + sum(k.mean() for k in reversed(kept) if not isinstance(k, str))


def recomputed(model: nn.Module, x: Any) -> Any:
    for part in (model[:3], model[3:7], model[7:]):  # type: ignore[index]
        x = checkpoint(part, x, use_reentrant=False)
    return x


def recomputed_inside(model: nn.Module, x: Any) -> Any:
    for part in (model[:3], model[3:7], model[7:]):  # type: ignore[index]
        x = checkpoint(part, x, use_reentrant=True)
    return x


def own_function(model: nn.Module, x: Any) -> Any:
    for part in model:  # type: ignore[attr-defined]
        x = part(x)
        if isinstance(part, nn.MaxPool3d | nn.ReLU | nn.BatchNorm3d):
            assert x.requires_grad
            x = Twice.apply(x.clone())
    return x


def changed_afterwards(model: nn.Module, x: Any) -> Any:
    """The source of a pending tensor changes before anybody looks at that."""
    y = F.conv3d(x, model[0].weight)  # type: ignore[index]
    z = F.relu(y)
    w = F.max_pool3d(F.relu(y), 2)
    y.mul_(3)
    return z.sum() + w.sum() + y.sum()


def changed_by_view(model: nn.Module, x: Any) -> Any:
    y = F.conv3d(x, model[0].weight)  # type: ignore[index]
    view = y[:, 1:]
    z = F.relu(y)
    view.mul_(3)
    return z.sum() + y.sum()


def changed_by_alias(model: nn.Module, x: Any) -> Any:
    y = F.conv3d(x, model[0].weight)  # type: ignore[index]
    alias = y.detach()
    z = F.relu(y)
    alias.mul_(3)
    return z.sum() + y.sum()


def looked_at_in_inference_mode(model: nn.Module, x: Any) -> Any:
    for part in model:  # type: ignore[attr-defined]
        x = part(x)
        with torch.inference_mode():
            (x * 2).mean()
    return x


def pooled_without_gradients(model: nn.Module, x: Any) -> Any:
    """As the target of another branch; the norm before it is wanted with gradients."""
    y = model[:2](x)  # type: ignore[index]
    for pool in (F.max_pool3d, F.avg_pool3d):
        z = model[1](y)  # type: ignore[index]
        with torch.no_grad():
            target = pool(z, 2)
        assert not target.requires_grad
        y = y + z * target.mean()
    return model[2:](y)  # type: ignore[index]


def rectified_without_gradients(model: nn.Module, x: Any) -> Any:
    """In place behind autograd's back: torch takes the gradient for that of the norm."""
    y = model[:2](x)  # type: ignore[index]
    with torch.no_grad():
        F.relu(y, inplace=True)
    return model[2:](y)  # type: ignore[index]


WAYS = (
    plain,
    with_full_hooks,
    with_forward_hooks,
    with_tensor_hooks,
    in_pieces,
    recomputed,
    recomputed_inside,
    own_function,
    changed_afterwards,
    changed_by_view,
    changed_by_alias,
    looked_at_in_inference_mode,
    pooled_without_gradients,
    rectified_without_gradients,
)


Way = Callable[[nn.Module, Any], Any]


def results(way: Way, axes: dict[str, int] | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients, of the serial run without ``axes``."""
    model = net().to(dtype)
    torch.manual_seed(1)
    x = torch.randn(2, 2, 12, 8, 8).to(dtype).requires_grad_()
    grid = None if axes is None else hs.Grid(**axes)
    y = way(model, x if grid is None else hs.shard(x, grid))
    (y * y).mean().backward()
    found = [y.full() if isinstance(y, hs.Sharded) else y, x.grad]
    for parameter in model.parameters():
        if parameter.grad is not None and grid is not None and grid.size > 1:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= grid.size
        found.append(parameter.grad)
    return [t.detach() for t in found if t is not None]


def difference(way: Way, axes: dict[str, int]) -> float:
    """How far from float64 the results are, beyond five times what serial ones are."""
    exact = results(way, None, torch.float64)
    serial = results(way, None, torch.float32)
    cut = results(way, axes, torch.float32)
    floor = 1e-3 * max(float(t.norm()) for t in exact[1:])

    def worst(found: list[torch.Tensor]) -> float:
        pairs = zip(found, exact, strict=True)
        return max(float((a - b).norm()) / max(float(b.norm()), floor) for a, b in pairs)

    return worst(cut) - 5 * worst(serial)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_one_rank(way: Way) -> None:
    assert difference(way, {}) < 1e-5


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_two_ranks(way: Way) -> None:
    assert max(run_ranks(2, difference, way, {"depth": 2})) < 1e-5


def test_an_alias_from_before_is_refused_rather_than_missed() -> None:
    """``.data`` and the like that a rule cannot see: the version of the memory tells."""
    y = F.conv3d(
        hs.shard(torch.randn(1, 1, 4, 4, 4), hs.Grid()), torch.ones(2, 1, 1, 1, 1).requires_grad_()
    )
    alias = y._block  # as torch's C++ would hand it to somebody
    z = F.relu(y)
    with torch.no_grad():
        alias.mul_(2)
    with pytest.raises(hs.LayoutError, match="changed in place"):
        z.sum()


def test_nothing_between_is_kept() -> None:
    """Of convolution, activation and pooling a bit an element and the convolution's input."""
    saved: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    weight = torch.randn(8, 2, 3, 3, 3, requires_grad=True)
    x = hs.shard(torch.randn(1, 2, 16, 16, 16), hs.Grid())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = F.avg_pool3d(F.leaky_relu(F.conv3d(x, weight, padding=1)), 2)
        loss = (y * torch.ones(())).sum()
    del loss
    elements = 8 * 16**3
    assert sum(saved.values()) <= 4 * (2 * 16**3 + weight.numel()) + elements / 8 + 4 * elements / 8


def second_gradients(chain: Callable[[Any], Any], axes: dict[str, int]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    weight = torch.randn(4, 2, 3, 3, 3, requires_grad=True)
    x = torch.randn(2, 2, 8, 8, 8, requires_grad=True)
    cut = hs.shard(x, hs.Grid(**axes)) if axes is not None else x
    y = chain(F.conv3d(cut, weight, padding=1))
    (first,) = torch.autograd.grad((y**3).mean(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), weight)
    return [first.detach(), second]


CHAINS: dict[str, Callable[[Any], Any]] = {
    "relu": lambda y: F.relu(y),
    "leaky, average": lambda y: F.avg_pool3d(F.leaky_relu(y, 0.2), 2),
    "relu, maximum": lambda y: F.max_pool3d(F.relu(y), 2),
    "batch norm, leaky": lambda y: F.leaky_relu(F.batch_norm(y, None, None, training=True), 0.2),
    "group norm, maximum": lambda y: F.max_pool3d(F.group_norm(y, 2), 2),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_gradient_has_a_graph(name: str) -> None:
    mine = second_gradients(CHAINS[name], {})
    theirs = second_gradients(CHAINS[name], None)  # type: ignore[arg-type]
    for a, b in zip(mine, theirs, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-4
