"""Every reduction over any dims equals the serial one (tier: a few gloo ranks)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "reductions": {
        "var",
        "std",
        "var_mean",
        "std_mean",
        "norm",
        "vector_norm",
        "linalg_norm",
        "logsumexp",
        "prod",
        "nansum",
        "nanmean",
        "_is_all_true",
        "equal",
        "allclose",
    },
    "normalization": {"normalize"},
}


@st.composite
def tensors(draw: st.DrawFn, ranks: int) -> Example:
    """Any shape of two to five dims."""
    n = draw(st.sampled_from([0, 1, 2, 3, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(p, p + 4)) for p in parts_of(grid, n)] if n else []
    return Example(
        grid=grid,
        shape=(draw(st.integers(2, 5)), draw(st.integers(2, 4)), *extents),
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        mean=draw(st.sampled_from([0.0, 3.0])),
        seed=draw(st.integers(0, 1000)),
    )


def dims_of(draw: st.DrawFn, example: Example, several: bool = True) -> dict[str, Any]:
    """No dim, one or several, by torch's names or by numpy's."""
    last = len(example.shape) - 1
    one = st.integers(-1, last)
    some = st.lists(st.integers(0, last), unique=True, min_size=1)
    dim = draw(st.one_of(st.none(), one, some) if several else st.one_of(st.none(), one))
    if dim is None:
        return {}
    names = draw(st.sampled_from([("dim", "keepdim"), ("dim", "keepdim"), ("axis", "keepdims")]))
    return {names[0]: dim, names[1]: draw(st.booleans())}


def first(results: Any) -> Any:
    """One tensor of what may be several: the second one counts too."""
    if not isinstance(results, tuple):
        return results
    return results[0] + 2 * results[1]


def moments(x: Any, *, kind: str, **options: Any) -> Any:
    return first(getattr(torch, kind)(x, **options))


@st.composite
def of_moments(draw: st.DrawFn, ranks: int) -> Example:
    example = draw(tensors(ranks))
    options = dims_of(draw, example)
    options |= draw(st.sampled_from([{}, {"correction": 0}, {"correction": 0.5}]))
    if "keepdims" not in options and "correction" not in options and "dim" in options:
        options |= draw(st.sampled_from([{}, {"unbiased": False}, {"unbiased": True}]))
    options["kind"] = draw(st.sampled_from(["var", "std", "var_mean", "std_mean"]))
    # A single value has no deviation: NaN for both, which is not compared here.
    return replace(example, options=options, shape=tuple(extent + 1 for extent in example.shape))


@pytest.mark.parametrize("ranks", RANKS)
def test_any_variance(ranks: int) -> None:
    run_ranks(ranks, compare, moments, draw_examples(of_moments(ranks), 28))


ORDERS = [2, 2.0, 1, 0, 3, 0.5, 1.5, -1, -2.5, float("inf"), float("-inf")]

NORMS: dict[str, Callable[..., Any]] = {
    "vector_norm": lambda x, p, **o: torch.linalg.vector_norm(x, p, **o),
    "norm": lambda x, p, **o: torch.norm(x, p, **o),
    "method": lambda x, p, **o: x.norm(p, **o),
    "frobenius": lambda x, p, **o: x.norm(**o),
    "linalg_norm": lambda x, p, **o: torch.linalg.norm(x, None, **o),
    "of rows": lambda x, p, **o: torch.linalg.norm(x, p, dim=-1),
    "normalize": lambda x, p, **o: torch.nn.functional.normalize(x, p, **o),
}


def norm(x: Any, *, kind: str, p: float, **options: Any) -> Any:
    # Of order 0 torch has no gradient where a communication has a zero one.
    return NORMS[kind](x + 0.1, p, **options) + 0 * x.sum()


@st.composite
def of_norms(draw: st.DrawFn, ranks: int) -> Example:
    example = draw(tensors(ranks))
    kind = draw(st.sampled_from(list(NORMS)))
    options = dims_of(draw, example) if kind != "of rows" else {}
    options = {"dim": options.get("dim", options.get("axis")), "keepdim": any(options.values())}
    if kind in ("linalg_norm", "frobenius") and isinstance(options["dim"], list):
        options["dim"] = options["dim"][:2]  # torch takes no more
    if kind == "normalize":
        options.pop("keepdim")
        options["dim"] = 1 if options["dim"] is None else options["dim"]
        dims = options["dim"] if isinstance(options["dim"], list) else [options["dim"]]
        # Of one value, divided by itself, the gradient is what rounding leaves.
        assume(math.prod(example.shape[dim] for dim in dims) > 1)
    options |= {"kind": kind, "p": draw(st.sampled_from(ORDERS))}
    return replace(example, options=options)


@pytest.mark.parametrize("ranks", RANKS)
def test_any_norm(ranks: int) -> None:
    run_ranks(ranks, compare, norm, draw_examples(of_norms(ranks), 28))


def test_every_order_over_cut_dims() -> None:
    cases = [
        Example(
            grid={"data": 2, "depth": 3},
            shape=(3, 2, 7, 4, 3),
            options={"kind": kind, "p": p, "dim": dim},
        )
        for p in ORDERS
        for kind, dim in [("vector_norm", 2), ("norm", (0, 2)), ("method", None), ("normalize", 2)]
    ]
    run_ranks(6, compare, norm, cases)


def other(x: Any, *, kind: str, method: bool, holes: bool, **options: Any) -> Any:
    """Also of tensors with zeros or with NaN."""
    if holes:
        mark = 0.0 if kind == "prod" else float("nan")
        x = x.masked_fill((x * 3).round() == 2, mark)
    return getattr(x, kind)(**options) if method else getattr(torch, kind)(x, **options)


@st.composite
def of_others(draw: st.DrawFn, ranks: int) -> Example:
    example = draw(tensors(ranks))
    kind = draw(st.sampled_from(["logsumexp", "prod", "prod", "nansum", "nanmean"]))
    options = dims_of(draw, example, several=kind != "prod")
    if kind == "logsumexp" and not options:
        options = {"dim": 0}
    if kind == "prod" and not options:
        example = replace(example, mean=0.0)
    if draw(st.booleans()) and kind != "logsumexp":
        options["dtype"] = torch.float64
    holes = kind == "nansum" or (kind == "prod" and draw(st.booleans()))
    options |= {"kind": kind, "method": draw(st.booleans()), "holes": holes}
    return replace(example, options=options)


@pytest.mark.parametrize("ranks", RANKS)
def test_any_other_reduction(ranks: int) -> None:
    run_ranks(ranks, compare, other, draw_examples(of_others(ranks), 28))


def edges() -> None:
    """What has no gradient by the formula, NaN, integers, half precision, legacy arguments."""
    grid = hs.Grid(data=2, height=2)
    constant = torch.ones(4, 3, 6, 4, dtype=torch.float64)
    for op in (
        lambda x: x.std((0, 2)),
        lambda x: (x - 1).norm(),
        lambda x: (x - 1).norm(1.5, 2),
        lambda x: x.amax((0, 2)),
        lambda x: torch.linalg.vector_norm(x - 1, float("inf"), (0, 2)),
    ):
        a, b = constant.clone().requires_grad_(), constant.clone().requires_grad_()
        op(a).sum().backward()
        y = op(hs.shard(b, grid))
        (y.full() if isinstance(y, hs.Sharded) else y).sum().backward()
        assert torch.equal(a.grad, b.grad)
    full = torch.randn(4, 3, 6, 4, dtype=torch.float64)
    x = hs.shard(full, grid)
    assert torch.allclose(torch.var(x, False), torch.var(full, False))
    assert torch.allclose(x.std(2, False).full(), full.std(2, False))
    assert torch.allclose(x.var(2, True, True).full(), full.var(2, True, True))
    assert (x.std(0, correction=4).full() == torch.inf).all()
    single = torch.randn(2, 3, 6, 4)
    a, b = single.clone().requires_grad_(), single.clone().requires_grad_()
    for z in (a, hs.shard(b, grid)):
        var, mean = torch.var_mean(z, 1)
        mean -= 1  # which the backward pass needs as it was
        loss = (var * mean).sum()
        (loss.full() if isinstance(loss, hs.Sharded) else loss).backward()
        var, mean = torch.var_mean(z * 2, (2, 3))
        mean.neg_()
        loss = (var * mean).sum()
        (loss.full() if isinstance(loss, hs.Sharded) else loss).backward()
    assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    for nothing in torch.var_mean(x[:, :0], (0, 1, 2)):
        assert torch.isnan(nothing).all()
        assert nothing.shape == (4,)
    full[0, 0, 0, 0] = float("nan")
    x = hs.shard(full, grid)
    assert torch.allclose(x.nanmean((0, 2)), full.nanmean((0, 2)))
    assert x.sum().isnan()
    assert x.var().isnan()
    integers = torch.arange(1, 9).view(2, 1, 4, 1)
    y = hs.shard(integers, grid)
    assert torch.equal(y.prod(), integers.prod())
    assert torch.equal(y.bool().prod(2).full(), integers.bool().prod(2))
    assert torch.equal(y.int().nansum(), integers.int().nansum())
    half = torch.full((2, 3, 64, 64), 60.0, dtype=torch.float16)
    z = hs.shard(half, grid)
    assert z.norm(dtype=torch.float32) == half.norm(dtype=torch.float32)
    for op in (lambda v: v.norm(dim=2), lambda v: v.var(2), lambda v: v.logsumexp(2)):
        assert op(z).dtype == op(half).dtype
        assert torch.equal(op(z).full(), op(half))
        with torch.autocast("cpu", torch.bfloat16):
            assert op(z.bfloat16()).dtype == op(half.bfloat16()).dtype
            assert z.bfloat16().prod(2).dtype == half.bfloat16().prod(2).dtype


def test_edges() -> None:
    run_ranks(4, edges)


def far_from_zero(dtype: torch.dtype) -> float:
    x = (torch.randn(4, 3, 9, 8, 8, dtype=torch.float64) + 1e4).to(dtype)
    exact = x.double().std()
    return abs(hs.shard(x, hs.Grid(depth=4)).std().double() - exact).item()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_nothing_cancels_far_from_zero(dtype: torch.dtype, error: float) -> None:
    assert max(run_ranks(4, far_from_zero, dtype)) <= error


def of_distributions(x: Any) -> list[torch.Tensor]:
    """Their arguments are checked, cut or not."""
    normal = torch.distributions.Normal(x, x.exp())
    standard = torch.distributions.Normal(0.0, 1.0)
    classes = torch.distributions.Categorical(logits=x.mean((2, 3, 4)))
    return [
        normal.log_prob(x * 2).mean(),
        torch.distributions.kl_divergence(normal, standard).mean(),
        torch.distributions.Bernoulli(logits=x).entropy().sum(),
        classes.log_prob(torch.tensor([0, 2])).mean(),
    ]


def distributions() -> None:
    full = torch.randn(2, 3, 6, 4, 4, dtype=torch.float64)
    x = hs.shard(full, hs.Grid(depth=2))
    for got, want in zip(of_distributions(x), of_distributions(full), strict=True):
        assert torch.allclose(got, want, rtol=1e-12)
    with pytest.raises(ValueError, match="parameter scale"):
        torch.distributions.Normal(x, x)


def test_arguments_of_distributions_are_checked() -> None:
    run_ranks(2, distributions)


def refused(case: str) -> None:
    x = hs.shard(torch.randn(4, 3, 6, 4), hs.Grid(data=2))
    {
        "nuclear": lambda: x.norm("nuc"),
        "matrix": lambda: torch.linalg.norm(x, 2, (2, 3)),
        "complex": lambda: (
            torch.complex(x.full(), x.full()).var()
            + hs.shard(torch.complex(x.full(), x.full()), x.grid).var()
        ),
        "out": lambda: torch.sum(x, 0, out=torch.empty(())),
        "normalize out": lambda: torch.nn.functional.normalize(x, out=torch.empty(())),
    }[case]()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nuclear", "the matrix norm 'nuc' has no rule"),
        ("matrix", "the matrix norm 2 has no rule"),
        ("complex", "the variance of complex numbers"),
        ("out", r"sum\(out=...\) has no rule"),
        ("normalize out", r"normalize\(out=...\) has no rule"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(2, refused, case)


def comparisons() -> list[bool]:
    """One element of one rank's block decides for all ranks."""
    grid, full = hs.Grid(depth=2), torch.randn(1, 2, 5, 3, 2, dtype=torch.float64)
    other = full.clone()
    other[0, 0, 4] += 1e-3
    x, y = hs.shard(full, grid), hs.shard(other, grid)
    return [
        torch.equal(x, full),
        full.equal(x),
        torch.allclose(x, y, atol=1e-2),
        torch.allclose(x[:, :, :0], y[:, :, :0]),
        torch.equal(x, y),
        x.equal(x[:, :1]),
        x.allclose(other),
        y.allclose(full, 0.0, 1e-4, equal_nan=True),
    ]


def test_comparisons_of_all_elements() -> None:
    assert run_ranks(2, comparisons) == [[True] * 4 + [False] * 4] * 2


def complex_deviations() -> None:
    full = torch.randn(2, 3, 6, 4, 2, dtype=torch.complex128)
    x = hs.shard(full, hs.Grid(depth=2))
    for found, expected in zip(torch.std_mean(x, 1), torch.std_mean(full, 1), strict=True):
        assert found.dtype == expected.dtype
        assert torch.allclose(found.full(), expected)


def test_deviations_of_complex_numbers_are_real() -> None:
    run_ranks(2, complex_deviations)
