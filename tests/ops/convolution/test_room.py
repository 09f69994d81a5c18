"""A block is made where its halo has room (tiers: no process; two ranks)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.comm.exchange import Gathers
from hyperslab.kernels.memory_format import CHANNELS_LAST, HaloPaddedBuffer
from hyperslab.kernels.registry import choose_as_if_on
from tests.ranks import run_ranks


def test_a_block_lies_in_the_middle_of_its_buffer() -> None:
    room = HaloPaddedBuffer(1, 2)
    block = room.block((1, 3, 4, 5, 6), torch.float32, torch.channels_last_3d)
    assert block is not None
    assert room.buffer is not None
    assert not block._is_view()  # autograd lets a user change it in place
    assert block.stride() == torch.empty_like(block, memory_format=CHANNELS_LAST[5]).stride()
    block.fill_(1)
    room.buffer[:, :, 1:5] += 1
    assert room.buffer.shape == (1, 3, 7, 5, 6)
    assert bool((block == 2).all())
    assert room.block((1, 3, 4, 5, 6), torch.float32, torch.channels_last_3d) is None


@pytest.mark.parametrize(
    ("samples", "order"), [(2, torch.channels_last_3d), (1, torch.contiguous_format)]
)
def test_no_room_where_planes_lie_apart(samples: int, order: torch.memory_format) -> None:
    room = HaloPaddedBuffer(1, 1)
    assert room.block((samples, 3, 4, 5, 6), torch.float32, order) is None
    assert room.buffer is None


class Network(nn.Module):
    """Chains before convolutions: with and without what is kept, and one that two read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(2, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv3d(8, 8, 3, padding=1)
        self.third = nn.Conv3d(8, 4, 3, stride=2, padding=1)
        self.point = nn.Conv3d(8, 4, 1, stride=2)
        self.deep = nn.Conv3d(4, 3, (5, 3, 1), padding=(2, 1, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(F.relu(self.norm(self.first(x))))
        y = F.leaky_relu(x, 0.1)
        z = self.third(y) + self.point(y)
        y.mul(2)
        return self.deep(F.avg_pool3d(F.relu(z), (1, 2, 2)))


def losses_and_gradients(x: torch.Tensor, axes: dict[str, int] | None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    network = Network()
    if axes is not None:
        grid = hs.Grid(**axes)
        hs.parallelize(network, grid)
        x = hs.shard(x, grid)
    loss = network(x).square().mean()
    loss.backward()
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    return [loss.detach(), *(g.detach().clone() for g in gradients)]


def compare(extents: tuple[int, ...]) -> None:
    """Blocks of more and of fewer elements than are kept rather than computed again."""
    torch.manual_seed(0)
    for samples, extent in ((1, extents), (2, (8, 8, 8)), (1, (4, 8, 8))):
        x = torch.randn(samples, 2, *extent)
        want = losses_and_gradients(x, None)
        for axes in ({"depth": 2}, {"height": 2}):
            got = losses_and_gradients(x, axes)
            for mine, theirs in zip(got, want, strict=True):
                assert float((mine - theirs).norm() / theirs.norm()) < 1e-4


def change_in_place(grid: hs.Grid) -> None:
    """What a convolution keeps may not be changed; torch says so in its own words."""
    x = hs.shard(torch.randn(1, 4, 8, 4, 4), grid)
    y = F.relu(F.conv3d(x, torch.randn(4, 4, 3, 3, 3, requires_grad=True), padding=1))
    z = F.conv3d(y, torch.randn(4, 4, 3, 3, 3, requires_grad=True), padding=1)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        z.square().mean().backward()


def on_ranks() -> None:
    compare((40, 24, 24))
    change_in_place(hs.Grid(depth=2))


def test_equals_serial_on_two_ranks() -> None:
    run_ranks(2, on_ranks)


def joined_once() -> tuple[int, int, list[float]]:
    """Counts how often a small block and its halo are joined, on the CPU and as on a GPU.

    And how far gradients as on a GPU, first and second ones, are from those of the CPU.
    """
    grid = hs.Grid(depth=2)
    full = torch.randn(1, 2, 8, 4, 4, dtype=torch.float64)
    weight = torch.randn(3, 2, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    counts, found = [], []
    for kind in ("cpu", "cuda"):
        joined: list[object] = []
        with pytest.MonkeyPatch.context() as patch, choose_as_if_on(kind):
            for name in ("join", "bring"):
                own = getattr(Gathers, name)
                patch.setattr(Gathers, name, lambda *of, own=own: (joined.append(of), own(*of))[1])  # noqa: B023
            x = hs.shard(full, grid).requires_grad_()
            y = F.conv3d(x, weight, padding=1).square().sum()
            y.backward()
            counts.append(len(joined))
            (first,) = torch.autograd.grad(
                F.conv3d(x, weight, padding=1).pow(3).sum(), x, create_graph=True
            )
            (second,) = torch.autograd.grad(first.square().sum(), x)
        assert x.grad is not None
        found.append([x.grad.local, second.local])
    return *counts, [float((a - b).abs().max()) for a, b in zip(*found, strict=True)]


def test_a_gpu_keeps_a_small_block_with_its_halo() -> None:
    for on_cpu, on_gpu, errors in run_ranks(2, joined_once):
        assert (on_cpu, on_gpu) == (2, 1)
        assert max(errors) <= 1e-10
