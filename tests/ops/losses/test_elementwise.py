"""Elementwise losses on cut tensors equal the serial ones (tier: a few gloo ranks).

Those of `mse_loss`, `l1_loss` and `smooth_l1_loss` are in `tests/ops/reductions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "losses": {
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "gaussian_nll_loss",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "margin_ranking_loss",
        "multilabel_soft_margin_loss",
        "poisson_nll_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
        "triplet_margin_with_distance_loss",
    }
}


def signs(x: torch.Tensor) -> torch.Tensor:
    return x.detach().sign()


def distance_of_whole(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    difference = a - b
    whole = difference.full() if isinstance(difference, hs.Sharded) else difference
    return whole.square().sum(-1)


LOSSES: dict[str, Callable[..., Any]] = {
    "bce": lambda x, y, w, o: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), w, **o),
    "bce_logits": lambda x, y, w, o: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), w, pos_weight=w, **o
    ),
    "gaussian": lambda x, y, w, o: F.gaussian_nll_loss(x, y, y.exp(), full=True, **o),
    "hinge": lambda x, y, w, o: F.hinge_embedding_loss(x, signs(y), margin=0.5, **o),
    "huber": lambda x, y, w, o: F.huber_loss(x, y, delta=0.4, **o),
    "huber weighted": lambda x, y, w, o: F.huber_loss(x, y, weight=y.detach().exp(), **o),
    "kl": lambda x, y, w, o: F.kl_div(x, y, log_target=True, **o),
    "kl of probabilities": lambda x, y, w, o: F.kl_div(x, y.sigmoid(), **o),
    "margin": lambda x, y, w, o: F.margin_ranking_loss(x, y, signs(y - x), margin=0.3, **o),
    "multilabel": lambda x, y, w, o: F.multilabel_soft_margin_loss(x, y, w, **o),
    "poisson": lambda x, y, w, o: F.poisson_nll_loss(x, y.exp(), full=True, **o),
    "soft margin": lambda x, y, w, o: F.soft_margin_loss(x, signs(y), **o),
    "triplet": lambda x, y, w, o: F.triplet_margin_loss(x, y, y - x / 2, 0.4, 1, swap=True, **o),
    "triplet of cosines": lambda x, y, w, o: F.triplet_margin_with_distance_loss(
        x, y, x.flip(0), distance_function=F.cosine_similarity, **o
    ),
    "triplet out of the cut": lambda x, y, w, o: F.triplet_margin_with_distance_loss(
        x, y, x.flip(0), distance_function=distance_of_whole, **o
    ),
}


def loss(
    x: Any, target: torch.Tensor, *, kind: str, cut: bool, weight: tuple[int, ...] | None, **o: Any
) -> Any:
    """Against a target that is cut as well, or that every rank holds."""
    y = hs.shard(target, x.grid) if cut and isinstance(x, hs.Sharded) else target
    w = None
    if weight is not None:
        generator = torch.Generator().manual_seed(3)
        w = torch.rand(weight, generator=generator, dtype=torch.float64).to(x.dtype)
    return LOSSES[kind](x, y, w, o)


@st.composite
def losses(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([0, 1, 2, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(p, p + 4)) for p in parts_of(grid, n)] if n else []
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 4)), *extents)
    kind = draw(st.sampled_from(sorted(LOSSES)))
    more = ["batchmean"] if kind.startswith("kl") else []
    weights = [None, shape, (shape[1], *[1] * n), (shape[0], *[1] * (n + 1)), shape[-1:]]
    return Example(
        grid=grid,
        shape=shape,
        weights=(shape,),
        dtype=draw(dtypes),
        seed=draw(st.integers(0, 99)),
        options={
            "kind": kind,
            "cut": draw(st.booleans()),
            "weight": draw(st.sampled_from(weights)),
            "reduction": draw(st.sampled_from(["none", "mean", "sum", *more])),
        },
    )


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("ranks", RANKS)
def test_any_elementwise_loss(ranks: int) -> None:
    run_ranks(ranks, compare, loss, draw_examples(losses(ranks), 28))


def gaussian(x: Any, *, var: tuple[int, ...] | float, cut: bool) -> Any:
    """One variance for all, or one dim of it missing or of extent 1."""
    spread: Any = var
    if not isinstance(var, float):
        generator = torch.Generator().manual_seed(3)
        spread = torch.rand(var, generator=generator, dtype=x.dtype) + 0.1
    if cut and isinstance(x, hs.Sharded):
        spread = hs.shard(spread, x.grid)
    return F.gaussian_nll_loss(x, x.detach() + 1, spread)


def test_the_variance() -> None:
    shape = (2, 3, 4, 5, 6)
    variances = [0.5, shape, (2, 3, 4, 5), (2, 1, 4, 5, 6), (2, 3, 4, 5, 1), (2, 3, 1, 5, 6)]
    cases = [
        Example(grid=grid, shape=shape, options={"var": var, "cut": cut})
        for grid in ({"data": 2, "depth": 3}, {"height": 3, "width": 2})
        for var in variances
        for cut in (False, isinstance(var, tuple) and 1 not in var)
    ]
    run_ranks(6, compare, gaussian, cases)


def classes_of_one_sample(x: Any) -> Any:
    row = x[0, 0, :, 0, 0]
    return row * F.multilabel_soft_margin_loss(row, torch.arange(4) % 2.0, reduction="none")


def test_one_sample_of_several_classes() -> None:
    run_ranks(2, compare, classes_of_one_sample, [Example({"depth": 2}, (1, 2, 4, 1, 1))])


def triplets(case: str) -> None:
    x = hs.shard(torch.randn(2, 3, 4), hs.Grid(width=2))
    {
        "margin": lambda: F.triplet_margin_loss(x, x, x, margin=0.0),
        "dims": lambda: F.triplet_margin_loss(x, x, torch.randn(4)),
    }[case]()


def test_triplets_that_torch_refuses() -> None:
    with pytest.raises(ValueError, match="margin must be greater than 0"):
        run_ranks(2, triplets, "margin")
    with pytest.raises(hs.LayoutError, match="as many dims, not 3, 3 and 1"):
        run_ranks(2, triplets, "dims")


def autocast() -> None:
    """The types are torch's: elementwise losses of half precision in float32 under autocast."""
    x, grid = torch.randn(2, 3, 6, 5, 4), hs.Grid(data=2, depth=2)
    for function in (F.mse_loss, F.binary_cross_entropy_with_logits, F.kl_div, F.soft_margin_loss):
        for reduction in ("none", "sum"):
            with torch.autocast("cpu", torch.bfloat16):
                serial = function(x.bfloat16(), x.sigmoid(), reduction=reduction)
                cut = function(hs.shard(x.bfloat16(), grid), x.sigmoid(), reduction=reduction)
            found = cut.full() if isinstance(cut, hs.Sharded) else cut
            assert found.dtype == serial.dtype, function
            torch.testing.assert_close(found, serial)


