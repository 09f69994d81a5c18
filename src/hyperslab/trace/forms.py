"""Forms of tensors, calls of operators, and what an operator's schema says of its operands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from hyperslab.trace.records import Call, TensorSpec


def call_of(operator: OpOverload, args: Any, kwargs: Any) -> Call:
    """An operator with the forms of its arguments."""
    return Call(
        str(operator),
        specs_of(args),
        tuple((name, specs_of(value)) for name, value in kwargs.items()),
    )


def specs_of(value: Any) -> Any:
    """Tensors as their forms, lists as tuples."""
    if isinstance(value, torch.Tensor):
        return form_of(value)
    if isinstance(value, list | tuple):
        return tuple(map(specs_of, value))
    return value


# The methods of `torch.Tensor` itself: those of a `Sharded` speak globally.


def form_of(tensor: torch.Tensor) -> TensorSpec:
    """The form of a tensor's own block."""
    shape = tuple(torch.Tensor.size(tensor))
    return TensorSpec(shape, torch.Tensor.stride(tensor), tensor.dtype)


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same form on torch's meta device."""
    form = form_of(tensor)
    return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")


def zeros_of(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the same shape and type."""
    return torch.zeros(torch.Tensor.size(tensor), dtype=tensor.dtype)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of all elements [B]."""
    return sum(form_of(tensor).nbytes for tensor in tensors)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Wherever they are in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def shapes_of(tensors: list[torch.Tensor]) -> str:
    """In words, for errors."""
    return ", ".join(str(form_of(tensor).shape) for tensor in tensors)


def written_operands(
    operator: OpOverload, args: Any, kwargs: Any
) -> list[tuple[frozenset[str], Any]]:
    """The operands into which an operator writes, by the names that its schema gives them."""
    names = (argument.name for argument in operator._schema.arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    return [
        (frozenset(argument.alias_info.before_set), given.get(argument.name))
        for argument in operator._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def target_of(alias: Any, written: list[tuple[frozenset[str], Any]]) -> Any:
    """The operand that a result is; None: a new tensor."""
    if alias is None:
        return None
    return next((value for names, value in written if names == alias.before_set), None)
