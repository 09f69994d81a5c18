"""Guards a parallelised module: no gradient may stay unaveraged.

DistributedDataParallel averages once for each forward, those parameters that it was made with.
Whatever it would leave partial without a word is an error here. Parameters that something else
has sharded are refused: see docs/design/0026-fsdp.md.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy

from hyperslab.comm import Grid, log_once
from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.ops.autograd import look_after_backward
from hyperslab.parallel.averaging import Averaging, SharedGradients
from hyperslab.parallel.consistency import EqualParameters, OrdinaryInputs, equal_losses
from hyperslab.tensor import Sharded, boxes, gather, scatter, shard
from hyperslab.tensor.dispatch import HAS_PARTS, watched_gradients
from hyperslab.util.capture import beside_capture
from hyperslab.util.torch_internals import (
    BatchNorm,
    EagerReason,
    accumulation_hooks,
    asks_for_one_graph,
    at_end_of_backward,
    backward_hooks,
    graph_task,
    inside_ddp,
    jit_is_tracing,
    keep_out_of_graphs,
    tree_leaves,
    version_of,
)


def refuse_sharded_parameters(module: nn.Module) -> None:
    """Refuse parameters that `fully_shard` has sharded (it makes them whole within a forward pass),
    or that are DTensors.
    """
    # A program that has used them has imported them, which takes a second.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    by_fsdp = fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in module.modules())
    cut = sys.modules.get("torch.distributed.tensor")
    if by_fsdp or (
        cut is not None and any(isinstance(own, cut.DTensor) for own in module.parameters())
    ):
        raise LayoutError(
            f"the parameters of {type(module).__name__} are sharded (fully_shard, or tensor "
            "parallelism), but hyperslab.parallelize needs whole ones\n    to shard what the "
            "optimizer keeps, use torch.distributed.optim.ZeroRedundancyOptimizer"
        )


def refuse_unmade_parameters(module: nn.Module) -> None:
    """Refuse a lazy layer (`torch.nn.LazyConv3d`) that has not made its parameters yet."""
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise LayoutError(
            f"{len(lazy)} parameters and buffers of {type(module).__name__} have no shape before "
            f"its first forward pass: {', '.join(lazy[:3])}\n    call the module once, on a small "
            "volume that is not cut, before hyperslab.parallelize"
        )


def refuse_scripted_parts(module: nn.Module) -> None:
    """Refuse what was made by `torch.jit`, which runs without rules."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise LayoutError(
                f"{name or 'the module'} was made by torch.jit.script or torch.jit.trace, whose "
                "operators ask for no rule\n    parallelize the module that it was made of"
            )


class ForwardBody(nn.Module):
    """Calls a module's own forward, for DistributedDataParallel to wrap."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._forward = module.forward
        self._running = False
        for part in module.modules():
            if part is not module and next(part.parameters(recurse=False), None) is not None:
                part.register_forward_pre_hook(self._check, with_kwargs=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._running = True
        try:
            return _force_outputs(self._forward(*args, **kwargs))
        finally:
            self._running = False

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise _no_copy()  # its parts' hooks lead here before the module's own forward is reached

    def _check(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a part that is called by itself: nothing would average its partial gradients."""
        recomputed = graph_task() != -1  # activation checkpointing
        if self._running or recomputed or not torch.is_grad_enabled():
            return
        if any(isinstance(value, Sharded) for value in (*args, *kwargs.values())):
            raise LayoutError(
                f"{type(part).__name__} was called outside the forward of the parallelised "
                f"{type(self.module).__name__}, so its gradients would not be averaged\n"
                "    call the module that parallelize returned (give it a forward that does all: "
                "encode and decode),\n    parallelize this part by itself instead, or use "
                "torch.no_grad();\n    two modules that share it are parallelised as one, a module "
                "that holds both"
            )


