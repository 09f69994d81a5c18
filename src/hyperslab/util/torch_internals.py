"""Names everything of torch that is used here and not public, each with the reason.

No other module reaches into private torch, so a move to another version of torch needs this file
alone. Everything in it was run with torch 2.11, 2.13 and 2.15. What a step calls often is an alias,
not a function of its own, so that the indirection costs nothing.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import operator
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch, _pytree

# Operators and their dispatch.

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Runs operators on a subclass as on an ordinary tensor; public names exist as decorators alone."""

EnableTorchFunction = torch._C._EnableTorchFunction
"""Ends the former for code that it calls."""

asks_for_rules: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Tells whether operators ask a subclass how they run on it: not within the former."""

OpOverload = torch._ops.OpOverload
"""Is the type of what ``__torch_dispatch__`` receives, for which torch has no public name."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Sees every operator below autograd; torch documents it under this private module."""

without_dispatch_modes: Callable[[], AbstractContextManager[object]] = (
    _python_dispatch._disable_current_modes
)
"""Hides operators from all modes within it: what a measurement adds to a step is not counted."""

dispatch_modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Counts the active modes: one that watches or traces must see no write past the dispatcher."""

function_modes_active: Callable[[], int] = torch._C._len_torch_function_stack
"""Counts the active modes of the other kind, such as ``torch.set_default_device``."""

profiler_runs: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Tells whether a profiler notes operators, by their names in the dispatcher."""

record_graph: Callable[[bool], None] = torch._C._set_grad_enabled
"""Switches the graph on or off, in a tenth of the time of torch's context managers."""

autocast_anywhere: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Tells whether autocast is on for some device; the public question is asked of one, by name."""

saved_tensor_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""Returns what packs and unpacks the tensors that autograd keeps, None by default.

Called with whether hooks count that were set while a function is traced.
"""

foreach_multiply_: Callable[..., None] = torch._foreach_mul_
"""Scales a list of tensors in place with one kernel on a GPU; no optimizer offers that alone."""


class BlockFunction(torch.autograd.Function):
    """Is applied by rules to this rank's blocks: no cut tensor, no transform is among them.

    ``Function.apply`` looks for those of torch in Python, and is wrapped for cut tensors; both
    together take longer than the call.
    """

    apply: Any = vars(torch._C._FunctionBase).get("apply", vars(torch.autograd.Function)["apply"])


tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
tree_unflatten = _pytree.tree_unflatten
"""Walk nested arguments as torch does, users' registered containers included."""


def map_only(kind: type[Any], change: Callable[[Any], Any], value: Any) -> Any:
    """Does as `tree_map_only` on arguments of an operator in C, in a third of its time."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: map_only(kind, change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([map_only(kind, change, item) for item in value])
    return value


def is_compiled(module: nn.Module) -> bool:
    """Tell whether ``torch.compile`` has made this module, or ``module.compile`` was called."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def fake_tensor_mode() -> Any:
    """Return a mode in which operators compute shapes alone, next to tensors with values.

    ``torch.device("meta")`` would not do: modules whose parameters have values run in it.
    """
    # Imported when it is needed: it takes long.
    return importlib.import_module(FAKE_TENSOR_MODULE).FakeTensorMode(allow_non_fake_inputs=True)


FAKE_TENSOR_MODULE = "torch._subclasses.fake_tensor"
"""Names the logger by which torch says what fails in that mode."""


def import_compiler() -> None:
    """Import ``torch._dynamo``, as the first optimizer of a process does, for its memory."""
    importlib.import_module("torch._dynamo")


def keep_out_of_graphs(
    packages: Sequence[str], functions: Sequence[Any], reason: EagerReason
) -> None:
    """Let ``torch.compile`` run functions of these packages as they are, and not trace them.

    Of those which users call it says the ``reason``.
    """
    rules = importlib.import_module("torch._dynamo.trace_rules")
    for package in packages:
        rules.add(package)
    for function in functions:
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = reason


