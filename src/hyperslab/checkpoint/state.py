"""Turns the state of model and optimizer into named tensors and plain values, and back.

Weights have their names in the state dict. What an optimizer keeps of a weight is named by that
weight, so that it finds it again where another optimizer counts its weights in another order. No
name depends on the grid.

Plain values become JSON with their tensors beside, so that a checkpoint needs no pickle. JSON
has fewer kinds of values than Python. What it lacks is an object of one key that begins with
``$``; other objects are dictionaries::

    >>> encode_value({"step": 3, "betas": (0.9, 0.999), "rates": {0: float("inf")}}, "", {})
    {'step': 3, 'betas': {'$tuple': [0.9, 0.999]}, 'rates': {'$dict': [[0, {'$float': 'inf'}]]}}
"""

from __future__ import annotations

import base64
import itertools
import math
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hyperslab.checkpoint.tensors import check_storable
from hyperslab.errors import CheckpointError

DOLLAR = "$"

RESERVED_NAME = "__metadata__"
"""Safetensors keep something else than a tensor under this name."""

Tensors = dict[str, torch.Tensor]
"""Holds tensors by their names."""


def encode_value(
    value: Any,
    name: str,
    tensors: Tensors,
    take: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> Any:
    """Returns a value as JSON; its tensors, as ``take`` gives them, go into ``tensors`` by name.

    These kinds are taken, nested as one likes, and others refused: None, bool, int, float,
    complex, str, bytes, list, tuple, set, dict, OrderedDict, Counter, and tensors and sizes, types
    and devices of torch.
    """

    def below(value: Any, key: object) -> Any:
        return encode_value(value, f"{name}/{key}" if name else str(key), tensors, take)

    kind = type(value)
    if isinstance(value, torch.Tensor):
        key = _free_name(name, tensors)
        tensors[key] = take(value)
        return {"$tensor": key}
    if kind in (type(None), bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is dict and all(type(key) is str and not key.startswith(DOLLAR) for key in value):
        return {key: below(item, key) for key, item in value.items()}
    if issubclass(kind, dict) and kind in _CONTAINERS:
        pairs = [
            [encode_value(key, name, tensors, take), below(item, key)]
            for key, item in value.items()
        ]
        return {_CONTAINERS[kind]: pairs}
    if kind is list or kind in _CONTAINERS:
        items = [below(item, place) for place, item in enumerate(value)]
        return items if kind is list else {_CONTAINERS[kind]: items}
    if kind in _OF_TEXT:
        mark, as_text, _ = _OF_TEXT[kind]
        return {mark: as_text(value)}
    raise CheckpointError(
        f"{name or 'it'} has the type {kind.__qualname__}, which a checkpoint cannot hold\n"
        "    it holds plain Python values and tensors"
    )


def decode_value(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns the value that `encode_value` was given; what it did not write is a ValueError."""
    if isinstance(value, list):
        return [decode_value(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if not mark.startswith(DOLLAR):
        return {key: decode_value(item, tensors) for key, item in value.items()}
    content = value[mark]
    if len(value) != 1 or mark not in _MARKS:
        raise ValueError(f"nothing is written as {mark[:40]!r}")
    try:
        if mark == "$tensor":
            return tensors[content]
        if mark in _FROM_TEXT:
            return _FROM_TEXT[mark](content)
        items = [decode_value(item, tensors) for item in content]
        return _KINDS[mark](dict(items) if issubclass(_KINDS[mark], dict) else items)
    except (TypeError, AttributeError, LookupError, RuntimeError) as error:
        raise ValueError(f"{mark} is of {str(content)[:40]!r}: {error}") from None


def tensors_named(value: Any) -> Iterator[str]:
    """Return the names of the tensors that an encoded value refers to.

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


def _free_name(name: str, tensors: Tensors) -> str:
    """Names may meet where keys hold a slash; and a file of tensors has none that is no text."""
    found = name.encode(errors="replace").decode()
    while found in tensors or found == RESERVED_NAME:
        found += "+"
    return found


_CONTAINERS: dict[type, str] = {
    dict: "$dict",
    OrderedDict: "$ordered",
    Counter: "$counter",
    tuple: "$tuple",
    set: "$set",
    frozenset: "$frozenset",
    torch.Size: "$size",
}


def _encode_bytes(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _decode_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _decode_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError("no type of torch's")
    return found


_OF_TEXT: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    complex: (
        "$complex",
        lambda number: [repr(number.real), repr(number.imag)],
        lambda parts: complex(float(parts[0]), float(parts[1])),
    ),
    bytes: ("$bytes", _encode_bytes, _decode_bytes),
    bytearray: ("$bytearray", _encode_bytes, lambda text: bytearray(_decode_bytes(text))),
    torch.dtype: ("$dtype", lambda kind: str(kind).removeprefix("torch."), _decode_dtype),
    torch.device: ("$device", str, torch.device),
}
"""Kinds by their marks, with the ways to JSON and back."""


_KINDS = {mark: kind for kind, mark in _CONTAINERS.items()}
_FROM_TEXT: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    **{mark: decode for mark, _, decode in _OF_TEXT.values()},
}
_MARKS = {"$tensor", *_FROM_TEXT, *_KINDS}


MaybeOptimizer = torch.optim.Optimizer | None

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Wrappers of torch put these into names: the network has other ones with them and without."""

EXTRA_STATE = "_extra_state"
"""The last part of the name under which torch keeps what a module's ``get_extra_state`` gave."""

ARGUMENTS = "_metadata"
"""Names the entry of a state dict in which neuraloperator keeps its constructor's arguments."""

NAMES_SHOWN = 3
"""An error has at most so many names."""


@dataclass
class State:
    """Holds the state as JSON with tensors beside."""

    # What a state dict has besides tensors, mostly nothing; tensors in that are weights, too.
    model: dict[str, Any] = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    moments: Tensors = field(default_factory=dict)


def state_of(model: torch.nn.Module, optimizer: MaybeOptimizer = None) -> State:
    """Returns the present state, with the tensors in use. Every rank of a cut tensor calls it."""
    state = State()
    current = model.state_dict()
    for name, key in _keys_by_name(model, current).items():
        value = encode_value(current[key], name, state.weights, _gather_whole)
        if value != {"$tensor": name}:
            state.model[name] = value
    if optimizer is not None:
        state.optimizer = _encode_optimizer(model, optimizer, state.moments)
    for name, tensor in [*state.weights.items(), *state.moments.items()]:
        check_storable(name, tensor)
    return state


def check_fits(state: State, model: torch.nn.Module, optimizer: MaybeOptimizer) -> None:
    """Refuses a state by the first name or shape that differs, before anything is changed."""
    _check_values(state, model)
    if optimizer is None:
        return
    if state.optimizer is None:
        raise CheckpointError("it holds no state of an optimizer")
    groups = [[*names] for names in _group_names(model, optimizer)]
    stored_groups = [group["params"] for group in state.optimizer["param_groups"]]
    if [sorted(names) for names in groups] != [sorted(names) for names in stored_groups]:
        raise CheckpointError("its optimizer groups hold other weights")
    own = type(optimizer).__name__
    kind = state.optimizer.get("kind", own)
    pairs = zip(optimizer.param_groups, state.optimizer["param_groups"], strict=True)
    if kind != own and any(current.keys() - stored.keys() for current, stored in pairs):
        raise CheckpointError(f"it holds the state of the optimizer {kind}, not of {own}")


def _check_values(state: State, model: torch.nn.Module) -> None:
    current = model.state_dict()
    expected = _keys_by_name(model, current)
    found = _state_dict_values(state)
    for names, words in (
        ([name for name in expected if name not in found], "it has no {}"),
        (sorted(found.keys() - expected.keys()), "it has {}, which the model lacks"),
    ):
        if names:
            more = ", ..." if len(names) > NAMES_SHOWN else ""
            raise CheckpointError(words.format(", ".join(names[:NAMES_SHOWN]) + more))
    for name, key in expected.items():
        value, stored = current[key], found[name]
        if name.rpartition(".")[2] == EXTRA_STATE:  # of which the module itself makes what it will
            continue
        if isinstance(value, torch.Tensor) != isinstance(stored, torch.Tensor):
            raise CheckpointError(f"{name} has another type in it")
        if isinstance(stored, torch.Tensor) and stored.shape != value.shape:
            raise CheckpointError(
                f"{name} has the shape {list(stored.shape)} in it, not {list(value.shape)}"
            )


def fill(state: State, model: torch.nn.Module, optimizer: MaybeOptimizer) -> None:
    """Gives model and optimizer a state that fits them."""
    current = model.state_dict()
    values = _state_dict_values(state)
    keys = _keys_by_name(model, current)
    model.load_state_dict(
        {keys[name]: _distribute_like(current[keys[name]], v) for name, v in values.items()}
    )
    if optimizer is not None:
        _fill_optimizer(state, model, optimizer)


def _state_dict_values(state: State) -> dict[str, Any]:
    """Return the state dict, under the names that it has without wrappers."""
    within = {*tensors_named([*state.model.values()])}
    values: dict[str, Any] = {k: v for k, v in state.weights.items() if k not in within}
    return values | {k: decode_value(v, state.weights) for k, v in state.model.items()}


def _encode_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, moments: Tensors
) -> dict[str, Any]:
    """Name the weights in an optimizer's state, which torch numbers through all groups."""
    state = optimizer.state_dict()
    names = [name for group in _group_names(model, optimizer) for name in group]
    groups = []
    for position, group in enumerate(state["param_groups"]):
        rest = {key: value for key, value in group.items() if key != "params"}
        encoded = {
            key: encode_value(value, f"param_groups/{position}/{key}", moments, _gather_whole)
            for key, value in rest.items()
        }
        groups.append({**encoded, "params": [names[number] for number in group["params"]]})
    of_weights = {
        names[key]: encode_value(value, names[key], moments, _gather_whole)
        for key, value in state["state"].items()
        if isinstance(key, int)
    }
    others = {key: value for key, value in state["state"].items() if not isinstance(key, int)}
    rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {
        "kind": type(optimizer).__name__,
        "state": of_weights,
        "param_groups": groups,
        "other_state": encode_value(others, "other_state", moments, _gather_whole),
        "rest": encode_value(rest, "rest", moments, _gather_whole),
    }


def _fill_optimizer(state: State, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert state.optimizer is not None
    stored = state.optimizer
    names = [name for group in _group_names(model, optimizer) for name in group]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    of_weights = {
        numbers[name]: _spread(decode_value(value, state.moments), weights[numbers[name]])
        for name, value in stored["state"].items()
    }
    groups = []
    for group, current, own in zip(
        stored["param_groups"],
        _group_names(model, optimizer),
        optimizer.param_groups,
        strict=True,
    ):
        rest = {k: decode_value(v, state.moments) for k, v in group.items() if k != "params"}
        # How a step is computed is this device's: torch puts its counters where that needs them.
        rest |= {k: own[k] for k in ("fused", "foreach") if k in own and k in rest}
        groups.append({**rest, "params": [numbers[name] for name in current]})
    others = decode_value(stored["other_state"], state.moments)
    rest = decode_value(stored["rest"], state.moments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that what is cast loses something: it is put right below
        optimizer.load_state_dict({**rest, "state": of_weights | others, "param_groups": groups})
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    for number, value in of_weights.items():
        optimizer.state[weights[number]] = _exact(value, optimizer.state[weights[number]])


def _exact(stored: Any, loaded: Any) -> Any:
    """Restore values as they were stored: torch casts tensors to the type of the weight."""
    if isinstance(stored, torch.Tensor):
        same = isinstance(loaded, torch.Tensor) and loaded.dtype == stored.dtype
        return loaded if same else stored.to(getattr(loaded, "device", "cpu"))
    if isinstance(stored, dict) and isinstance(loaded, dict):
        return {key: _exact(value, loaded.get(key)) for key, value in stored.items()}
    if type(stored) in (list, tuple) and isinstance(loaded, (list, tuple)):
        return type(stored)(_exact(*pair) for pair in zip(stored, loaded, strict=True))
    return stored


def _keys_by_name(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a state dict by the names that the network has without wrappers."""
    keys: dict[str, str] = {}
    wrapped = _wrapper_prefixes(model)
    for key in state:
        if key == ARGUMENTS and isinstance(state[key], dict):
            continue  # its load_state_dict does without
        name = _without_wrappers(key, wrapped)
        if name in keys:
            raise CheckpointError(f"two weights have the name {name}")
        keys[name] = key
    return keys


def _wrapper_prefixes(model: torch.nn.Module) -> list[str]:
    """Find the prefixes of names under a part which holds the network as its ``module``."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    modules = model.named_modules(remove_duplicate=False)
    found = [f"{name}." if name else "" for name, part in modules if isinstance(part, wrappers)]
    return sorted(found, key=len, reverse=True)


def _without_wrappers(key: str, wrapped: list[str]) -> str:
    """Return a key without what wrappers add."""
    for prefix in wrapped:
        if key.startswith(f"{prefix}module."):
            key = prefix + key[len(prefix) + len("module.") :]
    for part in WRAPPERS:
        key = key.replace(part, "")
    return key


def _group_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[list[str]]:
    """Return the names of the weights, by groups; one that is not the model's has its number."""
    wrapped = _wrapper_prefixes(model)
    names = {
        id(weight): _without_wrappers(name, wrapped) for name, weight in model.named_parameters()
    }
    numbers = itertools.count()  # of all weights, those with names too
    for group in optimizer.param_groups:
        yield [names.get(id(weight), f"#{next(numbers)}") for weight in group["params"]]


def _gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself; one that torch has cut over ranks, a DTensor, is gathered."""
    gather = getattr(tensor, "full_tensor", None)
    return (tensor if gather is None else gather()).detach()


def _distribute_like(current: Any, value: Any) -> Any:
    """Cut as the current one is, if it is."""
    if not hasattr(current, "full_tensor") or not isinstance(value, torch.Tensor):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = current.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, current.placements)


def _spread(values: Any, weight: torch.Tensor) -> Any:
    """Cut and lay out what has a weight's shape as the weight is; leave the rest."""
    if not isinstance(values, dict):
        return values
    found = dict(values)
    for key, value in values.items():
        if not isinstance(value, torch.Tensor) or value.shape != weight.shape:
            continue
        if hasattr(weight, "full_tensor"):
            found[key] = _distribute_like(weight, value)
        elif value.stride() != weight.stride():
            found[key] = torch.empty_like(weight, dtype=value.dtype, device="cpu").copy_(value)
    return found
