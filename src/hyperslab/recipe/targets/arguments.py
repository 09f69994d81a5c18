"""The arguments of a target: looked at by its signature and its annotations."""

from __future__ import annotations

import difflib
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from torch.optim.lr_scheduler import LRScheduler

from hyperslab.errors import RecipeError

FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""YAML 1.1 takes 1e-3 for a text."""

NOT_YET = object()
"""In place of a value that is not known before the data are."""


def positional(made: Callable[..., Any]) -> list[str]:
    """The names of the parameters that can be given by their place."""
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):  # written in C
        return []
    return [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]


def hints(made: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function, or of what makes an instance of a class."""
    try:
        return typing.get_type_hints(made.__init__ if isinstance(made, type) else made)  # type: ignore[misc]
    except Exception:  # names that are there for type checkers alone, say
        return {}


def check_argument_names(
    arguments: Mapping[str, Any],
    parameters: Mapping[str, inspect.Parameter],
    where: str,
    *,
    open_end: bool,
) -> None:
    unknown = [name for name in arguments if name not in parameters]
    if unknown and not open_end:
        near = difflib.get_close_matches(unknown[0], parameters, 1)
        nearest = f"nearest: {near[0]!r}; " if near else ""
        raise RecipeError(
            f"{where} takes no argument {unknown[0]!r}\n"
            f"    {nearest}it takes {', '.join(parameters) or 'none'}"
        )
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in arguments
    ]
    if missing:
        raise RecipeError(f"{where} needs the argument {missing[0]!r}: it is missing")


def typed(value: Any, hint: Any, default: Any, key: str, name: str) -> Any:
    """The value as its annotation has it; where there is none, or none that says anything, itself.

    Raises:
        RecipeError: it is of another type.
    """
    if value is NOT_YET or (value is None and default is None):
        return value
    if isinstance(value, list) and _mentions_tensor(hint):
        return torch.tensor(value)
    if hint in (Any, inspect.Parameter.empty):
        return float(value) if isinstance(value, str) and FLOAT.fullmatch(value) else value
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, LRScheduler)):
        return value
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticUserError, TypeError, NameError, AttributeError):
        return value  # an annotation of which pydantic knows nothing
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        words = str(error.errors()[0]["msg"]).replace("Input should", "it should")
        wanted = getattr(hint, "__name__", None) if isinstance(hint, type) else None
        raise RecipeError(
            f"bad value {value!r} for {key!r}: {words} ({name} wants "
            f"{wanted or str(hint).replace('typing.', '')})"
        ) from None


def _mentions_tensor(hint: Any) -> bool:
    return hint is torch.Tensor or torch.Tensor in typing.get_args(hint)
