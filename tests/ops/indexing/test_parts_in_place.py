"""Parts of tensors that operators in place change, wherever they lie (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from monai.inferers import sliding_window_inference
from torch import nn

import hyperslab as hs
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks


def made(x: Any, kind: str) -> Any:
    """A tensor of the shape of ``x``: cut, cut zeros, or ordinary."""
    if kind == "zeros":
        return torch.zeros(tuple(x.shape), dtype=x.dtype)
    return torch.zeros_like(x) if kind == "zeros_like" else x * 2


def changed(x: Any, *, kind: str, windows: list[tuple[slice, ...]], held: bool) -> Any:
    """Windows that overlap, each changed twice, as sums of predictions are."""
    y = made(x, kind)
    if kind == "zeros":  # one that has a graph becomes cut no more, as after a window of one rank
        y[:] += x
    for number, window in enumerate(windows, 1):
        source = (x * number).sigmoid()[window]
        if held and number > 1:
            part = y[window]
            part += source
            part.mul_(2).clamp_(max=3)
            y = y + part.sum()
        else:
            y[window] += source
    return y * y


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([1, 2, 3]))
    grid = draw(grids(ranks))
    shape = (draw(st.integers(grid["data"], grid["data"] + 1)), 2)
    shape += tuple(draw(st.integers(p, p + 4)) for p in parts_of(grid, n))

    def window() -> tuple[slice, ...]:
        parts = []
        for extent in shape[2:]:
            low = draw(st.integers(0, extent - 1))
            parts.append(slice(low, draw(st.integers(low + 1, extent))))
        first = draw(st.sampled_from([slice(None), slice(0, 1)]))
        return (first, slice(None), *parts)

    return Example(
        grid=grid,
        shape=shape,
        options={
            "kind": draw(st.sampled_from(["cut", "zeros_like", "zeros"])),
            "windows": [window() for _ in range(draw(st.integers(1, 3)))],
            "held": draw(st.booleans()),
        },
        dtype=draw(dtypes),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_windows(ranks: int) -> None:
    run_ranks(ranks, compare, changed, draw_examples(examples(ranks), 20))


def one_plane(x: Any, *, dim: int, at: int) -> Any:
    """A plane that one rank owns, which serial torch has as a view."""
    y = x * 2
    index = (*[slice(None)] * dim, at)
    plane = y[index]
    plane += 1
    plane.mul_(3).clamp_(max=4)
    seen = plane * 3
    y[index] -= plane.sigmoid()
    return y + seen.unsqueeze(dim)


def test_planes() -> None:
    shape = (3, 2, 5, 4, 3)
    places = [(2, 0), (2, -1), (2, 2), (3, 1), (4, 2), (0, 2), (1, 0)]
    options = [{"dim": dim, "at": at} for dim, at in places]
    for axes in ({"depth": 2, "width": 2}, {"data": 2, "height": 2}):
        run_ranks(4, compare, one_plane, [Example(axes, shape, options=o) for o in options])


def without_a_graph(x: Any) -> Any:
    """Values that change under no_grad, where gradients stay as they were."""
    y = x * 2
    part = y[:, :, :2]
    with torch.no_grad():
        part.mul_(3)
        y[:, :, 1:2] += 1
    y = y * y.detach()
    again = y[:, :, -1]
    with torch.no_grad():
        again.add_(1)
    return y + again.exp().unsqueeze(2)


def test_changes_without_a_graph() -> None:
    for axes in ({"depth": 2, "width": 2}, {"data": 2, "depth": 2}):
        run_ranks(4, compare, without_a_graph, [Example(axes, (2, 2, 5, 4, 3))])


def seen_by_others() -> list[bool]:
    x = hs.shard(torch.arange(12.0).view(1, 1, 6, 2), hs.Grid(height=2))
    y = x * 1
    part, same = y[:, :, :2], y[:, :, :2]
    turned = part.transpose(2, 3)
    part += 1
    for stale in (same, turned):
        with pytest.raises(hs.LayoutError, match="was changed in place since"):
            stale.sum()
    y[:, :, 4] = 0.0
    with pytest.raises(hs.LayoutError, match="was changed in place since"):
        part.add_(1)
    with pytest.raises(hs.LayoutError, match="in place, on a copy"):
        y[:, :, :2].transpose(2, 3).add_(1)
    rows = (y * 1).flatten(2)
    part = rows[:, :, :2]
    rows.sort(-1)  # which has gathered what was merged
    with pytest.raises(hs.LayoutError, match="in place, on a copy"):
        part += 1
    tall = y * 1
    turned = tall[:, :, :2]
    turned.transpose_(2, 3)
    with pytest.raises(hs.LayoutError, match="in place, on a copy"):
        turned += 1  # its place has other dims
    part = tall[:, :, :2]
    tall.transpose_(2, 3)
    with pytest.raises(hs.LayoutError, match="in place, on a copy"):
        part += 1
    for rows, view in (
        (2, lambda base: base.flatten()[1:5].view(1, 1, 2, 2)),  # from the middle of a row on
        (6, lambda base: base.to(torch.complex64).conj()),
    ):
        whole = torch.zeros(1, 1, 6, 2)
        with pytest.raises(hs.LayoutError, match="of an ordinary one of which this is a part"):
            view(whole).add_(x[:, :, :rows])
        assert type(whole) is torch.Tensor
    fresh = torch.zeros(1, 1, 6, 2)
    kept = fresh[:, :, 1:3]
    view = fresh[:, :, 1:5]
    with pytest.raises(hs.LayoutError, match="of an ordinary one of which this is a part"):
        view += x[:, :, 1:5]
    assert kept.abs().sum() == 0
    with torch.inference_mode():
        sums = torch.zeros(1, 1, 6, 2)
        with pytest.raises(hs.LayoutError, match=r"needs torch.no_grad\(\) in place of"):
            sums[:, :, 1:5] += x[:, :, 1:5]
    return [torch.equal(y.full()[0, 0, :3, 0], torch.tensor([1.0, 3.0, 4.0]))]


def test_what_others_see() -> None:
    assert run_ranks(2, seen_by_others) == [[True]] * 2


def windows_of_monai(
    axes: dict[str, int], shape: tuple[int, ...], options: dict[str, Any]
) -> float:
    torch.manual_seed(0)
    convolution = (nn.Conv2d, nn.Conv3d)[len(shape) - 4]
    net = convolution(1, 2, 3, padding=1).double().eval()
    x = torch.randn(shape, dtype=torch.float64)
    grid = hs.Grid(**axes)
    with torch.no_grad():
        expected = sliding_window_inference(x, predictor=net, **options)
        found = sliding_window_inference(hs.shard(x, grid), predictor=net, **options)
    if isinstance(found, hs.Sharded):  # windows of few voxels are gathered by the network
        found = found.full()
    return float((found - expected).abs().max())


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 1, 11, 8, 9), {"roi_size": (4, 5, 4), "sw_batch_size": 3, "mode": "gaussian"}),
        ((1, 1, 5, 8, 9), {"roi_size": (8, 4, 6), "sw_batch_size": 1, "overlap": 0.5}),
        ((1, 1, 13, 9), {"roi_size": (6, 4), "sw_batch_size": 2, "buffer_steps": 1}),
    ],
)
def test_sliding_windows_of_monai(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    for axes in ({"depth": 2, "width": 2}, {"height": 2, "width": 2}):
        if len(shape) == 5 or "depth" not in axes:
            assert max(run_ranks(4, windows_of_monai, axes, shape, options)) < 1e-12
