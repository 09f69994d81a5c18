"""Joined tensors equal the serial ones, however the operands are cut (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.geometry import Cut
from hyperslab.kernels.registry import choose_as_if_on
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "views": {
        "cat",
        "concat",
        "concatenate",
        "stack",
        "vstack",
        "row_stack",
        "hstack",
        "dstack",
    }
}


def joined(
    x: Any, *others: Any, kind: str, cut: int, recuts: tuple[int, ...], **options: Any
) -> Any:
    """``x`` and others; bit i of ``cut`` says whether the i-th of the others is cut too."""
    operands = [recut(x * 2, recuts[0])]
    for i, other in enumerate(others):
        y = hs.shard(other, x.grid) if isinstance(x, hs.Sharded) and cut >> i & 1 else other
        operands.append(recut(y, recuts[i + 1]))
    operands = operands[::-1] if cut & 4 else operands
    return getattr(torch, kind)(operands, **options)


@st.composite
def joins(draw: st.DrawFn, ranks: int) -> Example:
    """One to three operands, any dim, other extents along it, other cuts, some of them ordinary."""
    n = draw(st.sampled_from([0, 1, 2, 3, 3]))
    grid = draw(grids(ranks))
    least = [grid["data"], 1, *(parts_of(grid, n) if n else ())]
    shape = [draw(st.integers(low, low + 4)) for low in least]
    dim = draw(st.integers(0, n + 1))
    count = draw(st.integers(0, 2))
    kind = draw(st.sampled_from(["cat", "cat", "cat", "stack"]))
    others = []
    for _ in range(count):
        other = list(shape)
        if kind == "cat":
            other[dim] = draw(st.integers(least[dim], least[dim] + 4))
        others.append(tuple(other))
    place = draw(st.sampled_from([dim, dim - len(shape)]))
    return Example(
        grid=grid,
        shape=tuple(shape),
        weights=tuple(others),
        options={
            "kind": kind,
            "dim": draw(st.integers(-len(shape) - 1, len(shape))) if kind == "stack" else place,
            "cut": draw(st.integers(0, 7)),
            "recuts": tuple(draw(st.integers(0, 9)) for _ in range(3)),
        },
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_join(ranks: int) -> None:
    run_ranks(ranks, compare, joined, draw_examples(joins(ranks), 28))


def test_other_names() -> None:
    cases = [
        Example(
            grid={"data": 2, "depth": 2},
            shape=(3, 2, 5, 4),
            weights=((3, 2, 5, 4),),
            options={"kind": kind, "cut": 1, "recuts": (0, 3)},
        )
        for kind in ("concat", "concatenate", "vstack", "row_stack", "hstack", "dstack")
    ]
    run_ranks(4, compare, joined, cases)


def test_rows_have_one_dim_too_few() -> None:
    """Torch makes matrices of them first."""
    x = hs.shard(torch.randn(4), hs.Grid())
    for kind in ("vstack", "row_stack", "hstack", "dstack"):
        with pytest.raises(hs.LayoutError, match=rf"{kind} of tensors with fewer than"):
            getattr(torch, kind)([x, x])


def skip_connection() -> Any:
    """An up-sampled map that is cut unevenly, and a skip that is balanced: the skip stays."""
    grid = hs.Grid(depth=2)
    skip = hs.shard(torch.randn(1, 8, 6, 4, 4), grid)
    up = hs.shard(torch.randn(1, 2, 6, 4, 4), grid)
    up = up.redistribute(up.partition.with_dim(2, 6, Cut("depth", (0, 4, 6))))
    both, turned = torch.cat([up, skip], 1), torch.cat([skip, up], 1)
    assert torch.equal(both.full(), torch.cat([up.full(), skip.full()], 1))
    whole = hs.gather(up, "depth")
    assert torch.cat([whole, skip], 1).partition.axes == ("depth",)
    return [y.partition.cuts[2].bounds for y in (both, turned)]


def test_the_larger_operand_stays() -> None:
    assert run_ranks(2, skip_connection) == [[(0, 3, 6)] * 2] * 2


def what_torch_does_beside() -> None:
    grid, full = hs.Grid(depth=2), torch.randn(2, 3, 5, 4, 4)
    x = hs.shard(full, grid)
    for legacy in ([torch.empty(0), x], [torch.empty(0, dtype=torch.float64), x, x]):
        expected = torch.cat([t.full() if isinstance(t, hs.Sharded) else t for t in legacy], 1)
        found = torch.cat(legacy, 1)
        assert torch.equal(found.full(), expected)
        assert found.dtype == expected.dtype
    none = hs.shard(torch.empty(0), grid)
    assert torch.equal(torch.cat([none, x], 1).full(), full)
    assert torch.equal(torch.cat([none, full], -1).full(), full)
    mixed = torch.cat([x, x.double().redistribute(x.partition.without(["depth"]))], 2)
    assert mixed.dtype == torch.float64
    assert torch.equal(mixed.full(), torch.cat([full, full], 2).double())
    single = torch.cat([x])
    single.mul_(2)  # a copy, as it is serially
    assert torch.equal(x.full(), full)
    last = x.to(memory_format=torch.channels_last_3d)
    joined = torch.cat([last, last], 1)
    assert joined.is_contiguous(memory_format=torch.channels_last_3d)
    with torch.no_grad():
        assert torch.equal(torch.cat([x, x], dim=-1).full(), torch.cat([full, full], -1))
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.cat([x, x.bfloat16()], 1)
        assert found.dtype == torch.cat([full, full.bfloat16()], 1).dtype
    assert torch.cat([x[:, :0], x], 1).shape == x.shape
    assert torch.equal(torch.cat((x, torch.zeros(2, 3, 0, 4, 4)), 2).full(), full)


def test_what_torch_does_beside() -> None:
    run_ranks(2, what_torch_does_beside)


def refused(case: str) -> None:
    grid = hs.Grid(depth=2)
    x = hs.shard(torch.randn(2, 3, 6, 4, 4), grid)
    if case == "shapes":
        torch.cat([x, hs.shard(torch.randn(2, 3, 7, 4, 4), grid)], 1)
    elif case == "dims":
        torch.cat([x, torch.randn(2, 3, 6, 4)], 1)
    elif case == "grids":
        torch.cat([x, hs.shard(torch.randn(2, 3, 6, 4, 4), hs.Grid(height=2))], 1)
    elif case == "out":
        torch.cat([x, x], 1, out=torch.empty(0))
    elif case == "dstack":
        torch.dstack([hs.shard(torch.randn(2, 3), grid)] * 2)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("shapes", r"the other dims of the global shapes differ"),
        ("dims", r"the other dims of the global shapes differ"),
        ("grids", "operands on two grids"),
        ("out", r"cat\(out=...\) has no rule"),
        ("dstack", "use stack"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(2, refused, case)


def test_no_such_dim() -> None:
    x = hs.shard(torch.randn(2, 3), hs.Grid())
    with pytest.raises(IndexError, match="cat: dim 2 is out of range for a tensor of 2 dims"):
        torch.cat([x, x], 2)
    with pytest.raises(IndexError, match="stack: dim 3"):
        torch.stack([x, x], 3)


def order_of_gradients() -> list[bool]:
    """Of two operands: channels last without gaps; and whether they are the serial ones."""
    grid = hs.Grid(depth=2)
    last = torch.channels_last_3d
    blocks = [torch.randn(2, c, 4, 3, 2).to(memory_format=last) for c in (3, 2)]
    cut = [hs.shard(b, grid).requires_grad_() for b in blocks]
    serial = [b.clone().requires_grad_() for b in blocks]
    found = []
    for operand in cut:
        operand.register_hook(lambda g: found.append(g.is_contiguous(memory_format=last)))
    for operands in (cut, serial):
        y = torch.cat(operands, 1)
        (first,) = torch.autograd.grad((y**3).sum(), operands[:1], create_graph=True)
        (first**2).sum().backward()
    equal = [
        c.grad is not None and s.grad is not None and torch.allclose(c.grad.full(), s.grad)
        for c, s in zip(cut, serial, strict=True)
    ]
    return [bool(found) and all(found), *equal]


def test_gradients_of_joined_channels_have_no_gaps() -> None:
    assert run_ranks(2, order_of_gradients) == [[True] * 3] * 2


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_gradients_of_joined_channels_are_not_copied_on_a_gpu(kind: str) -> None:
    grid = hs.Grid()
    leaves = [torch.randn(1, c, 2, 3, 4, requires_grad=True) for c in (8, 5)]
    parts = [x.contiguous(memory_format=torch.channels_last_3d) for x in leaves]
    found: list[torch.Tensor] = []
    for part in parts:
        part.register_hook(lambda gradient: found.append(gradient))
    joined = torch.cat([hs.shard(part, grid) for part in parts], 1)
    given = torch.randn(joined.shape).contiguous(memory_format=torch.channels_last_3d)
    with choose_as_if_on(kind):
        joined.full().backward(given)
    wants = {want.shape: want for want in given.split([8, 5], 1)}
    assert len(found) == 2
    assert all(torch.equal(gradient, wants.pop(gradient.shape)) for gradient in found)
    storages = {gradient.untyped_storage().data_ptr() for gradient in found}
    assert len(storages) == (1 if kind == "cuda" else 2)


def densely(x: Any, filters: list[torch.Tensor]) -> list[Any]:
    """What each layer of a dense block adds to."""
    found = [x]
    for weight in filters:
        new = torch.nn.functional.conv3d(found[-1], weight, padding=1)
        found.append(torch.cat([found[-1], new], 1))
    return found


def dense_block(depth: int, batch: int) -> list[tuple[str, ...]]:
    """Which axes cut what is joined; both gradients are the serial ones."""
    grid = hs.Grid(depth=2, data=batch)
    torch.manual_seed(0)
    full = torch.randn(2, 2, depth, 6, 6, dtype=torch.float64, requires_grad=True)
    filters = [torch.randn(2, 2 + 2 * i, 3, 3, 3, dtype=torch.float64) for i in range(3)]
    weights = [w.requires_grad_() for w in filters]
    expected = torch.autograd.grad(densely(full, weights)[-1].square().mean(), [full, *weights])
    leaf = full.detach().clone().requires_grad_()
    blocks = densely(hs.shard(leaf, grid), weights)
    loss = blocks[-1].square().mean()
    found = torch.autograd.grad(loss, [leaf, *weights])
    for got, want in zip(found, expected, strict=True):
        total = got.clone()
        torch.distributed.all_reduce(total)
        torch.testing.assert_close(total / grid.size, want, rtol=1e-10, atol=1e-12)
    return [block.partition.axes for block in blocks]


@pytest.mark.parametrize(
    ("depth", "batch", "after"),
    [(4, 1, ()), (3, 1, ()), (8, 1, ("depth",)), (4, 2, ("data",)), (8, 2, ("data", "depth"))],
)
def test_a_dense_block_is_gathered_once(depth: int, batch: int, after: tuple[str, ...]) -> None:
    """Where its convolutions gather what they read, what they add to is gathered, too."""
    before = ("data", "depth") if batch > 1 else ("depth",)
    for first, *others in run_ranks(2 * batch, dense_block, depth, batch):
        assert first == before
        assert others == [after] * 3
