"""Running sums, sorting and quantiles along any dim (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import Example, average, compare
from tests.ranks import run_ranks
from tests.selection import in_gate

COVERS = {
    "scans": {
        "sort",
        "argsort",
        "msort",
        "mode",
        "topk",
        "kthvalue",
        "median",
        "nanmedian",
        "cumsum",
        "cumprod",
        "cumsum_",
        "cumprod_",
        "cummax",
        "cummin",
        "logcumsumexp",
        "quantile",
        "nanquantile",
    }
}


def calls(dim: int) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Every form of every operator along one dim of five."""
    return [
        ("sort", (dim,), {}),
        ("sort", (dim, True), {}),
        ("sort", (), {"dim": dim, "descending": True}),
        ("sort", (), {"stable": True, "dim": dim - 5}),
        ("argsort", (dim,), {}),
        ("mode", (dim, True), {}),
        ("mode", (), {"dim": dim}),
        ("topk", (2, dim), {}),
        ("topk", (1,), {"dim": dim, "largest": False}),
        ("kthvalue", (2, dim), {"keepdim": True}),
        ("kthvalue", (1, dim - 5), {}),
        ("median", (dim,), {}),
        ("median", (dim, True), {}),
        ("nanmedian", (), {"dim": dim}),
        ("cumsum", (dim,), {}),
        ("cumsum", (), {"dim": dim, "dtype": torch.float64}),
        ("cumsum", (), {"axis": dim}),
        ("cumprod", (dim,), {}),
        ("cummax", (dim,), {}),
        ("cummin", (dim,), {}),
        ("logcumsumexp", (dim,), {}),
        ("quantile", (0.3, dim), {}),
        ("quantile", (0.5,), {"dim": dim, "keepdim": True, "interpolation": "nearest"}),
        ("nanquantile", (0.5, dim), {}),
    ]


def parts(value: Any) -> list[torch.Tensor]:
    values = list(value) if isinstance(value, tuple) else [value]
    return [v.full() if isinstance(v, hs.Sharded) else v for v in values]


DIMS = (1, 2, 0, 4)  # of the cases below


def check(grid: dict[str, int], shape: tuple[int, ...], dim: int, seed: int) -> None:
    """Uneven shards in the lines' dim and in others; every value occurs several times.

    By turns of a function and of the tensor's method: each form is both, on one dim or another.
    """
    ranks = hs.Grid(**grid)
    full = (torch.randn(shape, dtype=torch.float64) * 4).round() / 4 + 0.1
    for number, (name, args, options) in enumerate(calls(dim)):
        functional = (number + DIMS.index(dim)) % 2 == 0
        a, b = full.clone().requires_grad_(), full.clone().requires_grad_()
        found, expected = (
            getattr(torch, name)(x, *args, **options)
            if functional
            else getattr(x, name)(*args, **options)
            for x in (recut(hs.shard(a, ranks), seed), b)
        )
        assert type(found) is type(expected) or isinstance(found, hs.Sharded)
        for x, y in zip(parts(found), parts(expected), strict=True):
            assert x.dtype == y.dtype
            assert torch.allclose(x, y, rtol=1e-10), (name, args, options)
        if parts(expected)[0].requires_grad:
            (parts(found)[0] ** 2).sum().backward()
            (parts(expected)[0] ** 2).sum().backward()
            assert torch.allclose(average(a.grad), b.grad, rtol=1e-10), (name, args, options)


@pytest.mark.parametrize("seed", in_gate([0, 3], kept=[0]))
@pytest.mark.parametrize(
    ("grid", "shape", "dim"),
    [
        pytest.param({"data": 2, "depth": 2}, (4, 5, 6, 3, 2), 1, id="not cut"),
        pytest.param({"data": 2, "depth": 2}, (4, 3, 7, 3, 2), 2, id="cut by depth"),
        pytest.param({"data": 2, "height": 2}, (5, 1, 2, 5, 3), 0, id="cut by data"),
        pytest.param({"depth": 2, "width": 2}, (1, 1, 3, 1, 5), 4, id="no other dim is free"),
    ],
)
def test_along_any_dim(grid: dict[str, int], shape: tuple[int, ...], dim: int, seed: int) -> None:
    run_ranks(4, check, grid, shape, dim, seed)


