"""Defines `Sharded`, this rank's block of a tensor that is cut over the grid, and its `Policy`.

[Note: forms of a tensor] A *global* tensor exists only as an idea. A `Sharded` is this rank's
*local* block of it together with its `Partition`; along axes that do not cut it the ranks hold
equal copies. An *ordinary* tensor next to a `Sharded` is a global one of which every rank holds
an equal copy (parameters, constants).

[Note: gradients] A backward pass through cut tensors differentiates the sum of the (equal)
losses of all ranks, because every communication uses its true adjoint. So a gradient that
arrives at a block is ``grid.size`` times that of the one loss, and the plain average over ranks
of a parameter's gradients, which DistributedDataParallel takes, is the serial gradient.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hyperslab.comm import Grid, all_reduce_sum, fetch, per_grid, plan_exchange
from hyperslab.comm.grid import warn_of_metrics
from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.geometry import Box, Partition
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.tensor.deferred import (
    Deferred,
    DeferredTensor,
    python_looks,
    sees_serial_gradients,
    watch_functions,
)
from hyperslab.tensor.dispatch import (
    PARTS_OF_GRADIENT,
    RULES,
    check_operands,
    describe,
    op_name,
    refuse,
)
from hyperslab.tensor.gradient_buffers import GradientBuffers
from hyperslab.util.torch_internals import (
    DisableTorchFunctionSubclass,
    graph_task,
    is_of_block,
    is_of_user,
    next_node_number,
    node_metadata,
    node_number,
    refusal_to_compile,
    swap_tensor_impl,
    transforms_active,
    tree_map,
)


class ForwardScope:
    """Is open while a module's forward runs, and in backward passes, which may repeat parts.

    ``owned``: the module's parameters, by id.
    """

    def __init__(self, owned: Collection[int] = ()) -> None:
        self._owned = owned
        self._running = 0
        self._first_node = 0  # of the forward's graph
        self._made: dict[int, bool] = {}  # of its nodes: if nothing else leads to them

    @property
    def is_open(self) -> bool:
        return self._running > 0 or graph_task() != -1

    def has_made(self, x: torch.Tensor, grid: Grid) -> bool:
        """Tell whether the forward that runs has computed ``x`` of the module's parameters alone.

        Not of a tensor that it found in an attribute, say, or in an object that it was given; nor
        where a user's function is on the way, which may clip its gradient: only what is linear may
        come before the average. The nodes remember the ``grid``: ranks have parts of gradients.
        """
        if self._running == 0 or x.grad_fn is None:
            return False
        nodes = [x.grad_fn]
        new: dict[int, tuple[bool, list[int]]] = {}
        reference = weakref.ref(grid)
        while nodes:
            node = nodes.pop()
            number = node_number(node)
            if number in self._made or number in new:  # many ways may lead to one
                continue
            before = [] if is_of_block(node) else [n for n, _ in node.next_functions if n]
            leaves = [n.variable for n in before if hasattr(n, "variable")]
            before = [n for n in before if not hasattr(n, "variable")]
            own = number >= self._first_node and all(id(leaf) in self._owned for leaf in leaves)
            own = own and not is_of_user(node)
            new[number] = own, [*map(node_number, before)]
            if own:
                node_metadata(node)[PARTS_OF_GRADIENT] = reference
            nodes += before if own else ()
        for number in sorted(new):  # a node is younger than what it comes from
            own, numbers = new[number]
            self._made[number] = own and all(self._made.get(n, False) for n in numbers)
        return self._made[node_number(x.grad_fn)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the scope open, within a forward."""
        if self._running == 0:
            self._first_node = next_node_number()
            self._made.clear()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


@dataclass(frozen=True, slots=True)
class Policy:
    """Choices that travel with a tensor through a network.

    ``batch_norm``: statistics over the whole ``"grid"`` (the serial result) or per ``"replica"``.
    ``kernels``: those of convolutions by a rule (``"measure"``, ``"fixed"``), or as torch chooses.
    ``scope``: while it is open ranks share the filters of large layers that are not cut, instead
    of repeating each other's work. Then all ranks must call such a layer, as inside a parallelised
    module; elsewhere a tensor that is not cut needs no message.
    ``homes``: where the gradients of the module's parameters are averaged.
    ``slab``: convolutions whose result is several times as large run over slabs of so many bytes
    (`hyperslab.ops.slabs`); None: all of them run whole.
    """

    batch_norm: str = "grid"
    kernels: Literal["measure", "fixed", "torch"] = "measure"
    scope: ForwardScope | None = field(default=None, compare=False)
    homes: GradientBuffers | None = field(default=None, compare=False)
    slab: int | None = None


