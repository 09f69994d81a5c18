"""Matrix products and Einstein sums equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "linalg": {
        "outer",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "cross",
        "linalg_cross",
        "mm",
        "spmm",  # another name of mm
        "bmm",
        "mv",
        "dot",
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "einsum",
        "tensordot",
        "bilinear",
    }
}


def operand(x: Any, other: torch.Tensor, cut: bool, seed: int) -> Any:
    return recut(hs.shard(other, x.grid), seed) if cut and isinstance(x, hs.Sharded) else other


def multiplied(x: Any, other: Any, *, kind: str, cut: bool, seeds: tuple[int, int]) -> Any:
    x, y = recut(x, seeds[0]), operand(x, other, cut, seeds[1])
    if kind == "right":
        return y @ x
    return x @ y if kind == "operator" else torch.matmul(x, y)


@st.composite
def products(draw: st.DrawFn, ranks: int) -> Example:
    """Matrices and stacks of them, any dim cut, also the contracted one."""
    n = draw(st.sampled_from([0, 1, 2, 3, 3]))
    grid = draw(grids(ranks))
    least = [grid["data"], 1, *(parts_of(grid, n) if n else ())]
    shape = tuple(draw(st.integers(low, low + 3)) for low in least)
    kind, cut = draw(st.sampled_from(["operator", "matmul", "right"])), draw(st.booleans())
    columns = draw(st.integers(8, 9))
    other = (
        [*shape[:-2], shape[-1], columns] if kind != "right" else [*shape[:-2], columns, shape[-2]]
    )
    if not cut:
        other = other[draw(st.integers(0, len(other) - 2)) :]
    elif any(a < b for a, b in zip(other, least, strict=True)):
        cut = False
    return Example(
        grid=grid,
        shape=shape,
        weights=(tuple(other),),
        options={
            "kind": kind,
            "cut": cut,
            "seeds": (draw(st.integers(0, 5)), draw(st.integers(0, 5))),
        },
        dtype=draw(dtypes),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_product(ranks: int) -> None:
    run_ranks(ranks, compare, multiplied, draw_examples(products(ranks), 28))


def summed(x: Any, other: Any, *, equation: str, cut: bool, seeds: tuple[int, int]) -> Any:
    x, y = recut(x * 2, seeds[0]), operand(x, other, cut, seeds[1])
    return torch.einsum(equation, x, y)


EQUATIONS = {
    "bcdhw,kc->bkdhw": ("kc", False),  # a pointwise convolution
    "bcdhw,bc->bcdhw": ("bc", True),  # a gate for each channel
    "bcdhw,bkdhw->bck": ("bkdhw", True),  # a sum over the volume
    "bcdhw,bkdhw->bkc": ("bkdhw", False),
    "bcdhw,bcdhw->b": ("bcdhw", True),
    "bcdhw,bcdhw->": ("bcdhw", True),
    "bcdhw,bcdhw": ("bcdhw", True),
    "bcdhw,hj->bcdjw": ("hj", False),  # over one cut dim
    "bc...,kc->bk...": ("kc", False),
    "...w,wj->...j": ("wj", False),
    "...,...": ("bcdhw", True),
    "bcdhw,dj->bdhwc": ("dj", False),
    "b c d h w , k -> k w h d c b": ("k", False),
    "bcdhw,BCdHW->bB": ("BCdHW", True),
}


def extents(draw: st.DrawFn, grid: dict[str, int]) -> dict[str, int]:
    found = {
        "k": draw(st.integers(1, 4)),
        "j": draw(st.integers(1, 4)),
        "c": draw(st.integers(1, 3)),
    }
    for axis, labels in (("data", "bB"), ("depth", "dD"), ("height", "hH"), ("width", "wW")):
        for label in labels:
            found[label] = draw(st.integers(grid[axis], grid[axis] + 3))
    return {**found, "C": 2}


@st.composite
def sums(draw: st.DrawFn, ranks: int) -> Example:
    grid = draw(grids(ranks))
    equation = draw(st.sampled_from(sorted(EQUATIONS)))
    labels, cut = EQUATIONS[equation]
    extent = extents(draw, grid)
    dtype = draw(dtypes)
    if equation in ("bcdhw,bcdhw->", "bcdhw,bcdhw"):  # hundreds of terms that nearly cancel
        dtype = torch.float64
    return Example(
        grid=grid,
        shape=tuple(extent[label] for label in "bcdhw"),
        weights=(tuple(extent[label] for label in labels),),
        options={
            "equation": equation,
            "cut": cut and draw(st.booleans()),
            "seeds": (draw(st.integers(0, 5)), draw(st.integers(0, 5))),
        },
        dtype=dtype,
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_einstein_sum(ranks: int) -> None:
    run_ranks(ranks, compare, summed, draw_examples(sums(ranks), 28))


def filtered_by_its_means(x: Any) -> Any:
    """Filters that a network makes of its input are equal on all ranks of a replica."""
    means = x.mean((2, 3))
    return F.linear(x.movedim(1, -1), means, means[:, 0])


def test_filters_from_the_input() -> None:
    example = Example(grid={"height": 2}, shape=(2, 3, 5, 4))
    run_ranks(2, compare, filtered_by_its_means, [example])


def special(x: Any, a: torch.Tensor, b: torch.Tensor, *, kind: str) -> Any:
    rows = x.flatten(1)
    return {
        "mm": lambda: torch.mm(rows, a),
        "mm method": lambda: rows.mm(a) * 2,
        "mv": lambda: rows.mv(a[:, 0]),
        "dot": lambda: torch.dot(rows[:, 0], rows[:, 1]),
        "bmm": lambda: torch.bmm(x.flatten(2), x.flatten(2).transpose(1, 2)),
        "addmm": lambda: torch.addmm(b, rows, a, beta=0.5, alpha=2),
        "addmm cut": lambda: torch.addmm(rows[:, :4], rows, a),
        "addmm weight": lambda: torch.addmm(a, a, rows[:2, :4].mT @ rows[:2, :4]),
        "addbmm": lambda: torch.addbmm(b[:2, None], x.flatten(2), x.flatten(2).mT, beta=0.5),
        "addmv": lambda: torch.addmv(b[0], rows, rows[0].addmv(rows.mT, b), alpha=3),
        "addr": lambda: torch.addr(b, rows[:, 0], b, alpha=2) + b.addr(b, vec2=rows[0, :4]),
        "baddbmm": lambda: (
            torch.baddbmm(b, x.flatten(2), a.view(-1, 12, 4)[:1].expand(4, 12, 4), beta=0) + b.sum()
        ),
        "tensordot": lambda: torch.tensordot(x, a.view(2, 12, 4)[:, :3], ([1, 3], [0, 1])),
        "tensordot cut": lambda: torch.tensordot(x, x, ([0, 1, 3, 4], [0, 1, 3, 4])),
        "tensordot number": lambda: torch.tensordot(rows, a, 1),
        "bilinear": lambda: F.bilinear(rows[:, :4], rows[:, 4:10], a.view(4, 4, 6), b),
        "list": lambda: torch.einsum("bi,ij->bj", [rows, a]),
        "sublists": lambda: torch.einsum(rows, [0, 1], a, [1, 2], [0, 2]),
        "three": lambda: torch.einsum("bi,ij,bk->bjk", rows, a, rows),
        "one": lambda: torch.einsum("bcdhw->dc", x),
        "diagonal": lambda: torch.einsum("bcii->bci", x[:, :, :, 0]),
        "reversed": lambda: torch.Tensor.__rmatmul__(a.mT[:, :4], rows[:, :4] * 2),
        "cross": lambda: torch.cross(x, x.flip(0) + a[0, 0], dim=3),
        "cross of three": lambda: x.mT.cross(x.mT.flip(0) * b[:2, None]),
        "linalg cross": lambda: torch.linalg.cross(x[:, :1].mT, a[:6].view(4, 1, 2, 1, 3)),
    }[kind]()


KINDS = """mm,mm method,mv,dot,bmm,addmm,addmm cut,addmm weight,baddbmm,tensordot,tensordot cut
addbmm,addmv,addr
tensordot number,bilinear,list,sublists,three,one,diagonal,reversed,cross,cross of three
linalg cross""".replace("\n", ",").split(",")


@pytest.mark.parametrize("kind", KINDS)
def test_other_products(kind: str) -> None:
    weights = ((24, 4), (4,))
    cases = [
        Example(grid=grid, shape=(4, 2, 2, 3, 2), weights=weights, options={"kind": kind})
        for grid in ({"data": 2, "height": 2}, {"data": 4})
    ]
    run_ranks(4, compare, special, cases)


def beside() -> None:
    full = torch.randn(4, 3, 6)
    x, weight = hs.shard(full, hs.Grid(data=2)), torch.randn(6, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ weight).dtype == (full @ weight).dtype == torch.bfloat16
        found = torch.addmm(weight[0], x[:, 0], weight)
        assert found.dtype == torch.addmm(weight[0], full[:, 0], weight).dtype
    with torch.no_grad():
        assert torch.allclose((x @ weight).full(), full @ weight)
    scalar = torch.einsum("bij,bij->", x, x)
    assert type(scalar) is torch.Tensor
    assert torch.allclose(scalar, (full**2).sum())
    assert torch.allclose((x.long() @ torch.ones(6, 1).long()).full(), full.long().sum(2, True))


def test_beside() -> None:
    run_ranks(2, beside)


def refused(case: str) -> None:
    grid = hs.Grid(height=2)
    x = hs.shard(torch.randn(2, 4, 4), hs.Grid(height=2), channels=False)
    {
        "extents": lambda: x @ torch.randn(5, 3),
        "number": lambda: x @ torch.tensor(2.0),
        "dims": lambda: torch.mm(x, torch.randn(4, 4)),
        "out": lambda: torch.matmul(x, x, out=torch.empty(0)),
        "diagonal": lambda: torch.einsum("bii->bi", x),
        "terms": lambda: torch.einsum("bij,jk->bk", x),
        "fit": lambda: torch.einsum("bijk->b", x),
        "grids": lambda: torch.matmul(x, hs.shard(torch.randn(2, 4, 4), hs.Grid(data=2))),
        "integers": lambda: torch.baddbmm(x.long(), x.long(), x.long(), alpha=0.6),
        "only the sum": lambda: torch.addmm(x[0], torch.randn(4, 4), torch.randn(4, 4)),
    }[case]()
    assert grid


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("extents", "4 and 5 elements in one dim"),
        ("number", r"use a \* b"),
        ("dims", "use matmul"),
        ("out", r"matmul\(out=...\) has no rule"),
        (
            "diagonal",
            r"the diagonal of a dim that is cut.*\n.*hyperslab.gather\(x, \('height',\)\)",
        ),
        ("terms", "2 terms"),
        ("fit", "does not fit"),
        ("grids", "operands on two grids"),
        ("only the sum", "one of them cut"),
        ("integers", "alpha and beta have to be integers"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(2, refused, case)


def outer(x: Any, weight: torch.Tensor) -> Any:
    """Both cut along one axis, or one of them."""
    rows, columns = x.mean((1, 2, 3, 4)), x.sum((0, 1, 3, 4))
    return rows.outer(columns).sum() + torch.outer(columns, columns) * columns.outer(weight).sum()


def test_outer_products() -> None:
    for grid in ({"data": 2, "depth": 2}, {"depth": 4}, {"data": 2, "height": 2}):
        run_ranks(4, compare, outer, [Example(grid, (2, 3, 5, 4, 4), ((7,),))])