def extremes() -> None:
    """Infinities, NaN, overflow in half precision and integers, with totals from every rank."""
    grid = hs.Grid(depth=4)
    x = torch.randn(1, 2, 9, 2, 2)
    x[0, 0, 4] = torch.inf
    x[0, 1, 2, 0] = torch.nan
    x[0, 1, 6, 1] = -torch.inf
    for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
        found = getattr(hs.shard(x, grid), name)(2)
        for y, z in zip(parts(found), parts(getattr(x, name)(2)), strict=True):
            assert torch.allclose(y.double(), z.double(), equal_nan=True), name
    numbers = torch.randint(-3, 4, (1, 2, 9, 2, 2))
    for dtype in (torch.int64, torch.uint8, torch.bool):
        for name in ("cumsum", "cumprod", "cummax"):
            whole = getattr(numbers.to(dtype), name)(2)
            cut = getattr(hs.shard(numbers.to(dtype), grid), name)(2)
            for y, z in zip(parts(cut), parts(whole), strict=True):
                assert y.dtype == z.dtype
                assert torch.equal(y, z), (name, dtype)
    with pytest.raises(hs.LayoutError, match="complex numbers needs all of dim 2"):
        hs.shard(x.to(torch.complex64), grid).logcumsumexp(2)
    half = torch.rand(1, 1, 64, 3, 1).to(torch.bfloat16)
    exact = half.double().cumsum(2)
    found = hs.shard(half, grid).cumsum(2).full()
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), exact, rtol=2**-8)


def test_extreme_values() -> None:
    run_ranks(4, extremes)


def all_of_it() -> None:
    """Without a dim, of a tensor that nothing cuts."""
    full = torch.randn(3, 4)
    x = hs.shard(full, hs.Grid(depth=2))
    assert torch.equal(x.median(), full.median())
    assert torch.equal(x.quantile(0.2), full.quantile(0.2))
    assert torch.equal(x.msort().full(), full.msort())


def test_of_a_whole_tensor() -> None:
    run_ranks(2, all_of_it)


def of_everything(x: Any, *, of_all: bool) -> Any:
    """Several quantiles, and those of all elements, which every rank has meanwhile."""
    q = torch.tensor([0.1, 0.5, 0.8], dtype=x.dtype)
    if not of_all:
        found = [x.quantile(q, dim, keepdim=True) for dim in (0, 1, 2, -1)]
        return x + sum((i + 1) * y[i] for y in found for i in range(3))
    values = [x.quantile(q), x.quantile(0.3, keepdim=True), x.nanquantile(q), x.median()]
    return torch.cat([y.flatten() for y in (*values, x.nanmedian())])


@pytest.mark.parametrize("of_all", [False, True])
def test_several_quantiles_and_of_all_elements(of_all: bool) -> None:
    grids = ({"data": 2, "depth": 2}, {"depth": 2, "width": 2})
    cases = [Example(grid, (2, 3, 5, 4, 6), options={"of_all": of_all}) for grid in grids]
    run_ranks(4, compare, of_everything, cases)


def sought_in_a_cut_tensor() -> None:
    x = hs.shard(torch.rand(4, 2), hs.Grid(data=2))
    with pytest.raises(hs.LayoutError, match="a number or an ordinary tensor"):
        x.quantile(x[:, 0], 1)


def test_sought_quantiles_are_not_cut() -> None:
    run_ranks(2, sought_in_a_cut_tensor)


def in_place() -> None:
    grid, full = hs.Grid(depth=2), torch.rand(2, 3, 5, 4, 2, dtype=torch.float64) + 0.5
    for name in ("cumsum_", "cumprod_"):
        for dim in (1, 2, -1):
            leaf, serial = full.clone().requires_grad_(), full.clone().requires_grad_()
            x, expected = hs.shard(leaf, grid) * 2, serial * 2
            view = x[:, 0]
            assert getattr(x, name)(dim) is x
            getattr(expected, name)(dim)
            assert torch.allclose(x.full(), expected, rtol=1e-12)
            assert torch.allclose(view.full(), expected[:, 0], rtol=1e-12)
            (x.full() ** 2).sum().backward()
            (expected**2).sum().backward()
            assert leaf.grad is not None
            assert torch.allclose(leaf.grad, serial.grad, rtol=1e-10)
    numbers = hs.shard(torch.ones(1, 1, 4, 1, 1, dtype=torch.int32), grid)
    assert numbers.cumsum_(2).dtype == torch.int32
    assert numbers.full().flatten().tolist() == [1, 2, 3, 4]


def test_in_place() -> None:
    run_ranks(2, in_place)
