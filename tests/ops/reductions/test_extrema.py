"""Maxima, minima, their indices, and counts, with ties over ranks (tier: a few gloo ranks)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.reductions.test_reductions import dims_of, tensors
from tests.ops.serial import RANKS, Example, compare, draw_examples
from tests.ranks import run_ranks

COVERS = {
    "reductions": {
        "amax",
        "amin",
        "max",
        "min",
        "aminmax",
        "argmax",
        "argmin",
        "any",
        "all",
        "count_nonzero",
    }
}


def extremum(x: Any, *, kind: str, method: bool, **options: Any) -> Any:
    """Of values with many ties, the same ones on several ranks; indices weigh in as well."""
    ties = x - (x - x.round()).detach()
    found = getattr(ties, kind)(**options) if method else getattr(torch, kind)(ties, **options)
    if not isinstance(found, tuple):
        return found
    return found[0] * 2 + found[1]


def kinds() -> list[str]:
    """The functions that this torch differentiates: 2.11 has no derivative of `aminmax`."""
    x = torch.ones(2, requires_grad=True)
    try:
        sum(torch.aminmax(x)).backward()
    except RuntimeError:
        return ["amax", "amin", "max", "min"]
    return ["amax", "amin", "max", "min", "aminmax"]


@st.composite
def extrema(draw: st.DrawFn, ranks: int) -> Example:
    example = draw(tensors(ranks))
    kind = draw(st.sampled_from(kinds()))
    options = dims_of(draw, example, several=kind.startswith("am") and kind != "aminmax")
    options |= {"kind": kind, "method": draw(st.booleans())}
    return replace(example, options=options)


@pytest.mark.parametrize("ranks", RANKS)
def test_any_extremum(ranks: int) -> None:
    run_ranks(ranks, compare, extremum, draw_examples(extrema(ranks), 28))


def without_gradient(x: Any, *, kind: str, method: bool, **options: Any) -> Any:
    """Indices, truths and counts, of values with many ties; the input joins for its gradient."""
    ties = (x * 0.7).round()
    if kind in ("any", "all"):
        ties = ties == 0 if kind == "any" else ties < 2
    if kind == "count_nonzero":
        options.pop("keepdim", None)
    found = getattr(ties, kind)(**options) if method else getattr(torch, kind)(ties, **options)
    return found.to(x.dtype) + 0 * x.sum()


@st.composite
def indices_and_counts(draw: st.DrawFn, ranks: int) -> Example:
    example = draw(tensors(ranks))
    kind = draw(st.sampled_from(["argmax", "argmin", "any", "all", "count_nonzero"]))
    options = dims_of(draw, example, several=not kind.startswith("arg"))
    if "axis" in options and kind == "count_nonzero":
        options = {}
    if not options and kind.startswith("arg"):
        options = {"keepdim": draw(st.booleans())}
    options |= {"kind": kind, "method": draw(st.booleans())}
    return replace(example, options=options)


@pytest.mark.parametrize("ranks", RANKS)
def test_any_index_and_count(ranks: int) -> None:
    run_ranks(ranks, compare, without_gradient, draw_examples(indices_and_counts(ranks), 28))


def whole(value: Any) -> Any:
    if isinstance(value, tuple):
        return [whole(part) for part in value]
    return value.full() if isinstance(value, hs.Sharded) else value


OPERATORS = {
    "max": lambda x: x.max(),
    "max over a dim": lambda x: x.max(2),
    "max over the batch": lambda x: x.max(0),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax((0, 3)),
    "aminmax": lambda x: x.aminmax(),
    "argmax": lambda x: x.argmax(),
    "argmin": lambda x: x.argmin(3),
    "any": lambda x: x.any(2),
    "any of nothing": lambda x: torch.any(x, dim=()),
    "all": lambda x: x.all(),
    "all over two": lambda x: x.all((0, 2)),
    "count": lambda x: x.count_nonzero(),
}


def of_types() -> None:
    """Integers, truths, half precision and NaN: values, types and indices."""
    grid, full = hs.Grid(data=2, height=2), torch.randn(5, 3, 6, 5).mul_(3).round_()
    holes = full.masked_fill(full == 2, float("nan"))
    kinds = [torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16]
    values = [full.abs().to(kind) for kind in kinds] + [full, holes, full > 1]
    for value in values:
        x = hs.shard(value, grid)
        for name, op in OPERATORS.items():
            if value.dtype == torch.bool and name.startswith("arg"):
                continue
            expected, found = op(value), whole(op(x))
            for a, b in zip(
                expected if isinstance(expected, tuple) else [expected],
                found if isinstance(found, list) else [found],
                strict=True,
            ):
                assert a.dtype == b.dtype, name
                assert torch.equal(a.nan_to_num(77), b.nan_to_num(77)), (name, value.dtype)


def test_types_and_nan() -> None:
    run_ranks(4, of_types)


def gradient_of_nan() -> None:
    """Where NaN is the result torch gives its gradient to all NaNs, to the first, or as NaN."""
    grid = hs.Grid(depth=2)
    full = torch.randn(2, 2, 4, 3, 3, dtype=torch.float64)
    full[:, 0, ::3, 0] = float("nan")
    for op in (
        lambda x: x.max(),
        lambda x: x.min(),
        lambda x: x.max(2).values,
        lambda x: x.amax(2),
    ):
        a, b = full.clone().requires_grad_(), full.clone().requires_grad_()
        op(a).sum().backward()
        whole(op(hs.shard(b, grid))).sum().backward()
        assert torch.allclose(a.grad, b.grad, equal_nan=True)


def test_gradient_of_nan() -> None:
    run_ranks(2, gradient_of_nan)


def results() -> None:
    """Named tuples as torch's; the larger of two; an ordinary result decides for all ranks."""
    grid, full = hs.Grid(depth=2), torch.randn(2, 2, 4, 3, 3)
    x = hs.shard(full, grid)
    found, expected = x.max(dim=2), full.max(dim=2)
    assert torch.equal(found.values.full(), expected.values)
    assert torch.equal(found.indices.full(), expected.indices)
    assert torch.equal(torch.max(x, -x).full(), torch.max(full, -full))
    assert torch.equal(torch.min(full, other=hs.shard(-full, grid)).full(), torch.min(full, -full))
    assert torch.equal(torch.aminmax(x).max, full.max())
    assert bool((x > 2).any()) == bool((full > 2).any())
    assert x.argmax().item() == full.argmax().item()
    with torch.no_grad():
        assert torch.equal(x.amax(2).full(), full.amax(2))