def refusal_to_compile(kind: type[Exception], words: str) -> Exception:
    """Return an error, to be raised by the caller, that ``torch.compile`` hands on as it is.

    Of any other error it makes one of its own, whose frames and words come before ours.
    """
    short = importlib.import_module("torch._dynamo.exc").ShortenTraceback
    made = type(kind.__name__, (short, kind), {"__module__": kind.__module__})
    error: Exception = made(words, first_useful_frame=sys._getframe(1))
    return error


def asks_for_one_graph() -> bool:
    """Tell whether what runs or is traced was compiled with ``fullgraph=True``; torch 2.12 on."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    noted = getattr(frames, "dynamo_tls", None)
    return getattr(noted, "skip_reasons", None) is not None


class EagerReason(str):
    """Says why a function runs eagerly, for torch to quote.

    Where one graph is asked for, it ends the trace with an error of our own in its words.
    """

    kind: type[Exception]

    def __format__(self, spec: str) -> str:
        if asks_for_one_graph():
            raise refusal_to_compile(self.kind, str(self))
        return super().__format__(spec)


are_all_true: Callable[[torch.Tensor], torch.Tensor] = torch._is_all_true
"""Is the ``all`` by which ``torch.distributions`` check their arguments."""

_functions: Any = torch._C._VariableFunctions
"""Has what torch's own functions in Python call, under the same names."""

meshgrid_of_list: Callable[..., tuple[torch.Tensor, ...]] = _functions.meshgrid
"""Is what ``torch.meshgrid`` calls with a list, for which it asks no ``__torch_function__``."""

# Tensors and their memory.

swap_tensor_impl: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
"""Exchanges what two Python tensors stand for, graph included.

The public ``swap_tensors`` exchanges attributes, too, and refuses tensors that are referred to
weakly.
"""


storage_address: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Tells storages apart that have no memory.

Two Python objects may stand for one storage, and ``data_ptr`` of an empty one is 0.
"""


def count_storage_users(storage: torch.UntypedStorage) -> int:
    """Count the tensors and Python objects that hold a storage, the argument included."""
    return int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Counts the changes in place of a tensor's memory; an inference tensor has no such number."""

is_view: Callable[[torch.Tensor], bool] = operator.methodcaller("_is_view")
"""Tells whether autograd takes a tensor for a view, whose changes in place its base sees."""

base_of_view: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""Returns the tensor that a view is of; None of an inference tensor, too."""

count_tensor_users: Callable[[torch.Tensor], int] = operator.methodcaller("_use_count")
"""Counts what refers to a tensor behind Python: autograd, which has saved it."""

backward_hooks: Callable[[torch.Tensor], Any] = operator.attrgetter("_backward_hooks")
"""Returns what ``register_hook`` has added to a tensor, which nothing public lists."""

accumulation_hooks: Callable[[torch.Tensor], Any] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)
"""Returns what ``register_post_accumulate_grad_hook`` has added, which nothing public lists."""

# Transforms of functions.

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Tells whether code runs inside a function that ``torch.func`` or ``torch.vmap`` transforms."""


def function_transforms() -> list[tuple[Any, str, str, str]]:
    """List the functions of torch, most of transforms, that take a tensor without asking its class.

    Each with the module and the name of the function that does it, what users call, and what they
    can do instead.
    """
    vmap: Any = importlib.import_module("torch._functorch.vmap")
    transforms: Any = importlib.import_module("torch._functorch.eager_transforms")
    scripted = "call what it was made of (the environment variable PYTORCH_JIT=0 does)"
    return [
        (
            vmap,
            "_add_batch_dim",
            "torch.vmap (also torch.func.jacrev, jacfwd, hessian)",
            "call f(x) itself, whose operators take dim 0 for the batch,\n"
            "    or torch.stack([f(each) for each in x.unbind(dim)])",
        ),
        (
            transforms,
            "_wrap_for_grad",
            "torch.func (grad, vjp, jvp, jacrev, hessian, linearize)",
            "use torch.autograd.grad(y, x)",
        ),
        (
            transforms,
            "_wrap_functional_tensor",
            "torch.func.functionalize",
            "call the function itself",
        ),
        (torch._C.ScriptMethod, "__call__", "torch.jit (script, trace)", scripted),
        (torch._C.ScriptFunction, "__call__", "torch.jit (script, trace)", scripted),
        *(
            (module, "to_dlpack", "torch.to_dlpack", "give it this rank's block, x.local")
            for module in (torch, torch.utils.dlpack)
        ),
        *(
            (torch.jit, name, f"torch.jit.{name}", "trace a network that is not parallelised")
            for name in ("trace", "trace_module")
        ),
    ]


