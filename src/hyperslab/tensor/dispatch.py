"""Finds the rule of a torch operator for cut tensors, and refuses operators that have none.

In reading order: `Signature`, how torch lets its functions be called (NumPy's names, ``out=``,
dims counted from the end), worked out when a rule is registered; `RULES`, `register` and the
refusal; `check_operands`, what is done to the operands of every operator before its rule runs.
"""

from __future__ import annotations

import inspect
import logging
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import Parameter
from torch.overrides import resolve_name
from torch.utils.weak import WeakTensorKeyDictionary

from hyperslab.comm import Grid, all_reduce_sum, log_once, per_grid
from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.util.torch_internals import inside_ddp, node_metadata, version_of

NUMPY_NAMES = {
    "axis": "dim",
    "keepdims": "keepdim",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
}
"""Maps the names that torch takes, too, to its own."""

_KINDS_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def read_dim(dim: int, ndim: int, name: str) -> int:
    """Count a dim of a tensor of ``ndim`` dims from the front; ``name`` is the operator's.

    >>> read_dim(-1, 5, "narrow")
    4
    """
    if not -ndim <= dim < ndim:
        raise IndexError(f"{name}: dim {dim} is out of range for a tensor of {ndim} dims")
    return dim % ndim


def read_dims(dims: Iterable[int], ndim: int, name: str) -> tuple[int, ...]:
    """Count several dims from the front, in their order; see `read_dim`."""
    return tuple(read_dim(dim, ndim, name) for dim in dims)


_kept_dims = lru_cache(4096)(read_dims)


