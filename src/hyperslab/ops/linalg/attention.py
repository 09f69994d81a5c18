"""Distributes attention: queries may stay cut; every rank has all keys and values meanwhile."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import log_once
from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.ops.elementwise.random import check_whole_mask
from hyperslab.ops.linalg.contraction import DimLabel, batch_labels, contract
from hyperslab.tensor import Sharded, gather, register
from hyperslab.tensor.dispatch import gather_first


@register(F.scaled_dot_product_attention, family="linalg")
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
    """Batch, heads and queries may be cut; keys that are cut are gathered; features must be whole.

    Distribution scheme: 1. every rank gets all keys and values, which takes memory in proportion to
    the tokens, not to their square, 2. it attends with its own queries.
    """
    name = "scaled_dot_product_attention"
    check_whole_mask([query, key, value, attn_mask], dropout_p, name)
    _check_whole(query, name, -2 if is_causal else None, -1, -3 if enable_gqa else None)
    for x in (key, value):
        _check_whole(x, name, -1, -3 if enable_gqa else None)
    key, value = (_with_all_tokens(x, name, -2) for x in (key, value))
    operands = [query, key, value]
    batch = batch_labels(query.dim() - 2)
    other: list[DimLabel] = [*batch[:-1], "head"] if enable_gqa else batch
    inputs = [[*batch, "query", "e"], [*other, "key", "e"], [*other, "key", "v"]]
    if attn_mask is not None:
        operands.append(attn_mask)
        inputs.append([*batch_labels(attn_mask.dim() - 2), "query", "key"])

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return contract(name, operands, inputs, [*batch, "query", "v"], run, linear=False)


def _with_all_tokens(x: torch.Tensor, name: str, dim: int) -> torch.Tensor:
    """Gathers keys or values along the tokens: every query sees all of them."""
    if not isinstance(x, Sharded):
        return x
    cut = x.partition.cuts[dim]
    if cut is None:
        return x
    log_once(
        x.grid,
        f"{name}: the keys and values of {x.partition} are gathered along {cut.axis}, "
        f"{x.partition.without([cut.axis]).box(x.grid.coords).size * x.element_size() / 2**20:.1f} "
        "MiB each on every rank; queries stay cut",
    )
    return gather(x, cut.axis)


def _check_whole(x: torch.Tensor, name: str, *dims: int | None) -> None:
    """Refuses a tensor that is cut along one of ``dims``.

    Raises:
        LayoutError: one of these dims is cut.
    """
    for dim in dims:
        if dim is None or not isinstance(x, Sharded):
            continue
        cut = x.partition.cuts[dim]
        if cut is not None:
            raise LayoutError(
                f"{name} needs the whole of dim {dim % x.dim()}, which is cut: "
                f"{x.partition} on {x.grid}\n{gather_first(cut.axis)}"
            )


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


@register(F.multi_head_attention_forward, family="linalg")
def multi_head_attention_forward(
    *args: object, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of (sequence, batch, feature): as scaled_dot_product_attention."""
    name = "multi_head_attention_forward"
    call = _MULTI_HEAD.bind(*args, **kwargs)
    call.apply_defaults()
    given: dict[str, Any] = call.arguments
    weights: list[torch.Tensor | None] = []
    sequences: list[torch.Tensor] = [given[key] for key in ("query", "key", "value")]
    masks = [given["key_padding_mask"], given["attn_mask"]]
    check_whole_mask([*sequences, *masks], given["dropout_p"] if given["training"] else 0.0, name)
    _check_whole(sequences[0], name, 0 if given["is_causal"] else None, -1)
    for key in ("key", "value"):
        _check_whole(given[key], name, -1)
        given[key] = _with_all_tokens(given[key], name, 0)
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
        for x in sequences:
            _check_whole(x, f"a mask for each head in {name}", *([1] if batch else []))

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