def test_results() -> None:
    run_ranks(2, results)


def empty_shards() -> None:
    """Shards of which some rank has nothing."""
    grid, full = hs.Grid(depth=3), torch.randn(2, 2, 4, 3, 3, dtype=torch.float64)
    uneven = hs.geometry.Cut("depth", (0, 1, 1, 4))
    leaf = full.clone().requires_grad_()
    serial = full.clone().requires_grad_()
    x = hs.shard(leaf, grid)
    y = x.redistribute(x.partition.with_dim(2, 4, uneven))
    for op in (
        lambda t: t.mean(),
        lambda t: t.amax(2),
        lambda t: t.var((0, 2)),
        lambda t: torch.nn.functional.group_norm(t, 1),
        lambda t: torch.nn.functional.batch_norm(t, None, None, training=True),
        lambda t: t.softmax(2),
        lambda t: t.norm(),
        lambda t: t.prod(2),
    ):
        leaf.grad = serial.grad = None
        expected, found = op(serial), whole(op(y))
        assert torch.allclose(found, expected)
        (expected**2).sum().backward()
        (found**2).sum().backward(retain_graph=True)
        assert torch.allclose(leaf.grad, serial.grad, atol=1e-12)


def test_empty_shards() -> None:
    run_ranks(3, empty_shards)


def dims_that_are_tensors() -> None:
    x = torch.randn(2, 3, 5, 4)
    cut = hs.shard(x, hs.Grid(depth=1, height=2))
    for function in (torch.max, torch.min):
        for dim in (1, -1, 2):
            for values, expected in (
                (function(cut, dim=torch.tensor(dim)), function(x, dim=dim)),
                (function(cut, axis=dim, keepdims=True), function(x, dim=dim, keepdim=True)),
                (function(cut, dim, True), function(x, dim, True)),
            ):
                assert torch.equal(values[0].full(), expected[0])
                assert torch.equal(values[1].full(), expected[1])
        number = torch.tensor(0.25)
        assert torch.equal(function(cut, number).full(), function(x, number))
        assert torch.equal(function(cut, other=number).full(), function(x, other=number))


def test_a_dim_may_be_a_tensor() -> None:
    run_ranks(2, dims_that_are_tensors)
