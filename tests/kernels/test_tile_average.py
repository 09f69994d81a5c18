"""Average pooling by tiles against torch's own and the reference (tier: no process)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyperslab.kernels import registry
from hyperslab.kernels.avg_pool import TileAverage, reference

AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@pytest.mark.parametrize("kernel", [[2], [3, 1], [2, 2, 2], [1, 3, 2], [5, 2, 1]], ids=str)
def test_equals_torch(kernel: list[int]) -> None:
    torch.manual_seed(0)
    extents = [k * n for k, n in zip(kernel, (3, 4, 2), strict=False)]
    x = torch.randn(2, 3, *extents, dtype=torch.float64, requires_grad=True)
    y, want = TileAverage.apply(x, kernel), AVG[len(kernel)](x, kernel)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(y, reference(x, kernel))
    factor = torch.randn_like(want)
    (dx,), (want_dx,) = (torch.autograd.grad(out, x, factor) for out in (y, want))
    torch.testing.assert_close(dx, want_dx)
    one = x[:1, :1].detach().requires_grad_()  # each element is a pass
    assert torch.autograd.gradgradcheck(lambda t: TileAverage.apply(t, kernel), (one,))


def test_autocast_gives_float32_as_torch_does() -> None:
    x = torch.randn(1, 2, 4, 4, 4).bfloat16().requires_grad_()
    assert registry.choose("avg_pool", x, [2] * 3, [2] * 3) == "torch"
    with torch.autocast("cpu", torch.bfloat16):
        assert registry.choose("avg_pool", x, [2] * 3, [2] * 3) == "tiles"
        y, want = TileAverage.apply(x, [2] * 3), F.avg_pool3d(x, 2)
    assert y.dtype == want.dtype == torch.float32
    torch.testing.assert_close(y, want)
    (dx,), (want_dx,) = (torch.autograd.grad(out.sum(), x) for out in (y, want))
    assert dx.dtype == torch.bfloat16
    torch.testing.assert_close(dx, want_dx)


def test_leaves_other_windows_to_torch() -> None:
    x = torch.randn(1, 2, 4, 4, 5)
    assert (
        registry.choose("avg_pool", x, [2, 2, 2], [2, 2, 2]) == "torch"
    )  # 5 is not a whole number of tiles
    assert registry.choose("avg_pool", x[..., :4].contiguous(), [2, 2, 2], [1, 2, 2]) == "torch"
    assert (
        registry.choose("avg_pool", x[..., :4], [2, 2, 2], [2, 2, 2]) == "torch"
    )  # not contiguous
    assert registry.choose("avg_pool", x[..., :4].contiguous(), [2, 2, 2], [2, 2, 2]) == "tiles"
