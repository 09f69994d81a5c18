"""Maximum pooling of windows that overlap: its graph, types and memory (tier: a few gloo ranks)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.kernels.compile import library
from hyperslab.kernels.resample import Line
from hyperslab.ops.pooling import WindowMaximum
from tests.ranks import run_ranks

SHAPE = (2, 3, 9, 8, 7)
LINES = (Line(3, 2, 1, 5), Line(3, 2, 1, 4), Line(2, 2, 0, 3))


def torchs(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool3d(x, (3, 3, 2), (2, 2, 2), (1, 1, 0))


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_of_gradients(channels_last: bool) -> None:
    x = torch.randn(SHAPE)
    x = x.contiguous(memory_format=torch.channels_last_3d) if channels_last else x
    results = []
    for run in (torchs, lambda t: WindowMaximum.apply(t, LINES, t.dtype)):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad((run(leaf) ** 3).sum(), leaf, create_graph=True)
        (again,) = torch.autograd.grad((dx**2).sum(), leaf)
        results.append((dx.detach(), again))
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected)


def saved_and_equal(dtype: torch.dtype) -> tuple[int, torch.dtype, float, float]:
    """Bytes that a cut pooling saves, its type under autocast, how far it is from torch's."""
    torch.manual_seed(0)
    grid = hs.Grid(depth=2)
    x = torch.randn(1, 8, 16, 8, 8)
    g = torch.randn(1, 8, 8, 4, 4)
    serial = x.to(dtype, copy=True).requires_grad_()
    leaf = hs.shard(x.to(dtype, copy=True).requires_grad_(), grid)
    leaf.retain_grad()
    sizes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autocast("cpu", torch.bfloat16):
        expected = F.max_pool3d(serial, 3, 2, 1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = F.max_pool3d(leaf, 3, 2, 1)
            kind = y.local.dtype
    expected.backward(g.to(expected.dtype))
    (y.full() * g).sum().backward()
    forward = (y.full() - expected).abs().max().item()
    difference = leaf.grad.full() - serial.grad
    assert kind == expected.dtype
    return sum(sizes), kind, forward, (difference.norm() / serial.grad.norm()).item()


@pytest.mark.skipif(library() is None, reason="no compiler: torch's own runs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_byte_an_element_is_saved(dtype: torch.dtype) -> None:
    for saved, kind, forward, backward in run_ranks(2, saved_and_equal, dtype):
        assert saved == 8 * 4 * 4 * 4
        assert kind == torch.float32
        assert forward == 0
        assert backward <= (1e-6 if dtype == torch.float32 else 1e-2)
