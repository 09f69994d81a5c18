"""Volumes without a batch dim, as torch takes them (tier: a few gloo ranks)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from tests.ops.serial import Example, compare
from tests.ranks import run_ranks


def convolved(x: Any, weight: Any, bias: Any) -> Any:
    return F.conv3d(x, weight, bias, stride=(2, 1, 1), padding=1)


def transposed(x: Any, weight: Any, bias: Any) -> Any:
    return F.conv_transpose3d(x, weight.transpose(0, 1), bias, stride=2, padding=1)


def pooled(x: Any) -> Any:
    y = F.max_pool3d(x, 2) + F.avg_pool3d(x, 3, 2, 1)[:, :3, :3, :3]
    return y * F.adaptive_avg_pool3d(x, (3, 3, 3)) + F.adaptive_max_pool3d(x, (3, 3, 3))


def unpooled(x: Any) -> Any:
    y, indices = F.max_pool3d(x, 2, return_indices=True)
    return F.max_unpool3d(y, indices, 2) + F.lp_pool3d(x, 2.0, 2).mean()


def padded(x: Any) -> Any:
    y = F.pad(F.pad(x, (1, 1, 2, 0, 1, 0), "circular"), (1,) * 6, "replicate")
    return F.instance_norm(y[None])[0] + F.softmax(y, 0)


def labelled(x: Any) -> Any:
    """A loss of every voxel; of (classes, D, H, W) torch knows none without a batch."""
    return F.mse_loss(x, torch.ones(x.shape, dtype=x.dtype) * 0.5) + x.var()


WEIGHTS = ((4, 2, 3, 3, 3), (4,))
OPERATORS: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "convolved": (convolved, WEIGHTS), "transposed": (transposed, WEIGHTS), "pooled": (pooled, ()),
    "unpooled": (unpooled, ()), "padded": (padded, ()), "labelled": (labelled, ()),
}  # fmt: skip
GRIDS = [{"depth": 2}, {"height": 2}, {"depth": 2, "width": 2}, {"depth": 3}]


def alone(x: Any, *weights: Any, name: str) -> Any:
    """The only sample of a mini-batch."""
    return OPERATORS[name][0](x[0], *weights)


@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_equal_to_serial(axes: dict[str, int]) -> None:
    cases = [
        Example(
            grid=axes,
            shape=(1, 2, *((7, 6, 8) if weights else (6, 6, 6))),
            weights=weights,
            options={"name": name},
            dtype=dtype,
        )
        for name, (_, weights) in OPERATORS.items()
        for dtype in (torch.float64, torch.float32)
    ]
    run_ranks(math.prod(axes.values()), compare, alone, cases)


def images(x: Any, weight: Any) -> Any:
    return F.max_pool2d(F.conv2d(x[0], weight, padding=1), 3, 2)


def test_images() -> None:
    run_ranks(2, compare, images, [Example({"height": 2}, (1, 2, 9, 8), ((3, 2, 3, 3),))])


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.PReLU(),
            nn.MaxPool3d(2), nn.Dropout3d(0.5), nn.ConvTranspose3d(4, 2, 2, 2),
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def step(axes: dict[str, int] | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    network = Network().double()
    x: Any = torch.randn(1, 8, 8, 6, dtype=torch.float64)
    if axes is not None:
        grid = hs.Grid(**axes)
        hs.parallelize(network, grid)
        x = hs.shard(x, grid, batch="none")
        assert x.partition.axes == tuple(axes)
    torch.manual_seed(1)
    y = network(x)
    y.square().mean().backward()
    whole = y.full() if isinstance(y, hs.Sharded) else y
    return [whole.detach(), *(p.grad for p in network.parameters() if p.grad is not None)]


def test_a_network_takes_a_volume_alone() -> None:
    (expected,) = run_ranks(1, step, None)
    for found in run_ranks(4, step, {"depth": 2, "height": 2}):
        for got, want in zip(found, expected, strict=True):
            assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)


def refused() -> None:
    grid = hs.Grid(data=2)
    F.conv3d(hs.shard(torch.randn(2, 4, 4, 4), grid), torch.randn(3, 2, 3, 3, 3))


def test_channels_in_the_place_of_the_batch_are_refused() -> None:
    with pytest.raises(hs.LayoutError, match=r"(?s)conv3d takes dim 0.*unsqueeze\(0\).*data=1"):
        run_ranks(2, refused)


def cuts() -> None:
    grid = hs.Grid(depth=2)
    labels = torch.zeros(6, 4, 4)
    assert hs.shard(labels, grid, channels=False, batch="none").partition.cut_dims == (0,)
    volume = torch.randn(2, 6, 4, 4)
    assert hs.shard(volume, grid, batch="none").partition.cut_dims == (1,)
    x = hs.shard(volume, grid)  # images: (batch, channel, H, W), of which depth cuts nothing
    assert x.partition.cut_dims == ()
    weight = torch.randn(3, 2, 3, 3, 3)
    assert torch.allclose(F.conv3d(x, weight).full(), F.conv3d(volume, weight), atol=1e-5)
    leaf = volume.clone().requires_grad_() if grid.rank == 0 else None
    scattered = hs.scatter(leaf, grid, batch="none")
    assert torch.equal(scattered.full(), volume)


def test_where_it_is_cut() -> None:
    run_ranks(2, cuts)


def without_a_batch() -> None:
    hs.shard(torch.randn(2, 6, 4, 4), hs.Grid(data=2), batch="none")


def test_a_data_axis_is_refused() -> None:
    with pytest.raises(hs.LayoutError, match=r"without a batch dim .*\n.*data=1, or x.unsqueeze"):
        run_ranks(2, without_a_batch)
