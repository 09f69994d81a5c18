"""Operators that need the whole of a dim which is cut: another one is cut (tier: a few gloo ranks).

Networks that look at slices make channels of depth, and filters of images make them of all dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import average
from tests.ranks import run_ranks
from tests.selection import in_gate

SHAPE = (2, 3, 6, 5, 4)  # batch, channels, depth, height, width; slices have 6 channels

WEIGHT = torch.linspace(-1, 1, 4 * 6 * 3 * 3, dtype=torch.float64).view(4, 6, 3, 3)

CALLS: dict[str, Callable[[Any], Any]] = {
    "conv2d of a channel": lambda x: F.conv2d(x[:, 0], WEIGHT, padding=1),
    "conv2d of a channel, by groups": lambda x: F.conv2d(x[:, 1], WEIGHT[:, :3], groups=2),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x[:, 0], WEIGHT.transpose(0, 1), stride=2),
    "conv3d of a turned volume": lambda x: F.conv3d(
        x.transpose(1, 2), WEIGHT[:, :, :1, None].expand(4, 6, 1, 1, 3)
    ),
    "conv1d along depth": lambda x: F.conv1d(x[:, :, 0, 0], WEIGHT[:, :3, :, 0]),
    "pooling": lambda x: F.avg_pool3d(x.transpose(1, 2), 2),
    "maximum": lambda x: F.max_pool2d(x[:, 0], 2),
    "adaptive pooling": lambda x: F.adaptive_avg_pool2d(x[:, 0], 3),
    "power pooling": lambda x: F.lp_pool2d(x[:, 0] ** 2 + 1, 2.0, 2),
    "batch norm": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True),
    "group norm": lambda x: F.group_norm(x.sum(1), 3),
    "instance norm": lambda x: F.instance_norm(x[:, 2]),
    "response norm": lambda x: F.local_response_norm(x[:, 2], 3),
    "interpolation": lambda x: F.interpolate(x[:, 0], scale_factor=2, mode="bilinear"),
    "pixel shuffle": lambda x: F.pixel_shuffle(x.sum(1)[:, :4], 2),
    "prelu": lambda x: F.prelu(x[:, 0], torch.linspace(0, 1, 6, dtype=torch.float64)),
    "glu": lambda x: F.glu(x, 2),
    "linear": lambda x: F.linear(x.transpose(2, 4), WEIGHT[0, :, :, 0].T),
    "index_select": lambda x: x.index_select(2, torch.tensor([4, 0, 4])),
    "cross entropy": lambda x: F.cross_entropy(x[:, 0], (x[:, 1, 0] > 0).long()),
    "2.5-D network": lambda x: nn.Sequential(
        nn.Conv2d(6, 4, 3, padding=1, dtype=torch.float64),
        nn.BatchNorm2d(4, dtype=torch.float64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 2, 2, dtype=torch.float64),
    )(x[:, 0]),
}


def check(axes: dict[str, int], seed: int) -> None:
    torch.manual_seed(1)
    grid = hs.Grid(**axes)
    full = torch.randn(SHAPE, dtype=torch.float64)
    failures = []
    for name, call in CALLS.items():
        a, b = full.clone().requires_grad_(), full.clone().requires_grad_()
        torch.manual_seed(2)
        expected = call(b)
        torch.manual_seed(2)
        found = call(recut(hs.shard(a, grid), seed))
        whole = found.full() if isinstance(found, hs.Sharded) else found
        (whole**2).sum().backward()
        (expected**2).sum().backward()
        if not torch.allclose(whole, expected, rtol=1e-10, atol=1e-12):
            failures.append(f"{name}: {tuple(whole.shape)}")
        if not torch.allclose(average(a.grad), b.grad, rtol=1e-9, atol=1e-11):
            failures.append(f"{name}: its gradient")
    assert not failures, failures


@pytest.mark.parametrize(
    ("axes", "seed"),
    in_gate(
        [
            ({"depth": 2}, 0),
            ({"depth": 3}, 5),
            ({"data": 2, "depth": 2}, 0),
            ({"height": 2, "depth": 2}, 7),
        ],
        kept=[({"depth": 3}, 5), ({"height": 2, "depth": 2}, 7)],
    ),
    ids=str,
)
def test_equal_to_serial(axes: dict[str, int], seed: int) -> None:
    run_ranks(torch.tensor(list(axes.values())).prod().item(), check, axes, seed)


def parts_of_slices() -> list[tuple[int, ...]]:
    """No rank has more than half of a slice's activations, before and behind its convolution."""
    x = hs.shard(torch.zeros(1, 1, 8, 6, 4), hs.Grid(depth=2))[:, 0]
    y = F.conv2d(x, torch.zeros(5, 8, 3, 3), padding=1)
    return [tuple(x.local.shape), tuple(y.local.shape)]


def test_nothing_is_gathered() -> None:
    assert run_ranks(2, parts_of_slices) == [[(1, 4, 6, 4), (1, 5, 3, 4)]] * 2
