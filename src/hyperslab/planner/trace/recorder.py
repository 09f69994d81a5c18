"""Records every operator of a step instead of running it, by a torch dispatch mode.

In reading order: `Layers` finds the submodule that an operator or a node of the backward pass
belongs to; calls and tensor specs of operators; meta implementations where torch has none, or
a wrong one; FLOPs of a call, by pass, from torch's own formulas; `TraceMode` puts them together.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyperslab.errors import UnsupportedOp
from hyperslab.kernels.memory_format import CHANNELS_LAST, memory_format_of
from hyperslab.planner.trace.records import Call, LocalOperator, Pass, TensorSpec, Trace
from hyperslab.planner.trace.unbacked_memory import UnbackedMemory, scratch_of
from hyperslab.train.flops import WEIGHT_GRADIENTS, flop_formulas
from hyperslab.train.profile import Stage
from hyperslab.util.torch_internals import (
    DisableTorchFunctionSubclass,
    OpOverload,
    TorchDispatchMode,
    autograd_node,
    graph_task,
    next_node_number,
    onednn_transposed_convolution,
    storage_address,
    tree_leaves,
    tree_map_only,
)


class Layers:
    """Follows the calls of a module's submodules.

    Autograd numbers its nodes in the order in which they are made. So the numbers at which the
    forward pass entered and left submodules tell for every node of the backward pass where it was
    made.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._names: list[str] = []

    @contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for name, part in module.named_modules():
                if part is not module:
                    self._follow(part, name, stack)
            yield

    def _follow(self, part: nn.Module, name: str, stack: ExitStack) -> None:
        def enter(*_: Any) -> None:
            self._stack.append(name)
            self._mark()

        def leave(*_: Any) -> None:
            self._stack.pop()
            self._mark()

        stack.callback(part.register_forward_pre_hook(enter, prepend=True).remove)
        stack.callback(part.register_forward_hook(leave, always_call=True).remove)

    def _mark(self) -> None:
        if graph_task() == -1:
            self._numbers.append(next_node_number())
            self._names.append(self._stack[-1] if self._stack else "")

    @property
    def current(self) -> str:
        """Returns the name of the innermost submodule at work, "" outside of all."""
        if self._stack:
            return self._stack[-1]
        node = autograd_node()
        if node is None:
            return ""
        at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._names[at] if 0 <= at < len(self._names) else ""


def call_of(operator: OpOverload, args: Any, kwargs: Any) -> Call:
    """Describes an operator's call by the forms of its arguments."""
    return Call(
        str(operator),
        specs_of(args),
        tuple((name, specs_of(value)) for name, value in kwargs.items()),
    )


def specs_of(value: Any) -> Any:
    """Replaces tensors by their forms, lists by tuples."""
    if isinstance(value, torch.Tensor):
        return spec_of(value)
    if isinstance(value, list | tuple):
        return tuple(map(specs_of, value))
    return value


# The methods of `torch.Tensor` itself: those of a `Sharded` speak globally.


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Returns the form of a tensor's own block."""
    shape = tuple(torch.Tensor.size(tensor))
    return TensorSpec(shape, torch.Tensor.stride(tensor), tensor.dtype)


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a tensor of the same form on torch's meta device."""
    form = spec_of(tensor)
    return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")