@dataclass(frozen=True, slots=True)
class DimArgument:
    """Describes an argument of a rule that is a dim, a sequence of dims, or None.

    ``position``: among the positional arguments; beyond all of them if it goes by name only.
    """

    name: str
    position: int
    default: int | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Signature:
    """Holds what has to be done to the arguments of a call before its rule runs.

    ``first``: the name of the tensor whose dims are counted; ``own``: the names of the rule's
    arguments; ``numpy_names``: those that stand for one of them.
    """

    first: str = "input"
    own: frozenset[str] = frozenset()
    numpy_names: Mapping[str, str] = field(default_factory=dict)
    dims: tuple[DimArgument, ...] = ()

    @staticmethod
    def of(run: Callable[..., Any], dims: Sequence[str]) -> Signature:
        """Return the signature of a rule whose arguments ``dims`` name dims of the first one."""
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
            if parameter is None or parameter.kind not in _KINDS_BY_NAME:
                raise ValueError(f"dims={name!r} is not an argument of the rule that goes by name")
            by_name = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            default = None if parameter.default is parameter.empty else parameter.default
            position = sys.maxsize if by_name else names.index(name)
            found.append(DimArgument(name, position, default))
        first = names[0] if names else ""
        return Signature(first, frozenset(names), other, tuple(found))

    def read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], function: Callable[..., Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments as the rule takes them."""
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
        first = args[0] if args else kwargs[self.first]
        ndim = first.dim() or 1  # a number has a dim 0 for torch
        for dim in self.dims:
            by_position = dim.position < len(args)
            given = args[dim.position] if by_position else kwargs.get(dim.name, dim.default)
            if given is None or (type(given) is int and 0 <= given < ndim):
                continue  # often: as the rule wants it
            value = _dims_from_front(given, ndim, function)
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


def _dims_from_front(value: Any, ndim: int, function: Callable[..., Any]) -> Any:
    """Count a dim, or several, from the front; what is neither is the rule's to understand.

    A dim is whatever is an integer for Python: NumPy's too, and a tensor of one.
    """
    if type(value) is int:
        return read_dim(value, ndim, function.__name__)
    if isinstance(value, list | tuple):
        return _kept_dims(tuple(map(operator.index, value)), ndim, function.__name__)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    return read_dim(operator.index(value), ndim, function.__name__)


@dataclass(frozen=True, slots=True)
class Rule:
    """Runs one operator on cut tensors; ``family`` and ``doc`` are for the table of ops."""

    run: Callable[..., Any]
    family: str
    doc: str
    signature: Signature = field(default_factory=Signature)
    lazy: bool = False
    """It knows of operands whose block is pending; see the note in `hyperslab.tensor.deferred`."""
    merged: bool = False
    """It takes operands with a dim that is merged of several, see `hyperslab.geometry.Cut`."""


RULES: dict[Callable[..., Any], Rule] = {}
"""The rule of each operator, keyed by the torch function that users' code calls."""


def register(
    *functions: Callable[..., Any],
    family: str | None = None,
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
        functions: the functions that users call, such as ``torch.heaviside``.
        family: the rule's heading in the table of ops, by default "user"; of a rule of ours that is
            the module of `hyperslab.ops` in which it stands.
        doc: the rule's line in the table of ops, by default the first of its docstring.
        dims: the rule's arguments that are dims of its first one. The rule gets them counted from
            the front, as numbers or tuples of numbers; one that does not exist is an IndexError.
        lazy: the rule changes no operand, and takes care of those whose block is pending.
        merged: the rule takes operands whose cut dims were merged by a reshape; other rules get
            such dims whole.

    Raises:
        ValueError: one of ``dims`` is not an argument of the rule that could be given by name.

    >>> import torch
    >>> @register(torch.heaviside, doc="Block by block.")
    ... def heaviside(x, values):
    ...     return x.like(torch.heaviside(x.local, values))
    """

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        line = doc or (run.__doc__ or "").strip().split("\n")[0]
        home, _, module = (getattr(run, "__module__", None) or "").rpartition(".")
        heading = family or (module if home == "hyperslab.ops" else "user")
        rule = Rule(run, heading, line, Signature.of(run, dims), lazy, merged)
        for function in functions:
            RULES[function] = rule
        return run

    return add


def op_name(function: Callable[..., Any]) -> str:
    """Return the name under which users know a torch function."""
    name = resolve_name(function) or getattr(function, "__qualname__", None) or repr(function)
    return str(name)


_REMEDY = (
    "leave the cut with x.full(), work on the block with x.local, or add a rule with "
    "hyperslab.register,\n    which is short where volumes are whole: after "
    "hyperslab.gather(x, axes) or parallelize(model, grid, until=...)"
)

_OWN_REMEDIES = {
    "_pack_padded_sequence": (
        "pack x.full(), so that every rank runs the layer on all sequences; or give a layer that "
        "only runs forward\n    the padded sequences, whose batch stays cut, and drop its "
        "results behind their ends"
    ),
    "pad_sequence": "pad each sequence with F.pad and join them with torch.stack",
}
"""Names the way around operators that have a closer one than leaving the cut."""


def refuse(function: Callable[..., Any], args: Any, kwargs: Any) -> UnsupportedOp:
    """Return the error for an operator without a rule: op, shapes, layout, remedy."""
    head = f"{op_name(function)} has no rule for a cut tensor"
    operands = describe([*args, *kwargs.values()])
    if getattr(function, "__module__", "").startswith("torch.distributed"):
        return UnsupportedOp(
            f"{head}, which all ranks share already: a mean or a sum of it is the global one\n"
            f"{operands}"
            "    leave the network's own communication out (ddp_sync=False of MONAI's quantizers), "
            "and update a metric\n    of torchmetrics with x.full(), made with "
            "process_group=grid.process_group()"
        )
    remedy = _OWN_REMEDIES.get(getattr(function, "__name__", ""), _REMEDY)
    return UnsupportedOp(f"{head}; nothing was computed\n{operands}    {remedy}")


def gather_first(*axes: str) -> str:
    """Say what to do where an operator needs the whole of a dim that ``axes`` cut."""
    return (
        f"    use hyperslab.gather(x, {axes}) before it, or hyperslab.parallelize(model, grid, "
        "until=...)\n    with the name of the submodule that calls it"
    )


def describe(values: Any) -> str:
    """Return one indented line for every tensor among ``values``."""
    lines = []
    for value in values:
        if isinstance(value, list | tuple):
            lines.append(describe(value))
        elif isinstance(value, torch.Tensor):
            text = f"Tensor {' x '.join(map(str, value.shape))}"
            if (partition := getattr(value, "partition", None)) is not None:
                text = f"Sharded {partition} on {getattr(value, 'grid', None)}"
            lines.append(f"    {text}\n")
    return "".join(lines)


def check_operands(values: Iterable[Any], rule: Rule, cut: type, first: Any = None) -> Any:
    """Return the first cut tensor among an operator's arguments; None if there are none.

    ``cut`` is their class. Unless its rule is ``lazy``, what is pending is computed: see the note
    in `tensor.lazy`. Unless it takes them, dims that were merged where they are cut become whole.
    """
    for value in values:
        kind = type(value)
        if kind is list or kind is tuple:
            for part in value:
                if type(part) is not int:  # no sizes, no dims
                    first = check_operands(value, rule, cut, first)
                    break
        elif kind is cut:
            if not rule.lazy and (value.pending is not None or value.readers):
                value.force()
            if value._partition.merged and not rule.merged:
                value.gather_merged()
            if first is None:
                first = value
            elif first._grid is not value._grid and first._grid.extents != value._grid.extents:
                raise LayoutError(f"operands on two grids: {first._grid} and {value._grid}")
        elif (kind is Parameter or kind is torch.Tensor) and value.requires_grad:
            x: Any = first
            if x is None:
                x = next((v for v in values if type(v) is cut), None)
            if x is None or x._grid.size == 1 or not torch.is_grad_enabled():
                continue
            homes = x._policy.homes
            if kind is not Parameter or homes is None or id(value) not in homes.owned:
                _watch_gradient(value, x)
    return first


HAS_PARTS = WeakTensorKeyDictionary()
"""Has the grid, weakly, of each ordinary tensor of whose gradient every rank gets a part.

That of a parameter is averaged by its parallelised module, that of another tensor by a hook. What
``torch.autograd.grad`` hands to its caller they may not see: the wrapper of it asks
`grid_of_parts`.
"""

PARTS_OF_GRADIENT = "hyperslab_parts_of_gradient"
"""Names what nodes of the graph know, as `HAS_PARTS`, that a forward made of its parameters."""


def grid_of_parts(x: torch.Tensor) -> Grid | None:
    """Return the grid whose ranks each get a part of this ordinary tensor's gradient."""
    known = HAS_PARTS.get(x)
    if known is None and x.grad_fn is not None:
        known = node_metadata(x.grad_fn).get(PARTS_OF_GRADIENT)
    return None if known is None else known()


class WatchedGradients(WeakTensorKeyDictionary):
    """Holds the hooks that `_watch_gradient` set, by tensor, for `parallelize` to remove.

    ``versions``: of tensors that are no leaves, when they got theirs; ``averaged``: has the
    parameters of parallelised modules that are averaged whatever has used them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.versions = WeakTensorKeyDictionary()
        self.averaged = WeakTensorKeyDictionary()
        self.warnings: set[int] = set()  # the hooks that warn
        self.warned = False  # from then on no parameter needs a hook for that


@per_grid
def watched_gradients(_grid: Grid) -> WatchedGradients:
    """Return those of a grid."""
    return WatchedGradients()


def _watch_gradient(operand: torch.Tensor, x: Any) -> None:
    """Have an ordinary operand's gradient averaged, or have a warning logged that nothing does.

    The latter for parameters of no parallelised module, also beside what has come from one. While
    the forward of one runs, what it computes of parameters needs no average of its own, as theirs
    is taken.
    """
    grid = x._grid
    if not isinstance(operand, Parameter):
        scope = x._policy.scope
        if scope is None or not scope.has_made(operand, grid):
            average_gradient(operand, grid)
    else:
        if (known := HAS_PARTS.get(operand)) is None or known() is None:
            HAS_PARTS[operand] = weakref.ref(grid)
        watched = watched_gradients(grid)
        if operand in watched.averaged:
            return
        # Beside what is whole each rank may have all of the gradient.
        if x._partition.axes and not (watched.warned or operand in watched or inside_ddp()):
            hook = partial(_warn_of_part, weakref.ref(grid))
            watched[operand] = handle = operand.register_post_accumulate_grad_hook(hook)
            watched.warnings.add(handle.id)


def average_gradient(x: torch.Tensor, grid: Grid) -> None:
    """Have the gradient of an ordinary tensor averaged over all ranks, as parameters' gradients.

    Each rank has its part of what comes from cut tensors, and equal gradients of all else.
    """
    if grid.size == 1:
        return
    mean = partial(_mean, weakref.ref(grid))
    watched = watched_gradients(grid)
    HAS_PARTS[x] = weakref.ref(grid)
    if not x.is_leaf:
        if watched.versions.get(x) != version_of(x):  # a change in place leaves a hook behind
            watched.versions[x] = version_of(x)
            x.register_hook(mean)
    elif x not in watched:
        watched[x] = x.register_post_accumulate_grad_hook(partial(_average, mean))


def _average(mean: Callable[[torch.Tensor], torch.Tensor], leaf: torch.Tensor) -> None:
    if leaf.grad is not None:
        leaf.grad = mean(leaf.grad)


def _mean(reference: weakref.ref[Grid], gradient: torch.Tensor) -> torch.Tensor:
    grid = reference()
    if grid is None:
        return gradient
    group = grid.group(tuple(grid.extents))
    return all_reduce_sum(gradient, group, "the gradient of an ordinary tensor") / grid.size


def _warn_of_part(reference: weakref.ref[Grid], parameter: torch.Tensor) -> None:
    grid = reference()
    if grid is None:
        return
    watched = watched_gradients(grid)
    watched.warned = True
    for tensor, handle in list(watched.items()):
        if handle.id in watched.warnings:
            del watched[tensor]
            handle.remove()
    log_once(
        grid,
        "a module that is not parallelised is trained on cut tensors: each rank has only its part "
        "of the gradients, and the ranks' weights drift apart\n    call net = "
        "hyperslab.parallelize(net, grid) before training, or average every .grad over all ranks",
        logging.WARNING,
    )
