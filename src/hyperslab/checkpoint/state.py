"""What model and optimizer are made of, under names that do not depend on the grid, and back.

Weights have their names in the state dict. What an optimizer keeps of a weight is named by that
weight, so that it finds it again where another optimizer counts its weights in another order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hyperslab.checkpoint.safetensors_file import check_storable
from hyperslab.checkpoint.values import Tensors, decode_value, encode_value, tensors_named
from hyperslab.errors import CheckpointError

Optimizer = torch.optim.Optimizer | None

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What wrappers of torch put into names: the network has other ones with them and without."""

EXTRA_STATE = "_extra_state"
"""The last part of the name under which torch keeps what a module's ``get_extra_state`` gave."""

NAMES_SHOWN = 3
"""So many names an error has."""


@dataclass
class State:
    """As JSON with tensors beside; ``optimizer`` is None where there is none.

    ``model`` holds what a state dict has besides tensors, mostly nothing; tensors within that are
    among the ``weights``, too.
    """

    model: dict[str, Any] = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    moments: Tensors = field(default_factory=dict)


def state_of(model: torch.nn.Module, optimizer: Optimizer = None) -> State:
    """The state as it is now; its tensors are those in use. Every rank of a cut tensor calls it.

    Raises:
        CheckpointError: names what cannot be stored.
    """
    state = State()
    for name, key in _names(model, model.state_dict()).items():
        value = encode_value(key, name, state.weights, _whole)
        if value != {"$tensor": name}:
            state.model[name] = value
    if optimizer is not None:
        state.optimizer = _encode_optimizer(model, optimizer, state.moments)
    for name, tensor in [*state.weights.items(), *state.moments.items()]:
        check_storable(name, tensor)
    return state


