"""The segmentation losses, and a public library's, on cut tensors (tier: a few gloo ranks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

LOSSES: dict[str, Callable[..., Any]] = {
    "dice": hs.losses.dice_loss,
    "generalised dice": hs.losses.generalised_dice_loss,
    "focal": hs.losses.focal_loss,
    "dice and cross-entropy": hs.losses.dice_cross_entropy_loss,
}


def labels_of(x: Any, *, channel: bool = False, whole: bool = False) -> Any:
    """The same on every grid, cut where ``x`` is cut; sample 0 lacks the last class."""
    n, c, *space = x.shape
    labels = torch.randint(c, (n, *space), generator=torch.Generator().manual_seed(7))
    labels[0] %= c - 1
    if channel:
        labels = labels.unsqueeze(1)
    if whole or not isinstance(x, hs.Sharded):
        return labels
    return hs.shard(labels, x.grid, channels=channel)


def segmentation(x: Any, *, kind: str, whole: bool, **options: Any) -> Any:
    return LOSSES[kind](x, labels_of(x, whole=whole), **options)


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([1, 2, 3, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(p, p + 4)) for p in parts_of(grid, n)]
    classes = draw(st.integers(2, 4))
    kind = draw(st.sampled_from(sorted(LOSSES)))
    options: dict[str, Any] = {"kind": kind, "whole": draw(st.booleans())}
    if kind == "focal":
        options["gamma"] = draw(st.sampled_from([0.0, 0.5, 2.0]))
        options["alpha"] = draw(st.sampled_from([None, [0.3, 0.5, 1.0, 0.1][:classes]]))
    else:
        options["include_background"] = draw(st.booleans())
    if kind != "dice and cross-entropy":
        options["reduction"] = draw(st.sampled_from(["none", "mean", "sum"]))
    return Example(
        grid=grid,
        shape=(draw(st.integers(1, 4)), classes, *extents),
        dtype=draw(dtypes),
        channels_last=n > 1 and kind == "dice" and draw(st.booleans()),
        options=options,
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_segmentation_loss(ranks: int) -> None:
    run_ranks(ranks, compare, segmentation, draw_examples(examples(ranks), 28))


def out_of_range(grid: dict[str, int]) -> None:
    cut = hs.Grid(**grid)
    labels = torch.zeros(1, 6, 2, 2, dtype=torch.uint8)
    labels[0, 0] = 3
    x = hs.shard(torch.randn(1, 3, 6, 2, 2), cut)
    hs.losses.dice_cross_entropy_loss(x, hs.shard(labels, cut, channels=False))


def test_a_label_that_is_no_class() -> None:
    with pytest.raises(IndexError, match="one of the 3 classes"):
        run_ranks(2, out_of_range, {"depth": 2})