_SERIAL_POLICY = Policy()
_TORCH_GRAD: Any = torch.Tensor.grad


@per_grid
def _known(grid: Grid, partition: Partition) -> tuple[Partition, tuple[int, ...]]:
    """Return the first of all equal partitions on a grid, and the shape of this rank's block.

    What is kept by a partition is found at once by the same object, and by an equal one only after
    its cuts were compared, which takes several times as long.
    """
    watch_functions(grid)  # in here it costs nothing but at the first tensor of a partition
    return partition, partition.box(grid.coords).shape


class Sharded(DeferredTensor):
    """Holds a block of a global tensor; ``shape``, ``size()``, ``dim()``, ``numel()`` are global.

    `hyperslab.shard`, a data set, or `from_local` makes it. Operators run by the rules of
    the op table; one without a rule raises `hyperslab.UnsupportedOp`.
    """

    _partition: Partition
    _block_shape: tuple[int, ...]  # of this rank
    _grid: Grid
    _policy: Policy
    _gradient: Sharded | None = None
    """The serial gradient as it was last looked at; torch has the block's of later passes."""

    @staticmethod
    def from_local(
        local: torch.Tensor, partition: Partition, grid: Grid, policy: Policy = _SERIAL_POLICY
    ) -> Sharded:
        """Wrap this rank's block; no copy, differentiable.

        Raises:
            LayoutError: the block does not have the shape of this rank's box.
        """
        return _wrap(local, *_known(grid, partition), grid, policy)

    def like(
        self,
        local: torch.Tensor,
        partition: Partition | None = None,
        *,
        fresh: bool = False,
        consumed: bool = False,
        reordered: bool | None = None,
    ) -> Sharded:
        """Wrap a block on the same grid; ``partition`` defaults to this tensor's own.

        Args:
            fresh: the rule has just made its memory, and nobody else sees it; nor does the rule,
                for which ``local`` is no block any more.
            consumed: nobody else has the object ``local``, the view of a block say, and for the
                rule it is no block any more. It becomes the tensor, without an alias.
            reordered: whether serial torch has it contiguous, if it lies channels last; by default
                as this tensor.
        """
        turned = self.reordered if reordered is None else reordered
        turned = turned and memory_format_of(local) is not torch.contiguous_format
        if partition is None or partition is self._partition:
            partition, shape = self._partition, self._block_shape
        else:
            partition, shape = _known(self._grid, partition)
        y = _wrap(local, partition, shape, self._grid, self._policy, fresh or consumed)
        if fresh:
            y.mark_as_private()
        else:
            self._pass_on_to(y)
            self.share()  # who holds the one may change the other
        if turned:
            y.mark_as_reordered()
        return y

    def will_be(
        self, pending: Deferred, partition: Partition, *, reordered: bool | None = None
    ) -> Sharded:
        """Return a tensor on the same grid whose block is computed when it is first used.

        ``reordered``: as `like` takes it.
        """
        with DisableTorchFunctionSubclass():
            y: Any = torch.empty(0, dtype=pending.dtype, device=self.device)
        y.__class__ = Sharded
        if partition is self._partition:
            y._partition, y._block_shape = partition, self._block_shape
        else:
            y._partition, y._block_shape = _known(self._grid, partition)
        y._grid = self._grid
        y._policy = self._policy
        y.put_off(pending)
        if self.reordered if reordered is None else reordered:
            y.mark_as_reordered()
        return y

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's block as an ordinary tensor: a differentiable view, see the notes.

        The block has the memory format that serial torch would have.

        Raises:
            LayoutError: it is a copy where serial torch has a view, whose base was changed since.
        """
        if self.pending is not None or self.readers:
            self.force()
        self.share()
        if self._base_of_copy is not None:
            self._check_base_of_copy()
        return self._in_serial_order() if self.reordered else self._block

    @property
    def block(self) -> torch.Tensor:
        """Return ``local`` for rules, which change no operand: in any memory format."""
        if self._base_of_copy is not None:
            self._check_base_of_copy()
        return self._block

    @property
    def native(self) -> torch.Tensor:
        """Return ``block`` for an operator of torch's that is written in C and makes a new tensor.

        That is this tensor itself, unless something written in Python sees it: an alias takes as
        long as an operator on a few voxels.
        """
        return self if self.is_its_block and not python_looks() else self.block

    @property
    def native_local(self) -> torch.Tensor:
        """Return ``local`` for an operator of torch's that is written in C, as `native` does.

        It may make a view.
        """
        if self.readers or self.reordered or not self.is_its_block or python_looks():
            return self.local
        self.share()
        return self

    @property
    def native_or_block(self) -> torch.Tensor:
        """Return ``native`` where nothing is cut, for code that asks it for its shape, too."""
        return self.block if self._partition.axes else self.native

    @property
    def partition(self) -> Partition:
        """Return the global shape and the cuts."""
        return self._partition

    @property
    def grid(self) -> Grid:
        """Return the ranks over which it is cut."""
        return self._grid

    @property
    def policy(self) -> Policy:
        """Return the choices that go on to what is computed of it."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def box(self) -> Box:
        """Return the region of the global tensor that this rank holds."""
        return self._partition.box(self._grid.coords)

    def full(self) -> torch.Tensor:
        """Return the global tensor, batch included, as an ordinary tensor equal on all ranks.

        It is differentiable, and takes the memory of the whole tensor on every rank.
        """
        if "torchmetrics" in sys.modules and self._grid.size > 1 and self._grid.has_values:
            warn_of_metrics(self._grid)
        return self.redistribute(Partition.whole(self.shape), "full()").local

    def block_shape(self, partition: Partition) -> tuple[int, ...]:
        """Return the shape of this rank's block of a tensor that is cut so, on the same grid."""
        return _known(self._grid, partition)[1]

    def redistribute(self, partition: Partition, why: str = "a change of the cut") -> Sharded:
        """Return the same global tensor, cut in another way; differentiable.

        Raises:
            LayoutError: the two partitions are of different global shapes.
        """
        if partition is self._partition or partition == self._partition:
            return self
        if partition.shape != self._partition.shape:
            raise LayoutError(f"cannot cut {self._partition} as {partition}: another shape")
        plan = plan_exchange(self._partition, partition.cover, self._grid)
        with DisableTorchFunctionSubclass():
            return self.like(fetch(self.block, plan, what=why), partition)

    def gather_merged(self) -> None:
        """Make dims whole that a reshape merged, as the reshape would have."""
        axes = [cut.axis for cut in self._partition.cuts if cut is not None and cut.merged]
        self.force()
        # Who looks first may do so under no_grad.
        with torch.inference_mode(False), torch.set_grad_enabled(self._block.requires_grad):
            whole = self.redistribute(self._partition.without(axes), "the gather of a merged dim")
            self.mark_as_copy(self)
            self.become(whole)

    def become(self, other: Sharded) -> Sharded:
        """Take the block and the partition of another tensor."""
        self.replace_storage(other.block)
        self._partition = other._partition
        self._block_shape = other._block_shape
        return self

    def take_place_of(self, ordinary: torch.Tensor) -> Sharded:
        """Turn an ordinary tensor into this cut one, where torch would change it in place."""
        with DisableTorchFunctionSubclass():
            ordinary.data = (self.local if self.pending is None else self).detach()
        ordinary.__class__ = Sharded
        vars(ordinary).update(vars(self))
        return ordinary  # type: ignore[return-value]

    def take_place_of_view(self, ordinary: torch.Tensor) -> None:
        """Turn an ordinary tensor into this cut one, and its view into a view of nothing else."""
        self.force()
        ordinary.__class__ = Sharded
        vars(ordinary).update(vars(self))
        swap_tensor_impl(ordinary, self)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self._partition.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self._partition.shape)

    ndimension = dim
    ndim = property(dim)

    def numel(self) -> int:
        return self.shape.numel()

    nelement = numel

    def __len__(self) -> int:
        return self.shape[0]

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            kind = f"dtype={self.dtype}, device={self.device}"
        return f"Sharded({self._partition}, {kind}, box={self.box}, grid={self._grid})"

    def __format__(self, spec: str) -> str:
        number = self.dim() == 0 and spec != ""
        return format(self.item() if number else repr(self), spec)

    @property
    def grad(self) -> Sharded | None:
        """Return this rank's block of the serial gradient of the loss.

        All ranks ask together: copies along axes that do not cut the tensor are summed. Until it is
        set to None it is one tensor, so that what changes it in place changes the gradient.
        """
        with DisableTorchFunctionSubclass():
            part = _TORCH_GRAD.__get__(self)
            # Inside a backward pass it is re-entrant checkpointing that hands the block's on.
            if graph_task() != -1 and not sees_serial_gradients():
                return part
            if part is not None:  # what came since the last look
                _TORCH_GRAD.__set__(self, None)
                self._gradient = _accumulated(self._gradient, self.serial_gradient(part))
            return self._gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None and (not isinstance(value, Sharded) or value.shape != self.shape):
            raise LayoutError(
                "the gradient of a cut tensor can only be set to None or a cut tensor of its shape"
            )
        self._gradient = (
            None if value is None else value.redistribute(self._partition, "a gradient that is set")
        )
        with DisableTorchFunctionSubclass():
            _TORCH_GRAD.__set__(self, None)

    def serial_gradient(self, gradient: torch.Tensor) -> Sharded:
        """Return the serial gradient, cut like this tensor, from its block's; differentiable.

        All ranks ask together: copies along axes that do not cut the tensor are summed.
        """
        copies = [a for a in self._grid.extents if a not in self._partition.axes]
        total = all_reduce_sum(gradient, self._grid.group(copies), "the gradient of a cut tensor")
        return self.like(total / self._grid.size)

    # Torch would not ask __torch_function__.

    def set_(self, *args: Any, **_: Any) -> Any:
        """Refuse: it would give this rank another block, which no other rank knows of."""
        raise refuse(torch.Tensor.set_, (self, *args), {})

    def as_subclass(self, *args: Any) -> Any:
        """Refuse: it would take this rank's block for all of the tensor."""
        raise refuse(torch.Tensor.as_subclass, (self, *args), {})

    def _is_view(self) -> bool:  # what torch.compile asks of a tensor first
        raise refusal_to_compile(
            UnsupportedOp,
            f"torch.compile cannot trace a cut tensor\n    Sharded {self._partition} on "
            f"{self._grid}\n    compile nothing but the module that hyperslab.parallelize takes or "
            "returns, which runs eagerly;\n    wrap other functions in torch.compiler.disable, and "
            "export a network that is not parallelised",
        )

    def __matmul__(self, other: object) -> Any:  # torch would turn the refusal into NotImplemented
        return torch.matmul(self, other)  # type: ignore[arg-type]

    def __rmatmul__(self, other: object) -> Any:
        return torch.matmul(other, self)  # type: ignore[arg-type]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        rule = RULES.get(func)
        if rule is None:
            raise refuse(func, args, kwargs or {})
        if transforms_active():  # not a TypeError, of which Python's operators make their own
            raise LayoutError(
                f"{op_name(func)}: torch.func and torch.vmap cannot transform a function that uses "
                f"cut tensors; nothing was computed\n{describe(args)}"
                "    use torch.autograd.grad(y, x), or x.full()"
            )
        with DisableTorchFunctionSubclass():
            given = (*args, *kwargs.values()) if kwargs else args
            first = check_operands(given, rule, Sharded)
            if not kwargs and not rule.signature.dims:
                return rule.run(*args)
            args, kwargs = rule.signature.read(args, kwargs or {}, func)
            if rule.signature.dims and first is not None and not first._partition.shape:
                others = [v for v in (*args, *kwargs.values()) if isinstance(v, Sharded)]
                if not any(v._partition.axes for v in others) and func.__name__[-1] != "_":
                    return _of_a_number(func, first, args, kwargs)
            return rule.run(*args, **kwargs)


