"""Captures a training step in a CUDA graph, and replays it in place of its Python.

A replay queues the kernels of the step again, messages and sums over NCCL among them, on the same
memory. It is the eager step only if everything else that the step depends on is as it was at the
capture, or is brought up to date beside it: docs/design/0016-gpu-kernels.md lists what, and where.

Legend: a *kind* is what a step finds on the host: shapes, types and cuts of tensors, other
arguments, which modules train, which parameters have a gradient. Another kind is another graph.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from hyperslab.comm import Grid
from hyperslab.comm.agreement import any_rank
from hyperslab.comm.bootstrap import own_rank
from hyperslab.comm.communicator import note_messages
from hyperslab.errors import HyperslabError, LayoutError, UnsupportedOp
from hyperslab.kernels.random_bits import fill_seeds
from hyperslab.parallel.guard import Guard, GuardedForward
from hyperslab.tensor import Sharded
from hyperslab.util.capture import Beside
from hyperslab.util.torch_internals import (
    BACKWARD_PASSES,
    leaves_behind,
    own_tensors,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    version_of,
)

log = logging.getLogger(__name__)

EAGER_CALLS = 11
"""Counts the calls of a kind before its capture: DistributedDataParallel arranges its buckets and
times its first steps, kernels are chosen and compiled, indices of messages are made."""

MANY_KINDS = 16

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class CudaRecorder:
    """Records what a step queues on its device, as one CUDA graph with memory of its own."""

    def __init__(self, device: torch.device) -> None:
        if not hasattr(torch.autograd.graph, "set_override_stale_capture_stream"):
            raise UnsupportedOp(
                f"hyperslab.graphed with torch {torch.__version__}: in a captured backward pass it "
                "cannot leave the stream on which parameters were made\n    use torch 2.13 or newer"
            )
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Prepare for a capture: a step in this context is run as it will be recorded."""
        outside = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def record(self, step: Callable[[], Result]) -> Result:
        """Run a step's Python, whose operators are queued by `replay` alone."""
        # Not "global": other threads read data and watch over waits meanwhile.
        capture = torch.cuda.graph(
            self._graph, stream=self._stream, capture_error_mode="thread_local"
        )
        problem: Exception | None = None
        torch.autograd.graph.set_override_stale_capture_stream(True)
        try:
            with capture:
                try:
                    return step()
                except Exception as error:
                    problem = error  # the end of a capture that failed raises another one
                    raise
        except Exception as error:
            raise problem or error from None
        finally:
            torch.autograd.graph.set_override_stale_capture_stream(False)

    def replay(self) -> None:
        """Queue them, behind all that the caller's stream was given."""
        self._graph.replay()


def recorder_for(tensors: Sequence[torch.Tensor]) -> CudaRecorder | None:
    """Return what records a step of these arguments; None where their device has no graphs."""
    if not tensors or not tensors[0].is_cuda:
        return None
    return CudaRecorder(tensors[0].device)


@dataclass
class _Graph:
    """Replays a captured step; ``statics``, ``outputs`` and ``gradients`` lie in its memory."""

    recorder: CudaRecorder
    beside: Beside
    statics: list[Any]
    outputs: Any
    lay: list[int]  # where parameters and buffers lay
    found: list[tuple[torch.Tensor, torch.Tensor]]  # gradients that it adds to
    gradients: list[tuple[torch.Tensor, torch.Tensor]]
    owed: list[tuple[Guard, set[int]]]

    def replay(self, leaves: Sequence[Any]) -> Any:
        with torch.no_grad():
            for static, given in zip(self.statics, leaves, strict=True):
                if isinstance(given, Sharded):
                    static.block.copy_(given.local)
                elif isinstance(given, torch.Tensor):
                    static.copy_(given)
            for parameter, gradient in self.found:
                if parameter.grad is not None and parameter.grad is not gradient:
                    gradient.copy_(parameter.grad)
            fill_seeds(self.beside.seeds)
            self.recorder.replay()
            outputs = tree_map_only(torch.Tensor, torch.clone, self.outputs)
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for guard, owed in self.owed:
            assert guard.averaging is not None
            guard.averaging.owed = set(owed)
        for action in self.beside.actions:
            action()
        return outputs


