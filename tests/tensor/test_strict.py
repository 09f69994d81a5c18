"""No operator falls through: each is equal to torch's or refused (tier: no process, then a few
gloo ranks).
"""

from __future__ import annotations

import ast
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import get_overridable_functions, get_testing_overrides

import hyperslab as hs
from hyperslab.tensor.dispatch import RULES, op_name

TESTS = Path(__file__).parent.parent


def covered() -> dict[str, set[str]]:
    """The operators that the tests call, by family, as each test module says in ``COVERS``."""
    found: dict[str, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        if "\nCOVERS" not in (text := path.read_text()):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COVERS":
                for family, names in ast.literal_eval(node.value).items():
                    assert all(name.rstrip("_123d") in text for name in names), path
                    found.setdefault(family, set()).update(names)
    return found


def functions() -> Iterator[Callable[..., Any]]:
    """Every function of torch that a tensor class can override."""
    for space in get_overridable_functions().values():
        yield from space


def cut(*shape: int) -> Any:
    return hs.shard(torch.randn(*shape or (2, 3, 4, 4, 4)), hs.Grid())


POINTWISE = "_pointwise_rule.<locals>.rule"
"""The rule whose test walks over the table itself, as that of the attributes does."""


def test_every_rule_has_a_test() -> None:
    tested = covered()
    for function, rule in RULES.items():
        pointwise = getattr(rule.run, "__qualname__", "") == POINTWISE
        if rule.family != "attribute" and not pointwise:
            name = op_name(function).split(".")[-1]
            assert name in tested.get(rule.family, ()), f"{op_name(function)} has no test"


def test_what_has_no_rule_is_refused_by_the_dispatcher() -> None:
    x, refused = cut(), 0
    for function in functions():
        if function in RULES:
            continue
        with pytest.raises(hs.UnsupportedOp, match="has no rule for a cut tensor"):
            hs.Sharded.__torch_function__(function, (hs.Sharded,), (x,), {})
        refused += 1
    assert refused > 380


def arguments(function: Callable[..., Any], x: Any) -> list[Any] | None:
    """The cut tensor wherever torch's own list of signatures has an argument without default.

    None for functions that the class itself overrides: the next test calls those.
    """
    dummy = get_testing_overrides().get(function)
    if dummy is None or getattr(function, "__name__", "") in vars(hs.Sharded):
        return None
    args: list[Any] = []
    for parameter in inspect.signature(dummy).parameters.values():
        if parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
            continue
        args.append([x, x] if parameter.name in ("tensors", "sequence") else x)
    return args


def test_real_calls_do_not_fall_through() -> None:
    """Call each function for real: with a cut tensor it must raise, torch or hyperslab."""
    x, reached, fell = cut(), 0, []
    warnings.simplefilter("ignore")
    for function in functions():
        args = arguments(function, x)
        if function in RULES or args is None:
            continue
        try:
            result = function(*args)
        except hs.UnsupportedOp:
            reached += 1
        except Exception:  # torch's own parser refused the arguments
            continue
        else:
            # Python makes a TypeError of NotImplemented.
            if result is not NotImplemented and op_name(function) not in HARMLESS:
                fell.append((op_name(function), type(result)))
    assert fell == []
    assert reached > 260


def test_methods_of_a_cut_tensor_do_not_fall_through() -> None:
    """Through the instance, where the class itself could have put something else in the way."""
    x = cut()
    own = {name for name in vars(hs.Sharded) if not name.startswith("__")} | {"grad"}
    for name in dir(torch.Tensor):
        if name.startswith("__") or name in own or name in ("_make_subclass", "as_subclass"):
            continue
        try:
            member = getattr(x, name)
        except (hs.UnsupportedOp, RuntimeError, AttributeError, TypeError):
            continue
        if callable(member) and not isinstance(member, type):
            function = getattr(torch.Tensor, name)
            if function in RULES:
                continue
            if not isinstance(function, (types.MethodDescriptorType, types.FunctionType)):
                continue
            try:
                result = member()
            except Exception:
                continue
            assert name in HARMLESS, f"x.{name}() gave {type(result)}"
        else:
            descriptor = getattr(torch.Tensor, name)
            known = name in HARMLESS or getattr(descriptor, "__get__", None) in RULES
            assert known, f"x.{name} is {member!r}"


HARMLESS = {
    "torch.Tensor._grad_fn.__get__",
    "_fix_weakref",
    "_grad_fn",
    "_has_symbolic_sizes_strides",
    "_python_dispatch",
    "_use_count",
}
"""What says nothing about the values or the shape."""
