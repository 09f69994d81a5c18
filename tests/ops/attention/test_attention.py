"""Attention over cut tokens equals the formula on whole ones (tier: a few gloo ranks).

The reference writes scores, softmax and product out; the operator under test takes no part in it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.ops.attention import Scheme
from tests.ops.recut import recut
from tests.ops.serial import Example, compare, draw_examples, dtypes
from tests.ranks import run_ranks
from tests.selection import in_gate

COVERS = {"attention": {"scaled_dot_product_attention"}}


def by_formula(
    q: Any, k: Any, v: Any, mask: Any = None, *, causal: bool = False, scale: float | None = None
) -> Any:
    """Softmax of products, and zeros for a query that sees nothing, as torch has it."""
    if k.dim() > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
        seen = seen & (mask > -math.inf)
    some = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(~some, 0)
    return (torch.softmax(scores, -1) * some) @ v


def attention(x: Any, bias: torch.Tensor, *, how: str, keys: str, heads: int, seed: int) -> Any:
    """Tokens (batch, features, ..., tokens) attend to themselves, or to more or fewer of them."""
    x = recut(x, seed)
    batch, features = x.shape[:2]
    if x.dim() == 4:  # the rows of an image are samples, too: queries and keys are cut by two axes
        x = x.transpose(1, 2)
        lead = [batch, x.shape[1]]
    else:
        lead = [batch]
    other = {
        "same": lambda: x.cos(),
        "fewer": lambda: x[..., 1:] * 0.5,
        "more": lambda: torch.cat([x, x.sin(), x[..., :1]], -1),
        "whole": lambda: bias[0, :features, :5].expand(*lead, features, 5).sin(),
    }[keys]()
    q, k = (t.transpose(-1, -2).unflatten(-1, (heads, -1)).transpose(-2, -3) for t in (x, other))
    v = torch.cat([k, k[..., :1].sin()], -1)
    options: dict[str, Any] = {"scale": 0.7} if seed % 2 else {}
    mask = None
    rows, columns = q.shape[-2], k.shape[-2]
    positions = torch.arange(rows)[:, None] * 3 + torch.arange(columns) * 5
    if how.startswith("grouped"):
        k, v = k[..., :1, :, :], v[..., :1, :, :]
        options["enable_gqa"] = True
    if how == "grouped, bias":
        mask = q.mean(-1, keepdim=True) * k.mean(-1).unsqueeze(-2)
    elif how == "causal":
        options["is_causal"] = True
    elif how == "boolean":
        mask = positions % 4 > 1
        mask[rows // 2] = False  # a query that sees nothing
    elif how == "learned":
        mask = bias[: 1 if seed % 3 else heads, : rows if seed % 2 else 1, :columns]
    elif how == "hidden":
        mask = torch.zeros(1, columns).masked_fill(torch.arange(columns) % 3 == 1, -math.inf)
        mask = mask.to(q.dtype)
    elif how == "cut mask":  # of whole keys that nobody sees, such as a padding mask
        mask = (other.mean(-2) > -0.3).unsqueeze(-2).unsqueeze(-2)
    elif how == "cut bias":
        mask = q.mean(-1, keepdim=True) * k.mean(-1).unsqueeze(-2)
    if isinstance(x, hs.Sharded):
        y = F.scaled_dot_product_attention(q, k, v, mask, **options)
    else:
        options.pop("enable_gqa", None)
        causal = options.pop("is_causal", False)
        y = by_formula(q, k, v, mask, causal=causal, **options)
    return y.transpose(-2, -3).flatten(-2).transpose(-1, -2)


HOW = ["plain", "grouped", "grouped, bias", "causal", "boolean", "learned", "hidden"]
HOW += ["cut mask", "cut bias"]


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    image = draw(st.booleans())
    axes = ("data", "height", "width") if image else ("data", "width")
    choices = [
        parts
        for parts in torch.cartesian_prod(*[torch.arange(1, ranks + 1)] * len(axes)).tolist()
        if math.prod(parts) == ranks
    ]
    grid = dict(zip(axes, draw(st.sampled_from(choices)), strict=True))
    heads = draw(st.sampled_from([1, 2, 3]))
    rows = [draw(st.integers(grid["height"], grid["height"] + 1))] if image else []
    tokens = draw(st.integers(max(grid["width"], 2), max(grid["width"], 2) + 7))
    return Example(
        grid=grid,
        shape=(draw(st.integers(grid["data"], grid["data"] + 1)), 2 * heads, *rows, tokens),
        weights=((3, 16, 32),),
        options={
            "how": draw(st.sampled_from(HOW)),
            "keys": draw(st.sampled_from(["same", "same", "fewer", "more", "whole"])),
            "heads": heads,
            "seed": draw(st.integers(0, 5)),
        },
        dtype=draw(dtypes),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", in_gate((1, 2, 3, 4, 8), kept=(1, 2, 8)))
def test_equal_to_the_formula(ranks: int) -> None:
    run_ranks(ranks, compare, attention, draw_examples(examples(ranks), 30))


def grouped_with_a_mask_of_cut_heads(x: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
    """The mask's heads are the depth of a volume; its columns are its first voxels."""
    mask = x.mean(1).flatten(2)[:, :, :6].unsqueeze(2)
    if isinstance(x, hs.Sharded):
        return F.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)
    return by_formula(q, k, k, mask)


