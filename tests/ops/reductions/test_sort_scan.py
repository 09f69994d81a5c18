"""Operators along one dim that is not cut, refused where it is (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hyperslab as hs
from tests.ops.serial import average
from tests.ranks import run_ranks

COVERS = {
    "reductions": {
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
        "cummax",
        "cummin",
        "logcumsumexp",
        "quantile",
        "nanquantile",
    }
}

CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("sort", (1,), {}),
    ("sort", (1, True), {}),
    ("sort", (), {"dim": 1, "descending": True}),
    ("sort", (), {"stable": True, "dim": -4}),
    ("argsort", (1,), {}),
    ("mode", (1, True), {}),
    ("mode", (), {"dim": 1}),
    ("topk", (2, 1), {}),
    ("topk", (3,), {"dim": 1, "largest": False}),
    ("kthvalue", (2, 1), {"keepdim": True}),
    ("kthvalue", (1, -4), {}),
    ("median", (1,), {}),
    ("median", (1, True), {}),
    ("nanmedian", (), {"dim": 1}),
    ("cumsum", (1,), {}),
    ("cumsum", (), {"dim": 1, "dtype": torch.float64}),
    ("cumsum", (), {"axis": 1}),
    ("cumprod", (1,), {}),
    ("cummax", (1,), {}),
    ("cummin", (1,), {}),
    ("logcumsumexp", (1,), {}),
    ("quantile", (0.3, 1), {}),
    ("quantile", (0.5,), {"dim": 1, "keepdim": True, "interpolation": "nearest"}),
    ("nanquantile", (0.5, 1), {}),
]


def parts(value: Any) -> list[torch.Tensor]:
    values = list(value) if isinstance(value, tuple) else [value]
    return [v.full() if isinstance(v, hs.Sharded) else v for v in values]


def check() -> None:
    grid = hs.Grid(data=2, depth=2)
    full = torch.randn(4, 5, 6, 3, 2, dtype=torch.float64)
    for name, args, options in CALLS:
        for functional in (True, False):
            a, b = full.clone().requires_grad_(), full.clone().requires_grad_()
            found, expected = (
                getattr(torch, name)(x, *args, **options)
                if functional
                else getattr(x, name)(*args, **options)
                for x in (hs.shard(a, grid), b)
            )
            assert type(found) is type(expected) or isinstance(found, hs.Sharded)
            for x, y in zip(parts(found), parts(expected), strict=True):
                assert x.dtype == y.dtype
                assert torch.allclose(x, y), (name, args, options)
            if parts(expected)[0].requires_grad:
                (parts(found)[0] ** 2).sum().backward()
                (parts(expected)[0] ** 2).sum().backward()
                assert torch.allclose(average(a.grad), b.grad), (name, args, options)


def test_along_channels() -> None:
    run_ranks(4, check)


def all_of_it() -> None:
    """Without a dim, of a tensor that nothing cuts."""
    full = torch.randn(3, 4)
    x = hs.shard(full, hs.Grid(depth=2))
    assert torch.equal(x.median(), full.median())
    assert torch.equal(x.quantile(0.2), full.quantile(0.2))
    assert torch.equal(x.msort().full(), full.msort())


def test_of_a_whole_tensor() -> None:
    run_ranks(2, all_of_it)


def refused(name: str, args: tuple[Any, ...]) -> None:
    x = hs.shard(torch.randn(4, 2, 6, 4, 4), hs.Grid(depth=2))
    getattr(x, name)(*args)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("sort", (2,)),
        ("argsort", (2,)),
        ("mode", (2,)),
        ("topk", (2, 2)),
        ("kthvalue", (2, 2)),
        ("median", ()),
        ("nanmedian", (2,)),
        ("cumsum", (2,)),
        ("cumprod", (2,)),
        ("cummax", (2,)),
        ("cummin", (2,)),
        ("logcumsumexp", (2,)),
        ("quantile", (0.5,)),
        ("nanquantile", (0.5, 2)),
    ],
)
def test_a_cut_dim_is_refused(name: str, args: tuple[Any, ...]) -> None:
    message = (
        rf"^{name} needs all of dim .*, which is cut: .*\n    use hyperslab.gather\(x, \('depth',\)"
    )
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(2, refused, name, args)


def batch_refused(name: str) -> None:
    x = hs.shard(torch.randn(4, 2), hs.Grid(data=2))
    if name == "msort":
        x.msort()
    else:
        x.quantile(torch.tensor([0.1, 0.2]), 1)


@pytest.mark.parametrize(
    ("name", "message"), [("msort", "msort needs all of dim 0"), ("several q", "one q at a time")]
)
def test_more_that_is_refused(name: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(2, batch_refused, name)