def zeros_of(tensor: torch.Tensor) -> torch.Tensor:
    """Makes zeros of the same shape and type."""
    return torch.zeros(torch.Tensor.size(tensor), dtype=tensor.dtype)


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sums the sizes of tensors in bytes."""
    return sum(spec_of(tensor).nbytes for tensor in tensors)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Finds tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def shapes_of(tensors: list[torch.Tensor]) -> str:
    """Writes the shapes of tensors, for errors."""
    return ", ".join(str(spec_of(tensor).shape) for tensor in tensors)


def written_operands(
    operator: OpOverload, args: Any, kwargs: Any
) -> list[tuple[frozenset[str], Any]]:
    """Lists the operands into which an operator writes, by their alias sets in the schema."""
    names = (argument.name for argument in operator._schema.arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    return [
        (frozenset(argument.alias_info.before_set), given.get(argument.name))
        for argument in operator._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def aliased_operand(alias: Any, written: list[tuple[frozenset[str], Any]]) -> Any:
    """Returns the operand that a result aliases; None: a new tensor."""
    if alias is None:
        return None
    return next((value for names, value in written if names == alias.before_set), None)


_aten = torch.ops.aten


def _convolution_meta(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    extra: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Mends torch's meta form (2.13), which is contiguous whatever the operands are."""
    y = _aten.convolution(x, weight, bias, stride, padding, dilation, transposed, extra, groups)
    formats = {memory_format_of(x), memory_format_of(weight)}
    if formats == {torch.contiguous_format}:
        return y
    return torch.empty_like(y, memory_format=CHANNELS_LAST[x.dim()])


