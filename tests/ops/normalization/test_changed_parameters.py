"""Weight and bias of a normalisation, changed in place after it (tier: one rank)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs

NORMS: dict[str, Callable[..., Any]] = {
    "batch": lambda y, w, b: F.batch_norm(y, None, None, w, b, training=True),
    "group": lambda y, w, b: F.group_norm(y, 2, w, b),
    "instance": lambda y, w, b: F.instance_norm(y, weight=w, bias=b),
}
WHEN = ("pending", "activation pending", "before backward")
CHANGED = "modified by an inplace operation"


def gradients(
    name: str, changed: str, when: str, dtype: torch.dtype, *, cut: bool
) -> list[torch.Tensor]:
    """Loss and gradients of convolution, norm, ReLU, convolution."""
    torch.manual_seed(0)
    parameters = {"weight": torch.rand(4) + 0.5, "bias": torch.randn(4)}
    parameters = {key: p.to(dtype).requires_grad_() for key, p in parameters.items()}
    kernel = torch.randn(4, 2, 3, 3, 3).requires_grad_()
    x: Any = torch.randn(2, 2, 6, 6, 6)
    x = hs.shard(x, hs.Grid()) if cut else x

    def change(now: str) -> None:
        if now == when:
            with torch.no_grad():
                parameters[changed].add_(1.0)

    y = NORMS[name](F.conv3d(x, kernel, padding=1), *parameters.values())
    change("pending")
    y = F.relu(y)
    change("activation pending")
    loss = (F.conv3d(y, torch.ones(1, 4, 1, 1, 1)) ** 2).mean()
    change("before backward")
    found = torch.autograd.grad(loss, [kernel, *parameters.values()])
    return [loss.detach(), *found]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(("name", "changed"), list(itertools.product(NORMS, ("weight", "bias"))))
def test_as_torch_has_it(name: str, changed: str, when: str) -> None:
    """The values at the call count; where torch refuses the gradient, so do we."""
    refused = changed == "weight" and name != "instance"
    if refused:
        for cut in (False, True):
            with pytest.raises(RuntimeError, match=CHANGED):
                gradients(name, changed, when, torch.float32, cut=cut)
        return
    serial = gradients(name, changed, when, torch.float32, cut=False)
    mine = gradients(name, changed, when, torch.float32, cut=True)
    for a, b in zip(mine, serial, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["batch", "group"])
def test_a_weight_of_half_precision_is_watched_itself(name: str) -> None:
    with pytest.raises(RuntimeError, match=CHANGED):
        gradients(name, "weight", "pending", torch.bfloat16, cut=True)


def second_gradients(changed: str, *, cut: bool) -> list[torch.Tensor]:
    """Of instance norm, whose parameters torch copies; they change before the backward pass."""
    torch.manual_seed(0)
    weight, bias = (torch.randn(4).requires_grad_() for _ in range(2))
    kernel = torch.randn(4, 2, 3, 3, 3).requires_grad_()
    x = torch.randn(2, 2, 6, 6, 6, requires_grad=True)
    y = F.conv3d(hs.shard(x, hs.Grid()) if cut else x, kernel, padding=1)
    y = F.leaky_relu(F.instance_norm(y, weight=weight, bias=bias), 0.2)
    loss = (y**3).mean()
    with torch.no_grad():
        {"weight": weight, "bias": bias}[changed].add_(1.0)
    first = torch.autograd.grad(loss, [x, bias], create_graph=True)
    total = sum((g * g).sum() for g in first)
    assert isinstance(total, torch.Tensor)
    return list(torch.autograd.grad(total, [kernel, weight]))


@pytest.mark.parametrize("changed", ["weight", "bias"])
def test_gradients_of_gradients_have_the_values_at_the_call(changed: str) -> None:
    for a, b in zip(
        second_gradients(changed, cut=True), second_gradients(changed, cut=False), strict=True
    ):
        assert float((a - b).norm() / b.norm()) < 1e-4


def test_running_statistics_are_those_of_the_call() -> None:
    """They move at once, and ``eval()`` between call and result changes nothing of it."""
    torch.manual_seed(0)
    kernel = torch.randn(4, 2, 3, 3, 3).requires_grad_()
    x = torch.randn(2, 2, 6, 6, 6)
    found = []
    for volume in (x, hs.shard(x, hs.Grid())):
        norm = torch.nn.BatchNorm3d(4)
        y = norm(F.conv3d(volume, kernel, padding=1))
        before = [b.clone() for b in norm.buffers()]
        norm.eval()
        z = y * 1.0
        z = z.full() if isinstance(z, hs.Sharded) else z
        (gradient,) = torch.autograd.grad((z**3).sum(), kernel)
        found.append([z.detach(), gradient, *before])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_parameters_of_other_channels_are_refused() -> None:
    x = F.conv3d(hs.shard(torch.randn(1, 2, 6, 6, 6), hs.Grid()), torch.ones(4, 2, 1, 1, 1))
    with pytest.raises(hs.LayoutError, match="4 channels has a parameter"):
        F.batch_norm(x, None, None, torch.ones(1), training=True)
