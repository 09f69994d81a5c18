"""Networks of which a part needs whole volumes (tier: a few gloo ranks)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from tests.ops.serial import distance
from tests.ranks import run_ranks
from tests.selection import by_rotation

GRIDS = [{"depth": 2}, {"data": 2, "height": 2}, {"depth": 2, "height": 2, "width": 2}]


class Fourier(nn.Module):
    """A convolution over the whole volume, by its spectrum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, 2, 2, 2, dtype=torch.complex128))

    def forward(self, x: Any) -> Any:
        spectrum = torch.fft.rfftn(x, dim=(2, 3, 4))
        low = torch.einsum("bixyz,ioxyz->boxyz", spectrum[:, :, :2, :2, :2], self.weight)
        padding = [b - a for a, b in zip(low.shape[2:], spectrum.shape[2:], strict=True)]
        low = F.pad(low, [0, padding[2], 0, padding[1], 0, padding[0]])
        return torch.fft.irfftn(low, s=x.shape[2:], dim=(2, 3, 4))


class Axial(nn.Module):
    """Attention along the width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(channels, 3 * channels)

    def forward(self, x: Any, *, scale: float = 0.5) -> Any:
        q, k, v = self.qkv(x.permute(0, 2, 3, 4, 1)).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, scale=scale)
        return y.permute(0, 4, 1, 2, 3)


class Transformer(nn.Module):
    """Over all voxels of a small map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.position = nn.Parameter(0.1 * torch.randn(1, 80, channels))
        self.layer = nn.TransformerEncoderLayer(channels, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Any) -> Any:
        tokens = self.layer(x.flatten(2).transpose(1, 2) + self.position)
        return tokens.transpose(1, 2).reshape(x.shape)


class Ranked(nn.Module):
    """The voxels of every line by their size."""

    def __init__(self, channels: int) -> None:
        super().__init__()

    def forward(self, x: Any) -> Any:
        return torch.sort(x, dim=-1).values


class Mixer(nn.Module):
    """A linear layer along the width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.mix(x)


class Net(nn.Module):
    """A U with the given layer at its bottom: what that gives meets a skip connection."""

    def __init__(self, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding=1)
        self.down = nn.Conv3d(4, 4, 2, stride=2)
        self.bottom = layer(4)
        self.up = nn.ConvTranspose3d(4, 4, 2, stride=2)
        self.last = nn.ModuleList([nn.GroupNorm(2, 8), nn.Conv3d(8, 2, 3, padding=1)])

    def forward(self, x: Any) -> Any:
        skip = F.silu(self.first(x))
        y = self.up(self.bottom(self.down(skip)))
        y = torch.cat([y, skip], 1)
        for layer in self.last:
            y = layer(y)
        return y


CUT = {"fourier": Fourier, "axial": Axial, "ranked": Ranked, "mixer": Mixer}
"""Layers that stay cut, where nobody asks for more."""

LAYERS = {**CUT, "transformer": Transformer}


def size(axes: dict[str, int]) -> int:
    return math.prod(axes.values())


def pair(layer: str) -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    """The same network twice, and data."""
    torch.manual_seed(3)
    serial, parallel = (Net(LAYERS[layer]).double() for _ in range(2))
    parallel.load_state_dict(serial.state_dict())
    x = torch.randn(2, 1, 10, 8, 8, dtype=torch.float64)
    return serial, parallel, x, torch.randint(2, (2, 10, 8, 8))


def differences(axes: dict[str, int], layer: str, until: str | list[str]) -> float:
    """Of outputs and of all gradients."""
    serial, parallel, x, labels = pair(layer)
    grid = hs.Grid(**axes)
    named = parallel.bottom if until and layer == "axial" else until
    hs.parallelize(parallel, grid, until=named)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = serial(a), parallel(hs.shard(b, grid))
    assert set(found.partition.axes) == {axis for axis, n in axes.items() if n > 1}
    F.cross_entropy(expected, labels).backward()
    F.cross_entropy(found, hs.shard(labels, grid, channels=False)).backward()
    pairs = [(found.full(), expected), (b.grad, a.grad)]
    both = zip(parallel.parameters(), serial.parameters(), strict=True)
    return max(distance(f, e) for f, e in [*pairs, *((p.grad, q.grad) for p, q in both)])


@pytest.mark.parametrize(("layer", "axes"), by_rotation(LAYERS, GRIDS), ids=str)
def test_equal_to_the_serial_run(axes: dict[str, int], layer: str) -> None:
    assert max(run_ranks(size(axes), differences, axes, layer, "bottom")) <= 1e-10


@pytest.mark.parametrize(("layer", "axes"), by_rotation(CUT, GRIDS), ids=str)
def test_equal_where_the_layer_stays_cut(axes: dict[str, int], layer: str) -> None:
    assert max(run_ranks(size(axes), differences, axes, layer, [])) <= 1e-10


class Takes(nn.Module):
    """Says how what it is given is cut, and changes it in place if told so."""

    def forward(self, x: Any, *, more: Any, in_place: bool = False) -> Any:
        self.seen = [v.partition.axes for v in (x, more[0], more[1]["key"])]
        return x.mul_(2) if in_place else x * 2


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.takes, self.list = Takes(), nn.ModuleList([nn.Conv3d(1, 1, 1)])

    def forward(self, x: Any, in_place: bool = False) -> Any:
        return self.takes(x, more=[x, {"key": x * 1}], in_place=in_place) + x


def arguments() -> list[str]:
    """Every cut tensor is gathered, and the log says so once."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hyperslab")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    grid = hs.Grid(data=2, depth=2)
    model = Holder()
    hs.parallelize(model, grid, until=["takes"], find_unused_parameters=True)
    full = torch.randn(2, 1, 4, 3, 3)
    for _ in range(2):
        x = hs.shard(full, grid)
        y = model(x)
    assert model.takes.seen == [("data",)] * 3
    assert y.partition == x.partition
    assert torch.equal(y.full(), 3 * full)
    with pytest.raises(hs.LayoutError, match="in place, on a copy where serial torch has a view"):
        model(x, in_place=True)
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return records


def test_arguments_and_log() -> None:
    records = run_ranks(4, arguments)
    assert len(records[0]) == 1
    assert "until 'takes'" in records[0][0]
    assert "gathered along depth; the ranks there repeat the work" in records[0][0]


def test_alone() -> None:
    """On one rank nothing is gathered, nor copied."""
    model = hs.parallelize(Holder(), hs.Grid(), until="takes")
    full = torch.randn(2, 1, 4, 3, 3)
    y = model(hs.shard(full.clone(), hs.Grid()), in_place=True)
    assert torch.equal(y.full(), 4 * full)


@pytest.mark.parametrize(
    ("until", "message"),
    [
        ("absent", "until='absent' is not a part of Holder\n    its parts are takes, list"),
        (nn.ReLU(), "until=a ReLU is not a part of Holder"),
        (["takes", "list"], "'list' is a ModuleList, which is never called\n.*list\\.0"),
    ],
)
def test_what_is_no_part(until: Any, message: str) -> None:
    model = Holder()
    with pytest.raises(hs.LayoutError, match=message):
        hs.parallelize(model, hs.Grid(), until=until)
    assert not model.takes._forward_pre_hooks
    hs.parallelize(model, hs.Grid())
