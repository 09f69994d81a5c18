"""Averages of windows by sparse maps against torch's own and the reference (tier: no process)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hyperslab.kernels import registry
from hyperslab.kernels.compile import library
from hyperslab.kernels.memory_format import CHANNELS_LAST
from hyperslab.kernels.resample import Line
from hyperslab.ops.pooling import average_windows

AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def reference(x: torch.Tensor, lines: Sequence[Line], divisor: int) -> torch.Tensor:
    """Returns the sum of every window over ``divisor``; autograd has its gradient."""
    for dim, line in enumerate(lines, start=2):
        end = (line.outputs - 1) * line.stride + line.kernel - line.padding
        margins = [line.padding, max(0, end - x.shape[dim])]
        x = F.pad(x.movedim(dim, -1), margins).unfold(-1, line.kernel, line.stride)
        x = x[..., : line.outputs, :].sum(-1).movedim(-1, dim)
    return x / divisor


@st.composite
def lines_in(draw: st.DrawFn) -> tuple[list[int], list[Line], bool]:
    """Draws extents of a block, and windows that meet it, also with gaps in between."""
    extents, lines = [], []
    ceil = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        kernel, stride = draw(st.integers(1, 5)), draw(st.integers(1, 6))
        padding = draw(st.integers(0, kernel // 2))
        extent = draw(st.integers(kernel, 9))  # torch refuses some smaller ones
        rest = extent + 2 * padding - kernel
        outputs = (rest + (stride - 1 if ceil else 0)) // stride + 1
        if (outputs - 1) * stride >= extent + padding:  # torch has no window in the padding alone
            outputs -= 1
        extents.append(extent)
        lines.append(Line(kernel, stride, padding, outputs))
    return extents, lines, ceil


@given(lines_in(), st.booleans())
def test_equals_torch(case: tuple[list[int], list[Line], bool], last: bool) -> None:
    extents, lines, ceil = case
    torch.manual_seed(0)
    last &= len(lines) > 1
    order = CHANNELS_LAST[len(lines) + 2] if last else torch.contiguous_format
    x = torch.randn(2, 3, *extents, dtype=torch.float64).contiguous(memory_format=order)
    x.requires_grad_()
    kernel, stride, padding, outputs = map(list, zip(*lines, strict=True))
    y = average_windows(x, lines, 7)
    assert list(y.shape[2:]) == outputs
    assert y.is_contiguous(memory_format=order)
    torch.testing.assert_close(y, reference(x, lines, 7))
    if len(lines) == 1:
        want = F.avg_pool2d(
            x[:, :, None], [1, *kernel], [1, *stride], [0, *padding], ceil, divisor_override=7
        )[:, :, 0]
    else:
        want = AVG[len(lines)](x, kernel, stride, padding, ceil, divisor_override=7)
    torch.testing.assert_close(y, want)
    factor = torch.randn_like(want)
    (dx,), (want_dx,) = (torch.autograd.grad(out, x, factor) for out in (y, want))
    assert dx.is_contiguous(memory_format=order)
    torch.testing.assert_close(dx, want_dx)


def test_reads_a_view_where_it_lies() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 5, 6, 9, requires_grad=True)
    view = x[:, :, 1:, ::2, :-1]
    y = average_windows(view, [Line(2, 2, 0, n) for n in (2, 1, 4)], 8)
    torch.testing.assert_close(y, F.avg_pool3d(view, 2))
    assert y.is_contiguous()


@pytest.mark.parametrize("line", [Line(2, 2, 0, 3), Line(3, 2, 1, 3), Line(2, 3, 0, 2)], ids=str)
def test_the_gradient_can_be_differentiated(line: Line) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: average_windows(t, [line] * 2, 4), (x,))


@pytest.mark.skipif(library() is None, reason="no compiler: torch's own runs")
def test_autocast_gives_float32_as_torch_does() -> None:
    x = torch.randn(1, 2, 4, 4, 4).bfloat16().requires_grad_()
    assert registry.choose("avg_pool", x) == "torch"
    with torch.autocast("cpu", torch.bfloat16):
        assert registry.choose("avg_pool", x) == "sparse"
        y, want = average_windows(x, [Line(2, 2, 0, 2)] * 3, 8), F.avg_pool3d(x, 2)
    assert y.dtype == want.dtype == torch.float32
    torch.testing.assert_close(y, want)
    (dx,), (want_dx,) = (torch.autograd.grad(out.sum(), x) for out in (y, want))
    assert dx.dtype == torch.bfloat16
    torch.testing.assert_close(dx, want_dx)


@pytest.mark.skipif(library() is None, reason="no compiler: torch's own runs")
def test_leaves_other_blocks_to_torch() -> None:
    x = torch.randn(1, 2, 4, 4, 5)
    assert registry.choose("avg_pool", x) == "sparse"
    assert registry.choose("avg_pool", x.half()) == "torch"
