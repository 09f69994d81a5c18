"""Sums, means, losses, reshapes and dense layers equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "linalg": {"linear"},
    "losses": {"mse_loss", "l1_loss", "smooth_l1_loss"},
    "reductions": {"sum", "mean"},
    "views": {
        "reshape",
        "view",
        "reshape_as",
        "view_as",
        "flatten",
        "ravel",
        "unflatten",
        "squeeze",
        "unsqueeze",
    },
}

LOSSES = {"mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss}


def reduction(x: Any, *, kind: str, method: bool, **options: Any) -> Any:
    if method:
        return getattr(x, kind)(**options)
    return getattr(torch, kind)(x, **options)


@st.composite
def tensors(draw: st.DrawFn, ranks: int, **fixed: Any) -> Example:
    """Any shape of two to five dims."""
    n = draw(st.sampled_from([0, 1, 2, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(p, p + 4)) for p in parts_of(grid, n)] if n else []
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 4)), *extents)
    return Example(
        grid=grid, shape=shape, dtype=draw(dtypes), seed=draw(st.integers(0, 99)), **fixed
    )


@st.composite
def reductions(draw: st.DrawFn, ranks: int) -> Example:
    example = draw(tensors(ranks))
    dims = st.lists(st.integers(0, len(example.shape) - 1), unique=True)
    dim = draw(st.one_of(st.none(), st.integers(-1, 1), dims))
    options = {"kind": draw(st.sampled_from(["sum", "mean"])), "method": draw(st.booleans())}
    if dim is not None:
        options |= {"dim": dim, "keepdim": draw(st.booleans())}
    return Example(**{**vars(example), "options": options})


@pytest.mark.parametrize("ranks", RANKS)
def test_any_sum_and_mean(ranks: int) -> None:
    run_ranks(ranks, compare, reduction, draw_examples(reductions(ranks), 28))


def loss(
    x: Any, target: torch.Tensor, *, kind: str, cut: bool, weighted: bool, **options: Any
) -> Any:
    """Against a target that is cut as well, or that every rank holds."""
    y = hs.shard(target, x.grid) if cut and isinstance(x, hs.Sharded) else target
    if weighted:
        generator = torch.Generator().manual_seed(3)
        options["weight"] = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(
            x.dtype
        )
    return LOSSES[kind](x, y, **options)


@st.composite
def losses(draw: st.DrawFn, ranks: int) -> Example:
    example = draw(tensors(ranks))
    kind = draw(st.sampled_from(list(LOSSES)))
    options = {
        "kind": kind,
        "reduction": draw(st.sampled_from(["none", "mean", "sum"])),
        "cut": draw(st.booleans()),
        "weighted": kind in ("mse", "l1") and draw(st.booleans()),
    }
    if kind == "smooth_l1":
        options["beta"] = draw(st.sampled_from([0.0, 0.3, 1.0]))
    return Example(**{**vars(example), "options": options, "weights": (example.shape,)})


@pytest.mark.parametrize("ranks", RANKS)
def test_any_loss(ranks: int) -> None:
    run_ranks(ranks, compare, loss, draw_examples(losses(ranks), 28))


def test_a_weighted_l1_loss() -> None:
    """Torch (2.13) drops the weight before the rule is called, which looks for it itself."""
    options = {"kind": "l1", "reduction": "sum", "cut": False, "weighted": True}
    compare(loss, [Example(grid={}, shape=(2, 3), weights=((2, 3),), options=options)])


def change_shape(x: Any, *, how: str, args: tuple[Any, ...]) -> Any:
    """By a method of the tensor; twice the input, so that a view does not hide an error."""
    return getattr(x * 2, how)(*args)


@st.composite
def reshapes(draw: st.DrawFn, ranks: int) -> Example:
    """Any merging of neighbouring dims after the batch, and their splitting up again."""
    example = draw(tensors(ranks))
    shape = example.shape
    bounds = [0, 1, *sorted(draw(st.sets(st.integers(2, len(shape))))), len(shape)]
    merged = [math.prod(shape[a:b]) for a, b in itertools.pairwise(bounds) if b > a]
    wanted: list[int] = merged[:1]
    for extent in merged[1:]:
        factors = [f for f in range(1, extent + 1) if extent % f == 0]
        split = draw(st.sampled_from([1, *factors]))
        wanted += [split, extent // split] if split > 1 else [extent]
    if draw(st.booleans()):
        wanted[draw(st.integers(0, len(wanted) - 1))] = -1
    how = draw(st.sampled_from(["reshape", "view"]))
    return Example(**{**vars(example), "options": {"how": how, "args": tuple(wanted)}})


@pytest.mark.parametrize("ranks", RANKS)
def test_any_reshape_behind_the_batch(ranks: int) -> None:
    run_ranks(ranks, compare, change_shape, draw_examples(reshapes(ranks), 28))


@pytest.mark.parametrize(
    ("how", "args", "shape"),
    [
        ("flatten", (1,), (3, 2, 4, 5, 6)),
        ("flatten", (2, 3), (3, 2, 4, 5, 6)),
        ("flatten", (-2, -1), (3, 2, 4, 5, 6)),
        ("unflatten", (1, (2, -1)), (3, 6, 4, 5, 6)),
        ("ravel", (), (2, 2, 5, 6)),
        ("unsqueeze", (1,), (3, 2, 4, 5, 6)),
        ("unsqueeze", (0,), (3, 2, 4, 5, 6)),
        ("unsqueeze", (-1,), (3, 2, 4, 5, 6)),
        ("squeeze", (1,), (3, 1, 4, 5, 6)),
        ("squeeze", (), (3, 1, 4, 5, 6)),
        ("squeeze", (0,), (1, 3, 4, 5, 6)),
        ("squeeze", (2,), (3, 1, 4, 5, 6)),
        ("squeeze", ((1, 2),), (3, 1, 4, 5, 6)),
        ("view_as", (torch.empty(3, 40, 6),), (3, 2, 4, 5, 6)),
        ("reshape_as", (torch.empty(3, 2, 20, 6),), (3, 2, 4, 5, 6)),
    ],
)
def test_other_shapes(how: str, args: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    options = {"how": how, "args": args}
    cases = [
        Example(grid=grid, shape=shape, options=options)
        for grid in ({"data": 3, "depth": 2}, {"height": 2, "width": 3})
    ]
    run_ranks(6, compare, change_shape, cases)


def linear(x: Any, weight: torch.Tensor, bias: Any, *, leave: bool) -> Any:
    return F.linear(x.flatten(1) if leave else x, weight, bias)


@pytest.mark.parametrize("axes", [{"data": 2}, {"depth": 2}, {"data": 2, "depth": 3}], ids=str)
def test_dense_layers(axes: dict[str, int]) -> None:
    cases = [
        Example(
            grid=axes,
            shape=shape,
            weights=((5, math.prod(shape[1:]) if leave else shape[-1]), bias),
            options={"leave": leave},
        )
        for shape, leave in [((3, 7), False), ((4, 2, 6, 3, 3), True), ((4, 2, 6, 3, 3), False)]
        for bias in [None, (5,)]
    ]
    run_ranks(math.prod(axes.values()), compare, linear, cases)


def refused(case: str) -> None:
    x = hs.shard(torch.randn(4, 2, 6, 4, 4), hs.Grid(data=2, width=2))
    {
        "batch behind": lambda: x.transpose(0, 1).reshape(8, 6, 4, 4),
        "batch divided": lambda: x[:3].reshape(1, 3, 2, 6, 4, 4).reshape(3, 12, 4, 4).view(2, -1),
        "local shape": lambda: x.view(2, -1, 7),
        "dtype": lambda: x.view(torch.int32),
        "cut weight": lambda: F.linear(torch.randn(3, 4), hs.shard(torch.randn(4, 4), x.grid)),
        "target": lambda: F.mse_loss(x, torch.randn(4, 2, 6, 4, 1)),
        "deprecated": lambda: F.mse_loss(x, x, size_average=False),
    }[case]()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("batch behind", "the batch dim is cut and would merge with others before it"),
        ("batch divided", "or be divided across a cut"),
        ("local shape", "shapes of a cut tensor are global"),
        ("dtype", "use x.to"),
        ("cut weight", "linear: the input has to be cut"),
        ("target", "differ in shape"),
        ("deprecated", "use reduction="),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(4, refused, case)


def change_in_place() -> None:
    """A flatten that gathers makes a copy where serial torch makes a view."""
    x = hs.shard(torch.randn(2, 3, 4, 4, 4), hs.Grid(depth=2))
    for way in (lambda y: y.mul_(2), lambda y: F.relu(y, inplace=True)):
        with pytest.raises(hs.LayoutError, match="in place, on a copy"):
            way(x.flatten(1))
    with pytest.raises(hs.LayoutError, match="dropout in place"):
        F.dropout(x.flatten(1), inplace=True)
    assert x.flatten(1).mul(1).mul_(2).shape == (2, 192)


def test_a_copy_is_not_changed_in_place() -> None:
    run_ranks(2, change_in_place)