def _mkldnn_convolution_meta(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    zero = [0] * len(padding)
    return _convolution_meta(x, weight, bias, stride, padding, dilation, False, zero, groups)


def _convolution_transpose_meta(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    extra: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *_: object,
) -> torch.Tensor:
    return _convolution_meta(x, weight, bias, stride, padding, dilation, True, extra, groups)


META_IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {
    _aten.convolution: _convolution_meta,
    _aten.mkldnn_convolution: _mkldnn_convolution_meta,
    onednn_transposed_convolution(): _convolution_transpose_meta,
    _aten.to_mkldnn: lambda x, *_: torch.empty_like(x),
}


GRADIENT_PASSES: tuple[Pass, Pass] = ("backward-data", "backward-filter")


def flops_of(
    operator: OpOverload, call: Call, result: object, stage: Stage
) -> tuple[tuple[Pass, int], ...]:
    """Counts the flops of each pass of a call; none where elements are only moved or scaled.

    ``result`` is the form of what it returns.
    """
    packet = operator.overloadpacket
    arguments = [_shapes_in_specs(value) for value in call.arguments]
    if packet is _aten.convolution_backward:
        return _convolution_backward_flops(arguments, _shapes_in_specs(result))
    formula = flop_formulas().get(packet)
    if formula is None:
        return ()
    options = {name: _shapes_in_specs(value) for name, value in call.options}
    count = int(formula(*arguments, **options, out_val=_shapes_in_specs(result)))
    if packet in WEIGHT_GRADIENTS:
        return (("backward-filter", count),)
    return (("forward" if stage == "forward" else "backward-data", count),)


def _convolution_backward_flops(arguments: list[Any], result: Any) -> tuple[tuple[Pass, int], ...]:
    formula = flop_formulas()[_aten.convolution_backward]
    counts: list[tuple[Pass, int]] = []
    for which, name in enumerate(GRADIENT_PASSES):
        if arguments[10][which]:
            mask = [which == 0, which == 1, False]
            counts.append((name, int(formula(*arguments[:10], mask, out_val=result))))
    return tuple(counts)


def _shapes_in_specs(value: object) -> Any:
    """Returns the shapes of tensors, as the formulas take them."""
    if isinstance(value, TensorSpec):
        return torch.Size(value.shape)
    if isinstance(value, tuple) and any(isinstance(v, TensorSpec | tuple) for v in value):
        return tuple(_shapes_in_specs(v) for v in value)
    return value


MOST_WITH_VALUES = 4096
"""Limits the elements of tensors with values that are computed: counters, seeds."""

LARGEST_ZEROS = 1 << 28
"""Limits the operands [B] of an operator without a meta form, which runs on zeros."""

ALLOCATING_OPERATORS = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
"""Lists operators that only allocate memory."""

FILLING_NAMESPACE = "hyperslab"
"""Names the namespace of operators that fill what they write into and do not read it."""

NO_META_IMPLEMENTATION = ("'Meta' backend", "expects CPU tensor", "no fake impl", "Meta tensors")
"""Quotes torch's errors about operators that do not run on its meta device."""


@dataclass(slots=True)
class CallCosts:
    """Keeps what equal calls share: the form of the result, and the costs."""

    result: Any
    read: int
    written: int
    traced: bool
    flops: dict[Stage, Any]


class TraceMode(TorchDispatchMode):
    """Makes torch's operators return tensors without memory, and records them.

    Views are made; operators on small tensors with values (the counter of Adam's steps, say) run.
    While ``trace`` is None nothing is recorded: a network is built so.
    """

    def __init__(self, memory: UnbackedMemory, layers: Layers, *, scratch: bool) -> None:
        """Counts, with ``scratch``, also what the CPU's convolutions take while they run."""
        super().__init__()
        self.memory = memory
        self.layers = layers
        self.scratch = scratch
        self._for_onednn: torch.Tensor | None = None  # the last one in its format
        self.trace: Trace | None = None
        self.optimizing = False
        self._known: dict[Call, CallCosts] = {}
        self._overwritten: list[torch.UntypedStorage] = []  # with values, which are wrong now

    @property
    def stage(self) -> Stage:
        """Tells the stage that the step is in."""
        if self.optimizing:
            return "optimizer"
        return "forward" if graph_task() == -1 else "backward"

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if operator.is_view or torch.Tag.inplace_view in operator.tags:
                return operator(*args, **kwargs)
            if operator.namespace == "profiler":  # marks that the optimizer's step leaves
                return operator(*args, **kwargs)
            if operator.overloadpacket in (_aten._unsafe_view, _aten.set_):
                return operator(*args, **kwargs)
            tensors = tensors_in((args, kwargs))
            if tensors and all(map(self._has_values, tensors)):
                return self._run(operator, args, kwargs, tensors)
            if torch.Tag.data_dependent_output in operator.tags:
                raise UnsupportedOp(_reads_values(operator, tensors, self.layers.current))
            if operator._schema.is_mutable:
                return self._write(operator, args, kwargs, tensors)
            return self._compute(operator, args, kwargs, tensors)

    def _has_values(self, tensor: torch.Tensor) -> bool:
        if self.memory.has(tensor):
            return False
        address = storage_address(tensor.untyped_storage())
        return all(storage_address(storage) != address for storage in self._overwritten)

    def _compute(self, operator: OpOverload, args: Any, kwargs: Any, tensors: Any) -> Any:
        """Records an operator that returns new tensors."""
        call = call_of(operator, args, kwargs)
        known = self._known.get(call)
        if known is None:
            known = self._known[call] = self._look_up(operator, args, kwargs, tensors)
        forms = [v for v in tree_leaves(known.result) if isinstance(v, TensorSpec)]
        if not tensors and sum(math.prod(form.shape) for form in forms) <= MOST_WITH_VALUES:
            return self._run(operator, args, kwargs, tensors)
        self._note(operator, call, known)
        result = tree_map_only(TensorSpec, self._new, known.result)
        if self.scratch:
            self._borrow(operator, call, args, result)
        return result

    def _borrow(self, operator: OpOverload, call: Call, args: Any, result: Any) -> None:
        """Takes the memory that the operator needs while it runs."""
        if operator.overloadpacket is _aten.to_mkldnn:
            self._for_onednn = result
        elif "convolution" in call.name:
            self.memory.borrow(scratch_of(call, to_onednn=args[1] is self._for_onednn))
            self._for_onednn = None

    def _run(self, operator: OpOverload, args: Any, kwargs: Any, tensors: Any) -> Any:
        """Runs an operator on small tensors with values."""
        result = operator(*args, **kwargs)
        if self.trace is not None:
            forms = tree_map_only(torch.Tensor, spec_of, result)
            read = total_bytes(tensors)
            known = CallCosts(forms, read, total_bytes(tensors_in(result)), True, {})
            self._note(operator, call_of(operator, args, kwargs), known)
        return result

    def _write(self, operator: OpOverload, args: Any, kwargs: Any, tensors: Any) -> Any:
        """Records an operator that writes into its operands; nothing is written."""
        call = call_of(operator, args, kwargs)
        written = written_operands(operator, args, kwargs)
        for tensor in tensors_in([value for _, value in written]):
            if not self.memory.has(tensor):
                self._overwritten.append(tensor.untyped_storage())
        known = self._known.get(call)
        results = [
            aliased_operand(result.alias_info, written) for result in operator._schema.returns
        ]
        if known is None:
            new = None
            if any(result is None for result in results):
                new = self._look_up(operator, args, kwargs, tensors).result
            nbytes = total_bytes(tensors_in([value for _, value in written]))
            read = total_bytes(tensors) - (nbytes if operator.namespace == FILLING_NAMESPACE else 0)
            nbytes += sum(v.nbytes for v in tree_leaves(new) if isinstance(v, TensorSpec))
            known = self._known[call] = CallCosts(new, read, nbytes, True, {})
        self._note(operator, call, known)
        if None in results:
            made = known.result if len(results) > 1 else [known.result]
            pairs = zip(results, made, strict=True)
            results = [
                tree_map_only(TensorSpec, self._new, form) if found is None else found
                for found, form in pairs
            ]
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def _look_up(
        self, operator: OpOverload, args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> CallCosts:
        """Finds the form of an operator's result, by its meta form or else on zeros."""
        form: Any = META_IMPLEMENTATIONS.get(operator.overloadpacket, operator)
        traced = True
        options = {**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs
        try:
            metas = tree_map_only(torch.Tensor, meta_of, (args, options))
            result = form(*metas[0], **metas[1])
        except RuntimeError as error:  # NotImplementedError is one
            if torch.Tag.dynamic_output_shape in operator.tags:
                words = _reads_values(operator, tensors, self.layers.current)
                raise UnsupportedOp(words) from error
            if not any(words in str(error) for words in NO_META_IMPLEMENTATION):
                raise
            traced = False
            result = _on_zeros(operator, args, kwargs, tensors)
        forms = tree_map_only(torch.Tensor, spec_of, result)
        new = [v for v in tree_leaves(forms) if isinstance(v, TensorSpec)]
        return CallCosts(forms, total_bytes(tensors), sum(v.nbytes for v in new), traced, {})

    def _new(self, form: TensorSpec) -> torch.Tensor:
        return self.memory.empty(form.shape, form.strides, form.dtype)

    def _note(self, operator: OpOverload, call: Call, known: CallCosts) -> None:
        trace = self.trace
        if trace is None or operator.overloadpacket in ALLOCATING_OPERATORS:
            return
        if not known.read and not known.written:  # it asks for a type, say
            return
        stage = self.stage
        if stage not in known.flops:
            known.flops[stage] = flops_of(operator, call, known.result, stage)
        if not known.traced:
            trace.not_traced[call.name] = trace.not_traced.get(call.name, 0) + 1
        trace.events.append(
            LocalOperator(
                call=call,
                layer=self.layers.current,
                stage=stage,
                flops=known.flops[stage],
                read=known.read,
                written=known.written,
            )
        )


def _on_zeros(operator: OpOverload, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
    taken = total_bytes(tensors)
    if taken > LARGEST_ZEROS:
        raise UnsupportedOp(
            f"{operator} has no meta form, so what it returns for {shapes_of(tensors)} is not "
            f"known without running it on {taken / 2**30:.1f} GiB\n    register one "
            "(torch.library.register_fake), or trace smaller volumes"
        )
    zeros = tree_map_only(torch.Tensor, zeros_of, (args, kwargs))
    return operator(*zeros[0], **zeros[1])


def _reads_values(operator: OpOverload, tensors: list[torch.Tensor], layer: str) -> str:
    where = f" in {layer}" if layer else ""
    return (
        f"{operator} of {shapes_of(tensors)}{where} reads values, and a step that is traced has "
        "none\n    what depends on values (.item(), an if on a tensor, nonzero) cannot be planned: "
        "leave it out of the network that is traced"
    )