def source_of_scripted(function: Any) -> Callable[..., Any] | None:
    """Return the Python function of which ``torch.jit.script`` made this one, if it did.

    ``torch.jit.trace`` keeps its function, too, but what that does may depend on its arguments.
    """
    attributes = vars(function) if isinstance(function, torch._C.ScriptFunction) else {}
    if attributes.get("__name__") != "ScriptFunction":
        return None
    source: Callable[..., Any] | None = attributes.get("_torchdynamo_inline")
    return source


def keep_known(replacement: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Let torch know a function of its own, which is replaced later, as it did before.

    ``torch.jit.script`` looks functions up by id; those that heed ``torch.set_default_device`` are
    listed when that is first used, and are called by what they were.
    """
    importlib.import_module("torch.utils._device")._device_constructors()
    builtins: Any = importlib.import_module("torch.jit._builtins")
    name = builtins._find_builtin(original)
    if name is not None:
        builtins._register_builtin(replacement, name)


# Backward passes.

BACKWARD_PASSES: tuple[Any, str] = (torch.autograd, "_engine_run_backward")
"""Says where ``torch.autograd.grad`` and ``backward`` run the engine."""


def leaves_behind(outputs: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the leaves to whose gradients a backward pass from tensors, or edges, adds."""
    nodes: list[Any] = [y.node if isinstance(y, GradientEdge) else y.grad_fn for y in outputs]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        nodes += (before for before, _ in node.next_functions)


CHECKPOINTS: tuple[Any, str] = (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator")
"""Says where ``checkpoint(function, *args, use_reentrant=False)`` prepares to call it again."""


graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Tells which backward pass this thread is in, -1 outside of all: there is no public question."""

autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""Returns the node that the engine runs: a trace finds the layer of a backward operator by it."""

next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the number of a graph's next node: nodes between two of them belong to one layer."""

node_number: Callable[[Node], int] = operator.methodcaller("_sequence_nr")
"""Returns the number that a node got when it was made."""

node_metadata: Callable[[Node], dict[str, Any]] = operator.attrgetter("metadata")
"""Returns what users note of a node; torch's types take the attribute for a method."""


def is_of_block(node: Node) -> bool:
    """Tell whether a node is that of a `BlockFunction`: what comes before it are blocks."""
    return issubclass(getattr(node, "_forward_cls", Node), BlockFunction)


def is_of_user(node: Node) -> bool:
    """Tell whether a node is that of a user's function, which may do anything with a gradient.

    Functions of `torch.library.custom_op` are made in a module of torch.
    """
    module = getattr(getattr(node, "_forward_cls", None), "__module__", "torch")
    if module == "torch._library.autograd":
        return True
    return module.split(".")[0] not in ("torch", "hyperslab")


will_execute_node: Callable[[Node], bool] = torch._C._will_engine_execute_node
"""Tells whether this backward pass reaches a node, here one that accumulates into ``.grad``.

It raises RuntimeError in ``torch.autograd.grad``, which hands gradients to its caller.
"""


at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Has a function called when the present backward pass ends, as DistributedDataParallel does."""

# Modules.

BatchNorm = _BatchNorm
"""Is the base class of batch normalisations of all dimensions, and of users' own."""


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor | None]]:
    """List a module's own parameters and buffers, also those that are None."""
    return [*module._parameters.items(), *module._buffers.items()]


# OneDNN.

onednn_enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled
"""Tells whether oneDNN is switched on, as the public flag does, which every convolution asks."""


LIBRARY: str = torch._C.__file__
"""Is the library that loads all others of torch: its OpenMP is found through it, not another's."""


