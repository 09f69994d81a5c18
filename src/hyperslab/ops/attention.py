"""Distributes attention: every query sees every key, wherever either lies.

Queries stay where they are. Where the same axis cuts queries and keys, blocks of keys and values
travel around the ring of its ranks behind the computation (Liu et al. 2023, "Ring attention").
Where another axis cuts the keys, each of its ranks attends to its own, and partial results are
summed. Both combine blocks by the logarithm of their sums of exponentials (Dao et al. 2022,
"FlashAttention", section 3.1), and compute scores a tile at a time, again in the backward pass. So
a rank holds its part of queries, keys and values and two blocks under way, and never their scores.

In reading order: `Scheme`, what all ranks know of a call; tiles of scores and what is made of them;
`_Attend`, forward and backward; the rules of attention and of the layer with several heads.

Legend: a *place* counts the shards of the keys along the axis that cuts them. Blocks are (*lead,
tokens, features), where *lead* are batch and heads.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import Grid, log_once
from hyperslab.comm.communicator import Arriving, completing
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Cut, Interval, Partition
from hyperslab.kernels.memory_format import accumulator
from hyperslab.kernels.random_bits import draw_seed, least_kept, scale_of, uniform_bits
from hyperslab.ops.elementwise import check_random_state, check_whole_mask, drops_anything
from hyperslab.ops.filter_parallel import operand_type
from hyperslab.ops.linalg import (
    DimLabel,
    batch_labels,
    contract,
    label_extents,
    operand_partition,
    wrap_labelled,
)
from hyperslab.ops.operands import (
    LAYOUTS,
    block_of,
    check_uncut,
    device_constant,
    first_cuts,
    whole_of,
)
from hyperslab.ops.placement import with_whole
from hyperslab.tensor import Sharded, gather, register
from hyperslab.tensor.dispatch import describe
from hyperslab.util.derivatives import differentiable_once
from hyperslab.util.torch_internals import BlockFunction, EnableTorchFunction

_KEYS_AT_ONCE = 1024
"""Limits the keys of a tile of scores."""

_SCORES_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Limits the scores that exist at a time: few enough for a core's cache, enough for a GPU."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Names some ``rows`` of a rank's queries, and some ``columns`` of the keys from ``lo`` on."""

    rows: slice
    columns: slice
    lo: int


