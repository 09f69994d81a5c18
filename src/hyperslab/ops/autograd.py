"""Distributes ``torch.autograd``: users' own functions, backward passes, gradients on request.

[Note: users' functions] Torch hands the backward of a ``torch.autograd.Function`` a block's
gradient, times the ranks (see the note on gradients in `hyperslab.tensor.sharded`), and beside
it the cut tensors that were saved: what a user's formula makes of the two is neither the one
nor the other. So a function that is applied to cut tensors runs as a class derived from it,
which turns gradients into serial ones, cut like the outputs, and back. Its forward and backward
then are programs on cut tensors as any other: exact or refused. Re-entrant checkpointing of
torch is such a function too, but hands on what it gets. Where hooks keep tensors
(``memory: offload``, ``save_on_cpu``, another checkpoint around it), torch returns plain blocks:
what a checkpoint calls again gets them cut as they were.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import BackwardHook

from hyperslab.comm import Grid, all_reduce_sum
from hyperslab.ops.operands import block_of
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.deferred import (
    before_functions,
    nothing_stays_deferred,
    seeing_serial_gradients,
    sees_serial_gradients,
    wrap_while_cut,
)
from hyperslab.tensor.dispatch import grid_of_parts, refuse
from hyperslab.util.torch_internals import (
    BACKWARD_PASSES,
    CHECKPOINTS,
    DisableTorchFunctionSubclass,
    EnableTorchFunction,
    TorchDispatchMode,
    dispatch_modes_active,
    graph_task,
    map_only,
    without_dispatch_modes,
)

Recut = Callable[[torch.Tensor], torch.Tensor]

_derive: Any = type(Function)  # torch's metaclass, which makes the class of the graph's nodes

_BOTH_WAYS = "_hyperslab_on_cut_tensors"
"""Names the attribute in which a class keeps its derived one; a table would keep both for ever."""


def block_gradient(gradient: torch.Tensor, x: Sharded) -> torch.Tensor:
    """Returns the block gradient that a backward pass has to bring: the ranks' sum of copies."""
    parts = math.prod(cut.parts for cut in x.partition.cuts if cut is not None)
    return block_of(gradient, x.partition, x.grid, "the gradient of an autograd function") * parts