def onednn_has_bfloat16() -> bool:
    """Tell whether oneDNN computes in bfloat16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def processor_has_matrix_tiles() -> bool:
    """Tell whether oneDNN multiplies bfloat16 in tiles of registers (AMX) on this processor."""
    return bool(torch.cpu._is_amx_tile_supported())


def onednn_transposed_convolution() -> Any:
    """Return oneDNN's transposed convolution, which aten's chooses for few shapes only.

    Builds without oneDNN have no such operator.
    """
    return torch.ops.mkldnn._convolution_transpose_pointwise


# Process groups.

FIRST_BUCKET_BYTES: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
"""Is the size of DistributedDataParallel's first bucket [B], which a trace imitates."""


jit_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
"""Tells whether `torch.jit.trace` runs; its module does not list the name among its own."""


def inside_ddp() -> bool:
    """Tell whether the forward of a DistributedDataParallel runs, which dynamo asks, too."""
    return DistributedDataParallel._get_active_ddp_module() is not None


def begin_messages(
    group: dist.ProcessGroup,
    receives: Sequence[tuple[int, torch.Tensor]],
    sends: Sequence[tuple[int, torch.Tensor]],
) -> list[dist.Work]:
    """Begin messages between pairs of ranks, all at once, as ``batch_isend_irecv`` does.

    Each is a rank of the group, by its number there, and a contiguous tensor. That function makes
    an object for each and asks the same of each several times: half of what an exchange with seven
    neighbours costs the host. The works are those of the messages in this order, or one for all.

    Raises:
        ValueError: the group has ended.
    """
    if group not in dist.distributed_c10d._world.pg_group_ranks:
        raise ValueError("the process group has ended")
    device = (receives or sends)[0][1].device
    # A group would ask torch's dispatcher for it at each message.
    backend: Any = group._get_backend(device)
    at_once = backend.supports_coalescing
    if at_once:
        group._start_coalescing(device)
    receive, send = backend.recv, backend.send
    works = [receive([tensor], rank, 0) for rank, tensor in receives]
    works += [send([tensor], rank, 0) for rank, tensor in sends]
    return [group._end_coalescing(device)] if at_once else works


@functools.cache
def _waited_for() -> dist.AllreduceOptions:
    """Return what ``dist.all_reduce`` says of a sum that is waited for at once."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return options


def sum_in_group(group: dist.ProcessGroup, x: torch.Tensor) -> None:
    """Sum a tensor in place, as ``dist.all_reduce`` does, which asks more than that takes."""
    real = torch.view_as_real(x) if x.is_complex() else x
    backend: Any = group._get_backend(x.device)  # as for messages
    work = backend.allreduce([real], _waited_for())
    if work is not None:
        work.wait()


def default_group() -> dist.ProcessGroup:
    """Return the group of all ranks; ``dist.group.WORLD`` is None before it is initialised."""
    return dist.distributed_c10d._get_default_group()


def default_store() -> dist.distributed_c10d.Store:
    """Return the store in which all ranks met, to hear of failures where no message passes."""
    return dist.distributed_c10d._get_default_store()


def time_limit_of(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta:
    """Return how long ranks of a group wait for each other, which is told when it is made only."""
    return group._get_backend(device).options._timeout


def set_time_limit(options: Any, limit: datetime.timedelta) -> None:
    """Write a limit into the options of a group, for which their constructor has no argument."""
    options._timeout = limit


def nccl_trace() -> dict[str, Any]:
    """Return what NCCL's flight recorder has of this process; nothing where torch has no NCCL.

    It is the only place that says which operation of which communicator has not ended.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return {}
    found: dict[str, Any] = pickle.loads(dump(True, False, False))
    return found


def abort_groups() -> None:
    """End all process groups without waiting for anybody; ``destroy_process_group`` would wait."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def number_of_groups() -> int:
    """Return how many process groups this process has made: the next one's name on all ranks."""
    return dist.distributed_c10d._world.group_count


def set_number_of_groups(count: int) -> None:
    """Skip names of process groups that another rank has used for groups of its own."""
    dist.distributed_c10d._world.group_count = count
