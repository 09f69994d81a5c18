"""Attention equals the serial one, or is refused (tier: a few gloo ranks)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from tests.ops.serial import Example, compare
from tests.ranks import run_ranks

COVERS = {"linalg": {"scaled_dot_product_attention", "multi_head_attention_forward"}}

GRIDS = ({"data": 2, "depth": 2}, {"depth": 2, "width": 2}, {"data": 4})


def over_space(x: Any, weight: torch.Tensor, mask: torch.Tensor, *, how: str) -> Any:
    """Heads of channels attend over the voxels: flatten(2) leaves space."""
    b, c = x.shape[:2]
    tokens = x.flatten(2).reshape(b, 2, c // 2, -1).transpose(2, 3)
    q, k, v = (tokens * scale for scale in weight)
    if how == "by hand":
        weights = (q @ k.transpose(-1, -2) * 0.3).softmax(-1)
        y = weights @ v
    elif how == "grouped":
        y = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
    else:
        options: dict[str, Any] = {
            "plain": {"scale": 0.3},
            "causal": {"is_causal": True},
            "mask": {"attn_mask": mask},
        }
        y = F.scaled_dot_product_attention(q, k, v, **options[how])
    return y.transpose(2, 3).reshape(x.shape) + x


@pytest.mark.parametrize("how", ["plain", "causal", "mask", "grouped", "by hand"])
def test_attention_over_space(how: str) -> None:
    cases = [
        Example(grid=grid, shape=(4, 4, 4, 2, 3), weights=((3,), (24, 24)), options={"how": how})
        for grid in GRIDS
    ]
    run_ranks(4, compare, over_space, cases)


def cut_queries(x: Any, context: torch.Tensor, mask: torch.Tensor, *, masked: bool) -> Any:
    """Every row of a volume asks a context that all ranks hold, or the gathered volume."""
    rows = x.flatten(3).permute(0, 2, 3, 1)  # batch, depth, voxels, channels: voxels gathered
    rows = rows.transpose(1, 2)  # queries are the planes, cut by depth
    y = F.scaled_dot_product_attention(rows, context, context, mask if masked else None)
    return y.transpose(1, 2)


def test_cut_queries() -> None:
    cases = [
        Example(
            grid=grid,
            shape=(2, 3, 5, 2, 2),
            weights=((2, 4, 6, 3), (5, 6)),
            options={"masked": masked},
        )
        for grid in ({"data": 2, "depth": 2}, {"depth": 4})
        for masked in (False, True)
    ]
    run_ranks(4, compare, cut_queries, cases)


def attend(x: Any, *weights: torch.Tensor, how: str) -> Any:
    """`torch.nn.MultiheadAttention` over the voxels, its parameters given."""
    layer = nn.MultiheadAttention(4, 2, batch_first=True).to(x.dtype)
    tokens = x.flatten(2).transpose(1, 2)
    padding = torch.arange(12).expand(x.shape[0], 12) > 9
    options: dict[str, Any] = {
        "plain": {},
        "no weights": {"need_weights": False},
        "each head": {"average_attn_weights": False},
        "padding": {"key_padding_mask": padding},
        "mask": {"attn_mask": torch.ones(12, 12, dtype=torch.bool).triu(1)},
    }[how]
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    parameters = dict(zip(names, weights, strict=True))
    y, found = torch.func.functional_call(layer, parameters, (tokens, tokens, tokens), options)
    return y if found is None else torch.cat([y.flatten(1), found.flatten(1)], 1)


@pytest.mark.parametrize("how", ["plain", "no weights", "each head", "padding", "mask"])
def test_multi_head_attention(how: str) -> None:
    cases = [
        Example(
            grid=grid,
            shape=(4, 4, 4, 3, 1),
            weights=((12, 4), (12,), (4, 4), (4,)),
            options={"how": how},
        )
        for grid in ({"data": 2, "depth": 2}, {"depth": 2, "height": 2}, {"data": 4})
    ]
    run_ranks(4, compare, attend, cases)


def transformer() -> None:
    """A whole layer in evaluation, where torch would take a fused path."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    full = torch.randn(4, 6, 4)
    with torch.no_grad():
        found = layer(hs.shard(full, hs.Grid(data=2)))
        assert torch.allclose(found.full(), layer(full), atol=1e-6)


def test_a_transformer_layer() -> None:
    run_ranks(2, transformer)


def tokens_attend(x: Any, *weights: Any, heads: int, layer: bool) -> Any:
    """Over tokens (batch, features, tokens) that stay cut."""
    tokens = x.transpose(1, 2)
    if layer:
        found, _ = F.multi_head_attention_forward(
            *[tokens.transpose(0, 1)] * 3, x.shape[1], heads, weights[0], None, None, None, False,
            0.0, weights[1], None, attn_mask=None, need_weights=False, training=True,
        )  # fmt: skip
        return found.transpose(0, 1)
    split = tokens.reshape(*tokens.shape[:2], heads, -1).transpose(1, 2)
    y = F.scaled_dot_product_attention(split, split * 0.5, split + 1)
    if isinstance(y, hs.Sharded):
        assert y.partition.cuts[2] is not None  # queries stay where they are
    return y


@pytest.mark.parametrize("axes", [{"width": 2}, {"width": 3}, {"data": 2, "width": 2}], ids=str)
def test_tokens_that_stay_cut(axes: dict[str, int]) -> None:
    cases = [
        Example(
            grid=axes,
            shape=(2, 4, 7),
            weights=((12, 4), (4, 4)),
            options={"heads": 2, "layer": layer},
            dtype=dtype,
        )
        for layer in (False, True)
        for dtype in (torch.float64, torch.float32)
    ]
    run_ranks(math.prod(axes.values()), compare, tokens_attend, cases)


def refused(case: str) -> None:
    grid = hs.Grid(width=2)
    x = hs.shard(torch.randn(2, 2, 6, 4), grid, channels=False)
    tokens, uncut = x.transpose(2, 3), hs.gather(x, "width")
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    mask = hs.shard(torch.zeros(2, 2, 6, 6), grid, channels=False)
    whole = hs.gather(hs.shard(torch.ones(6, 4, 4), grid, channels=False), "width")
    row = hs.shard(torch.randn(2, 6, 4), hs.Grid(width=2), channels=False).transpose(1, 2)
    {
        "features": lambda: F.scaled_dot_product_attention(x, x, x),
        "causal": lambda: F.scaled_dot_product_attention(
            tokens, uncut.mT, uncut.mT, is_causal=True
        ),
        "dropout": lambda: F.scaled_dot_product_attention(
            tokens, uncut.mT, uncut.mT, dropout_p=0.1
        ),
        "dropout, cut mask": lambda: F.scaled_dot_product_attention(
            uncut, uncut, uncut, mask, dropout_p=0.1
        ),
        "layer dropout, cut mask": lambda: nn.MultiheadAttention(4, 2, dropout=0.1)(
            *[whole] * 3, key_padding_mask=mask[0, 0, :4] > 9
        ),
        "layer features": lambda: layer(row.mT, row.mT, row.mT),
    }[case]()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("features", "needs the whole of dim 3, which is cut"),
        ("causal", "needs the whole of dim 2, which is cut"),
        ("dropout", "draws its dropout mask for the block only"),
        ("dropout, cut mask", "draws its dropout mask for the block only"),
        ("layer dropout, cut mask", "draws its dropout mask for the block only"),
        ("layer features", "multi_head_attention_forward needs the whole of dim 2, which is cut"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(2, refused, case)
