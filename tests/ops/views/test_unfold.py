"""Windows along a dim equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {"views": {"unfold"}, "spatial": {"unfold", "fold"}}


def windows(x: Any, *, dim: int, size: int, step: int, seed: int) -> Any:
    return recut(x * 2, seed).unfold(dim, size, step) * 3


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([1, 2, 3, 3]))
    grid = draw(grids(ranks))
    least = [grid["data"], 1, *parts_of(grid, n)]
    shape = tuple(draw(st.integers(low, low + 6)) for low in least)
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    return Example(
        grid=grid,
        shape=shape,
        options={
            "dim": dim,
            "size": draw(st.integers(1, shape[dim])),
            "step": draw(st.integers(1, 5)),
            "seed": draw(st.integers(0, 5)),
        },
        dtype=draw(dtypes),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_equal_to_serial(ranks: int) -> None:
    run_ranks(ranks, compare, windows, draw_examples(examples(ranks), 30))


def patches(x: Any, weight: torch.Tensor, *, size: int) -> Any:
    """Tokens of a volume, as transformers of patches take them."""
    y = x
    for dim in (2, 3, 4):
        y = y.unfold(dim, size, size)
    tokens = y.permute(0, 2, 3, 4, 1, 5, 6, 7).flatten(4)
    return tokens @ weight


@pytest.mark.parametrize("axes", [{"depth": 2}, {"data": 2, "width": 2}, {"depth": 3}], ids=str)
def test_patches(axes: dict[str, int]) -> None:
    ranks = axes.get("data", 1) * axes.get("depth", 1) * axes.get("width", 1)
    cases = [
        Example(grid=axes, shape=shape, weights=((16, 3),), options={"size": 2})
        for shape in ((2, 2, 12, 4, 6), (2, 2, 9, 5, 8))
    ]
    run_ranks(ranks, compare, patches, cases)


def nothing_travels() -> list[Any]:
    """Windows that fit into the blocks: views where torch has views, and written to alike."""
    full = torch.arange(48.0).view(1, 1, 8, 3, 2)
    expected, x = full.clone(), hs.shard(full.clone(), hs.Grid(depth=2))
    y = x.unfold(2, 2, 2)
    assert y.local.data_ptr() == x.local.data_ptr()
    y.mul_(-1)
    expected.unfold(2, 2, 2).mul_(-1)
    assert torch.equal(x.full(), expected)
    z = x.unfold(2, 3, 3)
    assert torch.equal(z.full(), expected.unfold(2, 3, 3))
    for size, step in ((0, 1), (9, 1), (2, 0)):
        with pytest.raises(ValueError, match="unfold"):
            x.unfold(2, size, step)
    with pytest.raises(hs.LayoutError):
        z.mul_(2)  # torch's view would write into x
    return list(y.partition.shape)


def test_views() -> None:
    assert run_ranks(2, nothing_travels) == [[1, 1, 4, 3, 2, 2]] * 2


def columns(x: Any, weight: torch.Tensor, *, seed: int, **options: Any) -> Any:
    """Convolution as a product with the columns of an image."""
    found = F.unfold(recut(x * 2, seed), **options)
    return torch.einsum("oc,bcl->bol", weight, found)


def folded(x: Any, *, seed: int, **options: Any) -> Any:
    """Columns of an image, changed, and summed to an image again."""
    columns = F.unfold(recut(x * 2, seed), **options)
    columns = columns.sin() if seed % 2 else columns.sort(1).values
    return F.fold(columns, tuple(x.shape[2:]), **options)


@st.composite
def images(draw: st.DrawFn, ranks: int) -> Example:
    grid = draw(grids(ranks).filter(lambda g: g["depth"] == 1))
    channels = draw(st.integers(1, 2))
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    least = map(max, spans, parts_of(grid, 2))
    return Example(
        grid=grid,
        shape=(grid["data"], channels, *(draw(st.integers(low, low + 4)) for low in least)),
        weights=((2, channels * kernel[0] * kernel[1]),),
        options={
            "kernel_size": kernel,
            "dilation": dilation,
            "padding": draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
            "stride": draw(st.integers(1, 3)),
            "seed": draw(st.integers(0, 5)),
        },
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_columns_of_images(ranks: int) -> None:
    run_ranks(ranks, compare, columns, draw_examples(images(ranks), 24))


@pytest.mark.parametrize("ranks", RANKS)
def test_columns_to_images(ranks: int) -> None:
    run_ranks(
        ranks, compare, folded, [replace(e, weights=()) for e in draw_examples(images(ranks), 16)]
    )


def fold_without_a_batch() -> None:
    full = torch.randn(3, 9, 6)
    columns = F.unfold(full, 2, stride=2)
    x = hs.shard(full, hs.Grid(width=2), batch="none")
    assert torch.allclose(
        F.fold(F.unfold(x, 2, stride=2), (9, 6), 2, stride=2).full(),
        F.fold(columns, (9, 6), 2, stride=2),
    )
    with pytest.raises(RuntimeError, match="Given output_size"):
        F.fold(F.unfold(x, 2, stride=2), (7, 6), 2, stride=2)


def test_fold_without_a_batch() -> None:
    run_ranks(2, fold_without_a_batch)
