"""Layers with attention equal serial ones, or are refused (tier: a few gloo ranks)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import Example, compare
from tests.ranks import run_ranks

COVERS = {"attention": {"multi_head_attention_forward"}}

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


def layer(x: Any, *weights: torch.Tensor, how: str, cross: bool) -> Any:
    """`nn.MultiheadAttention` over tokens (batch, features, tokens) that stay cut."""
    module = nn.MultiheadAttention(
        6, 2, batch_first=True, kdim=4 if how == "widths" else None, vdim=6
    ).to(x.dtype)
    names = [name for name, _ in module.named_parameters()]
    parameters = dict(zip(names, weights[: len(names)], strict=True))
    tokens = x.transpose(1, 2)
    key = tokens[:, 2:] if cross else tokens
    value = key.sin()
    if how == "widths":
        key = key[..., :4]
    rows, columns = tokens.shape[1], key.shape[1]
    padding = torch.arange(columns).expand(x.shape[0], columns) % 4 == 3
    triangle = torch.ones(rows, columns, dtype=torch.bool).triu(1)
    each = torch.stack([triangle] * 2 * x.shape[0])
    options: dict[str, Any] = {
        "plain": {},
        "widths": {},
        "padding": {"key_padding_mask": padding},
        "cut padding": {"key_padding_mask": key.mean(-1) > 0.4},
        "mask": {"attn_mask": triangle},
        "causal": {"attn_mask": triangle, "is_causal": True},
        "both": {"attn_mask": triangle, "key_padding_mask": padding},
        "mixed": {
            "attn_mask": torch.zeros(rows, columns).to(x).masked_fill(triangle, -math.inf),
            "key_padding_mask": torch.zeros(padding.shape).to(x).masked_fill(padding, -math.inf),
        },
        "each head": {"attn_mask": each},
    }[how]
    given = (tokens, key, value)
    if how == "causal" and not isinstance(x, hs.Sharded):
        options["is_causal"] = False  # torch's flag is only a hint
    y, _ = torch.func.functional_call(module, parameters, given, {**options, "need_weights": False})
    if isinstance(y, hs.Sharded) and "width" in x.partition.axes:
        assert y.partition.cuts[1] is not None
    return y.transpose(1, 2)


LAYERS = [
    "plain", "widths", "padding", "cut padding", "mask", "causal", "both", "mixed", "each head"
]  # fmt: skip


@pytest.mark.parametrize("axes", [{"width": 2}, {"data": 2, "width": 2}], ids=str)
def test_a_layer_over_cut_tokens(axes: dict[str, int]) -> None:
    packed = ((18, 6), (18,), (6, 6), (6,))
    apart = ((6, 6), (6, 4), (6, 6), (18,), (6, 6), (6,))
    cases = [
        Example(
            grid=axes,
            shape=(2, 6, 9),
            weights=apart if how == "widths" else packed,
            options={"how": how, "cross": cross},
        )
        for how in LAYERS
        for cross in (False, True)
    ]
    run_ranks(math.prod(axes.values()), compare, layer, cases)


def encoder(x: Any, *weights: torch.Tensor, norm_first: bool) -> Any:
    """A whole `nn.TransformerEncoderLayer` in training, with its gradients."""
    module = nn.TransformerEncoderLayer(
        6, 2, 10, dropout=0.0, batch_first=True, norm_first=norm_first, activation="gelu"
    ).to(x.dtype)
    names = [name for name, _ in module.named_parameters()]
    tokens = x.transpose(1, 2)
    y = torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (tokens,))
    return y.transpose(1, 2)


@pytest.mark.parametrize("axes", [{"width": 2}, {"width": 3}, {"data": 2, "width": 2}], ids=str)
def test_an_encoder_layer(axes: dict[str, int]) -> None:
    module = nn.TransformerEncoderLayer(6, 2, 10)
    weights = tuple(tuple(p.shape) for p in module.parameters())
    cases = [
        Example(grid=axes, shape=(2, 6, 8), weights=weights, options={"norm_first": first})
        for first in (False, True)
    ]
    run_ranks(math.prod(axes.values()), compare, encoder, cases)


def dropping(axes: dict[str, int]) -> torch.Tensor:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
    full = torch.randn(2, 6, 8)
    x = hs.shard(full, hs.Grid(**axes)).transpose(1, 2)
    torch.manual_seed(1)
    y, _ = module(x, x, x, need_weights=False)
    return y.full().detach()


def test_dropout_of_a_layer() -> None:
    (one,) = run_ranks(1, dropping, {})
    for axes in ({"width": 2}, {"data": 2}):
        for found in run_ranks(2, dropping, axes):
            assert torch.allclose(found, one, atol=1e-6)


class Block(nn.Module):
    """A vision transformer's block over the voxels of a volume, and back to a volume."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        features, *space = shape
        self.positions = nn.Parameter(torch.randn(1, math.prod(space), features))
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.mlp = nn.Sequential(
            nn.Linear(features, 2 * features), nn.GELU(), nn.Linear(2 * features, features)
        )

    def forward(self, x: Any, how: str) -> Any:
        space = x.shape[2:]
        tokens = x.flatten(2).transpose(1, 2) + self.positions
        batch, n, features = tokens.shape
        qkv = self.qkv(self.norm1(tokens)).reshape(batch, n, 3, 2, features // 2)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if how == "by hand":
            y = ((q @ k.transpose(-2, -1)) * 0.5).softmax(-1) @ v
        elif how == "einsum":
            weights = torch.einsum("bhxd,bhyd->bhxy", q, k).softmax(-1)
            y = torch.einsum("bhxy,bhyd->bhxd", weights, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        tokens = tokens + self.out(y.transpose(1, 2).reshape(batch, n, features))
        tokens = tokens + self.mlp(self.norm2(tokens))
        if isinstance(x, hs.Sharded):
            kept = [
                axis for axis in ("data", "depth", "height", "width") if x.grid.extents[axis] > 1
            ]
            space_axes = [axis for axis in kept if axis != "data"]
            assert tokens.partition.axes == tuple(kept[: len(kept) - len(space_axes) + 1])
        return tokens.transpose(1, 2).reshape(batch, features, *space)


def over_voxels(x: Any, *weights: torch.Tensor, how: str) -> Any:
    module = Block(tuple(x.shape[1:])).to(x.dtype)
    names = [name for name, _ in module.named_parameters()]
    return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x, how))