def check_fits(state: State, model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Compare names and shapes before anything is changed.

    Raises:
        CheckpointError: names the first that differs.
    """
    _check_values(state, model)
    if optimizer is not None:
        _check_optimizer(state, model, optimizer)


def _check_values(state: State, model: torch.nn.Module) -> None:
    expected = _names(model, model.state_dict())
    found = _values(state)
    for names, words in (
        ([name for name in expected if name not in found], "it has no {}"),
        (sorted(found.keys() - expected.keys()), "it has {}, which the model has not"),
    ):
        if names:
            more = ", ..." if len(names) > NAMES_SHOWN else ""
            raise CheckpointError(words.format(", ".join(names[:NAMES_SHOWN]) + more))
    for name, value in expected.items():
        stored = found[name]
        if name.rpartition(".")[2] == EXTRA_STATE:  # of which the module itself makes what it will
            continue
        if isinstance(value, torch.Tensor) != isinstance(stored, torch.Tensor):
            raise CheckpointError(f"{name} is not of the same kind there")
        if isinstance(stored, torch.Tensor) and stored.shape != value.shape:
            raise CheckpointError(f"{name} is {list(stored.shape)} there, not {list(value.shape)}")


def _check_optimizer(
    state: State, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    if state.optimizer is None:
        raise CheckpointError("it holds no state of an optimizer")
    groups = [[*names] for names in _group_names(model, optimizer)]
    stored_groups = [group["params"] for group in state.optimizer["param_groups"]]
    if [sorted(names) for names in groups] != [sorted(names) for names in stored_groups]:
        raise CheckpointError("the optimizer's groups have other weights there")
    own = type(optimizer).__name__
    kind = state.optimizer.get("kind", own)
    pairs = zip(optimizer.param_groups, state.optimizer["param_groups"], strict=True)
    if kind != own and any(current.keys() - stored.keys() for current, stored in pairs):
        raise CheckpointError(f"it holds the state of the optimizer {kind}, not of {own}")


def fill(state: State, model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Give model and optimizer a state that fits them.

    Raises:
        ValueError: it holds what no `state_of` gave.
    """
    current = model.state_dict()
    values = _values(state)
    keys = _keys(model, current)
    model.load_state_dict({keys[name]: _like(current[keys[name]], v) for name, v in values.items()})
    if optimizer is not None:
        _fill_optimizer(state, model, optimizer)


def _values(state: State) -> dict[str, Any]:
    """The state dict, under the names that it has without wrappers."""
    within = {*tensors_named([*state.model.values()])}
    values: dict[str, Any] = {k: v for k, v in state.weights.items() if k not in within}
    return values | {k: decode_value(v, state.weights) for k, v in state.model.items()}


def _encode_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, moments: Tensors
) -> dict[str, Any]:
    """Torch numbers the weights through all groups; here they have their names."""
    state = optimizer.state_dict()
    names = [name for group in _group_names(model, optimizer) for name in group]
    groups = []
    for position, group in enumerate(state["param_groups"]):
        rest = {key: value for key, value in group.items() if key != "params"}
        encoded = {
            key: encode_value(value, f"param_groups/{position}/{key}", moments, _whole)
            for key, value in rest.items()
        }
        groups.append({**encoded, "params": [names[number] for number in group["params"]]})
    of_weights = {
        names[key]: encode_value(value, names[key], moments, _whole)
        for key, value in state["state"].items()
        if isinstance(key, int)
    }
    others = {key: value for key, value in state["state"].items() if not isinstance(key, int)}
    rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {
        "kind": type(optimizer).__name__,
        "state": of_weights,
        "param_groups": groups,
        "other_state": encode_value(others, "other_state", moments, _whole),
        "rest": encode_value(rest, "rest", moments, _whole),
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
    for group, current in zip(stored["param_groups"], _group_names(model, optimizer), strict=True):
        rest = {k: decode_value(v, state.moments) for k, v in group.items() if k != "params"}
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
    """As it was stored, where it was loaded to: torch casts tensors to the type of the weight."""
    if isinstance(stored, torch.Tensor):
        same = isinstance(loaded, torch.Tensor) and loaded.dtype == stored.dtype
        return loaded if same else stored.to(getattr(loaded, "device", "cpu"))
    if isinstance(stored, dict) and isinstance(loaded, dict):
        return {key: _exact(value, loaded.get(key)) for key, value in stored.items()}
    if type(stored) in (list, tuple) and isinstance(loaded, (list, tuple)):
        return type(stored)(_exact(*pair) for pair in zip(stored, loaded, strict=True))
    return stored


def _names(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict under the names that the network has without wrappers."""
    named: dict[str, Any] = {}
    wrapped = _wrapped(model)
    for key, value in state.items():
        name = _plain(key, wrapped)
        if name in named:
            raise CheckpointError(f"two weights have the name {name}")
        named[name] = value
    return named


def _keys(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    wrapped = _wrapped(model)
    return {_plain(key, wrapped): key for key in state}


def _wrapped(model: torch.nn.Module) -> list[str]:
    """Where names begin with that of a part which holds the network as its ``module``."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    modules = model.named_modules(remove_duplicate=False)
    found = [f"{name}." if name else "" for name, part in modules if isinstance(part, wrappers)]
    return sorted(found, key=len, reverse=True)


def _plain(key: str, wrapped: list[str]) -> str:
    """Without what wrappers add."""
    for prefix in wrapped:
        if key.startswith(f"{prefix}module."):
            key = prefix + key[len(prefix) + len("module.") :]
    for part in WRAPPERS:
        key = key.replace(part, "")
    return key


def _group_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[list[str]]:
    """The names of the weights, by groups; one that is not the model's has its number."""
    wrapped = _wrapped(model)
    names = {id(weight): _plain(name, wrapped) for name, weight in model.named_parameters()}
    number = 0
    for group in optimizer.param_groups:
        found = []
        for weight in group["params"]:
            found.append(names.get(id(weight), f"#{number}"))
            number += 1
        yield found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; one that torch has cut over ranks, a DTensor, is gathered."""
    gather = getattr(tensor, "full_tensor", None)
    return (tensor if gather is None else gather()).detach()


def _like(current: Any, value: Any) -> Any:
    """Cut as the current one is, if it is."""
    if not hasattr(current, "full_tensor") or not isinstance(value, torch.Tensor):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = current.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, current.placements)


def _spread(value: Any, weight: torch.Tensor) -> Any:
    """What is kept of a weight, cut and laid out in memory as the weight where it has its shape."""
    if isinstance(value, dict):
        return {key: _spread_one(item, weight) for key, item in value.items()}
    return value


def _spread_one(value: Any, weight: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != weight.shape:
        return value
    if hasattr(weight, "full_tensor"):
        return _like(weight, value)
    if value.stride() == weight.stride():
        return value
    return torch.empty_like(weight, dtype=value.dtype, device="cpu").copy_(value)