@dataclass
class _Kind:
    """Counts the calls of one kind, and has its graph."""

    recorder: CudaRecorder
    calls: int = 0
    graph: _Graph | None = None


class GraphedStep(Generic[Arguments, Result]):
    """Is what `graphed` returns."""

    def __init__(self, step: Callable[Arguments, Result]) -> None:
        self._step = step
        self._kinds: dict[Hashable, _Kind] = {}
        self._modules: dict[nn.Module, None] = {}  # that the step has called, and their parts
        self._leaves = WeakTensorKeyDictionary()  # to which it adds gradients, if they outlive it
        self._said = False
        functools.update_wrapper(self, step, updated=())

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        leaves, form = tree_flatten((args, kwargs))
        tensors = _check_tensors(leaves)
        kind = (repr(form), *map(_kind_of, leaves), *self._state())
        known = self._kinds.get(kind)
        if known is None:
            recorder = recorder_for(tensors)
            if recorder is None:
                self._say_that_it_is_eager()
                grid = self._grid(leaves)
                if grid is not None and grid.device.type == "cuda":
                    self._all_ready(grid, ready=False)
                return self._run(args, kwargs)
            known = self._kinds[kind] = _Kind(recorder)
            if len(self._kinds) == MANY_KINDS:
                log.warning(
                    "%s was called with %d kinds of arguments, and a CUDA graph is made of each: "
                    "pass numbers that change as tensors",
                    *(self._name, MANY_KINDS),
                )
        if known.graph is not None and known.graph.lay != self._lie():
            known.graph = None
            known.recorder = recorder_for(tensors) or known.recorder
        if known.graph is None:
            known.calls += 1
        ready = known.graph is not None or known.calls > EAGER_CALLS
        if not self._all_ready(self._grid(leaves), ready=ready):
            with known.recorder.eagerly():
                return self._run(args, kwargs)
        if known.graph is None:
            known.graph = self._captured(known.recorder, leaves, form)
        note_messages(f"a replay of {self._name}")
        found: Result = known.graph.replay(leaves)
        return found

    def _grid(self, leaves: Sequence[Any]) -> Grid | None:
        """Return the ranks that take the step together, as its arguments and modules tell."""
        of_arguments = [leaf.grid for leaf in leaves if isinstance(leaf, Sharded)]
        of_modules = [guard.grid for guard in self._guards()]
        return next(iter(of_arguments + of_modules), None)

    def _all_ready(self, grid: Grid | None, *, ready: bool) -> bool:
        """Tell whether this call may replay; one rank that has no graph yet keeps all from it."""
        if grid is None or grid.size == 1:
            return ready
        return not any_rank(not ready, what=f"the start of {self._name}")

    @property
    def _name(self) -> str:
        return str(getattr(self._step, "__qualname__", type(self._step).__name__))

    def _say_that_it_is_eager(self) -> None:
        if not self._said and own_rank() == 0:
            log.info(
                "%s runs eagerly: a CUDA graph needs tensors on a CUDA device among its arguments",
                self._name,
            )
        self._said = True

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Run the step's Python, and note which modules it calls and which leaves it trains."""
        hook = register_module_forward_pre_hook(lambda module, _: self._note(module))
        parameters = self._parameters()
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        before = _versions(parameters), _versions(given)
        try:
            with self._noting_leaves():
                outputs = self._step(*args, **kwargs)
        finally:
            hook.remove()
        if _versions(parameters) != before[0]:
            raise UnsupportedOp(
                f"{self._name} changed parameters: an optimizer's step, whose learning rate and "
                "counts are the host's, cannot be part of a CUDA graph\n    call optimizer.step() "
                "after the step that hyperslab.graphed returned"
            )
        if _versions(given) != before[1]:
            raise UnsupportedOp(
                f"{self._name} changed an argument in place, of which a replay would change a copy"
                "\n    change a copy (x = x + 1 for x += 1), and return what its caller needs"
            )
        return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)

    def _note(self, module: nn.Module) -> None:
        """Note a module, and parts that it may use without a call: those of attention do so."""
        self._modules.update(dict.fromkeys(module.modules()))

    @contextmanager
    def _noting_leaves(self) -> Iterator[None]:
        """Note what backward passes add gradients to, in modules or not.

        What two runs find outlives the step, which may make other leaves itself.
        """
        owner, name = BACKWARD_PASSES
        original = getattr(owner, name)
        earlier = {id(leaf) for leaf in self._leaves}

        def run(outputs: Sequence[Any], *args: Any, **options: Any) -> Any:
            for leaf in leaves_behind(outputs) if options.get("accumulate_grad") else ():
                outlives = id(leaf) in earlier
                if outlives and isinstance(leaf, Sharded):
                    raise UnsupportedOp(
                        f"{self._name} adds to the gradient of a cut tensor that it finds, which a "
                        "replay would not\n    return torch.autograd.grad(loss, x) from the step"
                    )
                self._leaves[leaf] = outlives
            return original(outputs, *args, **options)

        setattr(owner, name, run)
        try:
            yield
        finally:
            setattr(owner, name, original)

    def _captured(self, recorder: CudaRecorder, leaves: Sequence[Any], form: Any) -> _Graph:
        """Capture the step, which computes nothing yet."""
        statics = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(statics, form)
        beside = Beside()
        drawn = _host_random_states()
        found = self._gradients()
        try:
            with beside.open():
                outputs = recorder.record(lambda: self._run(args, kwargs))
            left = self._gradients()
        except (HyperslabError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise UnsupportedOp(
                f"{self._name} cannot be captured in a CUDA graph: {error}\n    a captured step "
                "reads no value of a tensor (.item(), if loss > 0, print), makes no tensor from "
                "Python's numbers and copies none from the host: pass them as arguments"
            ) from error
        finally:  # nothing has been computed yet
            for parameter in self._parameters():
                parameter.grad = None
            for parameter, gradient in found:
                parameter.grad = gradient
        if _host_random_states() != drawn:
            raise UnsupportedOp(
                f"{self._name} draws random numbers on the host (torch's generator of the CPU, "
                "NumPy's or Python's), which would be the same in every replay\n    draw them "
                "before, and pass them as arguments"
            )
        owed = [(guard, set(guard.averaging.owed)) for guard in self._guards() if guard.averaging]
        return _Graph(recorder, beside, statics, outputs, self._lie(), found, left, owed)

    def _lie(self) -> list[int]:
        found = [own for module in self._modules for _, own in own_tensors(module)]
        return [0 if own is None else own.data_ptr() for own in (*found, *self._leaves_outside())]

    def _parameters(self) -> list[torch.Tensor]:
        """Return the modules' parameters, and what else has gradients from the step."""
        found = (own for module in self._modules for _, own in own_tensors(module))
        inside = (own for own in found if isinstance(own, nn.Parameter))
        return [*dict.fromkeys((*inside, *self._leaves_outside()))]

    def _leaves_outside(self) -> list[torch.Tensor]:
        return [leaf for leaf, outlives in self._leaves.items() if outlives]

    def _gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(p, p.grad) for p in self._parameters() if p.grad is not None]

    def _guards(self) -> list[Guard]:
        forwards = (vars(module).get("forward") for module in self._modules)
        return [f.guard for f in forwards if isinstance(f, GuardedForward) and f.guard is not None]

    def _state(self) -> list[Hashable]:
        """Return what a step finds on the host that decides what it does."""
        return [
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(module.training for module in self._modules),
            tuple((own.requires_grad, own.grad is None) for own in self._parameters()),
            tuple(g.averaging is None or g.averaging.synchronised for g in self._guards()),
        ]