@pytest.mark.parametrize("grid", [{"depth": 2}, {"depth": 2, "width": 2}, {"depth": 3}], ids=str)
def test_groups_with_a_mask_whose_heads_are_cut(grid: dict[str, int]) -> None:
    weights = ((2, 4, 3, 4), (2, 2, 6, 4))
    example = Example(grid, (2, 4, 4, 4, 5), weights, seed=3)
    run_ranks(math.prod(grid.values()), compare, grouped_with_a_mask_of_cut_heads, [example])


def dropped(axes: dict[str, int], causal: bool) -> torch.Tensor:
    """What dropout leaves of the weights themselves: the values are the identity."""
    torch.manual_seed(3)
    grid = hs.Grid(**axes)
    full = torch.randn(2, 8, 13, dtype=torch.float64)
    x = hs.shard(full, grid).transpose(1, 2).unflatten(-1, (2, 4)).transpose(1, 2)
    identity = torch.eye(13, dtype=torch.float64).expand(2, 2, 13, 13)
    if axes.get("width", 1) > 1:
        identity = hs.shard(identity, grid).transpose(2, 3)
    torch.manual_seed(4)
    y = F.scaled_dot_product_attention(x, x.sin(), identity, None, 0.4, causal)
    return y.full()


def test_dropout_is_the_same_on_every_grid() -> None:
    for causal in (False, True):
        (one,) = run_ranks(1, dropped, {}, causal)
        for axes in ({"width": 2}, {"data": 2}, {"data": 2, "width": 2}, {"width": 3}):
            for found in run_ranks(math.prod(axes.values()), dropped, axes, causal):
                assert torch.allclose(found, one, rtol=1e-10, atol=0)
        generator = torch.manual_seed(3)
        full = torch.randn(2, 8, 13, dtype=torch.float64, generator=generator)
        q = full.transpose(1, 2).unflatten(-1, (2, 4)).transpose(1, 2)
        weights = by_formula(q, q.sin(), torch.eye(13).double(), causal=causal)
        kept = one != 0
        assert torch.allclose(one[kept], weights[kept] / 0.6)
        share = kept.sum() / (weights != 0).sum()
        assert 0.5 < share < 0.7  # 0.6, of some 400 to 700 weights


def with_dropout(axes: dict[str, int]) -> tuple[torch.Tensor, ...]:
    """Gradients under dropout, of tokens that are cut or not."""
    torch.manual_seed(5)
    full = torch.randn(2, 4, 11, dtype=torch.float64, requires_grad=True)
    tokens = hs.shard(full, hs.Grid(**axes)).transpose(1, 2)
    torch.manual_seed(6)
    y = F.scaled_dot_product_attention(tokens, tokens.sin(), tokens.cos(), dropout_p=0.3)
    y.square().sum().backward()
    return y.full().detach(), full.grad


def test_gradients_under_dropout() -> None:
    (one,) = run_ranks(1, with_dropout, {})
    for axes in ({"width": 2}, {"data": 2, "width": 2}, {"width": 3}):
        for found in run_ranks(math.prod(axes.values()), with_dropout, axes):
            assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(found, one, strict=True))
    _, gradient = one
    assert (gradient != 0).all()


def half(dtype: torch.dtype) -> None:
    """In half precision, and under autocast, as near to the exact result as torch's own is."""
    grid = hs.Grid(width=2)
    full = torch.randn(2, 16, 70)
    tokens = full.transpose(1, 2).double()
    exact = by_formula(tokens, tokens, tokens)
    cut = hs.shard(full, grid).transpose(1, 2)
    plain = full.transpose(1, 2)
    own = F.scaled_dot_product_attention(*[plain.to(dtype)] * 3)
    low = F.scaled_dot_product_attention(*[cut.to(dtype)] * 3)
    with torch.autocast("cpu", dtype):
        cast = F.scaled_dot_product_attention(*[cut] * 3)
        # Queries and keys that come out of a norm are single, and values half.
        normed = F.scaled_dot_product_attention(cut, cut, cut.to(dtype))
    for found in (low, cast, normed):
        assert found.dtype == dtype
        error, other = ((t.double() - exact).norm() for t in (found.full(), own))
        assert error < 1.2 * other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    run_ranks(2, half, dtype)