@dataclass(frozen=True, slots=True)
class Scheme:
    """Holds what one call of attention computes, and where its keys and values lie.

    Args:
        grid: the ranks.
        shape: (*lead, queries, keys) of all scores.
        box: this rank's lead dims and queries; all of the keys.
        keys: which axis cuts the keys at which bounds; None if every rank has all.
        travels: whether blocks of keys go around, or else partial results are summed.
        causal: whether query i sees the keys up to i alone.
        scale: the factor of the scores.
        dropout: the probability with which a weight is dropped.
        seed: of that, on the device; None without dropout.
    """

    grid: Grid
    shape: tuple[int, ...]
    box: Box
    keys: Cut | None
    travels: bool
    causal: bool
    scale: float
    dropout: float
    seed: torch.Tensor | None

    @property
    def place(self) -> int:
        """Returns which shard of the keys is this rank's own."""
        return 0 if self.keys is None else self.grid.coords[self.keys.axis]

    @property
    def queries(self) -> Interval:
        return self.box.interval(len(self.shape) - 2)

    def keys_at(self, place: int) -> Interval:
        return (0, self.shape[-1]) if self.keys is None else self.keys.interval(place)

    def pass_on(self, block: torch.Tensor, to_come: Interval, what: str) -> Arriving:
        """Sends a block to the next rank of the ring; begins to receive one of other keys."""
        assert self.keys is not None
        before, after = (
            self.grid.rank_of(
                {**self.grid.coords, self.keys.axis: (self.place + step) % self.keys.parts}
            )
            for step in (-1, 1)
        )
        extent = to_come[1] - to_come[0]
        buffer = block.new_empty(*block.shape[:-2], extent, block.shape[-1])
        return self.grid.halos.exchange([(after, block)], [(before, buffer)], what)

    def blocks(self, own: torch.Tensor) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Yields places and their blocks, this rank's first; the next one travels meanwhile."""
        count = self.keys.parts if self.keys is not None and self.travels else 1
        block = own
        for step in range(count):
            place = (self.place - step) % count if count > 1 else self.place
            if step == count - 1:
                yield place, block
                return
            to_come = self.keys_at((place - 1) % count)
            passing = self.pass_on(block, to_come, "keys and values of attention")
            with completing(passing) as arriving:
                yield place, block
            (block,) = arriving.wait()

    def tiles(self, place: int, q: torch.Tensor) -> Iterator[Tile]:
        """Yields every tile of scores with the keys at a place."""
        lo, hi = self.keys_at(place)
        all_after = self.causal and lo >= self.queries[1]
        if all_after or q.numel() == 0 or lo == hi:
            return
        lead = max(1, math.prod(q.shape[:-2]))
        columns = min(hi - lo, _KEYS_AT_ONCE)
        rows = max(1, _SCORES_AT_ONCE.get(q.device.type, 1 << 25) // (lead * columns))
        first = self.queries[0]
        for row in range(0, q.shape[-2], rows):
            end = min(row + rows, q.shape[-2])
            for column in range(0, hi - lo, columns):
                if self.causal and lo + column > first + end - 1:
                    break
                yield Tile(slice(row, end), slice(column, min(column + columns, hi - lo)), lo)

    def kept(self, tile: Tile, like: torch.Tensor) -> torch.Tensor:
        """Draws what dropout leaves of a tile's weights, and by how much these grow.

        It depends on the global indices alone.
        """
        first, lead = self.queries[0], len(self.shape) - 2
        box = Box(
            (*self.box.lo[:lead], first + tile.rows.start, 0, tile.lo + tile.columns.start),
            (*self.box.hi[:lead], first + tile.rows.stop, 1, tile.lo + tile.columns.stop),
        )
        # A dim of 1 between queries and keys: the innermost two may have 2^31 elements at most.
        shape = (*self.shape[:-1], 1, self.shape[-1])
        assert self.seed is not None
        bits = uniform_bits(shape, box, self.seed, like.device).squeeze(-2)
        return (bits >= least_kept(self.dropout)).to(like.dtype).mul_(scale_of(self.dropout))

    def mask_part(self, mask: torch.Tensor, tile: Tile) -> tuple[Any, ...]:
        """Returns the index of a tile in this rank's part of the mask."""
        origin = tile.lo if self.travels else 0
        seen = slice(origin + tile.columns.start, origin + tile.columns.stop)
        every = slice(None)  # of a dim that is broadcast
        rows = tile.rows if mask.shape[-2] > 1 else every
        return ..., rows, seen if mask.shape[-1] > 1 else every

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, tile: Tile
    ) -> torch.Tensor:
        """Computes a tile of scores; -inf where a query does not see a key.

        Args:
            q: the queries, scaled, of the tile.
            k: the keys at its place.
            mask: this rank's part of the mask.
        """
        found = q @ k[..., tile.columns, :].mT
        if mask is not None:
            own = mask[self.mask_part(mask, tile)]
            if own.dtype == torch.bool:
                found.masked_fill_(~own, -math.inf)
            else:
                found += own
        first, lo = self.queries[0], tile.lo
        if self.causal and lo + tile.columns.stop - 1 > first + tile.rows.start:
            query = torch.arange(first + tile.rows.start, first + tile.rows.stop, device=q.device)
            key = torch.arange(lo + tile.columns.start, lo + tile.columns.stop, device=q.device)
            found.masked_fill_(query[:, None] < key, -math.inf)
        return found


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Replaces -inf, of a query that sees no key, by 0: its weights are zeros, not NaN."""
    return x.masked_fill(x == -math.inf, 0)


class _Attend(BlockFunction):
    """Computes what this rank's queries see of all keys.

    Distribution scheme, forward: for each block of keys and values, 1. send it on and begin to
    receive the next one, 2. update sums, maxima and weighted values tile by tile. If the keys' axis
    does not cut the queries, 1. do the same for this rank's own block alone, 2. find the largest
    maxima among the ranks that share queries, 3. sum their results. Backward: the blocks travel
    once more, each followed by its gradient, to which every rank adds; in the second case one sum
    of the result's gradient is enough.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scheme: Scheme,
    ) -> torch.Tensor:
        kind = accumulator(q.dtype)
        result = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=kind)
        largest = q.new_full((*q.shape[:-1], 1), -math.inf, dtype=kind)
        total = torch.zeros_like(largest)
        with closing(scheme.blocks(torch.cat([k, v], -1))) as blocks:
            for place, block in blocks:
                keys, values = _heads_of(block, q, kind).split([k.shape[-1], v.shape[-1]], -1)
                for tile in scheme.tiles(place, q):
                    rows = tile.rows
                    own = q[..., rows, :].to(kind) * scheme.scale
                    weights = scheme.scores(own, keys, mask, tile)
                    before = largest[..., rows, :]
                    after = torch.maximum(before, weights.amax(-1, keepdim=True))
                    shift = _finite(after)
                    weights.sub_(shift).exp_()
                    fade = (before - shift).exp_()
                    total[..., rows, :] = total[..., rows, :] * fade + weights.sum(-1, keepdim=True)
                    if scheme.dropout:
                        weights *= scheme.kept(tile, weights)
                    result[..., rows, :] *= fade
                    result[..., rows, :] += weights @ values[..., tile.columns, :]
                    largest[..., rows, :] = after
        if scheme.keys is not None and not scheme.travels:
            result, largest, total = _sum_of_ranks(scheme, result, largest, total)
        log_total = largest + total.log()  # -inf for a query that sees nothing
        y = (result / total.masked_fill_(total == 0, 1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, y, log_total)
        ctx.scheme = scheme
        return y

    @staticmethod
    @differentiable_once("attention over cut tokens")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, mask, y, log_total = ctx.saved_tensors
        scheme: Scheme = ctx.scheme
        kind = log_total.dtype
        if scheme.keys is not None and not scheme.travels:
            group = scheme.grid.group([scheme.keys.axis])
            assert group is not None
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            gradient = group.sum_in_place(gradient, "the adjoint of the sum of attention")
        mean = (gradient.to(kind) * y).sum(-1, keepdim=True)
        log_total = _finite(log_total)
        of_q = torch.zeros_like(q, dtype=kind)
        of_mask = torch.zeros_like(mask, dtype=kind) if ctx.needs_input_grad[3] else None

        def add_block(place: int, block: torch.Tensor) -> torch.Tensor:
            """Adds to the gradients of queries and mask; returns that of keys and values."""
            keys, values = _heads_of(block, q, kind).split([k.shape[-1], v.shape[-1]], -1)
            of_block = torch.zeros_like(_heads_of(block, q, kind))
            of_keys, of_values = of_block.split([k.shape[-1], v.shape[-1]], -1)
            for tile in scheme.tiles(place, q):
                rows, columns = tile.rows, tile.columns
                own = q[..., rows, :].to(kind) * scheme.scale
                weights = scheme.scores(own, keys, mask, tile)
                weights.sub_(log_total[..., rows, :]).exp_()
                of_rows = gradient[..., rows, :].to(kind)
                of_weights = of_rows @ values[..., columns, :].mT
                kept = weights
                if scheme.dropout:
                    keep = scheme.kept(tile, weights)
                    kept = weights * keep
                    of_weights *= keep
                of_values[..., columns, :] += kept.mT @ of_rows
                of_scores = of_weights.sub_(mean[..., rows, :]).mul_(weights)
                of_q[..., rows, :] += of_scores @ keys[..., columns, :]
                of_keys[..., columns, :] += of_scores.mT @ own
                if of_mask is not None:
                    part = of_mask[scheme.mask_part(mask, tile)]
                    part += of_scores.sum_to_size(part.shape)
            if of_block.shape == block.shape:
                return of_block
            return of_block.unflatten(-3, (block.shape[-3], -1)).sum(-3)  # adjoint of `_heads_of`

        home: Arriving | None = None
        total = None
        with closing(scheme.blocks(torch.cat([k, v], -1))) as blocks:
            for place, block in blocks:
                with nullcontext() if home is None else completing(home):
                    total = add_block(place, block)
                if scheme.keys is not None and scheme.travels:
                    if home is not None:  # what ranks before have added to this block's gradient
                        total += home.wait()[0]
                    to_come = scheme.keys_at((place - 1) % scheme.keys.parts)
                    what = "gradients of keys and values of attention"
                    home = scheme.pass_on(total, to_come, what)
        if home is not None:
            (total,) = home.wait()
        assert total is not None
        of_k, of_v = total.split([k.shape[-1], v.shape[-1]], -1)
        of_q *= scheme.scale
        of_mask = None if of_mask is None else of_mask.to(mask.dtype)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_mask, None


def _sum_of_ranks(
    scheme: Scheme, result: torch.Tensor, largest: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combines what ranks with other keys have for the same queries: two sums."""
    assert scheme.keys is not None
    group = scheme.grid.group([scheme.keys.axis])
    assert group is not None
    each = largest.new_zeros(scheme.keys.parts, *largest.shape)
    each[scheme.place] = largest
    everywhere = group.sum_in_place(each, "the largest scores of attention").amax(0)
    fade = (largest - _finite(everywhere)).exp_()
    both = group.sum_in_place(torch.cat([result, total], -1) * fade, "the sum of attention")
    result, total = both.split([result.shape[-1], 1], -1)
    return result, everywhere, total


def _heads_of(block: torch.Tensor, q: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Repeats heads of keys and values that several heads of queries share."""
    block = block.to(kind)
    times = q.shape[-3] // block.shape[-3] if q.dim() > 2 else 1
    return block if times == 1 else block.repeat_interleave(times, -3)


@register(F.scaled_dot_product_attention, merged=True)
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Batch, heads, queries and keys may be cut; features that are cut become whole by an exchange.

    Keys and values that are cut along the queries' axis travel; along another axis they stay, and
    results are summed. One dropout mask, the same on every grid.
    """
    name = "scaled_dot_product_attention"
    if attn_mask is not None and attn_mask.dim() < 2:
        raise LayoutError(f"{name} takes a mask of queries and keys\n{describe([attn_mask])}")
    if is_causal and attn_mask is not None:
        raise LayoutError(f"{name} takes a mask or is_causal, not both\n{describe([attn_mask])}")
    query, key, value = (_whole_features(x, name, enable_gqa) for x in (query, key, value))
    if enable_gqa and isinstance(attn_mask, Sharded) and attn_mask.dim() > 2:
        # A cut of its heads would cut the queries', whose groups are counted from the first head.
        attn_mask = with_whole(attn_mask, (attn_mask.dim() - 3,), name)
    operands = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    inputs, output = _labels_of_attention(tuple([x.dim() for x in operands]), enable_gqa)
    dropped = dropout_p > 0 and drops_anything(dropout_p, True)
    keys_cut = any(
        isinstance(x, Sharded) and x.partition.cuts[own.index("key")]
        for x, own in zip(operands[1:], inputs[1:], strict=True)
    )
    queries_cut = isinstance(query, Sharded) and query.partition.cuts[-2] is not None
    if dropped or keys_cut or (is_causal and queries_cut):
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return _attend_over_blocks(
            name, operands, inputs, output, is_causal, scale, dropout_p, enable_gqa
        )

    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    run = functools.partial(F.scaled_dot_product_attention, **options)
    return contract(name, operands, inputs, output, run, linear=False)


@functools.lru_cache(LAYOUTS)
def _labels_of_attention(
    dims: tuple[int, ...], grouped: bool
) -> tuple[tuple[tuple[DimLabel, ...], ...], tuple[DimLabel, ...]]:
    """Returns the labels of queries, keys, values and a mask of so many dims, and the result's."""
    batch = batch_labels(max(dims[:3]) - 2)
    heads: list[DimLabel] = [*batch[:-1], "head"] if grouped else batch
    inputs: list[tuple[DimLabel, ...]] = [
        (*(labels[-n + 2 :] if n > 2 else []), token, feature)
        for n, labels, token, feature in zip(
            dims[:3], (batch, heads, heads), ("query", "key", "key"), "eev", strict=True
        )
    ]
    inputs += [(*batch_labels(n - 2), "query", "key") for n in dims[3:]]
    return tuple(inputs), (*batch, "query", "v")


def _whole_features(x: torch.Tensor, name: str, heads_too: bool) -> torch.Tensor:
    """Makes features whole, and heads that several heads of queries share."""
    if not isinstance(x, Sharded):
        return x
    dims = (x.dim() - 1, x.dim() - 3) if heads_too and x.dim() > 2 else (x.dim() - 1,)
    return with_whole(x, dims, name)


def _attend_over_blocks(
    name: str,
    operands: Sequence[torch.Tensor],
    inputs: Sequence[Sequence[DimLabel]],
    output: Sequence[DimLabel],
    causal: bool,
    scale: float,
    dropout: float,
    grouped: bool,
) -> torch.Tensor:
    """Brings the operands to cuts that fit, and runs `_Attend` on their blocks.

    Distribution scheme: 1. cut batch, heads and queries as in the first operand that is cut there,
    and bring the others to these cuts, 2. leave the keys cut, unless their axis cuts a dim other
    than the queries, 3. if their axis also cuts the queries, the blocks of keys travel; otherwise
    they stay.
    """
    pairs = list(zip(operands, inputs, strict=True))
    extents = label_extents(name, pairs)
    _check_operands(name, operands, grouped)
    if extents != label_extents(name, pairs[:3]):
        raise LayoutError(f"{name}: the mask is larger than the scores\n{describe(operands)}")
    like = next(t for t in operands if isinstance(t, Sharded))
    grid = like.grid
    cut_dims = [
        (label, cut)
        for t, labels in pairs
        if isinstance(t, Sharded)
        for label, cut in zip(labels, t.partition.cuts, strict=True)
        if cut is not None
    ]
    cuts = first_cuts((label, cut) for label, cut in cut_dims if label != "key")
    keys = next((cut for label, cut in cut_dims if label == "key"), None)
    axes = {cut.axis: label for label, cut in cuts.items()}
    if keys is not None and (keys.thin or axes.get(keys.axis, "query") != "query"):
        keys = None
    travels = keys is not None and keys.axis in axes
    of_keys = cuts if keys is None else {**cuts, "key": keys}
    of_mask = cuts if travels else of_keys  # its columns lie on the rank that has the queries
    blocks = [
        block_of(
            tensor,
            operand_partition(tensor, labels, extents, of_mask if index == 3 else of_keys),
            grid,
            f"aligning operands of {name}",
        )
        for index, (tensor, labels) in enumerate(pairs)
    ]
    mask = blocks[3] if len(blocks) > 3 else None
    first = -3 if grouped else -2  # several heads of queries share one of keys
    blocks = [block.to(operand_type(block)) for block in blocks[:3]]
    lead = torch.broadcast_shapes(*(block.shape[:first] for block in blocks))
    q, k, v = (block.expand(*lead, *block.shape[first:]) for block in blocks)
    shape = (*(extents[label] for label in output[:-1]), extents["key"])
    of_scores = Partition(shape, (*(cuts.get(label) for label in output[:-1]), None))
    seed = None
    if dropout:
        check_random_state(like)
        seed = draw_seed(q.device)
    box = of_scores.box(grid.coords)
    scheme = Scheme(grid, shape, box, keys, travels, causal, scale, dropout, seed)
    with torch.autocast(q.device.type, enabled=False):
        y = _Attend.apply(q, k, v, mask, scheme)
    return wrap_labelled(y, pairs, output, extents, cuts)


def _check_operands(name: str, operands: Sequence[torch.Tensor], grouped: bool) -> None:
    """Refuses what torch's own operator refuses, in the global shapes."""
    query, key, value, *masks = operands
    lengths = key.shape[-2] == value.shape[-2]
    if grouped:  # heads of keys, and of values, for heads of queries
        lengths = lengths and key.shape[-3:-2] == value.shape[-3:-2]
    if not lengths or query.shape[-1] != key.shape[-1]:
        raise LayoutError(
            f"{name} takes queries and keys of as many features, and a value for each key\n"
            f"{describe(operands)}"
        )
    if not operand_type(query) == operand_type(key) == operand_type(value):
        raise LayoutError(f"{name} takes one type, not {query.dtype}, {key.dtype}, {value.dtype}")
    if any(mask.dtype != torch.bool and not mask.is_floating_point() for mask in masks):
        raise LayoutError(f"{name} takes a mask of booleans or floating-point numbers")
    if grouped and query.shape[-3] % key.shape[-3]:
        raise LayoutError(
            f"{name}: {query.shape[-3]} heads of queries cannot share {key.shape[-3]}\n"
            f"{describe(operands)}"
        )


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)

_EXTRA_KEYS = ("bias_k", "bias_v", "static_k", "static_v")

_PARAMETERS = tuple(name for name in _MULTI_HEAD.parameters if "proj_" in name) + _EXTRA_KEYS[:2]
"""Names the arguments that every rank needs whole."""

_TOKENS = ("query", "key", "value", "key_padding_mask", "attn_mask")


@register(F.multi_head_attention_forward, merged=True)
def multi_head_attention_forward(
    *args: object, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Takes (sequence, batch, feature), and is cut as scaled_dot_product_attention.

    The weights, if they are asked for, take all keys on every rank, and so do keys that are added
    to the sequence (add_bias_kv, add_zero_attn).
    """
    name = "multi_head_attention_forward"
    call = _MULTI_HEAD.bind(*args, **kwargs)
    call.apply_defaults()
    given: dict[str, Any] = call.arguments
    for parameter in _PARAMETERS:
        given[parameter] = whole_of(given[parameter], f"the {parameter} of {name}")
    if not any(isinstance(given[key], Sharded) for key in _TOKENS):
        return F.multi_head_attention_forward(**given)
    sequences = [given[key] for key in ("query", "key", "value")]
    dropout = given["dropout_p"] if given["training"] else 0.0
    cut = any(isinstance(x, Sharded) and x.partition.cuts[0] is not None for x in sequences)
    extra = given["add_zero_attn"] or any(given[key] is not None for key in _EXTRA_KEYS)
    plain = not given["need_weights"] and not extra
    if plain and (cut or dropout > 0):
        with EnableTorchFunction():  # or torch would ask for no rule inside of one
            return _attend_with_heads(given, dropout), None
    return _attend_with_weights(name, given, dropout)


def _attend_with_heads(given: dict[str, Any], dropout: float) -> torch.Tensor:
    """Runs the layer by the rules of its parts: its tokens stay cut.

    Distribution scheme: 1. every rank projects its tokens, 2. the heads attend like
    scaled_dot_product_attention, 3. every rank projects the results of its tokens.
    """
    query, key, value = (given[name] for name in ("query", "key", "value"))
    batched = query.dim() == 3
    heads, features = given["num_heads"], query.shape[-1]
    length, samples = query.shape[0], query.shape[1] if batched else 1
    keys = key.shape[0]
    biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = given["in_proj_weight"].chunk(3)
    q, k, v = (  # (sequence, batch, feature) as (batch, head, sequence, feature)
        F.linear(x, weight, bias).reshape(len(x), samples, heads, -1).permute(1, 2, 0, 3)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    mask, causal = _mask_of_layer(given, samples, heads, length, keys, q.dtype)
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    y = y.permute(2, 0, 1, 3)
    y = y.reshape((length, samples, features) if batched else (length, features))
    return F.linear(y, given["out_proj_weight"], given["out_proj_bias"])


def _mask_of_layer(
    given: dict[str, Any], samples: int, heads: int, length: int, keys: int, dtype: torch.dtype
) -> tuple[torch.Tensor | None, bool]:
    """Returns the masks of a layer as one that scaled_dot_product_attention takes, or is_causal."""
    mask, padding, causal = given["attn_mask"], given["key_padding_mask"], given["is_causal"]
    if causal and padding is None:
        return None, True
    found = []
    if mask is not None:
        if mask.dim() == 3:
            mask = mask.reshape(samples, heads, length, keys)
        found.append(mask)
    if padding is not None:
        found.append(padding.reshape(samples, 1, 1, keys))
    if not found:
        return None, False
    if all(each.dtype == torch.bool for each in found):  # here they say what is not seen
        return functools.reduce(torch.logical_and, map(torch.logical_not, found)), False
    return functools.reduce(torch.add, [_as_added(each, dtype) for each in found]), False


def _as_added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turns a mask of what is not seen into one that is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    hidden, seen = device_constant((-math.inf, 0.0), mask.device, dtype)
    return torch.where(mask, hidden, seen)


def _attend_with_weights(
    name: str, given: dict[str, Any], dropout: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs torch's own function on this rank's part of batch and queries, and all keys."""
    weights: list[torch.Tensor | None] = []
    sequences: list[torch.Tensor] = [given[key] for key in ("query", "key", "value")]
    masks = [given["key_padding_mask"], given["attn_mask"]]
    check_whole_mask([*sequences, *masks], dropout, name)
    _check_whole(sequences[0], name, *([0] if given["is_causal"] else []), -1)
    for key in ("key", "value"):
        _check_whole(given[key], name, -1)
        given[key] = _with_all_tokens(given[key], name)
    batch: list[DimLabel] = ["batch"] if sequences[0].dim() == 3 else []
    labels: dict[str, list[DimLabel]] = {
        "query": ["query", *batch, "e"],
        "key": ["key", *batch, "k"],
        "value": ["key", *batch, "v"],
        "key_padding_mask": [*batch, "key"],
        "attn_mask": ["query", "key"],
    }
    labels = {key: own for key, own in labels.items() if given[key] is not None}
    if given["attn_mask"] is not None and given["attn_mask"].dim() == 3:
        labels["attn_mask"] = ["head", "query", "key"]
        where = f"a mask for each head in {name}"
        for x in sequences:
            _check_whole(x, where, *([1] if batch else []))
        _check_whole(given["key_padding_mask"], where, *([0] if batch else []))

    def run(*blocks: torch.Tensor) -> torch.Tensor:
        y, found = F.multi_head_attention_forward(
            **{**given, **dict(zip(labels, blocks, strict=True))}
        )
        weights.append(found)
        return y

    operands = [given[key] for key in labels]
    output = ["query", *batch, ("e", "out")]
    y = contract(name, operands, list(labels.values()), output, run, linear=False)
    return y, _weights(y, weights[0])


def _weights(y: torch.Tensor, block: torch.Tensor | None) -> torch.Tensor | None:
    """Wraps the weights (batch, heads, query, key) of an attention, cut as its result is."""
    if block is None or not isinstance(y, Sharded):
        return block
    query, *batch, _ = y.partition.cuts
    lead = [*batch, *[None] * (block.dim() - len(batch) - 2)]
    extents = [*y.shape[1 : 1 + len(batch)], *block.shape[len(batch) : -2], y.shape[0]]
    partition = Partition((*extents, block.shape[-1]), (*lead, query, None))
    return y.like(block, partition)


def _with_all_tokens(x: torch.Tensor, name: str) -> torch.Tensor:
    """Gathers keys or values along the tokens: every query sees all of them."""
    if not isinstance(x, Sharded) or (cut := x.partition.cuts[0]) is None:
        return x
    log_once(
        x.grid,
        f"{name}: the keys and values of {x.partition} are gathered along {cut.axis}, "
        f"{x.partition.without([cut.axis]).box(x.grid.coords).size * x.element_size() / 2**20:.1f} "
        "MiB each on every rank; queries stay cut. Without the weights (need_weights=False) and "
        "keys that are added, nothing is gathered",
        logging.WARNING,
    )
    return gather(x, cut.axis)


def _check_whole(x: torch.Tensor, name: str, *dims: int) -> None:
    """Refuses a tensor that is cut along one of ``dims``."""
    if isinstance(x, Sharded):
        check_uncut(x, [dim % x.dim() for dim in dims], f"{name} needs the whole of")