@pytest.mark.parametrize(
    "axes",
    [{"depth": 2}, {"width": 3}, {"data": 2, "depth": 2}, {"depth": 2, "height": 2}],
    ids=str,
)
def test_tokens_of_a_volume_stay_cut(axes: dict[str, int]) -> None:
    """They do along the first axis that cuts the volume."""
    shape = (2, 4, 5, 2, 3)
    weights = tuple(tuple(p.shape) for p in Block(shape[1:]).parameters())
    cases = [
        Example(grid=axes, shape=shape, weights=weights, options={"how": how})
        for how in ("fused", "by hand", "einsum")
    ]
    run_ranks(math.prod(axes.values()), compare, over_voxels, cases)


def in_windows(x: Any, *weights: torch.Tensor, window: int, shift: int, seed: int) -> Any:
    """A block of shifted windows over a volume (channels last), padded to whole windows."""
    x = recut(x, seed).permute(0, 2, 3, 4, 1)
    batch, *space, features = x.shape
    full = [-(-n // window) * window for n in space]
    y = F.pad(
        x, [0, 0] + [p for n, m in zip(space[::-1], full[::-1], strict=True) for p in (0, m - n)]
    )
    y = torch.roll(y, [-shift] * 3, (1, 2, 3))
    counts = [m // window for m in full]
    parts = [n for count in counts for n in (count, window)]
    windows = y.view(batch, *parts, features).permute(0, 1, 3, 5, 2, 4, 6, 7).contiguous()
    if isinstance(x, hs.Sharded) and x.grid.depth > 1 and window == 2:
        assert windows.partition.cuts[1] is not None
    tokens = windows.view(-1, window**3, features)
    qkv = F.linear(tokens, *weights).reshape(-1, window**3, 3, 2, features // 2)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    attended = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2)
    y = attended.reshape(-1, window, window, window, features)
    y = y.view(batch, *counts, window, window, window, features)
    y = y.permute(0, 1, 4, 2, 5, 3, 6, 7).contiguous().view(batch, *full, features)
    y = torch.roll(y, [shift] * 3, (1, 2, 3))[:, : space[0], : space[1], : space[2]]
    return x + y.contiguous()


@pytest.mark.parametrize("ranks", [2, 3])
def test_windows(ranks: int) -> None:
    cases = [
        Example(
            grid={axis: ranks},
            shape=(batch, 4, 6 + window % 2, 6, 7),
            weights=((12, 4), (12,)),
            options={"window": window, "shift": shift, "seed": seed},
        )
        for axis in ("depth", "width")
        for batch, window, shift, seed in ((1, 2, 1, 0), (1, 3, 1, 3), (2, 2, 0, 0), (1, 4, 2, 5))
    ]
    run_ranks(ranks, compare, in_windows, cases)


def refused(case: str) -> None:
    grid = hs.Grid(width=2)
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    mask = hs.shard(torch.zeros(2, 2, 6, 6), grid, channels=False)
    whole = hs.gather(hs.shard(torch.ones(6, 4, 4), grid, channels=False), "width")
    row = hs.shard(torch.randn(2, 6, 4), hs.Grid(width=2), channels=False).transpose(1, 2)
    {
        "layer dropout, cut mask": lambda: nn.MultiheadAttention(4, 2, dropout=0.1)(
            *[whole] * 3, key_padding_mask=mask[0, 0, :4] > 9
        ),
        "layer features": lambda: layer(row.mT, row.mT, row.mT),
    }[case]()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("layer dropout, cut mask", "draws its dropout mask for the block only"),
        ("layer features", "multi_head_attention_forward needs the whole of dim 2, which is cut"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(2, refused, case)