class _Layout:
    """Remembers how the arguments, the results and the saved tensors of one call are cut."""

    def __init__(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        self.grid: Grid = next(v.grid for v in inputs if isinstance(v, Sharded))
        self.inputs = [_likeness(value) for value in inputs]
        self.outputs = [_likeness(value) for value in outputs]
        self.saved = [recut(value) for value in getattr(ctx, "to_save", None) or ()]

    def back(self, gradient: Any, x: Sharded | None) -> Any:
        if x is not None and isinstance(gradient, torch.Tensor):
            return block_gradient(gradient, x)
        return gradient.full() if isinstance(gradient, Sharded) else gradient


class _Context:
    """Wraps the context of a function's backward, so that saved tensors are cut as they were."""

    def __init__(self, ctx: Any, layout: _Layout) -> None:
        self._ctx = ctx
        self._layout = layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """Returns saved tensors, cut again: torch has plain blocks of outputs and packed ones."""
        pairs = zip(self._ctx.saved_tensors, self._layout.saved, strict=True)
        return tuple(v if again is None else again(v) for v, again in pairs)


def _likeness(value: Any) -> Sharded | None:
    """Makes a tensor without numbers that is cut as the value; None if that is not cut."""
    if not isinstance(value, Sharded):
        return None
    block = value.block.detach()
    return value.like(block.new_empty(1).expand(block.shape))


def recut(value: Any) -> Recut | None:
    """Returns what cuts a block again as the value was, which it does not hold; None of others."""
    if not isinstance(value, Sharded):
        return None
    how = (value.partition, value.grid, value.policy)
    reordered = value.reordered

    def again(saved: torch.Tensor) -> torch.Tensor:
        if isinstance(saved, Sharded):
            return saved
        y = Sharded.from_local(saved, *how)
        if reordered:
            y.mark_as_reordered()
        return y

    return again


def _on_cut_tensors(cls: type[Function]) -> type[Function]:
    """Derives the class of a user's function that takes cut arguments."""
    known: type[Function] | None = vars(cls).get(_BOTH_WAYS)
    if known is not None:
        return known

    def forward(ctx: Any, *args: Any) -> Any:
        output = cls.forward(ctx, *args)
        ctx._hyperslab_layout = _Layout(ctx, args, output)
        return output

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        cls.setup_context(ctx, inputs, output)
        ctx._hyperslab_layout = _Layout(ctx, inputs, output)

    def backward(ctx: Any, *gradients: Any) -> Any:
        layout: _Layout = ctx._hyperslab_layout
        pairs = zip(layout.outputs, gradients, strict=True)
        with seeing_serial_gradients():
            serial = [_serial(y, g, layout.grid, "the gradient of a number") for y, g in pairs]
            found = own(_Context(ctx, layout), *serial)
        if not isinstance(found, tuple | list):
            found = (found,)
        whole = [*found, *[None] * (len(layout.inputs) - len(found))]
        return tuple(layout.back(g, x) for g, x in zip(whole, layout.inputs, strict=False))

    name = "backward" if cls.vjp is Function.vjp else "vjp"
    own = getattr(cls, name)
    parts = {name: backward, "__module__": cls.__module__}
    if cls.setup_context is Function.setup_context:
        parts["forward"] = forward
    else:
        parts["setup_context"] = setup_context
    derived = _derive(
        cls.__name__, (cls,), {k: staticmethod(v) if callable(v) else v for k, v in parts.items()}
    )
    setattr(cls, _BOTH_WAYS, derived)
    return derived


def _on_arguments_cut_again(run: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that cuts its arguments as ``args`` were, and calls ``run``."""
    recuts = [recut(value) for value in args]

    def again(*saved: Any, **kwargs: Any) -> Any:
        pairs = zip(saved, recuts, strict=True)
        return run(*(v if cut is None else cut(v) for v, cut in pairs), **kwargs)

    return again


class _Checkpoint(CheckpointFunction):
    """Calls a function of cut tensors again on arguments that are cut as they were."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        again = _on_arguments_cut_again(run, args)
        with nothing_stays_deferred():  # what is computed later would replace what autograd has
            return CheckpointFunction.forward(ctx, again, preserve_rng_state, *args)


def _checkpointing_cut_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what prepares a checkpoint that is not re-entrant: a generator.

    What the function returns is computed within the checkpoint, both times: else torch would keep
    what it is computed from, and not come to the running statistics of a norm at the end again.
    """

    @functools.wraps(original)
    def run(
        function: Callable[..., Any],
        preserve_rng_state: bool,
        context_fn: object,
        determinism_check: str,
        debug: bool,
        early_stop: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        for value in args:
            if isinstance(value, Sharded):
                value.forget_origin()  # as it will be used again
        recompute = nothing_stays_deferred()(_on_arguments_cut_again(function, args))
        options = (preserve_rng_state, context_fn, determinism_check, debug, early_stop)
        # A checkpoint around this one detaches what this one keeps, for which a cut tensor would
        # change its order in memory, in the repeated forward alone.
        kept = [value.block if isinstance(value, Sharded) else value for value in args]
        with contextlib.closing(original(recompute, *options, *kept, **kwargs)) as generator:
            next(generator)
            with nothing_stays_deferred():
                yield
            yield from generator

    return run


wrap_while_cut(*CHECKPOINTS, _checkpointing_cut_tensors)


def _derived_if_cut(cls: type[Function], values: tuple[Any, ...]) -> type[Function]:
    if not torch.is_grad_enabled():
        return cls
    if cls is CheckpointFunction:
        return _Checkpoint if any(isinstance(v, Sharded) for v in values) else cls
    cut = any(isinstance(v, Sharded) and v.grid.size > 1 for v in values)
    return _on_cut_tensors(cls) if cut else cls


before_functions(_derived_if_cut)


class _Hooks:
    """Lets users' hooks see serial gradients, cut like the tensors ``inputs`` or ``outputs``.

    What they return is turned into blocks' gradients. All ranks run a hook together.
    """

    def __init__(self) -> None:
        self.inputs: list[Sharded | None] = []
        self.outputs: list[Sharded | None] = []
        self.grid: Grid | None = None

    def know(self, values: Any) -> list[Sharded | None]:
        """Remember the grid of cut tensors, and return how each is cut."""
        tensors = values if isinstance(values, tuple) else (values,)
        self.grid = next((v.grid for v in tensors if isinstance(v, Sharded)), self.grid)
        return [_likeness(value) for value in tensors]

    def serial(self, gradients: Sequence[Any], likes: Sequence[Sharded | None]) -> tuple[Any, ...]:
        if self.grid is None:
            return tuple(gradients)
        pairs = zip(likes, gradients, strict=True)
        return tuple(_serial(x, g, self.grid, "the gradient that a hook sees") for x, g in pairs)

    def run(
        self, hook: Callable[..., Any], gradients: Sequence[Any], likes: Sequence[Sharded | None]
    ) -> Any:
        """Call ``hook`` with serial gradients; return blocks' gradients, or None if it does."""
        if self.grid is None:
            return hook(gradients)
        # A pass that a rule began would ask no class.
        with seeing_serial_gradients(), EnableTorchFunction():
            found = hook(self.serial(gradients, likes))
            if found is None or len(found) != len(likes):  # torch refuses that
                return found
            pairs = zip(found, likes, strict=True)
            return tuple(g if x is None or g is None else block_gradient(g, x) for g, x in pairs)

    def run_full(
        self, hook: Callable[..., Any], module: object, before: Sequence[Any], after: Sequence[Any]
    ) -> Any:
        def seeing_both(given: Sequence[Any]) -> Any:
            return hook(module, given, self.serial(after, self.outputs))

        return self.run(seeing_both, before, self.inputs)

    def run_before(self, hook: Callable[..., Any], module: object, after: Sequence[Any]) -> Any:
        return self.run(functools.partial(hook, module), after, self.outputs)


@register(torch.Tensor.register_hook, merged=True)
def register_hook(self: Sharded, hook: Callable[[Any], Any]) -> Any:
    """Shows the hook the serial gradient, cut like the tensor, which it may replace."""
    self.check_on_path("register_hook")
    hooks = _Hooks()
    likes = hooks.know(self)

    def around(given: Sequence[Any]) -> Any:
        found = hook(*given)
        return None if found is None else (found,)

    def on_block(gradient: torch.Tensor) -> Any:
        found = hooks.run(around, (gradient,), likes)
        return None if found is None else found[0]

    return torch.Tensor.register_hook(self, on_block)


def _hooks_of_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what holds the hooks of one backward pass through a module."""

    @functools.wraps(original)
    def run(self: Any, module: object, full: Sequence[Any], before: Sequence[Any]) -> None:
        hooks = self._hyperslab_hooks = _Hooks()
        full = [functools.partial(hooks.run_full, hook) for hook in full]
        before = [functools.partial(hooks.run_before, hook) for hook in before]
        original(self, module, full, before)

    return run


def _knowing(side: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper of what sets hooks on the inputs or the outputs of a module."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(self: Any, args: Any) -> Any:
            hooks = getattr(self, "_hyperslab_hooks", None)
            if hooks is not None:
                setattr(hooks, side, hooks.know(args))
            return original(self, args)

        return run

    return wrap


wrap_while_cut(BackwardHook, "__init__", _hooks_of_module)
wrap_while_cut(BackwardHook, "setup_input_hook", _knowing("inputs"))
wrap_while_cut(BackwardHook, "setup_output_hook", _knowing("outputs"))


@register(torch.autograd.backward)
def backward(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *args: object,
    inputs: Sequence[Any] | None = None,
    **kwargs: object,
) -> None:
    """Begins with numbers, or with tensors and their gradients; takes cut ``inputs``.

    Within a backward pass re-entrant checkpointing calls it with blocks' gradients.
    """
    sequence = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
    if graph_task() == -1 and any(isinstance(t, Sharded) for t in sequence):
        if grad_tensors is None and any(t.numel() != 1 for t in sequence):
            raise refuse(torch.autograd.backward, (sequence, grad_tensors), {})
        with torch.enable_grad():
            sequence, grad_tensors = (_total(sequence, grad_tensors),), None
    if inputs is not None:
        with EnableTorchFunction():
            for tensor in inputs:
                if isinstance(tensor, torch.Tensor) and not tensor.is_leaf:
                    tensor.retain_grad()
        # Torch asks the inputs' class; their places in the graph have none.
        kwargs["inputs"] = [
            get_gradient_edge(t) if isinstance(t, torch.Tensor) else t for t in inputs
        ]
    with torch.enable_grad():
        blocks = [t.local if isinstance(t, Sharded) else t for t in sequence]
    given = grad_tensors
    if sees_serial_gradients():  # in a user's function that recomputes, as reversible networks do
        weights = (given,) if given is None or isinstance(given, torch.Tensor) else tuple(given)
        given = [
            block_gradient(g, t) if g is not None and isinstance(t, Sharded) else g
            for g, t in zip(weights, sequence, strict=True)
        ]
    with seeing_serial_gradients(False), EnableTorchFunction():
        torch.autograd.backward(blocks, given, *args, **kwargs)  # type: ignore[arg-type]


@register(torch.Tensor.backward)
def backward_of(
    self: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Any] | None = None,
) -> None:
    """Begins with a number, such as one voxel of a network's output, or with a gradient."""
    several = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    backward(self, gradient, retain_graph, create_graph, inputs=several)


@register(torch.autograd.grad)
def grad(
    outputs: torch.Tensor | Sequence[torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    grad_outputs: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Returns the serial gradient, cut like its input; create_graph differentiates it again.

    Distribution scheme: 1. form the one global number that is differentiated: the sum of the
    outputs, weighted by ``grad_outputs``, 2. run the backward pass, which differentiates the sum of
    the ranks' equal numbers, 3. add up the parts of equal copies and divide each gradient by the
    number of ranks.
    """
    sequence = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
    wanted = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    cut = [t for t in (*sequence, *wanted) if isinstance(t, Sharded)]
    tensors = all(isinstance(t, torch.Tensor) for t in (*sequence, *wanted))
    if is_grads_batched or not only_inputs or not tensors:
        raise refuse(torch.autograd.grad, (sequence, wanted), {})
    for tensor in wanted:
        if isinstance(tensor, Sharded):
            tensor.check_on_path("torch.autograd.grad")
    with torch.enable_grad():
        total = _total(sequence, grad_outputs)
    # A checkpoint, a hook or a function's backward may use cut tensors: rules have to see them.
    edges = [get_gradient_edge(tensor) for tensor in wanted]
    with EnableTorchFunction():
        found = torch.autograd.grad(
            total,
            edges,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=allow_unused or materialize_grads,
        )
    if materialize_grads:
        blocks = (t.block if isinstance(t, Sharded) else t for t in wanted)
        pairs = zip(found, blocks, strict=True)
        found = tuple(torch.zeros_like(t) if g is None else g for g, t in pairs)
    with torch.set_grad_enabled(create_graph):
        pairs = zip(wanted, found, strict=True)
        what = "the gradient of an ordinary tensor"
        return tuple(_serial(x, g, cut[0].grid, what) for x, g in pairs)


class _ShowingBlocks(TorchDispatchMode):
    """Shows the blocks of cut tensors that autograd has kept to the modes of a backward pass.

    Where no mode saw the forward pass an operator in C keeps the cut tensor itself (`native`).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_only(Sharded, _kept_block, (args, kwargs or {}))
        return func(*args, **kwargs)


def _kept_block(x: Sharded) -> torch.Tensor:
    """Returns what was kept: the tensor may have another block by now."""
    with DisableTorchFunctionSubclass(), without_dispatch_modes():
        return torch.Tensor.as_subclass(x, torch.Tensor)


LookAtOutputs = Callable[[Sequence[torch.Tensor]], None]
"""Looks at what a backward pass has begun with."""

_LOOKS: dict[int, dict[LookAtOutputs, None]] = {}


def look_after_backward(thread: int, look: LookAtOutputs) -> None:
    """Call ``look``, once, when the backward pass ends that this thread, by its id, runs now."""
    _LOOKS.setdefault(thread, {})[look] = None


def _asking_all_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what runs a backward pass and returns the gradients of ``inputs``."""

    @functools.wraps(original)
    def run(
        outputs: Sequence[torch.Tensor],
        weights: object,
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        within = graph_task() != -1  # a rule's own pass, or one of a forward that is recomputed
        if not within:
            _LOOKS.pop(threading.get_ident(), None)  # of a pass that failed
        shown = _ShowingBlocks() if dispatch_modes_active() else contextlib.nullcontext()
        with shown:
            found = original(outputs, weights, retain_graph, create_graph, inputs, *args, **kwargs)
        for look in () if within else _LOOKS.pop(threading.get_ident(), ()):
            look(outputs)
        if not found:
            return found
        serial = []
        with torch.set_grad_enabled(create_graph):
            for tensor, gradient in zip(inputs, found, strict=True):
                ordinary = isinstance(tensor, torch.Tensor) and not isinstance(tensor, Sharded)
                grid = grid_of_parts(tensor) if ordinary else None
                if grid is not None:
                    gradient = _serial(tensor, gradient, grid, "the gradient that is asked for")
                serial.append(gradient)
        return tuple(serial)

    return run


wrap_while_cut(*BACKWARD_PASSES, _asking_all_ranks)


class _Weighted(Function):
    """Multiplies by weights that have a graph: second derivatives follow it, first ones do not."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return output * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient * weight, None


def _total(
    outputs: Sequence[torch.Tensor],
    weights: torch.Tensor | Sequence[torch.Tensor | None] | None,
) -> torch.Tensor:
    """Sums the outputs to the number, equal on all ranks, whose gradient is asked for."""
    if weights is None or isinstance(weights, torch.Tensor):
        weights = (weights,) * len(outputs)
    total = torch.zeros(())
    for output, weight in zip(outputs, weights, strict=True):
        if weight is None and output.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        if weight is not None and weight.shape != output.shape:
            raise RuntimeError(
                f"the global shapes of an output {tuple(output.shape)} and of its grad_outputs "
                f"{tuple(weight.shape)} differ"
            )
        with EnableTorchFunction():  # or torch would ask for no rule inside of one
            if weight is not None:
                weigh = _Weighted.apply if weight.requires_grad else torch.mul
                output = weigh(output, weight)
            share = output.sum()
        total = total + share  # an ordinary number, even of a cut one without dims
    return total


def _serial(x: Any, gradient: torch.Tensor | None, grid: Grid, what: str) -> torch.Tensor | None:
    """Turns a block's gradient into the serial one; ``what`` names that of an ordinary ``x``."""
    if gradient is None:
        return None
    if isinstance(x, Sharded):
        return x.serial_gradient(gradient)
    group = grid.group(tuple(grid.extents))
    return all_reduce_sum(gradient, group, what) / grid.size
