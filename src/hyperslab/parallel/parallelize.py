"""Makes any module run on cut inputs, in place, and its gradients the serial ones.

`parallelize` puts the other modules of this folder together. ``until=...`` names submodules
whose inputs are gathered before them (`gather_before`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import nn

from hyperslab.comm import Grid, log_once, shared_channels
from hyperslab.comm.bootstrap import world
from hyperslab.comm.communicator import as_sent
from hyperslab.errors import LayoutError
from hyperslab.kernels.conv_problem import KERNELS, Kernels
from hyperslab.ops import slabs
from hyperslab.parallel.averaging import (
    Averaging,
    BucketedGradients,
    Gradients,
    SharedGradients,
)
from hyperslab.parallel.consistency import (
    ORDINARY,
    RANDOM_STATES,
    Ordinary,
    OrdinaryInputs,
    RandomStates,
    check_same_network,
    share_random_states,
)
from hyperslab.parallel.guard import (
    ForwardBody,
    Guard,
    GuardedForward,
    refuse_scripted_parts,
    refuse_sharded_parameters,
    refuse_unmade_parameters,
    replace_sync_batch_norm,
    run_eagerly,
)
from hyperslab.parallel.offload import Move, move_for, offload_activations
from hyperslab.parallel.recompute import recompute_stages
from hyperslab.tensor import Sharded
from hyperslab.tensor.gradient_buffers import GradientBuffers
from hyperslab.tensor.sharded import ForwardScope, Policy
from hyperslab.util.torch_internals import is_compiled, tree_leaves, tree_map

Submodule = str | nn.Module
"""Names a submodule, or is one."""


def gather_before(module: nn.Module, until: Submodule | Sequence[Submodule], grid: Grid) -> None:
    """Let these submodules of ``module`` get their inputs whole in space."""
    wanted = (until,) if isinstance(until, str | nn.Module) else until
    for name in [_submodule_name(module, submodule) for submodule in wanted]:
        hook = _gather_hook(name, grid)
        module.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)


def _submodule_name(module: nn.Module, wanted: Submodule) -> str:
    for name, submodule in module.named_modules():
        if wanted in (name, submodule):
            break
    else:
        kind = repr(wanted) if isinstance(wanted, str) else f"a {type(wanted).__name__}"
        parts = ", ".join(name for name, _ in module.named_children())
        raise LayoutError(
            f"until={kind} is not a part of {type(module).__name__}\n"
            f"    its parts are {parts}, and what named_modules() lists below them"
        )
    if isinstance(submodule, nn.ModuleList | nn.ModuleDict):
        members = ", ".join(f"{name}.{key}" for key, _ in submodule.named_children())
        raise LayoutError(
            f"until={name!r} is a {type(submodule).__name__}, which is never called\n"
            f"    name one of its members: {members}"
        )
    return name


def _gather_hook(name: str, grid: Grid) -> Callable[..., Any]:
    """Makes the hook that gathers the inputs of a submodule before its forward.

    Distribution scheme: 1. every cut tensor among the arguments is gathered along the axes that
    cut space; along the batch it stays cut, 2. the ranks of a replica repeat the
    submodule's work, and that of what uses its results.
    """

    def gathered(value: object) -> object:
        if not isinstance(value, Sharded):
            return value
        space = [axis for axis in value.partition.axes if axis != "data"]
        if not space:
            return value
        log_once(
            grid,
            f"until {name!r}: {value.partition} gathered along {', '.join(space)}; the ranks "
            "there repeat the work from here on",
        )
        whole = value.redistribute(value.partition.without(space), f"until {name!r}")
        whole.mark_as_copy(value)  # serial torch passes the tensor itself, not a copy
        return whole

    return lambda _submodule, args, kwargs: (tree_map(gathered, args), tree_map(gathered, kwargs))


Module = TypeVar("Module", bound=nn.Module)
"""Stands for what `parallelize` takes and gives back, so that type checkers know its attributes."""

NoSync = Callable[[], AbstractContextManager[None]]

BATCH_NORM_STATISTICS = ("grid", "replica")

Memory = Literal["none", "tile", "recompute", "offload"]
"""How memory is saved at the cost of time: what `parallelize` may be told."""


def parallelize(
    module: Module,
    grid: Grid,
    *,
    until: Submodule | Sequence[Submodule] = (),
    batch_norm: str = "grid",
    kernels: Kernels = "measure",
    memory: Memory = "none",
    find_unused_parameters: bool = False,
    ordinary_inputs: Ordinary = "check",
    random_states: RandomStates = "replica",
    gradients: Gradients = "exact",
) -> Module:
    """Make a module run on cut tensors and its gradients the serial ones; returns the same module.

    Parameters, buffers and torch's random state become equal to those of rank 0; the states of
    NumPy's and Python's global generators become equal within each replica. The module moves to the
    grid's device. Call it last: after freezing, replacing or converting parameters. After
    ``loss.backward()`` every ``.grad`` is the gradient of the one global loss: torch's
    DistributedDataParallel averages over all ranks, bucketed and overlapped with the backward
    pass; on the CPU of one machine the ranks do so themselves, in memory that they share. Names in
    the state dict do not change. ``module.no_sync()`` is a context in which gradients accumulate
    without communication, as DistributedDataParallel has it. The module runs eagerly, also if it
    or a part of it is compiled, before or afterwards.

    Args:
        module: any module; its forward takes `Sharded` inputs.
        grid: the ranks.
        until: submodules, or their names in the module, that need whole volumes (a transformer
            behind convolutions, a sort). Their inputs are gathered along the axes that cut space;
            the batch stays cut. The ranks of a replica repeat the work of these submodules and of
            all that uses their results, until such a result meets a tensor that is cut (the skip
            connection of a decoder): then each rank takes its part. Until then the whole takes
            memory on every rank; the log says where.
        batch_norm: statistics over the whole ``"grid"``, which is the serial result, or per
            ``"replica"`` as in Oyama et al. 2020 (the running statistics are the replicas' mean).
        kernels: how kernels of convolutions are chosen on the CPU: by a rule from types and
            shapes, the same on every machine with the same instruction set (``"fixed"``, and
            ``"measure"``, its older name), or as torch chooses (``"torch"``).
            The results differ by rounding. ``python -m hyperslab.kernels`` prints the rule.
        memory: ``"tile"``: a convolution with a large result, and the normalisation, activation and
            pooling behind it, run over slabs of the rank's block one after the other, so that the
            result and its gradient never exist whole; behind a normalisation it is convolved
            again. ``"recompute"``: autograd keeps the inputs of stages (parts of an
            `torch.nn.Sequential` up to a pooling) and runs each again in the backward pass; wide
            results are tiled as well. ``"offload"``: what autograd keeps waits for the backward
            pass in a file in ``TMPDIR`` (else ``/var/tmp``), or in the host's memory if the ranks
            compute on GPUs; wide results are tiled as well. The numbers are the same but for
            rounding.
        find_unused_parameters: pass True to freeze some parameters later, between steps.
            (Parameters that take no part in a step's loss need nothing: they get no gradient, as
            in a serial run.)
        ordinary_inputs: how to treat an ordinary tensor that enters the module in training on
            several ranks. ``"check"``: beside a cut tensor it counts as a value of which every rank
            has an equal copy (a time, an embedding), and the ranks compare it, bit by bit, by a
            checksum in one small message; without a cut tensor beside it every rank would train
            alone on what it holds, which is an error. ``"trust"`` accepts it without a message.
        random_states: ``"replica"``: NumPy's and Python's global generators get the state of rank 0
            on the ranks of the first replica, and a state that follows from it on those of each
            other replica. So data sets that draw from them give the ranks of a replica the
            same samples, also in the workers of a `torch.utils.data.DataLoader`, whose seeds come
            from torch's generator; those are the same in all replicas, unless its ``generator`` is
            seeded by `grid.coords["data"]`. A data set has to seed generators of its own
            (`numpy.random.default_rng()`) itself. ``"own"`` leaves the states as they are.
        gradients: how they travel between machines without GPUs. ``"bf16"`` is inexact, for a slow
            network: each rank's float32 gradients are rounded to bfloat16, added up in float32, and
            their mean is rounded once more, so that half as many bytes are sent. Ranks of one
            machine that share memory send none, and average exactly.

    Raises:
        LayoutError: the module is parallelised already, ``batch_norm``, ``kernels``, ``memory``,
            ``ordinary_inputs``, ``random_states`` or ``gradients`` is unknown, or not for such a
            device, or ``until`` names no part of it. Later, from forward or backward: the module is
            used in a way that would leave a gradient partial, or trained with ordinary tensors or
            parameters that are not equal on all ranks. The ranks compare parameters at the module's
            training forwards 1, 2, 4, 8, ...
    """
    if "no_sync" in vars(module):
        raise LayoutError("the module is parallelised already")
    _check_choice(ordinary_inputs, "ordinary_inputs", ORDINARY)
    _check_choice(random_states, "random_states", RANDOM_STATES)
    _check_choice(gradients, "gradients", get_args(Gradients))
    _check_rounding(gradients, grid)
    refuse_sharded_parameters(module)
    refuse_scripted_parts(module)
    if grid.size > 1:
        refuse_unmade_parameters(module)
    if any(map(is_compiled, module.modules())):
        log_once(
            grid,
            f"{type(module).__name__}: torch.compile has no effect, and its parts run eagerly, "
            "with fullgraph=True too: graphs cannot hold messages between ranks",
            logging.WARNING,
        )
    homes = GradientBuffers(module.parameters())
    policy = prepare(
        module,
        grid,
        until=until,
        batch_norm=batch_norm,
        kernels=kernels,
        memory=memory,
        homes=homes,
    )
    if grid.size > 1 or policy != Policy():
        module.forward = _with_policy(module.forward, policy)
    averaging: Averaging | None = None
    guard: Guard | None = None
    if grid.size > 1:
        options = {"batch_norm": batch_norm, "kernels": kernels, "memory": memory}
        options["find_unused_parameters"] = str(find_unused_parameters)
        options["gradients"] = gradients
        check_same_network(module, grid, options)
        share_random_states(grid, random_states)
        _broadcast_parameters(module)
        if any(p.requires_grad for p in module.parameters()):
            body = ForwardBody(module)
            if _can_share(module, grid):
                averaging = SharedGradients.of(module, body, grid, homes)
            averaging = averaging or BucketedGradients(module, body, grid, gradients)
        inputs = OrdinaryInputs(type(module).__name__, grid) if ordinary_inputs == "check" else None
        guard = Guard(module, grid, averaging, freezing=find_unused_parameters, inputs=inputs)
    forward = module.forward if averaging is None else averaging.forward
    no_sync = contextlib.nullcontext if averaging is None else averaging.no_sync
    module.forward = GuardedForward(forward, guard)
    module.no_sync = no_sync  # type: ignore[assignment]
    return module


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Return ``module.no_sync()`` of a parallelised module, whose class does not have the method.

    Type checkers know this function; in it gradients accumulate without communication.

    Raises:
        LayoutError: the module is not parallelised.
    """
    found = vars(module).get("no_sync")
    if found is None:
        raise LayoutError(f"{type(module).__name__} is not parallelised: nothing to hold back")
    return cast(NoSync, found)()


def _check_choice(word: str, name: str, words: Sequence[str]) -> None:
    if word not in words:
        raise LayoutError(f"{name}={word!r}; use one of {', '.join(words)}")


def _check_rounding(gradients: Gradients, grid: Grid) -> None:
    """Say in the log what becomes of gradients that may be rounded."""
    if gradients == "exact" or grid.size == 1:
        return
    if grid.device.type != "cpu":
        raise LayoutError(
            'gradients="bf16" is for ranks of the CPU, and these compute on '
            f'{grid.device.type} devices\n    use gradients="exact"'
        )
    if shared_channels() is not None:
        log_once(grid, "gradients=bf16: these ranks share memory and send none: they are exact")
    else:
        log_once(
            grid,
            "gradients=bf16: INEXACT: gradients are rounded to bfloat16 on their way between ranks "
            "(8 bits); this is not the serial result",
            logging.WARNING,
        )


def prepare(
    module: nn.Module,
    grid: Grid,
    *,
    until: Submodule | Sequence[Submodule] = (),
    batch_norm: str = "grid",
    kernels: Kernels = "measure",
    memory: Memory = "none",
    homes: GradientBuffers | None = None,
    move: Move | None = None,
) -> Policy:
    """Prepare a module for forward passes: device, gathers, the policy of its tensors.

    The inputs have to get that policy, and its scope has to be open while the module runs.
    ``homes``: see `Policy`; ``move``: offloads activations, by default as `move_for` says.
    """
    _check_choice(batch_norm, "batch_norm", BATCH_NORM_STATISTICS)
    _check_choice(kernels, "kernels", KERNELS)
    _check_choice(memory, "memory", get_args(Memory))
    gather_before(module, until, grid)
    replace_sync_batch_norm(module)
    module.to(grid.device)
    if memory == "recompute":
        recompute_stages(module)
    if memory == "offload":
        offload_activations(module, move or move_for(grid))
    owned = () if homes is None else homes.owned
    scope = ForwardScope(owned) if grid.size > grid.data else None
    slab = None if memory == "none" else slabs.SLAB_BYTES
    return Policy(batch_norm=batch_norm, kernels=kernels, scope=scope, homes=homes, slab=slab)


def _can_share(module: nn.Module, grid: Grid) -> bool:
    """Tell whether gradients lie in memory that all ranks share, and are all dense."""
    sparse = any(getattr(part, "sparse", False) for part in module.modules())
    return shared_channels() is not None and grid.device.type == "cpu" and not sparse


def _broadcast_parameters(module: nn.Module) -> None:
    for tensor in (*(p.data for p in module.parameters()), *module.buffers()):
        whole = tensor.contiguous()
        dist.broadcast(as_sent(whole), group=world(), group_src=0)
        if not torch.equal(tensor, whole):  # an expanded one cannot be written, nor need it be
            tensor.copy_(whole)


def _with_policy(forward: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    def apply(held: list[tuple[Sharded, Policy]], value: Any) -> Any:
        if isinstance(value, Sharded):
            return Sharded.from_local(value.local, value.partition, value.grid, policy)
        if hasattr(value, "__dict__") and not isinstance(value, nn.Module | torch.Tensor):
            # Of a dataclass, say, which is not copied: its tensors have this policy meanwhile.
            for x in tree_leaves(vars(value)):
                if isinstance(x, Sharded):
                    held.append((x, x.policy))
                    x.policy = policy
        return value

    def run(*args: Any, **kwargs: Any) -> Any:
        held: list[tuple[Sharded, Policy]] = []
        with policy.scope.running() if policy.scope is not None else contextlib.nullcontext():
            try:
                args, kwargs = tree_map(functools.partial(apply, held), (args, kwargs))
                return forward(*args, **kwargs)
            finally:
                for x, before in reversed(held):
                    x.policy = before

    return run_eagerly(run)
