"""More ranks than voxels, and more replicas than samples (tier: a few gloo ranks)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hyperslab as hs
from tests.ranks import run_ranks


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        *(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2)),
        *(nn.Conv3d(4, 4, 3, padding=1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2)),
    ]
    return nn.Sequential(*layers).double()


def results(x: torch.Tensor, grid: hs.Grid | None) -> list[torch.Tensor]:
    """The prediction, and the gradients of all weights."""
    model = network()
    if grid is None:
        y = model(x)
        whole = y
    else:
        model = hs.parallelize(model, grid)
        y = model(hs.shard(x, grid))
        whole = y.full()
    y.square().mean().backward()
    return [whole.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def compare(axes: dict[str, int], shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for got, want in zip(results(x, hs.Grid(**axes)), results(x, None), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ({"depth": 4}, (2, 1, 4, 8, 8)),  # one voxel a rank, and none after the pooling
        ({"data": 4}, (3, 1, 4, 8, 8)),
        ({"data": 2, "depth": 2}, (1, 1, 4, 4, 4)),
    ],
)
def test_the_result_is_the_serial_one(axes: dict[str, int], shape: tuple[int, ...]) -> None:
    run_ranks(4, compare, axes, shape)


def refused(axes: dict[str, int], shape: tuple[int, ...]) -> str:
    with pytest.raises(hs.LayoutError) as caught:
        hs.shard(torch.zeros(shape), hs.Grid(**axes))
    return str(caught.value)


def test_ranks_without_a_voxel_are_refused() -> None:
    for words in run_ranks(4, refused, {"depth": 2, "height": 2}, (2, 1, 4, 1, 4)):
        assert "cannot cut dim 3 (extent 1) of a tensor (2, 1, 4, 1, 4) into 2 shards" in words
        assert "use height<=1, or, if it is broadcast over space, the tensor as it is" in words
