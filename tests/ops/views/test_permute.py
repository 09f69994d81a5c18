"""Permuted tensors: cuts go with their dims (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import hyperslab as hs
from hyperslab.tensor.sharded import Policy
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "views": {
        "permute",
        "transpose",
        "swapaxes",
        "swapdims",
        "movedim",
        "moveaxis",
        "t",
        "adjoint",
        "channel_shuffle",
        "native_channel_shuffle",
        "__get__",  # of T, H, mT, mH
    }
}


def reordered(x: Any, *, how: str, args: tuple[Any, ...], method: bool, seed: int = 0) -> Any:
    """Twice the input, so that a view does not hide an error."""
    y = recut(x * 2, seed)
    return getattr(y, how)(*args) if method else getattr(torch, how)(y, *args)


@st.composite
def orders(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([0, 1, 2, 3, 3]))
    grid = draw(grids(ranks))
    least = [grid["data"], 1, *(parts_of(grid, n) if n else ())]
    shape = tuple(draw(st.integers(low, low + 3)) for low in least)
    dims = st.integers(-len(shape), len(shape) - 1)
    method, how = (
        draw(st.booleans()),
        draw(st.sampled_from(["permute", "transpose", "swapaxes", "swapdims", "movedim"])),
    )
    if how == "permute":
        order = tuple(draw(st.permutations(range(len(shape)))))
        args: tuple[Any, ...] = order if method and draw(st.booleans()) else (order,)
    elif how == "movedim" and draw(st.booleans()):
        some = draw(st.integers(1, len(shape)))
        args = tuple(tuple(draw(st.permutations(range(len(shape))))[:some]) for _ in range(2))
    else:
        args = (draw(dims), draw(dims))
    return Example(
        grid=grid,
        shape=shape,
        options={"how": how, "args": args, "method": method, "seed": draw(st.integers(0, 5))},
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_order(ranks: int) -> None:
    run_ranks(ranks, compare, reordered, draw_examples(orders(ranks), 28))


def transposed(x: Any, *, name: str) -> Any:
    member = getattr(x * 2, name)
    return member() if callable(member) else member


@pytest.mark.parametrize("name", ["T", "H", "mT", "mH", "t", "adjoint"])
def test_transposes_without_dims(name: str) -> None:
    two = [Example(grid={"data": 2}, shape=(3, 4), options={"name": name})]
    cut = Example(grid={"height": 2}, shape=(2, 3, 5, 4), options={"name": name})
    run_ranks(2, compare, transposed, two if name in ("T", "H", "t") else [*two, cut])


def complex_adjoint() -> None:
    full = torch.randn(2, 3, 4, 5, dtype=torch.complex128)
    x = hs.shard(full, hs.Grid(width=2))
    assert torch.equal(x.mH.full(), full.mH.resolve_conj())
    assert torch.equal(torch.adjoint(x).full(), full.mH.resolve_conj())
    assert torch.equal(torch.moveaxis(x, 1, 3).full(), torch.moveaxis(full, 1, 3))


def test_complex_adjoint() -> None:
    run_ranks(2, complex_adjoint)


def channels_last_norm(x: Any, scale: Any, weight: Any, back: Any) -> Any:
    """As ConvNeXt has it: norm and dense layers over the channels as the last dim."""
    y = x.permute(0, 2, 3, 4, 1)
    y = F.layer_norm(y, (x.shape[1],), scale)
    y = F.linear(F.gelu(F.linear(y, weight)), back)
    return x + y.permute(0, 4, 1, 2, 3)


@pytest.mark.parametrize(
    "grid", [{"depth": 2, "height": 2}, {"data": 2, "width": 2}, {"depth": 4}], ids=str
)
def test_channels_last_layers(grid: dict[str, int]) -> None:
    weights = ((3,), (7, 3), (3, 7))
    run_ranks(
        4, compare, channels_last_norm, [Example(grid=grid, shape=(2, 3, 5, 4, 6), weights=weights)]
    )


def on_swapped_dims(x: Any, weight: Any, *, order: tuple[int, ...], kind: str) -> Any:
    """Spatial dims that other axes cut than they usually do."""
    y = x.permute(order)
    if kind == "conv":
        y = F.conv3d(y, weight, padding=1)
    elif kind == "strided":
        y = F.conv3d(y, weight, stride=2, padding=(1, 0, 2))
    elif kind == "pool":
        y = F.max_pool3d(y, 3, 2, 1) * weight.sum()
    elif kind == "norm":
        y = F.batch_norm(y, None, None, weight[0, :, 0, 0, 0], training=True)
    return y.transpose(2, 4)


@pytest.mark.parametrize("kind", ["conv", "strided", "pool", "norm"])
def test_spatial_dims_in_another_order(kind: str) -> None:
    cases = [
        Example(
            grid=grid,
            shape=(2, 3, 6, 7, 5),
            weights=((4, 3, 3, 3, 3),),
            options={"order": order, "kind": kind},
        )
        for grid in ({"depth": 2, "height": 2}, {"depth": 4}, {"height": 2, "width": 2})
        for order in [(0, 1, 3, 2, 4), (0, 1, 4, 2, 3), (0, 1, 4, 3, 2)]
    ]
    run_ranks(4, compare, on_swapped_dims, cases)


def statistics_of_replicas() -> None:
    """The batch is found wherever it stands."""
    full, grid = torch.randn(4, 3, 6, 2, 2, dtype=torch.float64), hs.Grid(data=2, depth=2)
    x = hs.shard(full, grid)
    x = hs.Sharded.from_local(x.local, x.partition, grid, Policy(batch_norm="replica"))
    y = F.batch_norm(x.transpose(0, 2), None, None, training=True).transpose(0, 2)
    expected = [F.batch_norm(part, None, None, training=True) for part in full.chunk(2)]
    assert torch.allclose(y.full(), torch.cat(expected))


def test_statistics_of_replicas() -> None:
    run_ranks(4, statistics_of_replicas)


def in_place() -> None:
    """A permuted tensor is a view: what is done to it is done to its base."""
    full = torch.randn(2, 3, 6, 4, 4, dtype=torch.float64)
    leaf, serial = full.clone().requires_grad_(), full.clone().requires_grad_()
    x, y = hs.shard(leaf, hs.Grid(depth=2)) * 1, serial * 1
    for base in (x, y):
        base.permute(0, 4, 2, 1, 3).mul_(3)
        base.transpose(1, 2).add_(1)
    assert torch.equal(x.full(), y)
    (x.full() ** 2).sum().backward()
    (y**2).sum().backward()
    assert torch.allclose(leaf.grad, serial.grad)
    flat = (x * 1).flatten(1).unsqueeze(1)
    for view in (flat, flat.transpose(0, 1), flat.detach()):
        with pytest.raises(hs.LayoutError, match="in place, on a copy"):
            view.mul_(2)
    assert (flat * 2).mul_(2).shape == flat.shape


def test_in_place() -> None:
    run_ranks(2, in_place)


def refused(case: str) -> None:
    x = hs.shard(torch.randn(2, 3, 6, 4, 4), hs.Grid(depth=2))
    {
        "order": lambda: x.permute(0, 1, 2, 3, 3),
        "repeated": lambda: x.movedim((0, 1), (2, 2)),
    }[case]()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("order", "is not an order of the dims"),
        ("repeated", "repeated dims"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(2, refused, case)


def test_a_transpose_needs_dims() -> None:
    x = hs.shard(torch.randn(2, 3, 4), hs.Grid())
    for name in ("T", "H"):
        with pytest.raises(hs.UnsupportedOp, match=r"use x.transpose\(a, b\)"):
            getattr(x, name)


def test_no_such_dim() -> None:
    with pytest.raises(IndexError, match="transpose: dim 2 is out of range for a tensor of 2 dims"):
        hs.shard(torch.randn(2, 3), hs.Grid()).transpose(0, 2)


def shuffled_channels() -> None:
    full = torch.randn(2, 6, 5, 4, 4)
    x = hs.shard(full, hs.Grid(data=2, depth=2))
    for shuffle in (nn.ChannelShuffle(3), lambda y: torch.native_channel_shuffle(y, 2)):
        assert torch.equal(shuffle(x).full(), shuffle(full))
    with pytest.raises(hs.LayoutError, match="multiple of the groups"):
        F.channel_shuffle(x, 4)


def test_channels_are_shuffled() -> None:
    run_ranks(4, shuffled_channels)
