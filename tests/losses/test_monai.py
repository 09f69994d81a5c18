"""MONAI's own losses on cut tensors equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import monai.losses
import pytest
import torch
from hypothesis import strategies as st
from monai.networks.utils import one_hot

import hyperslab as hs
from tests.losses.test_partitioned import labels_of
from tests.ops.serial import RANKS, Example, compare, draw_examples, grids, parts_of
from tests.ranks import run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "include_background": {"include_background": False},
    "reduction": {"reduction": "none"},
    "batch": {"batch": True},
    "squared": {"squared_pred": True},
    "jaccard": {"jaccard": True},
    "simple": {"w_type": "simple"},
    "weight": {"weight": [0.2, 0.5, 1.0]},
    "gamma": {"gamma": 1.5},
    "alpha": {"alpha": 0.3},
    "tversky": {"alpha": 0.3, "beta": 0.7},
    "lambdas": {"lambda_dice": 0.5, "lambda_ce": 2.0},
    "ignore": {"ignore_index": 2},
}
TAKES = {
    "DiceLoss": [
        "include_background",
        "reduction",
        "batch",
        "squared",
        "jaccard",
        "weight",
        "ignore",
    ],
    "DiceCELoss": ["include_background", "batch", "squared", "jaccard", "lambdas"],
    "DiceFocalLoss": ["include_background", "batch", "squared", "gamma", "reduction"],
    "GeneralizedDiceLoss": ["include_background", "reduction", "batch", "simple"],
    "FocalLoss": ["include_background", "reduction", "gamma", "alpha", "ignore"],
    "TverskyLoss": ["include_background", "reduction", "batch", "tversky", "ignore"],
}


def monai_loss(x: Any, *, kind: str, softmax: bool, indices: bool, chosen: list[str]) -> Any:
    """With labels as classes, of which MONAI makes one-hot codes, or as one-hot codes."""
    options: dict[str, Any] = {"to_onehot_y": indices}
    if kind == "FocalLoss":
        options["use_softmax"] = softmax
    else:
        options["softmax" if softmax else "sigmoid"] = True
    for name in chosen:
        options |= OPTIONS[name]
    if options.get("weight") and not options.get("include_background", True):
        options["weight"] = options["weight"][1:]
    target = labels_of(x, channel=True)
    if not indices:
        # The one-hot code of whole labels is data, made before anything is cut.
        target = one_hot(labels_of(x, channel=True, whole=True), x.shape[1]).to(x.dtype)
        target = hs.shard(target, x.grid) if isinstance(x, hs.Sharded) else target
    return getattr(monai.losses, kind)(**options)(x, target)


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([2, 3, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(p, p + 4)) for p in parts_of(grid, n)]
    kind = draw(st.sampled_from(sorted(TAKES)))
    return Example(
        grid=grid,
        shape=(draw(st.integers(1, 4)), 3, *extents),
        dtype=torch.float32,
        options={
            "kind": kind,
            "softmax": draw(st.booleans()),
            "indices": draw(st.booleans()),
            "chosen": draw(st.lists(st.sampled_from(TAKES[kind]), unique=True)),
        },
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.filterwarnings("ignore:.include_background=False., scalar .alpha. ignored")
@pytest.mark.parametrize("ranks", RANKS)
def test_any_loss_of_monai(ranks: int) -> None:
    run_ranks(ranks, compare, monai_loss, draw_examples(examples(ranks), 25))


def centreline(x: Any) -> Any:
    """Skeletons by pooling, whose windows reach over the cuts."""
    target = one_hot(labels_of(x, channel=True, whole=True), x.shape[1]).to(x.dtype)
    target = hs.shard(target, x.grid) if isinstance(x, hs.Sharded) else target
    return monai.losses.SoftDiceclDiceLoss(iter_=2)(target, x.softmax(1))


@pytest.mark.parametrize("grid", [{"depth": 2, "height": 2}, {"data": 2, "width": 2}], ids=str)
def test_the_centreline_loss_of_monai(grid: dict[str, int]) -> None:
    run_ranks(4, compare, centreline, [Example(grid=grid, shape=(2, 3, 7, 6, 9))])