class Guard:
    """Watches a parallelised module's forward and the gradients that follow.

    Args:
        module: its trainable parameters now are those that will be averaged.
        grid: the ranks.
        averaging: what averages them; None if there are none.
        freezing: whether some of them may be frozen later.
        inputs: what looks at ordinary tensors that enter the module, if anything does.
    """

    def __init__(
        self,
        module: nn.Module,
        grid: Grid,
        averaging: Averaging | None,
        *,
        freezing: bool,
        inputs: OrdinaryInputs | None,
    ) -> None:
        self.module = module
        self.grid = grid
        self.averaging = averaging
        self.freezing = freezing
        self.averaged = _trainable(module)
        self.synchronised = True
        self.begun = False
        self.inputs = inputs
        self.parameters = EqualParameters(module, grid)
        self.alone: LayoutError | None = None  # if the forward's gradients are to be averaged
        self.seen: set[int] = set()
        self._arrived: dict[int, tuple[int, int]] = {}  # each gradient as it was collected
        self._thread = threading.get_ident()  # of the forward pass, and so of the backward pass
        self._pass: int | None = None  # the backward pass that `_finished` ends
        self._versions: list[tuple[str, nn.Parameter, int]] = []  # of the parameters as it began
        self._hooked: set[int] = set()  # parameters with hooks that run before this one's
        watched = watched_gradients(grid)
        for parameter in module.parameters():
            if parameter in watched:  # it has met a cut tensor before
                watched.pop(parameter).remove()
            if accumulation_hooks(parameter):
                self._hooked.add(id(parameter))
            if isinstance(averaging, SharedGradients):  # DistributedDataParallel knows forwards
                watched.averaged[parameter] = True
            if parameter.requires_grad:
                HAS_PARTS[parameter] = weakref.ref(grid)  # for ``torch.autograd.grad``
                parameter.register_post_accumulate_grad_hook(_weak_hook(self._accumulated))

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward pass whose gradients will be averaged, unless in ``no_sync``."""
        if inside_ddp():
            log_once(
                self.grid,
                f"the parallelised {type(self.module).__name__} runs in a DistributedDataParallel, "
                "which averages its averaged gradients once more in each step\n    train it "
                "without: Lightning's Trainer with strategy=GridStrategy(...) of "
                "hyperslab.parallel.lightning, Accelerate with prepare(optimizer) alone",
                logging.WARNING,
            )
        trainable = self._check_parameters()
        if self.inputs is not None:
            self.inputs.average_gradients(args, kwargs)
        if self.inputs is not None and trainable:
            self.alone = self.inputs.check(args, kwargs)
            if self.alone is not None and self.module.training:
                raise self.alone
        if trainable:
            self.parameters.look(args, kwargs)
        self.seen.clear()
        self._thread = threading.get_ident()
        self._pass = None
        if self.averaging is not None:
            self.synchronised = self.averaging.synchronised
            self.averaging.begin()

    def gradients_arrive(self) -> bool:
        """Tell whether a checkpoint calls the module again amid the pass that is being averaged.

        What has been collected counts, and would be forgotten if this began another forward pass.
        """
        return self._pass == graph_task()

    def _check_parameters(self) -> dict[int, torch.dtype]:
        """Return the parameters that are trained now, with their types."""
        now = _trainable(self.module)
        frozen = self.averaged.keys() - now.keys()
        changed = any(self.averaged.get(key) != kind for key, kind in now.items())
        # With none left to train (a frozen discriminator) there is nothing to average.
        if changed or (frozen and now and not self.freezing):
            refuse_sharded_parameters(self.module)
            raise LayoutError(
                f"the trainable parameters of {type(self.module).__name__} are not those that it "
                "was parallelised with, so some gradients would not be averaged\n    freeze, "
                "replace or convert parameters before hyperslab.parallelize; for some frozen "
                "later pass find_unused_parameters=True;\n    copy other values into them: "
                "load_state_dict without assign=True, not torch.func.functional_call"
            )
        return now

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if self.alone is not None:  # it is trained in its evaluation mode
            raise self.alone
        averaging = self.averaging
        assert averaging is not None  # what is trained later is refused in `begin`
        if averaging.filling or self._brought_nothing(parameter):
            return
        if not self.synchronised:
            averaging.owed.add(id(parameter))
            return
        if torch.is_grad_enabled():
            raise LayoutError(
                f"backward(create_graph=True) through {type(self.module).__name__}: averaging its "
                "gradients would lose their graph\n    use torch.autograd.grad(loss, x, "
                "create_graph=True) for a gradient penalty, or no_sync() around the module"
            )
        if id(parameter) in self.seen:
            raise LayoutError(
                f"a second backward pass through one forward of {type(self.module).__name__}: "
                "its gradients would not be averaged\n    add the losses and call backward once, "
                "or call the module again for each, with no_sync() around all but the last;\n    "
                "two activation checkpoints that share parameters need use_reentrant=False"
            )
        if backward_hooks(parameter):
            log_once(
                self.grid,
                f"a hook on a parameter of {type(self.module).__name__} sees this rank's part of "
                "the gradient, before the ranks average it: what is not linear in it, such as "
                "clipping, is not the serial result\n    change .grad after backward()",
                logging.WARNING,
            )
        if self._pass != graph_task():
            self._pass = graph_task()
            self._versions = [
                (name, p, version_of(p))
                for name, p in self.module.named_parameters()
                if p.requires_grad
            ]
            at_end_of_backward(self._finished)
        if parameter.grad is None:
            names = {id(p): name for name, p in self.module.named_parameters()}
            name = names.get(id(parameter), "?")
            if id(parameter) in self._hooked:
                raise self._used_in_backward(name, "used and freed")
            raise LayoutError(
                f"the backward of an autograd function returned None for the parameter {name} of "
                f"{type(self.module).__name__}, of which DistributedDataParallel would make "
                "zeros\n    return zeros there, or do not give the parameter to the function"
            )
        self.seen.add(id(parameter))
        averaging.collect(parameter, last=len(self.seen) == len(self.averaged))
        if isinstance(averaging, SharedGradients):
            self._arrived[id(parameter)] = _state(parameter.grad)

    def _brought_nothing(self, parameter: torch.Tensor) -> bool:
        """Tell whether a function's backward returned None for it: torch calls hooks then, too.

        So do blocks of reversible networks, in whose own backward pass the gradient came.
        """
        gradient = parameter.grad
        if not isinstance(self.averaging, SharedGradients):
            return False  # DistributedDataParallel counts it all the same
        if gradient is None:  # or one of these hooks has used it up
            return id(parameter) not in self._hooked
        return id(parameter) in self.seen and self._arrived[id(parameter)] == _state(gradient)

    def _finished(self) -> None:
        """Average what is there at the end of a backward pass, if it is not everything."""
        assert self.averaging is not None
        self._check_unchanged()
        missing = len(self.seen) < len(self.averaged)
        function = _function_under_way() if missing else None
        if function is not None:  # the pass of re-entrant checkpointing: another one goes on
            function.register_hook(lambda *_: at_end_of_backward(self._finished))
            return
        if missing:
            self.averaging.finish(self.seen, self.averaged)
        self.averaging.owed.clear()
        if self.inputs is not None:
            look_after_backward(self._thread, equal_losses(self.grid).look)

    def _check_unchanged(self) -> None:
        """Refuse a pass in which something used gradients before they were averaged.

        An optimizer in a parameter's hook steps by this rank's part of the gradient.
        """
        began, self._versions = self._versions, []
        for name, parameter, before in began:
            if version_of(parameter) != before:
                raise self._used_in_backward(name, "changed")

    def _used_in_backward(self, name: str, what: str) -> LayoutError:
        return LayoutError(
            f"the parameter {name} of {type(self.module).__name__} was {what} while the backward "
            "pass ran (an optimizer's step in a hook?), by a gradient that was not averaged over "
            "the ranks yet\n    call optimizer.step() after backward()"
        )


def _state(gradient: torch.Tensor) -> tuple[int, int]:
    """Tell a gradient from the same one after something was added to it."""
    return gradient.data_ptr(), version_of(gradient)


def _function_under_way() -> Any:
    """Find the Python autograd function whose backward began this pass inside another one.

    That is how re-entrant checkpointing recomputes. A pass inside another ends as any pass does,
    and torch does not say how deep one is (`graph_task` knows the innermost);
    but the function's own ``apply`` is still under way on this thread: only its frame tells.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not BackwardCFunction.apply.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


