"""Plain values as JSON, with their tensors beside: what a checkpoint holds without any pickle.

JSON has fewer kinds of values than Python. What it lacks is an object of one key that begins with
``$``; other objects are dictionaries::

    >>> encode_value({"step": 3, "betas": (0.9, 0.999), "rates": {0: float("inf")}}, "", {})
    {'step': 3, 'betas': {'$tuple': [0.9, 0.999]}, 'rates': {'$dict': [[0, {'$float': 'inf'}]]}}
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hyperslab.errors import CheckpointError

DOLLAR = "$"

TAKEN = "__metadata__"
"""What safetensors keep under this name is no tensor."""

Tensors = dict[str, torch.Tensor]
"""By their names."""


def encode_value(
    value: Any,
    name: str,
    tensors: Tensors,
    take: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> Any:
    """A value as JSON; its tensors go into ``tensors``, as ``take`` gives them, under ``name``.

    These kinds are taken, nested as one likes: None, bool, int, float, complex, str, bytes, list,
    tuple, set, dict, OrderedDict, Counter, and tensors and sizes, types and devices of torch.

    Raises:
        CheckpointError: names a value of another kind, of which nobody could make it again.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        key = _free_name(name, tensors)
        tensors[key] = take(value)
        return {"$tensor": key}
    if kind in (type(None), bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return _each(value, name, tensors, take)
    if kind is dict and all(type(key) is str and not key.startswith(DOLLAR) for key in value):
        return {k: encode_value(v, _below(name, k), tensors, take) for k, v in value.items()}
    if kind in _OF_PAIRS:
        pairs = [
            [encode_value(k, name, tensors, take), encode_value(v, _below(name, k), tensors, take)]
            for k, v in value.items()
        ]
        return {_OF_PAIRS[kind]: pairs}
    if kind in _OF_ITEMS:
        return {_OF_ITEMS[kind]: _each(value, name, tensors, take)}
    if kind in _OF_TEXT:
        mark, as_text = _OF_TEXT[kind]
        return {mark: as_text(value)}
    raise CheckpointError(
        f"{name or 'it'} is of the type {kind.__qualname__}, which a checkpoint does not hold\n"
        "    plain Python values and tensors can be stored"
    )


def decode_value(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `encode_value` was given.

    Raises:
        ValueError: no `encode_value` wrote this, or a tensor is missing.
    """
    if isinstance(value, list):
        return [decode_value(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if not mark.startswith(DOLLAR):
        return {key: decode_value(item, tensors) for key, item in value.items()}
    if len(value) == 1 and mark in _DECODERS:
        content = value[mark]
        try:
            return _DECODERS[mark](content, tensors)
        except (TypeError, AttributeError, LookupError, RuntimeError) as error:
            raise ValueError(f"{mark} is of {str(content)[:40]!r}: {error}") from None
    raise ValueError(f"nothing is written as {mark[:40]!r}")


def tensors_named(value: Any) -> Iterator[str]:
    """The names of the tensors that an encoded value refers to.

    >>> [*tensors_named({"a": [1, {"$tensor": "a/1"}], "b": {"$tensor": "b"}})]
    ['a/1', 'b']
    """
    if isinstance(value, list):
        for item in value:
            yield from tensors_named(item)
    elif isinstance(value, dict) and isinstance(value.get("$tensor"), str):
        yield value["$tensor"]
    elif isinstance(value, dict):
        yield from tensors_named([*value.values()])


def _each(values: Any, name: str, tensors: Tensors, take: Any) -> list[Any]:
    return [encode_value(v, _below(name, i), tensors, take) for i, v in enumerate(values)]


def _below(name: str, key: object) -> str:
    return f"{name}/{key}" if name else str(key)


def _free_name(name: str, tensors: Tensors) -> str:
    """Names may meet where keys hold a slash; and a file of tensors has none that is no text."""
    found = name.encode(errors="replace").decode()
    while found in tensors or found == TAKEN:
        found += "+"
    return found


_OF_PAIRS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_OF_ITEMS: dict[type, str] = {
    tuple: "$tuple",
    set: "$set",
    frozenset: "$frozenset",
    torch.Size: "$size",
}
_OF_TEXT: dict[type, tuple[str, Callable[[Any], Any]]] = {
    complex: ("$complex", lambda z: [repr(z.real), repr(z.imag)]),
    bytes: ("$bytes", lambda b: base64.b64encode(b).decode()),
    bytearray: ("$bytearray", lambda b: base64.b64encode(b).decode()),
    torch.dtype: ("$dtype", lambda kind: str(kind).removeprefix("torch.")),
    torch.device: ("$device", str),
}


def _pairs(kind: type) -> Callable[..., Any]:
    return lambda pairs, tensors: kind(
        {decode_value(key, tensors): decode_value(value, tensors) for key, value in pairs}
    )


def _items(kind: type) -> Callable[..., Any]:
    return lambda items, tensors: kind([decode_value(item, tensors) for item in items])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError("no type of torch's")
    return found


_DECODERS: dict[str, Callable[[Any, Mapping[str, torch.Tensor]], Any]] = {
    **{mark: _pairs(kind) for kind, mark in _OF_PAIRS.items()},
    **{mark: _items(kind) for kind, mark in _OF_ITEMS.items()},
    "$tensor": lambda name, tensors: tensors[name],
    "$float": lambda text, _: float(text),
    "$complex": lambda parts, _: complex(float(parts[0]), float(parts[1])),
    "$bytes": lambda text, _: base64.b64decode(text, validate=True),
    "$bytearray": lambda text, _: bytearray(base64.b64decode(text, validate=True)),
    "$dtype": lambda name, _: _dtype(name),
    "$device": lambda name, _: torch.device(name),
}
