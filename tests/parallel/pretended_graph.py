"""A device whose graphs are pretended: what is recorded on the CPU is what CUDA would record.

Operators, messages and sums of a step are noted with the memory that they read and write, and
replayed on it without the step's Python. All of a step is the device's but the seeds that are drawn
by ``torch.randint``: other random operators draw from a generator of the device, as on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hyperslab.comm import communicator
from hyperslab.util.torch_internals import without_dispatch_modes
from tests.parallel.waiting import READS

_aten = torch.ops.aten
SHARING = ("comm.communicator", "parallel.averaging", "parallel.parallelize")
NOTHING_QUEUED = {  # memory is taken at the capture alone
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}


def plain(x: torch.Tensor) -> torch.Tensor:
    """The same memory, for a class that no rule asks for and with versions of its own."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor).data


def memory(x: torch.Tensor) -> int:
    return plain(x).untyped_storage()._cdata


class Recording:
    """What a step has queued."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.made: dict[int, torch.Tensor] = {}  # memory of the graph's own
        self.found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # other memory, as it was

    def look_at(self, tensors: Sequence[torch.Tensor]) -> None:
        for x in map(plain, tensors):
            if memory(x) not in self.made and memory(x) not in self.found:
                whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                self.found[memory(x)] = (whole, whole.clone())

    def undo(self) -> None:
        """A capture computes nothing."""
        for now, before in self.found.values():
            now.copy_(before)

    def add(self, func: Any, args: Any, kwargs: Any, result: Any, run: Callable[..., Any]) -> None:
        held = {memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        results = [plain(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        for x in results:
            if memory(x) not in self.found:
                self.made[memory(x)] = x
        if func.overloadpacket in NOTHING_QUEUED or func.is_view:
            return
        args, kwargs = tree_map_only(torch.Tensor, plain, (args, kwargs))
        written = [memory(x) not in held for x in results]

        def call() -> None:
            again = [x for x in tree_leaves(run(args, kwargs)) if isinstance(x, torch.Tensor)]
            for old, new, fresh in zip(results, again, written, strict=True):
                if fresh:
                    old.copy_(new)

        self.calls.append(call)


class PretendedDevice(TorchDispatchMode):
    """Runs operators, and has a generator of its own; notes them where something is recorded."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.state = torch.Generator().manual_seed(seed).get_state()
        self.recording: Recording | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        recording = self.recording
        if recording is None:
            return self.run(func, args, kwargs)
        masks = func is _aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masks or func in READS:
            raise RuntimeError(f"CUDA error: operation not permitted when capturing: {func}")
        recording.look_at([x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)])
        result = self.run(func, args, kwargs)
        recording.add(func, args, kwargs, result, lambda a, k: self.run(func, a, k))
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and func.overloadpacket != _aten.randint:
            with self.generator():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            for work in tree_leaves(result):
                if isinstance(work, torch.ScriptObject) and self.recording is None:
                    dist.Work.unbox(work).wait()
        return result

    @contextmanager
    def generator(self) -> Iterator[None]:
        of_host = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(of_host)

    def recorder(self, _tensors: object) -> PretendedGraph:
        return PretendedGraph(self)


class PretendedGraph:
    """Records as `hyperslab.parallel.graphed.CudaRecorder` does, on the pretended device."""

    def __init__(self, device: PretendedDevice) -> None:
        self.device = device
        self.recording = Recording()

    def eagerly(self) -> Any:
        return nullcontext()

    def record(self, step: Callable[[], Any]) -> Any:
        recording = self.recording
        state = self.device.state.clone()

        def noted(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(group: Any, *parts: Any) -> Any:
                parts = tree_map_only(torch.Tensor, plain, parts)
                recording.look_at([x for x in tree_leaves(parts) if isinstance(x, torch.Tensor)])
                recording.calls.append(lambda: finish(function(group, *parts)))
                return function(group, *parts)

            return run

        with ExitStack() as stack:
            for name in ("begin_messages", "sum_in_group"):
                replaced = noted(getattr(communicator, name))
                stack.enter_context(mock.patch.object(communicator, name, replaced))
            for name in ("is_initialized", "is_current_stream_capturing"):
                stack.enter_context(mock.patch(f"torch.cuda.{name}", return_value=True))
            self.device.recording = recording
            try:
                return step()
            finally:
                self.device.recording = None
                self.device.state = state
                recording.undo()

    def replay(self) -> None:
        with without_dispatch_modes():
            for call in self.recording.calls:
                call()


def finish(works: Any) -> None:
    for work in works or ():
        work.wait()


@contextmanager
def pretended_device(seed: int = 0, eager_calls: int = 2) -> Iterator[PretendedDevice]:
    """A device with graphs, whose ranks send messages by a process group, as NCCL does."""
    device = PretendedDevice(seed)
    graphed = import_module("hyperslab.parallel.graphed")  # a function has its name, too
    with ExitStack() as stack:
        for name in SHARING:
            module = import_module(f"hyperslab.{name}")
            stack.enter_context(mock.patch.object(module, "shared_channels", return_value=None))
        stack.enter_context(mock.patch.object(graphed, "recorder_for", device.recorder))
        stack.enter_context(mock.patch.object(graphed, "EAGER_CALLS", eager_calls))
        stack.enter_context(device)
        yield device
