"""Scatter and its kin (index_add, index_copy, index_fill), along a dim that is not cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.ops.common.operands import aligned_but, check_writable
from hyperslab.ops.common.ordinary_targets import nobody_else_sees
from hyperslab.ops.indexing.gather import shrunk
from hyperslab.tensor import Sharded
from hyperslab.tensor.dispatch import describe

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "scatter": ("src", "reduce"),
    "scatter_add": ("src",),
    "scatter_reduce": ("src", "reduce"),
    "index_add": ("source",),
    "index_copy": ("source",),
    "index_fill": ("value",),
}
"""What every operator takes after the positions, in this order."""


@register_each(*ARGUMENTS, family="indexing", dims=["dim"])
def write_along(
    operator: Operator,
    input: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    *args: object,
    **options: object,
) -> Sharded:
    """Along a dim that is not cut; the operands are aligned with the input."""
    name = operator.__name__
    return _written(name, False, input, dim, index, _values(name, args, options))


@register_each(*(f"{name}_" for name in ARGUMENTS), family="indexing", dims=["dim"])
def write_in_place(
    operator: Operator,
    input: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    *args: object,
    **options: object,
) -> Sharded:
    """Along a dim that is not cut; the operands are aligned with the input."""
    name = operator.__name__.removesuffix("_")
    return _written(name, True, input, dim, index, _values(name, args, options))


def _values(name: str, args: tuple[object, ...], options: dict[str, object]) -> dict[str, object]:
    """What is written, by the names of torch's arguments."""
    values = {**dict(zip(ARGUMENTS[name], args, strict=False)), **options}
    if name == "scatter" and "src" in values and not isinstance(values["src"], torch.Tensor):
        values["value"] = values.pop("src")
    return values


def _written(
    name: str,
    in_place: bool,
    input: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    values: Mapping[str, object],
) -> Sharded:
    """Write at positions along a dim.

    Distribution scheme: 1. index and source are brought to the cut of the input (of an ordinary
    tensor this rank takes its part), 2. every rank writes into its block. An ordinary tensor that
    is to be changed in place turns into the cut result.
    """
    flat = name.startswith("index_")
    alone = not isinstance(input, Sharded) and nobody_else_sees(input)
    if flat and isinstance(index, Sharded):
        raise LayoutError(f"{name}: the positions are cut: {index.partition}\n    use index.full()")
    operands: dict[str, Any] = {"input": input, "index": index, **values}
    shaped = [
        key
        for key, value in operands.items()
        if isinstance(value, torch.Tensor) and value.dim() and not (flat and key == "index")
    ]
    if not flat and "src" in shaped:
        operands["src"] = shrunk(operands["src"], index, dim, name)
    fixed = in_place and isinstance(input, Sharded)
    blocks, cuts, like = aligned_but([operands[key] for key in shaped], dim, name, fixed=fixed)
    operands.update(zip(shaped, blocks, strict=True))
    block = operands.pop("input")
    positions = operands.pop("index")
    if fixed:
        check_writable(like, name)
        getattr(block, f"{name}_")(dim, positions, **operands)
        like.note_change()
        return like
    written = getattr(block, name)(dim, positions, **operands)
    y = like.like(written, Partition(tuple(input.shape), cuts))
    if not in_place:
        return y
    _check_replaceable(input, y, name, alone or not y.grid.has_values)  # in a trace all are views
    return y.take_place_of(input)


def _check_replaceable(x: torch.Tensor, y: Sharded, name: str, alone: bool) -> None:
    """Refuse to turn an ordinary tensor into a cut one behind the back of its views."""
    traced = not y.grid.has_values  # there all share nothing
    if not (alone or traced) or x.requires_grad or y.requires_grad:
        raise LayoutError(
            f"{name}_ would make a cut tensor of an ordinary one that has views or a gradient\n"
            f"{describe([x, y])}    use {name}, which returns a new tensor"
        )
