"""The op table: which operators have a rule for cut tensors. No rule, no run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import resolve_name

from hyperslab.errors import UnsupportedOp
from hyperslab.tensor.signature import Signature


@dataclass(frozen=True, slots=True)
class Rule:
    """How one operator runs on cut tensors; ``family`` and ``doc`` are for the table of ops."""

    run: Callable[..., Any]
    family: str
    doc: str
    signature: Signature = field(default_factory=Signature)
    lazy: bool = False
    """It knows of operands whose block is pending; see the note in `hyperslab.tensor.lazy`."""
    merged: bool = False
    """It takes operands with a dim that is merged of several, see `hyperslab.geometry.Cut`."""


RULES: dict[Callable[..., Any], Rule] = {}
"""The rule of each operator, keyed by the torch function that users' code calls."""


def register(
    *functions: Callable[..., Any],
    family: str = "user",
    doc: str | None = None,
    dims: Sequence[str] = (),
    lazy: bool = False,
    merged: bool = False,
) -> Callable[..., Any]:
    """Decorator: the decorated function is the rule of these torch functions.

    The rule has the operator's own signature and receives `Sharded` arguments; it computes with
    their ``.local`` blocks and returns `Sharded` (see `Sharded.like`) or ordinary tensors that
    are equal on all ranks. Before it runs, NumPy's names are translated (``axis`` to ``dim``),
    ``out=`` is refused unless the rule has an argument of that name, and so are operands on two
    grids.

    Args:
        functions: what users' code calls, such as ``torch.heaviside``.
        family: its heading in the table of ops.
        doc: its line in the table of ops, by default the first of its docstring.
        dims: the rule's arguments that are dims of its first one. The rule gets them counted from
            the front, as numbers or tuples of numbers; one that does not exist is an IndexError.
        lazy: the rule changes no operand, and takes care of those whose block is pending.
        merged: the rule takes operands of which a reshape merged dims where they are cut; others
            get such dims whole.

    Raises:
        ValueError: one of ``dims`` is no argument of the rule that could be given by name.

    >>> import torch
    >>> @register(torch.heaviside, doc="Block by block.")
    ... def heaviside(x, values):
    ...     return x.like(torch.heaviside(x.local, values))
    """

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        line = doc or (run.__doc__ or "").strip().split("\n")[0]
        rule = Rule(run, family, line, Signature.of(run, dims), lazy, merged)
        for function in functions:
            RULES[function] = rule
        return run

    return add


def op_name(function: Callable[..., Any]) -> str:
    """The name under which users know a torch function."""
    name = resolve_name(function) or getattr(function, "__qualname__", None) or repr(function)
    return str(name)


def refuse(function: Callable[..., Any], args: Any, kwargs: Any) -> UnsupportedOp:
    """The error for an operator without a rule: op, shapes, layout, remedy."""
    if getattr(function, "__module__", "").startswith("torch.distributed"):
        return UnsupportedOp(
            f"{op_name(function)} has no rule for a cut tensor, which is one of all ranks already: "
            f"a mean or a sum of it is the global one\n{describe([*args, *kwargs.values()])}"
            "    leave the network's own communication out (ddp_sync=False of MONAI's quantizers)"
        )
    return UnsupportedOp(
        f"{op_name(function)} has no rule for a cut tensor; nothing was computed\n"
        f"{describe([*args, *kwargs.values()])}"
        "    leave the cut with x.full(), work on the block with x.local, or add a rule with "
        "hyperslab.register,\n    which is short where volumes are whole: after "
        "hyperslab.gather(x, axes) or parallelize(model, grid, until=...)"
    )


def gather_first(*axes: str) -> str:
    """What to do where an operator needs the whole of a dim that ``axes`` cut."""
    return (
        f"    use hyperslab.gather(x, {axes}) before it, or hyperslab.parallelize(model, grid, "
        "until=...)\n    with the name of the submodule that calls it"
    )


def describe(values: Any) -> str:
    """One indented line for every tensor among ``values``."""
    lines = []
    for value in values:
        if isinstance(value, list | tuple):
            lines.append(describe(value))
        elif isinstance(value, torch.Tensor):
            partition = getattr(value, "partition", None)
            text = (
                f"Sharded {partition} on {getattr(value, 'grid', None)}"
                if partition is not None
                else (f"Tensor {' x '.join(map(str, value.shape))}")
            )
            lines.append(f"    {text}\n")
    return "".join(lines)