def _of_a_number(
    func: Callable[..., Any], x: Sharded, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run torch's own operator along dim 0 of a tensor that has no dim, as torch lets one do."""

    def block(operand: Any) -> Any:
        return operand.block if isinstance(operand, Sharded) else operand

    def wrap(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        return x.like(result, Partition.whole(result.shape))

    return tree_map(wrap, func(*map(block, args), **{k: block(v) for k, v in kwargs.items()}))


def _wrap(
    local: torch.Tensor,
    partition: Partition,
    expected: tuple[int, ...],
    grid: Grid,
    policy: Policy,
    consumed: bool = False,
) -> Sharded:
    """Make a cut tensor of a block; one that is ``consumed`` becomes it, without an alias.

    ``partition`` and the ``expected`` shape are `_known`.
    """
    x: Any = local
    if consumed and type(local) is torch.Tensor:
        shape = local.shape
        x.__class__ = Sharded
    else:
        with DisableTorchFunctionSubclass():
            shape = local.shape
            x = local.as_subclass(Sharded)
    if shape != expected:
        raise LayoutError(
            f"rank {grid.rank} holds a block {tuple(shape)} but its box of {partition} is "
            f"{expected}"
        )
    x._partition = partition
    x._block_shape = expected
    x._grid = grid
    x._policy = policy
    made: Sharded = x
    return made


def _accumulated(old: Sharded | None, new: Sharded) -> Sharded:
    """Add a gradient to the one before, in place where torch does."""
    if old is None:
        return new
    if old.requires_grad or new.requires_grad:
        return new.like(old.block + new.block)
    old.block.add_(new.block)
    old.note_change()
    return old
