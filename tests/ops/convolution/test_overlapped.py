"""All ways of a cut convolution, each also on blocks of the other (tier: a few gloo ranks)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.comm import exchange
from hyperslab.ops import convolution
from tests.ranks import run_ranks

SHAPES = {(2, 1, 1): (7, 5, 6), (2, 2, 1): (6, 7, 5), (2, 2, 2): (6, 7, 5), (3, 2, 1): (9, 5, 4)}


def errors(axes: tuple[int, int, int], stride: int, way: str) -> list[float]:
    """Relative differences of output and gradients from the serial convolution, in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "thin", lambda _: way != "slabs")
        if way != "buffer by one index":
            patch.setattr(exchange, "FEW_ELEMENTS", 0)
        grid = hs.Grid(depth=axes[0], height=axes[1], width=axes[2])
        x = torch.randn(2, 3, *SHAPES[axes], dtype=torch.float64, requires_grad=True)
        weight = torch.randn(4, 3, 3, 3, 3, dtype=torch.float64, requires_grad=True)
        want = F.conv3d(x, weight, None, stride, 1)
        factor = torch.randn_like(want)
        want_dx, want_dw = torch.autograd.grad((want * factor).sum(), (x, weight))
        cut = hs.shard(x, grid)
        y = F.conv3d(cut, weight, None, stride, 1)
        part = factor[y.box.slices()]
        dx, dw = torch.autograd.grad((y.local * part).sum(), (x, weight))
        torch.distributed.all_reduce(dw)
        # The adjoint of shard averages: see the note on gradients.
        pairs = [(y.full(), want), (dx * grid.size, want_dx), (dw, want_dw)]
        return [((a - b).norm() / b.norm()).item() for a, b in pairs]


@pytest.mark.parametrize("way", ["slabs", "buffer by one index", "buffer piece by piece"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_equals_serial(axes: tuple[int, int, int], stride: int, way: str) -> None:
    size = axes[0] * axes[1] * axes[2]
    for per_rank in run_ranks(size, errors, axes, stride, way):
        assert max(per_rank) <= 1e-12


def failing_behind_messages() -> None:
    """A program that catches the error and goes on gets its own halo, not that of before."""
    calls = itertools.count()
    conv_backward = convolution.conv_backward

    def fail_behind_the_slab(*given: Any) -> Any:
        if next(calls) % 2:  # of the block, while the gradient of the one slab travels
            raise ZeroDivisionError
        return conv_backward(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "thin", lambda _: False)
        x = torch.randn(1, 3, 6, 5, 5, dtype=torch.float64)
        weight = torch.randn(3, 3, 3, 3, 3, dtype=torch.float64)
        cut = hs.shard(x, hs.Grid(depth=2)).requires_grad_()
        for _ in range(3):  # more often than there are slots for messages
            with pytest.raises(RuntimeError):
                F.conv3d(cut * 100, weight.float(), padding=1)
        y = F.conv3d(cut, weight, padding=1)
        torch.testing.assert_close(y.full(), F.conv3d(x, weight, padding=1))
        patch.setattr(convolution, "conv_backward", fail_behind_the_slab)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                F.conv3d(cut * 100, weight, padding=1).sum().backward()
        patch.undo()
        patch.setattr(convolution, "thin", lambda _: False)
        F.conv3d(cut, weight, padding=1).square().sum().backward()
        leaf = x.clone().requires_grad_()
        F.conv3d(leaf, weight, padding=1).square().sum().backward()
        torch.testing.assert_close(cut.grad.full(), leaf.grad)


def test_a_convolution_that_failed_leaves_no_messages() -> None:
    run_ranks(2, failing_behind_messages)
