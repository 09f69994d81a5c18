"""Registers one rule for several operators and overloads, and reads their arguments into one form.

`register_each` serves operators that differ in what they compute on a block, not in the
distribution scheme, and `run_composed` those that torch composes of others; `per_dim`, `integers`
and `hashable` read arguments that torch takes in several forms; `result_type` asks torch for the
dtype of a result, which autocast may change.
"""

from __future__ import annotations

import functools
import operator
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeVar

import torch
import torch.nn.functional as F

from hyperslab.tensor import register
from hyperslab.util.torch_internals import EnableTorchFunction

Operator = Callable[..., Any]
"""Types a function of torch or a method of its tensors; torch does not say what it takes."""

Decorator = Callable[[Operator], Operator]

_SPACES = (torch, torch.Tensor, F, torch.special)


def overloads_of(name: str) -> tuple[Operator, ...]:
    """Finds an operator's forms: a function of torch, a method of a tensor, and so on.

    >>> overloads_of("dropout1d") == (F.dropout1d,)
    True
    """
    found = (getattr(space, name, None) for space in _SPACES)
    return tuple(form for form in found if callable(form))


@functools.cache
def spatial_dims(operator: Operator) -> int:
    """Returns the number of an operator's spatial dims, which its name tells.

    >>> spatial_dims(F.conv_transpose2d)
    2
    """
    found = re.search(r"([123])d", operator.__name__)
    assert found is not None
    return int(found[1])


def register_each(
    *operators: str | Operator | tuple[Operator, ...] | Mapping[Any, str],
    family: str | None = None,
    dims: Sequence[str] = (),
    lazy: bool = False,
    merged: bool = False,
) -> Decorator:
    """Registers the decorated function as the rule of several operators.

    Its first argument is the operator that was called, the others are the call's. So it says
    ``operator(x.local)`` where a rule of one operator would name it::

        @register_each("amax", "amin", dims=["dim"])
        def rule(operator, input, dim=(), keepdim=False): ...

    Args:
        operators: each a name (for all of its forms), a function, a tuple of forms, or such with
            their lines in the table of ops; the rule is given the first form.
        family, dims, lazy, merged: as in `hyperslab.register`.
    """

    def add(run: Operator) -> Operator:
        line = (run.__doc__ or "").strip().split("\n")[0]
        rows: dict[Any, str] = {}
        for named in operators:
            rows |= named if isinstance(named, Mapping) else {named: line}
        for named, doc in rows.items():
            forms = overloads_of(named) if isinstance(named, str) else named
            if not isinstance(forms, tuple):
                forms = (forms,)
            rule = functools.partial(run, forms[0])
            rule.__module__ = run.__module__  # by which the page of operators knows the file
            register(*forms, family=family, doc=doc, dims=dims, lazy=lazy, merged=merged)(rule)
        return run

    return add


def run_composed(function: Operator, *args: Any, **options: Any) -> Any:
    """Runs what torch composes a function of, in Python, by the rules of its parts."""
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        return _own_body(function)(*args, **options)


@functools.cache
def _own_body(function: Any) -> Operator:
    """Copies a function of torch, but for its look for a rule of the whole."""
    kinds = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**function.__globals__, **dict.fromkeys(kinds, lambda *_: False)}
    body = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


T = TypeVar("T")

PerDim = int | Sequence[int]
"""Types a number for every spatial dim, or one for all of them."""

Integers = SupportsIndex | Sequence[int]
"""Types one or several integers: torch takes shapes and dims one by one or as one sequence."""


def per_dim(value: SupportsIndex | Iterable[SupportsIndex], n: int) -> tuple[int, ...]:
    """Expands a number, or a sequence of one or ``n`` numbers, to ``n`` numbers.

    >>> per_dim(2, 3)
    (2, 2, 2)
    """
    if not isinstance(value, Iterable):
        return (operator.index(value),) * n
    values = tuple(map(operator.index, value))
    if len(values) not in (1, n):
        raise ValueError(f"{values} should be one number or {n}")
    return values * n if len(values) == 1 else values


def hashable(option: T) -> T:
    """Makes a key of a number, a word, or a sequence of numbers."""
    return tuple(option) if isinstance(option, list) else option  # type: ignore[return-value]


def integers(*given: Integers) -> tuple[int, ...]:
    """Reads integers that are given one by one or as one sequence.

    >>> integers(2, 3) == integers((2, 3))
    True
    """
    one = len(given) == 1 and not hasattr(given[0], "__index__")
    values: Sequence[SupportsIndex] = given[0] if one else given  # type: ignore[assignment]
    return tuple(map(operator.index, values))


def result_type(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype of torch's own result for an operand of ``dtype``."""
    if not torch.is_autocast_enabled(device.type):
        return dtype
    return _result_type_under_autocast(name, dtype, device, torch.get_autocast_dtype(device.type))


@functools.cache
def _result_type_under_autocast(
    name: str, dtype: torch.dtype, device: torch.device, _autocast: torch.dtype
) -> torch.dtype:
    run = getattr(F, name)
    norm = name.endswith("norm")
    shape = (1, 1, 2) if norm else (1,) * (2 + spatial_dims(run))
    options = () if name == "instance_norm" else (1,)  # one group, windows of one
    return run(torch.zeros(shape, dtype=dtype, device=device), *options).dtype
