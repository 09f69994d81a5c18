"""Dims that are merged with the batch: slices as samples, windows, rows (tier: gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import Example, compare, distance, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks
from tests.selection import in_gate


def slices(x: Any, weight: torch.Tensor) -> Any:
    """A 2D network on every slice, and back."""
    n, c, d, h, w = x.shape
    y = x.transpose(1, 2).reshape(n * d, c, h, w)
    y = F.batch_norm(F.conv2d(y, weight, padding=1), None, None, training=True)
    return y.unflatten(0, (n, d)).transpose(1, 2)


def channels(x: Any, weight: torch.Tensor) -> Any:
    """Every channel as a sample: a filter without groups."""
    n, c, *extents = x.shape
    y = F.conv3d(x.reshape(n * c, 1, *extents), weight[:1, :1, None], padding=(0, 1, 1))
    return F.max_pool3d(y, 3, 1, 1).view(n, c, *extents)


def windows(x: Any, weight: torch.Tensor) -> Any:
    """Attention within rows of voxels."""
    n, c, d, h, w = x.shape
    tokens = x.permute(0, 2, 3, 4, 1).reshape(-1, w, c)
    scores = (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens
    return scores.view(n, d, h, w, c).permute(0, 4, 1, 2, 3) * weight.sum()


def boxes(x: Any, weight: torch.Tensor) -> Any:
    """Attention within boxes of a padded and shifted volume, with a mask, as Swin has it."""
    n, c, *extents = x.shape
    y = F.pad(
        x.permute(0, 2, 3, 4, 1), (0, 0, 0, -extents[2] % 2, 0, -extents[1] % 2, 0, -extents[0] % 2)
    )
    y = y.roll((-1, -1, -1), (1, 2, 3))
    d, h, w = (extent // 2 for extent in y.shape[1:4])
    y = y.view(n, d, 2, h, 2, w, 2, c).permute(0, 1, 3, 5, 2, 4, 6, 7).contiguous().view(-1, 8, c)
    mask = torch.arange(d * h * w * 64, dtype=torch.float64).sin().to(weight).view(-1, 1, 8, 8)
    scores = (y @ y.transpose(1, 2)).view(n, -1, 1, 8, 8) + mask
    y = scores.view(-1, 8, 8).softmax(-1) @ y
    y = y.view(-1, 2, 2, 2, c).view(n, d, h, w, 2, 2, 2, c).permute(0, 1, 4, 2, 5, 3, 6, 7)
    y = y.contiguous().view(n, 2 * d, 2 * h, 2 * w, c).roll((1, 1, 1), (1, 2, 3))
    y = y[:, : extents[0], : extents[1], : extents[2]].permute(0, 4, 1, 2, 3)
    return F.conv3d(x + y, weight[:, :, None], padding=(0, 1, 1))


def positions(x: Any, weight: torch.Tensor) -> Any:
    """By rows, each with weights of its own; the batch is not the first dim there."""
    n, c, d, h, w = x.shape
    rows = x.permute(3, 0, 2, 4, 1).reshape(h, -1, c)
    table = torch.linspace(-1, 1, h * c * c).to(rows).view(h, c, c) * weight.mean()
    return torch.bmm(rows, table).view(h, n, d, w, c).permute(1, 4, 2, 0, 3)


def norms(x: Any, weight: torch.Tensor) -> Any:
    """Normalised samples by samples, as one normalisation of many groups."""
    y = x.reshape(-1, *x.shape[2:]).unsqueeze(1)
    y = F.instance_norm(y) + F.group_norm(y, 1) + F.layer_norm(y, y.shape[1:])
    return y.reshape(x.shape) * weight.sum()


def everything(x: Any, weight: torch.Tensor) -> Any:
    y = x.flatten() * weight.sum()
    return y.softmax(0).view(x.shape) * y.mean() + y.reshape(-1, x.shape[-1]).sum(0)


NETWORKS = {f.__name__: f for f in (slices, channels, windows, boxes, positions, norms, everything)}


def merged(x: Any, weight: torch.Tensor, *, network: str, seed: int) -> Any:
    return NETWORKS[network](recut(x * 2, seed), weight)


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    grid = draw(grids(ranks))
    batch = draw(st.integers(grid["data"], grid["data"] + 3))
    channels = draw(st.integers(1, 3))
    extents = [draw(st.integers(max(p, 2), p + 3)) for p in parts_of(grid, 3)]
    return Example(
        grid=grid,
        shape=(batch, channels, *extents),
        weights=((channels, channels, 3, 3),),
        options={"network": draw(st.sampled_from([*NETWORKS])), "seed": draw(st.integers(0, 5))},
        dtype=draw(dtypes),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", in_gate([2, 3, 4, 6], kept=[2, 6]))
def test_equal_to_serial(ranks: int) -> None:
    run_ranks(ranks, compare, merged, draw_examples(examples(ranks), 30))


def lists_of_windows() -> None:
    """Five windows along a dim, and a mini-batch whose depth is cut: ranks share lists evenly."""
    grid = hs.Grid(depth=2)
    for n, held in ((1, (63, 62)), (2, (125, 125)), (3, (188, 187))):
        x = hs.shard(torch.arange(n * 10.0**3).view(n, 1, 10, 10, 10), grid)
        split = x.view(n, 5, 2, 5, 2, 5, 2)
        windows = split.permute(0, 1, 3, 5, 2, 4, 6).reshape(-1, 2, 4)
        assert len(windows.local) == held[grid.coords["depth"]]
        back = windows.view(n, 5, 5, 5, 2, 2, 2).permute(0, 1, 4, 2, 5, 3, 6)
        assert back.partition.box(grid.coords) == split.partition.box(grid.coords)


def test_lists_of_windows() -> None:
    run_ranks(2, lists_of_windows)


def lists_of_other_rank() -> None:
    """A list whose elements get a dim more is split as the list itself would be."""
    full = torch.arange(540.0).view(3, 2, 10, 3, 3)
    x = hs.shard(full, hs.Grid(depth=2))
    for inner in ((1, 3, 3), (9,), (1, 1, 3, 3), (3, 1, 3)):
        y = x.reshape(60, 1, 3, 3).reshape(60, *inner).reshape(full.shape)
        assert y.partition == x.partition
        assert y.full().equal(full)


def test_lists_of_other_rank() -> None:
    run_ranks(2, lists_of_other_rank)


def as_channels() -> None:
    """A batch that has become channels, as modulated convolutions have it: another dim is cut."""
    full = torch.randn(4, 2, 6, 5, 4, dtype=torch.float64)
    weight = torch.randn(4, 2, 3, 3, 3, dtype=torch.float64)
    slopes = torch.rand(8, dtype=torch.float64)
    x = hs.shard(full, hs.Grid(data=2, width=2))
    for rule in (
        lambda y: F.conv3d(y, weight, groups=4),
        lambda y: F.batch_norm(y, None, None, training=True),
        lambda y: F.instance_norm(y),
        lambda y: F.group_norm(y, 4),
        lambda y: F.prelu(y, slopes),
    ):
        found, expected = (rule(whole.view(1, 8, 6, 5, 4)) for whole in (x, full))
        assert "data" in found.partition.axes
        assert distance(found.full(), expected) <= 1e-10


def test_as_channels() -> None:
    run_ranks(4, as_channels)