class _NotScripted(LayoutError, AttributeError):
    """A parallelised module was scripted; who only looks for an attribute finds none."""


class GuardedForward(functools.partial[Any]):
    """Runs the forward of a parallelised module.

    It runs eagerly, whether the module was compiled before, afterwards or in parts: torch.compile
    knows nothing of the messages that operators on cut tensors exchange. (It would look into a
    ``__call__`` written in Python.)
    """

    guard: Guard | None

    def __new__(cls, forward: Callable[..., Any], guard: Guard | None = None) -> GuardedForward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if asks_for_one_graph():
                raise UnsupportedOp(RUNS_EAGERLY)
            if guard is not None:
                _refuse_tracing(guard.module)
                if not guard.begun:  # it may have been converted since it was parallelised
                    guard.begun = True
                    replace_sync_batch_norm(guard.module)
                if torch.is_grad_enabled():
                    beside_capture(
                        f"what guards a training forward of {type(guard.module).__name__}, "
                        "parallelised over several ranks, with comparisons of parameters and inputs"
                    )
                    if not guard.gradients_arrive():
                        guard.begin(args, kwargs)
            with torch.compiler.set_stance("force_eager"):  # for compiled parts of it
                return _force_outputs(forward(*args, **kwargs))

        made = super().__new__(cls, run_eagerly(run))
        made.guard = guard
        return made

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise _no_copy()

    @property
    def __globals__(self) -> Any:  # what torch.jit.script asks of a forward first
        name = type(self.guard.module).__name__ if self.guard is not None else "module"
        raise _NotScripted(
            f"torch.jit.script cannot compile the parallelised {name}, whose messages between "
            f"ranks it knows nothing of\n{_EXPORT_A_SERIAL_ONE}"
        )


