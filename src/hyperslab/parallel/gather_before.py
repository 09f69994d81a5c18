"""``parallelize(until=...)``: submodules whose inputs are gathered before them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.utils._pytree import tree_map

from hyperslab.comm import Grid, log_once
from hyperslab.errors import LayoutError
from hyperslab.tensor import Sharded

Submodule = str | nn.Module
"""A submodule or its name."""


def gather_before(module: nn.Module, until: Submodule | Sequence[Submodule], grid: Grid) -> None:
    """Let these submodules of ``module`` get their inputs whole in space.

    Raises:
        LayoutError: one of them is not in the module, or is a list of modules, which torch never
            calls.
    """
    wanted = (until,) if isinstance(until, str | nn.Module) else until
    for name in [_name(module, submodule) for submodule in wanted]:
        hook = _Gather(name, grid)
        module.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)


def _name(module: nn.Module, wanted: Submodule) -> str:
    for name, submodule in module.named_modules():
        if wanted in (name, submodule):
            break
    else:
        kind = repr(wanted) if isinstance(wanted, str) else f"a {type(wanted).__name__}"
        parts = ", ".join(name for name, _ in module.named_children())
        raise LayoutError(
            f"until={kind} is no part of {type(module).__name__}\n"
            f"    its parts are {parts}, and what named_modules() lists below them"
        )
    if isinstance(submodule, nn.ModuleList | nn.ModuleDict):
        members = ", ".join(f"{name}.{key}" for key, _ in submodule.named_children())
        raise LayoutError(
            f"until={name!r} is a {type(submodule).__name__}, which is never called\n"
            f"    name what it holds: {members}"
        )
    return name


class _Gather:
    """A hook that runs before a submodule's forward.

    Distribution scheme: 1. every cut tensor among the arguments is gathered along the axes that
    cut space; along the batch it stays cut, 2. the ranks of a replica repeat the
    submodule's work, and that of what uses its results.
    """

    def __init__(self, name: str, grid: Grid) -> None:
        self.name = name
        self.grid = grid

    def __call__(
        self, _submodule: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return tree_map(self.whole, args), tree_map(self.whole, kwargs)

    def whole(self, value: object) -> object:
        if not isinstance(value, Sharded):
            return value
        space = [axis for axis in value.partition.axes if axis != "data"]
        if not space:
            return value
        log_once(
            self.grid,
            f"until {self.name!r}: {value.partition} gathered along {', '.join(space)}; the ranks "
            "there repeat the work from here on",
        )
        whole = value.redistribute(value.partition.without(space), f"until {self.name!r}")
        whole.mark_as_copy(value)  # serial torch passes the tensor itself, not a copy
        return whole