def nothing_is_gathered() -> None:
    """What the graph of attention keeps, and what travels: 1/ranks of the tokens each."""
    grid = hs.Grid(width=4)
    n = 4096
    x = hs.shard(torch.randn(1, 8, n), grid).transpose(1, 2)
    leaf = x.detach().requires_grad_()
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = F.scaled_dot_product_attention(leaf, leaf * 2, leaf * 3)
    own = n // 4 * 8 * 4
    assert sum(saved.values()) <= 5 * own  # queries, keys, values, the result, a number a query
    assert y.partition == x.partition


def test_nothing_is_gathered() -> None:
    run_ranks(4, nothing_is_gathered)


def penalty(x: hs.Sharded) -> torch.Tensor:
    y = F.scaled_dot_product_attention(x, x, x).sum()
    return torch.autograd.grad(y, x, create_graph=True)[0].square().sum()


def failing_in_a_tile(where: str) -> None:
    """What failed is not what the next call receives."""
    grid = hs.Grid(width=3)
    x = hs.shard(torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0)), grid)
    x = x.transpose(1, 2)
    scores = Scheme.scores
    calls = 0

    def fail(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyError("of a program that goes on")
        return scores(*arguments)

    def attend(factor: float, failing: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        leaf = (x * factor).detach().requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            if failing == "forward":
                patch.setattr(Scheme, "scores", fail)
            y = F.scaled_dot_product_attention(leaf, leaf, leaf)
            if failing == "backward":
                patch.setattr(Scheme, "scores", fail)
            y.sum().backward()
        return y.full(), leaf.grad.full()

    expected = attend(1)
    with pytest.raises(KeyError):
        attend(2, where)
    for found, own in zip(attend(1), expected, strict=True):
        assert torch.equal(found, own)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_call_that_failed_leaves_no_messages(where: str) -> None:
    run_ranks(3, failing_in_a_tile, where)


def wrong(case: str) -> None:
    grid = hs.Grid(width=2)
    x = hs.shard(torch.randn(2, 4, 6), grid).transpose(1, 2)
    heads = x.unsqueeze(1)
    {
        "both": lambda: F.scaled_dot_product_attention(
            x, x, x, torch.ones(6, 6, dtype=torch.bool), is_causal=True
        ),
        "types": lambda: F.scaled_dot_product_attention(x, x.double(), x),
        "integers": lambda: F.scaled_dot_product_attention(x, x, x, torch.ones(6, 6).long()),
        "row": lambda: F.scaled_dot_product_attention(x, x, x, torch.ones(6)),
        "lengths": lambda: F.scaled_dot_product_attention(x, x, x[:, 1:]),
        "one value": lambda: F.scaled_dot_product_attention(x, x, x[:, :1]),
        "features": lambda: F.scaled_dot_product_attention(x[..., :1], x, x),
        "large mask": lambda: F.scaled_dot_product_attention(x, x, x, torch.ones(3, 2, 6, 6)),
        "long mask": lambda: F.scaled_dot_product_attention(
            x[:1], x[:1], x[:1], torch.ones(2, 6, 6)
        ),
        "heads": lambda: F.scaled_dot_product_attention(
            *[torch.cat([heads] * n, 1) for n in (3, 2, 2)], enable_gqa=True
        ),
        "again": lambda: penalty(x.requires_grad_()).backward(),
    }[case]()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("both", "takes a mask or is_causal, not both"),
        ("types", "takes one type, not torch.float32, torch.float64"),
        ("integers", "takes a mask of booleans"),
        ("row", "takes a mask of queries and keys"),
        ("lengths", "6 and 5 elements in one dim"),
        ("one value", "a value for each key"),
        ("features", "queries and keys of as many features"),
        ("large mask", "the mask is larger than the scores"),
        ("long mask", "the mask is larger than the scores"),
        ("heads", "3 heads of queries cannot share 2"),
        ("again", "gradient of attention over cut tokens cannot be differentiated again"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises((hs.LayoutError, hs.UnsupportedOp), match=message):
        run_ranks(2, wrong, case)