RUNS_EAGERLY = EagerReason(
    "what works on cut tensors runs eagerly, a module of hyperslab.parallelize above all, because "
    "graphs cannot hold messages between ranks\n    leave fullgraph=True out, or compile functions "
    "that do not call it"
)
RUNS_EAGERLY.kind = UnsupportedOp


def run_eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a function that works on cut tensors out of graphs; torch quotes the reason."""
    _keep_packages_out_of_graphs()
    return torch.compiler.disable(function, reason=RUNS_EAGERLY)


@functools.cache
def _keep_packages_out_of_graphs() -> None:
    """Have what a compiled function calls run eagerly: `hs.shard`, say, before the module.

    Models and losses are plain torch, which compiles as ever.
    """
    packages = [f"hyperslab.{name}" for name in ("comm", "tensor", "ops", "parallel")]
    keep_out_of_graphs(packages, (boxes, gather, scatter, shard), RUNS_EAGERLY)


def replace_sync_batch_norm(module: nn.Module) -> None:
    """Let parts that are SyncBatchNorm run as batch norm, whose statistics are over the grid.

    Their own forward knows CUDA and whole process groups alone.
    """
    for part in module.modules():
        if isinstance(part, nn.SyncBatchNorm):
            part.forward = types.MethodType(BatchNorm.forward, part)  # type: ignore[method-assign]


def _no_copy() -> LayoutError:
    return LayoutError(
        "a parallelised module cannot be copied or pickled: the copy would run the original\n"
        "    copy it before hyperslab.parallelize, or use its state_dict() or hyperslab.save"
    )


_EXPORT_A_SERIAL_ONE = (
    "    export a network of the same class that is not parallelised, after "
    "load_state_dict(net.state_dict()): the keys and the weights are those of the serial network"
)


def _refuse_tracing(module: object) -> None:
    """Refuse `torch.export`, `torch.jit.trace` and ONNX, which would leave the messages out."""
    if torch.compiler.is_exporting() or jit_is_tracing():
        raise LayoutError(
            f"the parallelised {type(module).__name__} is traced (torch.export, torch.jit.trace, "
            f"torch.onnx), which cannot record messages between ranks\n{_EXPORT_A_SERIAL_ONE}"
        )


def _force_outputs(outputs: Any) -> Any:
    """Compute what leaves a module deferred: C++ asks without ``__torch_function__``."""
    for output in tree_leaves(outputs):
        if isinstance(output, Sharded):
            output.force()
    return outputs


def _trainable(module: nn.Module) -> dict[int, torch.dtype]:
    return {id(p): p.dtype for p in module.parameters() if p.requires_grad}


def _weak_hook(method: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return a hook that holds nothing: what a parameter's hook holds is never freed.

    The garbage collector does not see it, and it would be the module and its process group.
    """
    reference = weakref.WeakMethod(method)

    def hook(parameter: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(parameter)

    return hook
