"""Records every operator of a step instead of running it, by a torch dispatch mode.

In reading order: `Layers` finds the submodule that an operator or a node of the backward pass
belongs to; `Journal` collects events; forms of tensors; meta implementations where torch has
none, or a wrong one; FLOPs of a call, by pass, from torch's own formulas; `TraceMode` puts them
together.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hyperslab.errors import UnsupportedOp
from hyperslab.kernels.memory_format import CHANNELS_LAST, memory_format_of
from hyperslab.planner.records import Call, Event, LocalOperator, Pass, TensorSpec, Trace
from hyperslab.planner.unbacked_memory import UnbackedMemory, scratch_of
from hyperslab.train.flops import WEIGHT_GRADIENTS, flop_formulas
from hyperslab.train.profile import Stage
from hyperslab.util.torch_internals import (
    DisableTorchFunctionSubclass,
    OpOverload,
    TorchDispatchMode,
    autograd_node,
    graph_task,
    map_only,
    next_node_number,
    onednn_transposed_convolution,
    storage_address,
    tree_leaves,
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


class Journal:
    """Collects the events of a step; while ``trace`` is None they are forgotten.

    ``notes`` is what the rules log.
    """

    def __init__(self) -> None:
        self.layers = Layers()
        self.trace: Trace | None = None
        self.notes: list[str] = []
        self.optimizing = False

    @property
    def place(self) -> tuple[str, Stage]:
        """Returns the layer and the stage that the step is in."""
        if self.optimizing:
            return self.layers.current, "optimizer"
        return self.layers.current, "forward" if graph_task() == -1 else "backward"

    def add(self, event: Event) -> None:
        if self.trace is not None:
            self.trace.events.append(event)


def specs_of(value: Any) -> Any:
    """Replaces tensors by their forms, lists by tuples."""
    if isinstance(value, torch.Tensor):
        return spec_of(value)
    if isinstance(value, list | tuple):
        return tuple(map(specs_of, value))
    return value


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Returns the form of a tensor's own block."""
    # The methods of `torch.Tensor` itself: those of a `Sharded` speak globally.
    shape = tuple(torch.Tensor.size(tensor))
    return TensorSpec(shape, torch.Tensor.stride(tensor), tensor.dtype)


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a tensor of the same form on torch's meta device."""
    form = spec_of(tensor)
    return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Finds tensors in nested lists, tuples and dicts, in a third of the time of torch's pytree."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def bytes_in(forms: Any) -> int:
    """Sums the sizes of the forms in nested lists and tuples [B]."""
    if isinstance(forms, TensorSpec):
        return forms.nbytes
    return sum(leaf.nbytes for leaf in tree_leaves(forms) if isinstance(leaf, TensorSpec))


def shapes_of(tensors: list[torch.Tensor]) -> str:
    return ", ".join(str(spec_of(tensor).shape) for tensor in tensors)


def written_operands(operator: OpOverload, args: Any, kwargs: Any) -> dict[frozenset[str], Any]:
    """Finds the operands into which an operator writes, by their alias sets in the schema."""
    arguments = operator._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    return {
        frozenset(argument.alias_info.before_set): given.get(argument.name)
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }


_aten = torch.ops.aten


def _convolution_meta(operator: OpOverload, args: Sequence[Any]) -> torch.Tensor:
    """Mends torch's meta form (2.13), which is contiguous whatever the operands are.

    OneDNN's own convolutions have none: theirs is that of aten's with the same options.
    """
    x, weight, bias, *options = args
    names = (argument.name for argument in operator._schema.arguments[3:])
    given = dict(zip(names, options, strict=False))
    y = _aten.convolution(
        x,
        weight,
        bias,
        given["stride"],
        given["padding"],
        given["dilation"],
        given.get("transposed", operator.overloadpacket is onednn_transposed_convolution()),
        given.get("output_padding", [0] * len(given["padding"])),
        given["groups"],
    )
    if {memory_format_of(x), memory_format_of(weight)} == {torch.contiguous_format}:
        return y
    return torch.empty_like(y, memory_format=CHANNELS_LAST[x.dim()])


