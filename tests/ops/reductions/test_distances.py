"""Similarities and distances equal the serial ones; single values (tier: a few gloo ranks)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.reductions.test_reductions import tensors
from tests.ops.serial import RANKS, Example, compare, draw_examples
from tests.ranks import run_ranks

COVERS = {
    "reductions": {"cosine_similarity", "pairwise_distance", "dist"},
    "value": {"item", "__float__", "__int__", "__bool__"},
}

PAIRS = {
    "cosine_similarity": lambda x, y, dim, p: F.cosine_similarity(x, y, dim),
    "reversed": lambda x, y, dim, p: F.cosine_similarity(y, x, dim, 0.5),
    "large eps": lambda x, y, dim, p: F.cosine_similarity(x, y, dim, 50.0),
    "pairwise_distance": lambda x, y, dim, p: F.pairwise_distance(x, y, p),
    "keepdim": lambda x, y, dim, p: F.pairwise_distance(x, y, p, keepdim=True),
    "dist": lambda x, y, dim, p: torch.dist(x, y, p),
}


def pair(x: Any, y: torch.Tensor, *, kind: str, cut: bool, dim: int, p: float) -> Any:
    """With a tensor that is cut as well, or that every rank holds."""
    other = hs.shard(y, x.grid) if cut and isinstance(x, hs.Sharded) else y
    return PAIRS[kind](x, other, dim, p)


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    example = draw(tensors(ranks))
    # Of one element the cosine is a sign: its gradient is nothing but rounding.
    example = replace(example, shape=tuple(extent + 1 for extent in example.shape))
    shape = example.shape
    cut = draw(st.booleans())
    if not cut and draw(st.booleans()):
        shape = (1, *shape[1:])  # broadcast
    options = {
        "kind": draw(st.sampled_from(list(PAIRS))),
        "cut": cut,
        "dim": draw(st.integers(-1, len(shape) - 1)),
        "p": draw(st.sampled_from([2.0, 1.0, 3.0, float("inf")])),
    }
    return replace(example, weights=(shape,), options=options)


@pytest.mark.parametrize("ranks", RANKS)
def test_any_pair(ranks: int) -> None:
    run_ranks(ranks, compare, pair, draw_examples(examples(ranks), 28))


def single_values() -> None:
    grid = hs.Grid(depth=2)
    x = hs.shard(torch.ones(1, 2, 4, 3, 3), grid)
    one = x.mean(dim=(1, 2, 3, 4))
    assert isinstance(one, hs.Sharded)
    assert (one.item(), float(one), int(one), bool(one)) == (1.0, 1.0, 1, True)
    assert not bool(one > 1)
    for way in (torch.Tensor.item, float, int, bool):
        with pytest.raises(hs.UnsupportedOp, match="has no rule for a cut tensor"):
            way(x)


def test_single_values() -> None:
    run_ranks(2, single_values)
