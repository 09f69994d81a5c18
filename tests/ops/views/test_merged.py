"""Dims that a reshape merges where they are cut (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks
from tests.selection import in_gate


def mixed(x: Any, weight: Any, bias: Any, *, way: str, seed: int) -> Any:
    """Channels mixed over merged voxels, as neural operators do; then something else."""
    x = recut(x, seed)
    shape = x.shape
    rows = x.flatten(2) if way != "view" else x.contiguous().view(*shape[:2], -1)
    rows = F.gelu(F.conv1d(rows, weight, bias)) * 2 + rows[:, :1].detach()
    if way == "tokens":  # attention without positions
        tokens = rows.transpose(1, 2)
        # Unscaled, scores reach 130: their last digit in float32 is 1e-5, and so is the softmax's.
        scores = torch.softmax(tokens @ tokens.transpose(1, 2) / 8, -1)
        return scores @ tokens
    if way == "blurred":
        return F.conv1d(
            rows, torch.ones(weight.shape[0], 1, 3).to(x), padding=1, groups=weight.shape[0]
        )
    if way == "token mixing":
        tokens = x.permute(0, *range(2, x.dim()), 1).flatten(1, x.dim() - 2)
        return F.conv1d(tokens, torch.ones(2, tokens.shape[1], 1).to(x))
    if way == "sorted":
        return rows.sort(-1).values + rows.cumsum(-1)
    if way == "merged again":
        return rows.reshape(shape[0], -1) * 1
    rows.add_(1)
    return (
        rows.unflatten(2, shape[2:])
        if way == "unflattened"
        else rows.view(shape[0], -1, *shape[2:])
    )


WAYS = ["view", "unflattened", "tokens", "blurred", "token mixing", "sorted", "merged again"]


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([2, 3]))
    grid = draw(grids(ranks))
    channels = draw(st.integers(1, 3))
    return Example(
        grid=grid,
        shape=(
            draw(st.integers(grid["data"], grid["data"] + 1)),
            channels,
            *(draw(st.integers(max(p, 2), p + 3)) for p in parts_of(grid, n)),
        ),
        weights=((2, channels, 1), (2,)),
        options={"way": draw(st.sampled_from(WAYS)), "seed": draw(st.integers(0, 5))},
        dtype=draw(dtypes),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", in_gate([2, 3, 4, 6], kept=[2, 6]))
def test_equal_to_serial(ranks: int) -> None:
    run_ranks(ranks, compare, mixed, draw_examples(examples(ranks), 24))


def quantised(x: Any, codes: Any, *, flat: bool) -> Any:
    """Rows of features of all samples, as vector quantisers make them; and back."""
    rows = x.permute(0, 2, 3, 1).contiguous().view(-1, x.shape[1])
    nearest = (rows @ codes.t()).softmax(1)
    if flat:
        return (nearest.t() @ rows) * nearest.sum(0)[:, None]
    return nearest.sum(1).view(x.shape[0], *x.shape[2:]) * rows.square().sum(1).view(
        -1, *x.shape[2:]
    )


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "height": 2}, {"width": 4}], ids=str)
def test_rows_of_features(axes: dict[str, int]) -> None:
    cases = [
        Example(grid=axes, shape=(4, 3, 6, 5), weights=((7, 3),), options={"flat": flat})
        for flat in (True, False)
    ]
    ranks = 2 if len(axes) == 1 and "data" in axes else 4
    run_ranks(ranks, compare, quantised, cases)


def layouts() -> None:
    full = torch.randn(2, 3, 6, 4, 4)
    x = hs.shard(full, hs.Grid(depth=2))
    rows = F.relu(x.flatten(2) + 1)
    assert rows.shape == (2, 3, 96)
    assert rows.partition.axes == ("depth",)  # no message, no copy of the whole
    assert rows.local.shape == (2, 3, 48)
    assert rows.view(2, 3, 6, 4, 4).partition == x.partition
    assert rows.view(2, 3, 6, 16).partition.axes == ("depth",)  # split between whole parts
    assert rows.view(2, 3, 1, 96).partition.axes == ("depth",)
    assert rows.view(2, 3, 3, 32)[:, :, 1:].partition.axes == ("depth",)
    assert rows.view(2, 3, 32, 3).sort(2).values.partition.axes == ()
    kept = rows.transpose(1, 2)
    assert kept.partition.axes == rows.partition.axes == ("depth",)
    assert kept[:, :, 1:].partition.axes == kept.chunk(3, -1)[1].partition.axes == ("depth",)
    assert kept.sort(-1).values.shape == (2, 96, 3)  # a rule that wants all of it
    assert kept.partition.axes == ()
    assert torch.equal(rows.full(), F.relu(full.flatten(2) + 1))
    view = x.view(2, 3, 96)
    view.mul_(2)
    assert torch.equal(x.full(), full * 2)
    view.sort(-1)
    with pytest.raises(hs.LayoutError, match="its base would not change"):
        view.mul_(2)  # it was gathered
    again = x.view(2, 3, 96)
    again.sort(-1)
    x.add_(1)
    with pytest.raises(hs.LayoutError, match="changed in place since"):
        again + 1


def test_it_stays_cut_until_a_rule_wants_all_of_it() -> None:
    run_ranks(2, layouts)


def looked_at_first() -> list[bool]:
    """Statistics without a graph, before those with one, as of a layer that starts from data."""
    x = hs.shard(torch.randn(2, 2, 4, 6, 4), hs.Grid(depth=2, width=2)).requires_grad_()
    y = x.view(2, 2, 2, 2, 3, 2, 2, 2).permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(2, 16, 2, 3, 2)
    with torch.no_grad():
        mean = y.mean((0, 2, 3, 4), keepdim=True)
    ((y - mean) ** 2).sum().backward()
    full = x.detach().full().contiguous().requires_grad_()
    z = full.view(2, 2, 2, 2, 3, 2, 2, 2).permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(2, 16, 2, 3, 2)
    ((z - z.detach().mean((0, 2, 3, 4), keepdim=True)) ** 2).sum().backward()
    return [x.grad is not None and torch.allclose(x.grad.full(), full.grad, rtol=1e-4, atol=1e-5)]


def test_a_first_look_without_a_graph() -> None:
    assert run_ranks(4, looked_at_first) == [[True]] * 4
