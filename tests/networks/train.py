"""Steps of training, in plain torch or on a grid, and how far they are apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from monai.losses import DiceCELoss

import hyperslab as hs
from hyperslab.parallel.parallelize import Memory
from tests.networks.zoo import CLASSES, NETWORKS
from tests.ops.slabs.test_stages import slabs_of

STEPS = 3


@dataclass(frozen=True)
class Step:
    """What a step computed; ``cut`` says along which axes the output was cut."""

    loss: float
    gradients: Mapping[str, torch.Tensor]
    cut: tuple[str, ...]


def train(
    name: str,
    axes: dict[str, int] | None,
    dtype: torch.dtype,
    steps: int = STEPS,
    memory: Memory = "none",
) -> list[Step]:
    """By SGD; without axes nothing of hyperslab takes part. Slabs are as thin as they may be."""
    network = NETWORKS[name]
    torch.manual_seed(1)
    model = network.make().to(dtype)
    data = torch.randn(STEPS, *network.shape, dtype=torch.float64).to(dtype)
    labels = torch.randint(CLASSES, (STEPS, network.shape[0], 1, *network.shape[2:]))
    cut = lambda x: x  # noqa: E731
    if axes is not None:
        grid = hs.Grid(**axes)
        with slabs_of(1):
            hs.parallelize(model, grid, memory=memory)
        cut = lambda x: hs.shard(x, grid)  # noqa: E731
    torch.manual_seed(2)  # of dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for x, y in zip(data[:steps], labels[:steps], strict=True):
        with slabs_of(1), mock.patch("hyperslab.parallel.offload.OFFLOADED_FROM", 1):
            outputs = network.call(model, cut(x))
            loss = loss_of(outputs, cut(y), network.goal)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append(Step(loss.item(), gradients, cut_of(outputs)))
    return found


def loss_of(outputs: Any, labels: Any, goal: str) -> Any:
    """Of one output or, with falling weights, of several, which may be smaller."""
    if isinstance(outputs, list | tuple):
        return sum(loss_of(y, labels, goal) / 2**n for n, y in enumerate(outputs))
    if goal == "numbers":
        numbers = torch.linspace(0, 1, outputs.numel(), dtype=outputs.dtype)
        return F.mse_loss(outputs, numbers.view(outputs.shape))
    if outputs.dim() == 6:  # DynUNet stacks its outputs along a new dim
        return loss_of(outputs.unbind(1), labels, goal)
    if outputs.shape[2:] != labels.shape[2:]:
        labels = F.interpolate(labels.to(outputs.dtype), outputs.shape[2:], mode="nearest-exact")
    return DiceCELoss(softmax=True, to_onehot_y=True)(outputs, labels)


def cut_of(outputs: Any) -> tuple[str, ...]:
    first = outputs[0] if isinstance(outputs, list | tuple) else outputs
    return first.partition.axes if isinstance(first, hs.Sharded) else ()


def apart(
    name: str,
    axes: dict[str, int],
    dtype: torch.dtype,
    expected: list[Step],
    memory: Memory = "none",
) -> tuple[float, float, tuple[str, ...]]:
    """The largest differences from the serial losses and gradients, and the output's axes.

    A gradient is compared with its own norm, or with 1e-5 of that of all (float64; 1e-2 in
    float32): what precedes a normalisation has biases whose gradient is nothing but rounding.
    """
    found = train(name, axes, dtype, len(expected), memory)
    floor = 1e-5 if dtype == torch.float64 else 1e-2
    losses, gradients = [], []
    for step, reference in zip(found, expected, strict=True):
        assert step.gradients.keys() == reference.gradients.keys()
        total = torch.stack([g.norm() for g in reference.gradients.values()]).norm().item()
        losses.append(abs(step.loss / reference.loss - 1))
        for parameter, gradient in reference.gradients.items():
            norm = max(gradient.norm().item(), floor * total)
            gradients.append((step.gradients[parameter] - gradient).norm().item() / norm)
    return max(losses), max(gradients), found[0].cut