def test_autocast_is_torchs() -> None:
    run_ranks(4, autocast)


def refused(case: str) -> None:
    grid = hs.Grid(data=2, width=2)
    x = hs.shard(torch.rand(4, 2, 6, 4, 4), grid)
    y = torch.rand(4, 2, 6, 4, 4)
    {
        "target": lambda: F.binary_cross_entropy(x, torch.rand(4, 2, 6, 4, 1)),
        "ranking": lambda: F.margin_ranking_loss(x, y, torch.ones(4)),
        "weight": lambda: F.binary_cross_entropy(x, y, torch.rand(3, 4, 2, 6, 4, 4)),
        "channels": lambda: F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.rand(2)),
        "squares": lambda: F.mse_loss(x, y, weight=torch.rand(4)),
        "variance": lambda: F.gaussian_nll_loss(x, y, torch.rand(4, 2, 1, 1, 1)),
        "deprecated": lambda: F.kl_div(x, y, reduce=False),
        "cosine": lambda: F.cosine_embedding_loss(x, x, torch.ones(4)),
    }[case]()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("target", r"target \(4, 2, 6, 4, 1\) differ in shape"),
        ("ranking", r"target \(4,\) differ in shape"),
        ("weight", "must broadcast to the shape"),
        ("channels", r"pos_weight \(2,\) must broadcast to the shape"),
        ("squares", r"weight \(4,\) must have the shape"),
        ("variance", "the last dim may be missing, or one dim have extent 1"),
        ("deprecated", "use reduction="),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(4, refused, case)


def test_losses_that_mix_elements_have_no_rule() -> None:
    with pytest.raises(hs.UnsupportedOp, match="cosine_embedding_loss"):
        run_ranks(4, refused, "cosine")