def _meta_result(operator: OpOverload, args: Any, kwargs: Any) -> Any:
    """Runs an operator on the meta device; where torch has no form or a wrong one, by ours."""
    packet = operator.overloadpacket
    options = {**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs
    metas, options = map_only(torch.Tensor, meta_of, (args, options))
    if packet is _aten.to_mkldnn:
        return torch.empty_like(metas[0])
    if packet in (_aten.convolution, _aten.mkldnn_convolution, onednn_transposed_convolution()):
        return _convolution_meta(operator, metas)
    return operator(*metas, **options)


def flops_of(
    operator: OpOverload, call: Call, result: object, stage: Stage
) -> tuple[tuple[Pass, int], ...]:
    """Counts the flops of each pass of a call; none where elements are only moved or scaled.

    ``result`` is the form of what it returns.
    """
    packet = operator.overloadpacket
    formula = flop_formulas().get(packet)
    if formula is None:
        return ()
    # The formulas take the shapes of tensors in place of them.
    called = (call.arguments, dict(call.options), result)
    arguments, options, returned = map_only(TensorSpec, lambda spec: torch.Size(spec.shape), called)
    if packet is _aten.convolution_backward:
        # Torch adds both gradients up: it is asked for each alone.
        *operands, (data, weight, _) = arguments
        alone: list[tuple[Pass, list[bool]]] = []
        if data:
            alone.append(("backward-data", [True, False, False]))
        if weight:
            alone.append(("backward-filter", [False, True, False]))
        return tuple(
            (name, int(formula(*operands, mask, out_val=returned))) for name, mask in alone
        )
    count = int(formula(*arguments, **options, out_val=returned))
    if packet in WEIGHT_GRADIENTS:
        return (("backward-filter", count),)
    return (("forward" if stage == "forward" else "backward-data", count),)


MOST_WITH_VALUES = 4096  # elements of tensors with values that are computed: counters, seeds
LARGEST_ZEROS = 1 << 28  # [B] of operands of an operator without a meta form, which runs on zeros

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


@functools.cache
def _results_of_calls(_default: torch.dtype) -> tuple[dict[Call, Any], set[Call]]:
    """Holds what equal calls return, in all traces, and those without a meta form.

    Results are forms, which follow from the operands' and from torch's default type alone.
    """
    return {}, set()


class TraceMode(TorchDispatchMode):
    """Makes torch's operators return tensors without memory, and records them in ``journal``.

    Views are made; operators on small tensors with values (the counter of Adam's steps, say) run.
    """

    def __init__(self, memory: UnbackedMemory, journal: Journal, *, scratch: bool) -> None:
        """Counts, with ``scratch``, also what the CPU's convolutions take while they run."""
        super().__init__()
        self.memory = memory
        self.journal = journal
        self.scratch = scratch
        self._for_onednn: torch.Tensor | None = None  # the last one in its format
        self._results, self._without_meta = _results_of_calls(torch.get_default_dtype())
        self._overwritten: list[torch.UntypedStorage] = []  # with values, which are wrong now

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            # Views are made for real, so that storages are shared, and freed, as in a run.
            if operator.is_view or torch.Tag.inplace_view in operator.tags:
                return operator(*args, **kwargs)
            if operator.namespace == "profiler":  # marks that the optimizer's step leaves
                return operator(*args, **kwargs)
            if operator.overloadpacket in (_aten._unsafe_view, _aten.set_):
                return operator(*args, **kwargs)
            tensors = tensors_in((args, kwargs))
            call = Call(str(operator), specs_of(args), specs_of(list(kwargs.items())))
            # Adam's count of steps and dropout's seed, say: such tensors have values.
            if tensors and all(map(self._has_values, tensors)):
                return self._run(operator, call, args, kwargs)
            if torch.Tag.data_dependent_output in operator.tags:
                raise self._reads_values(operator, tensors)
            if operator._schema.is_mutable:
                return self._write(operator, call, args, kwargs)
            return self._compute(operator, call, args, kwargs)

    def _has_values(self, tensor: torch.Tensor) -> bool:
        if self.memory.has(tensor):
            return False
        address = storage_address(tensor.untyped_storage())
        return all(storage_address(storage) != address for storage in self._overwritten)

    def _compute(self, operator: OpOverload, call: Call, args: Any, kwargs: Any) -> Any:
        """Records an operator that returns new tensors."""
        forms = self._result_of(operator, call, args, kwargs)
        # A small new tensor, such as a counter, is made with its values: somebody may ask for them.
        if not any(call.tensors()):
            made = (form for form in tree_leaves(forms) if isinstance(form, TensorSpec))
            if sum(math.prod(form.shape) for form in made) <= MOST_WITH_VALUES:
                return self._run(operator, call, args, kwargs)
        self._note(operator, call, forms, call.nbytes, bytes_in(forms))
        result = map_only(TensorSpec, self._new, forms)
        if self.scratch:
            # What the operator needs while it runs.
            if operator.overloadpacket is _aten.to_mkldnn:
                self._for_onednn = result
            elif "convolution" in call.name:
                to_onednn = args[1] is self._for_onednn
                self.memory.borrow(scratch_of(call, forms, to_onednn=to_onednn))
                self._for_onednn = None
        return result

    def _run(self, operator: OpOverload, call: Call, args: Any, kwargs: Any) -> Any:
        """Runs an operator on small tensors with values."""
        result = operator(*args, **kwargs)
        forms = map_only(torch.Tensor, spec_of, result)
        self._note(operator, call, forms, call.nbytes, bytes_in(forms))
        return result

    def _write(self, operator: OpOverload, call: Call, args: Any, kwargs: Any) -> Any:
        """Records an operator that writes into its operands; nothing is written."""
        written = written_operands(operator, args, kwargs)
        targets = tensors_in(list(written.values()))
        for tensor in targets:
            if not self.memory.has(tensor):
                self._overwritten.append(tensor.untyped_storage())
        # Results that are no operand are new: batch norm writes statistics and returns a map.
        results = [
            None if one.alias_info is None else written.get(frozenset(one.alias_info.before_set))
            for one in operator._schema.returns
        ]
        forms = None
        if any(result is None for result in results):
            forms = self._result_of(operator, call, args, kwargs)
        nbytes = sum(spec_of(tensor).nbytes for tensor in targets)
        # Torch's in-place operators read what they change, ours do not.
        read = call.nbytes - (nbytes if operator.namespace == FILLING_NAMESPACE else 0)
        self._note(operator, call, forms, read, nbytes + bytes_in(forms))
        if forms is not None:
            made = forms if len(results) > 1 else [forms]
            results = [
                map_only(TensorSpec, self._new, form) if found is None else found
                for found, form in zip(results, made, strict=True)
            ]
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def _result_of(self, operator: OpOverload, call: Call, args: Any, kwargs: Any) -> Any:
        """Finds the form of an operator's result, by its meta form or else on zeros."""
        if call not in self._results:
            try:
                result = _meta_result(operator, args, kwargs)
            except RuntimeError as error:  # NotImplementedError is one
                tensors = tensors_in((args, kwargs))
                if torch.Tag.dynamic_output_shape in operator.tags:
                    raise self._reads_values(operator, tensors) from error
                if not any(words in str(error) for words in NO_META_IMPLEMENTATION):
                    raise
                self._without_meta.add(call)
                result = _on_zeros(operator, args, kwargs, tensors)
            self._results[call] = map_only(torch.Tensor, spec_of, result)
        return self._results[call]

    def _new(self, form: TensorSpec) -> torch.Tensor:
        return self.memory.empty(form.shape, form.strides, form.dtype)

    def _note(self, operator: OpOverload, call: Call, result: Any, read: int, written: int) -> None:
        trace = self.journal.trace
        if trace is None or operator.overloadpacket in ALLOCATING_OPERATORS:
            return
        if not read and not written:  # it asks for a type, say
            return
        if call in self._without_meta:
            trace.not_traced[call.name] = trace.not_traced.get(call.name, 0) + 1
        layer, stage = self.journal.place
        flops = flops_of(operator, call, result, stage)
        self.journal.add(LocalOperator(call, layer, stage, flops, read, written))

    def _reads_values(self, operator: OpOverload, tensors: list[torch.Tensor]) -> UnsupportedOp:
        layer = self.journal.layers.current
        where = f" in {layer}" if layer else ""
        return UnsupportedOp(
            f"{operator} of {shapes_of(tensors)}{where} reads values, and a step that is traced "
            "has none\n    what depends on values (.item(), an if on a tensor, nonzero) cannot be "
            "planned: leave it out of the network that is traced"
        )


def _on_zeros(operator: OpOverload, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
    taken = sum(spec_of(tensor).nbytes for tensor in tensors)
    if taken > LARGEST_ZEROS:
        raise UnsupportedOp(
            f"{operator} has no meta form, so its result for {shapes_of(tensors)} is not "
            f"known without running it on {taken / 2**30:.1f} GiB\n    register one "
            "(torch.library.register_fake), or trace smaller volumes"
        )

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(torch.Tensor.size(tensor), dtype=tensor.dtype)

    zero_args, zero_kwargs = map_only(torch.Tensor, zeros, (args, kwargs))
    return operator(*zero_args, **zero_kwargs)
