"""Writing by tensors of positions, along a dim that is not cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.ops.common.operands import aligned_but, check_writable
from hyperslab.ops.indexing.gather import shrunk
from hyperslab.ops.views.slicing import dim_of
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe


def _written(
    name: str, in_place: bool, input: torch.Tensor, dim: int, index: Any, rest: dict[Any, Any]
) -> Sharded:
    """Write at positions along a dim.

    Distribution scheme: 1. index and source are brought to the cut of the input (of an ordinary
    tensor this rank takes its part), 2. every rank writes into its block. An ordinary tensor that
    is to be changed in place turns into the cut result.
    """
    d, flat, alone = dim_of(input, dim, name), name.startswith("index_"), _alone(input)
    if flat and isinstance(index, Sharded):
        raise LayoutError(f"{name}: the positions are cut: {index.partition}\n    use index.full()")
    operands: dict[Any, Any] = {"input": input, "index": index, **rest}
    shaped = [
        key
        for key, value in operands.items()
        if isinstance(value, torch.Tensor) and value.dim() and not (flat and key == "index")
    ]
    if not flat and "src" in shaped:
        operands["src"] = shrunk(operands["src"], index, d, name)
    fixed = in_place and isinstance(input, Sharded)
    blocks, cuts, like = aligned_but([operands[key] for key in shaped], d, name, fixed=fixed)
    operands.update(zip(shaped, blocks, strict=True))
    block, positions, options = operands.pop("input"), operands.pop("index"), operands
    if fixed:
        check_writable(like, name)
        getattr(block, f"{name}_")(d, positions, **options)
        like.note_change()
        return like
    written = getattr(block, name)(d, positions, **options)
    y = like.like(written, Partition(tuple(input.shape), cuts))
    if not in_place:
        return y
    _check_replaceable(input, y, name, alone)
    return y.take_place_of(input)


def _alone(x: torch.Tensor) -> bool:
    """Whether nobody else sees this tensor's memory: the tensor and this look hold it."""
    if isinstance(x, Sharded):
        return False
    return not x._is_view() and torch._C._storage_Use_Count(x.untyped_storage()._cdata) == 2


def _check_replaceable(x: torch.Tensor, y: Sharded, name: str, alone: bool) -> None:
    """Refuse to turn an ordinary tensor into a cut one behind the back of its views."""
    if not alone or x.requires_grad or y.requires_grad:
        raise LayoutError(
            f"{name}_ would make a cut tensor of an ordinary one that has views or a gradient\n"
            f"{describe([x, y])}    use {name}, which returns a new tensor"
        )


def _register_written(name: str, *names: str) -> None:
    """``names``: the arguments after the positions, in their order."""

    def rule_of(in_place: bool) -> Callable[..., Any]:
        def rule(input: Any, dim: int, index: Any, *args: Any, **options: Any) -> Sharded:
            """Along a dim that is not cut; the operands are aligned with the input."""
            if options.pop("out", None) is not None:
                raise LayoutError(f"{name}(out=...) has no rule; use its return value")
            rest = {**dict(zip(names, args, strict=False)), **options}
            if name == "scatter" and not isinstance(rest.get("src", rest), torch.Tensor | dict):
                rest["value"] = rest.pop("src")
            return _written(name, in_place, input, dim, index, rest)

        return rule

    register(getattr(torch, name), getattr(torch.Tensor, name), family="scatter")(rule_of(False))
    register(getattr(torch.Tensor, f"{name}_"), family="scatter")(rule_of(True))


_register_written("scatter", "src", "reduce")
_register_written("scatter_add", "src")
_register_written("scatter_reduce", "src", "reduce")
_register_written("index_add", "source")
_register_written("index_copy", "source")
_register_written("index_fill", "value")
