"""How torch lets its functions be called: NumPy's names, ``out=``, dims counted from the end.

Done once, before any rule runs. What a rule's signature means for that is found out when the rule
is registered.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyperslab.errors import LayoutError

NUMPY_NAMES = {
    "axis": "dim",
    "keepdims": "keepdim",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
}
"""What torch takes instead of its own names."""

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def read_dim(dim: int, ndim: int, name: str) -> int:
    """A dim of a tensor of ``ndim`` dims, counted from the front; ``name`` is the operator's.

    >>> read_dim(-1, 5, "narrow")
    4

    Raises:
        IndexError: there is no such dim.
    """
    if not -ndim <= dim < ndim:
        raise IndexError(f"{name}: dim {dim} of a tensor of {ndim} dims")
    return dim % ndim


def read_dims(dims: Iterable[int], ndim: int, name: str) -> tuple[int, ...]:
    """Several dims, counted from the front, in their order; see `read_dim`."""
    return tuple(read_dim(dim, ndim, name) for dim in dims)


@dataclass(frozen=True, slots=True)
class DimArgument:
    """An argument of a rule that is a dim, a sequence of dims, or None.

    ``position``: among the positional arguments; beyond all of them if it goes by name only.
    """

    name: str
    position: int
    default: int | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Signature:
    """What has to be done to the arguments of a call before its rule runs.

    ``first``: the name of the tensor whose dims are counted; ``own``: the names of the rule's
    arguments; ``numpy_names``: those that stand for one of them.
    """

    first: str = "input"
    own: frozenset[str] = frozenset()
    numpy_names: Mapping[str, str] = field(default_factory=dict)
    dims: tuple[DimArgument, ...] = ()

    @staticmethod
    def of(run: Callable[..., Any], dims: Sequence[str]) -> Signature:
        """The signature of a rule whose arguments ``dims`` name dims of the first one.

        Raises:
            ValueError: one of them is no argument of the rule that could be given by name.
        """
        parameters = _parameters(run)
        names = list(parameters)
        other = {
            numpy: own
            for numpy, own in NUMPY_NAMES.items()
            if own in parameters and numpy not in parameters
        }
        found = []
        for name in dims:
            parameter = parameters.get(name)
            if parameter is None or parameter.kind not in _BY_NAME:
                raise ValueError(f"dims={name!r} is no argument of the rule that goes by name")
            by_name = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            default = None if parameter.default is parameter.empty else parameter.default
            position = sys.maxsize if by_name else names.index(name)
            found.append(DimArgument(name, position, default))
        first = names[0] if names else ""
        return Signature(first, frozenset(names), other, tuple(found))

    def read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], function: Callable[..., Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments as the rule takes them.

        Raises:
            LayoutError: ``out=`` is given and the rule has no such argument.
            IndexError: there is no such dim.
        """
        if not self.own.issuperset(kwargs):
            kwargs = self._own_names(kwargs, function)
        if self.dims:
            return self._from_the_front(args, kwargs, function)
        return args, kwargs

    def _own_names(
        self, kwargs: Mapping[str, Any], function: Callable[..., Any]
    ) -> Mapping[str, Any]:
        if "out" in kwargs and "out" not in self.own:
            if kwargs["out"] is not None:
                raise LayoutError(f"{function.__name__}(out=...) has no rule; use its return value")
            kwargs = {key: value for key, value in kwargs.items() if key != "out"}
        if self.numpy_names.keys().isdisjoint(kwargs):
            return kwargs
        return {self.numpy_names.get(key, key): value for key, value in kwargs.items()}

    def _from_the_front(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], function: Callable[..., Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        ndim = (
            args[0] if args else kwargs[self.first]
        ).dim() or 1  # a number has a dim 0 for torch
        for dim in self.dims:
            by_position = dim.position < len(args)
            given = args[dim.position] if by_position else kwargs.get(dim.name, dim.default)
            if given is None or (type(given) is int and 0 <= given < ndim):
                continue  # often: as the rule wants it
            value = _counted(given, ndim, function)
            if by_position:
                args = (*args[: dim.position], value, *args[dim.position + 1 :])
            else:
                kwargs = {**kwargs, dim.name: value}
        return args, kwargs


def _parameters(run: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(run).parameters
    except ValueError:  # a method of torch, written in C, that is its own rule
        return {}


def _counted(value: Any, ndim: int, function: Callable[..., Any]) -> Any:
    """A dim or a sequence of dims, from the front; what is neither is the rule's to understand.

    A dim is whatever is an integer for Python: NumPy's too, and a tensor of one.
    """
    if type(value) is int:
        return read_dim(value, ndim, function.__name__)
    if isinstance(value, list | tuple):
        return read_dims(map(operator.index, value), ndim, function.__name__)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    return read_dim(operator.index(value), ndim, function.__name__)