def _check_tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among a step's arguments, all on one device."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    devices = [*dict.fromkeys(str(x.device) for x in tensors)]
    if len(devices) > 1:
        raise LayoutError(
            f"hyperslab.graphed: the step's arguments are on {' and '.join(devices)}, and a replay "
            "copies nothing from the host\n    move all of them to the grid's device before"
        )
    if any(x.requires_grad for x in tensors):
        raise LayoutError(
            "hyperslab.graphed: an argument of the step requires a gradient, which would be that "
            "of a copy\n    let the step itself call requires_grad_() of x.detach()"
        )
    if any(torch.is_autocast_enabled(x.device.type) for x in tensors[:1]):
        raise LayoutError(
            "hyperslab.graphed: autocast is on around the step, and keeps weights of half "
            "precision that a replay would not make again\n    enter torch.autocast inside the step"
        )
    return tensors


def _kind_of(leaf: Any) -> Hashable:
    """Return what has to be equal for two arguments to be of one kind."""
    if isinstance(leaf, torch.Tensor):
        block = leaf.local if isinstance(leaf, Sharded) else leaf
        cut = (leaf.partition, id(leaf.grid)) if isinstance(leaf, Sharded) else ()
        form = tuple(block.shape), block.stride(), block.dtype, block.device
        return (type(leaf), cut, *form)
    try:
        hash(leaf)
    except TypeError:
        raise LayoutError(
            f"hyperslab.graphed: an argument of the step is a {type(leaf).__name__}, whose values "
            "a replay would not see\n    pass tensors, and numbers and words that stay the same"
        ) from None
    return (type(leaf), leaf)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Count the changes in place of tensors; those of inference have no count."""
    blocks = [x.block if isinstance(x, Sharded) else x for x in tensors]
    return [None if x.is_inference() else version_of(x) for x in blocks]


def _host_random_states() -> tuple[Any, ...]:
    of_numpy = np.random.get_state()  # noqa: NPY002
    return (torch.get_rng_state().tolist(), random.getstate(), repr(of_numpy))


def graphed(step: Callable[Arguments, Result]) -> GraphedStep[Arguments, Result]:
    """Make a step that is captured in a CUDA graph, and then replayed without its Python.

    Call what it returns in place of ``step``, for forward and backward pass, behind
    ``zero_grad()`` and before ``optimizer.step()``. Its first 12 calls run the step as it is; the
    next one captures it, with halos, sums over ranks and averages of gradients. From then on a call
    copies its arguments to where the step reads them, draws the seeds of its dropout as the step
    would, and replays the graph: the results are those of the step. Comparisons between ranks are
    made behind the replay. Other shapes, types or cuts, other numbers, another mode of a module,
    gradients where there were none before: each is a kind of its own with 11 calls and a graph,
    which keeps the memory of a step. Parameters that lie elsewhere than before are captured anew.
    Several ranks replay together: as long as one of them runs its kind eagerly, all run the step as
    it is, which they tell each other in a small message at the start of each call.
    Gradients lie in a graph's memory: clone() those that are to outlive the next call.

    Without a CUDA device the step runs eagerly each time, which the log says once. Ranks need NCCL.

    Args:
        step: takes tensors, cut or not, of one device, in any nesting, beside numbers and words,
            and changes none of them. It returns tensors, of which the caller gets copies without a
            graph of autograd. It reads no value of a tensor and draws nothing on the host. What its
            Python counts or decides stays as it was at the capture.

    Raises, when it is called:
        UnsupportedOp: the step cannot be captured, changes parameters or arguments, or adds to the
            gradient of a cut tensor that it was not given.
        LayoutError: its arguments are on several devices, require a gradient, or are no values
            that can be compared; or autocast is on around it.

    >>> step = graphed(lambda x: x.sum())
    >>> step(torch.ones(3))
    tensor(3.)
    """
    return GraphedStep(step)
