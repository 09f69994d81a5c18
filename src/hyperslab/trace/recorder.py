"""A dispatch mode that writes down every operator instead of running it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hyperslab.errors import UnsupportedOp
from hyperslab.trace.flops import flops_of
from hyperslab.trace.forms import (
    bytes_of,
    call_of,
    form_of,
    meta_of,
    shapes_of,
    target_of,
    tensors_in,
    written_operands,
    zeros_of,
)
from hyperslab.trace.layers import Layers
from hyperslab.trace.meta_forms import META_FORMS
from hyperslab.trace.nothing import Nothing
from hyperslab.trace.records import Call, LocalOperator, Stage, TensorSpec, Trace
from hyperslab.trace.scratch import scratch_of

_aten = torch.ops.aten

WITH_VALUES = 4096
"""Elements up to which operators on tensors that have values run: constants, counters, seeds."""

AFFORDABLE = 1 << 28
"""[B] of operands up to which an operator without a meta form runs on zeros, for its shapes."""

WITHOUT_WORK = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
"""Operators that only ask for memory."""

FILLING = "hyperslab"
"""The namespace of operators that fill what they write into, and do not read it."""

NO_META_FORM = ("'Meta' backend", "expects CPU tensor", "no fake impl", "Meta tensors")
"""What torch says of an operator that it cannot run on its meta device."""


@dataclass(slots=True)
class CallCosts:
    """What is worked out once for equal calls: the form of the result, and the costs."""

    result: Any
    read: int
    written: int
    traced: bool
    flops: dict[Stage, Any]


class TraceMode(TorchDispatchMode):
    """Within it torch's operators return tensors without memory, and are recorded.

    Views are made; operators on small tensors with values (the counter of Adam's steps, say) run.
    While ``trace`` is None nothing is recorded: a network is built so.
    """

    def __init__(self, nothing: Nothing, layers: Layers, *, scratch: bool) -> None:
        """With ``scratch``, what the CPU's convolutions take while they run is counted, too."""
        super().__init__()
        self.nothing = nothing
        self.layers = layers
        self.scratch = scratch
        self._for_onednn: torch.Tensor | None = None  # the last one in its format
        self.trace: Trace | None = None
        self.optimizing = False
        self._known: dict[Call, CallCosts] = {}
        self._overwritten: list[torch.UntypedStorage] = []  # with values, which are wrong now

    @property
    def stage(self) -> Stage:
        """What the step is doing."""
        if self.optimizing:
            return "optimizer"
        return "forward" if torch._C._current_graph_task_id() == -1 else "backward"

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
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
        if self.nothing.has(tensor):
            return False
        address = tensor.untyped_storage()._cdata
        return all(storage._cdata != address for storage in self._overwritten)

    def _compute(self, operator: OpOverload, args: Any, kwargs: Any, tensors: Any) -> Any:
        """An operator that returns new tensors."""
        call = call_of(operator, args, kwargs)
        known = self._known.get(call)
        if known is None:
            known = self._known[call] = self._look_up(operator, args, kwargs, tensors)
        forms = [v for v in tree_leaves(known.result) if isinstance(v, TensorSpec)]
        if not tensors and sum(math.prod(form.shape) for form in forms) <= WITH_VALUES:
            return self._run(operator, args, kwargs, tensors)
        self._note(operator, call, known)
        result = tree_map_only(TensorSpec, self._new, known.result)
        if self.scratch:
            self._borrow(operator, call, args, result)
        return result

    def _borrow(self, operator: OpOverload, call: Call, args: Any, result: Any) -> None:
        """Take the memory that the operator has while it runs."""
        if operator.overloadpacket is _aten.to_mkldnn:
            self._for_onednn = result
        elif "convolution" in call.name:
            self.nothing.borrow(scratch_of(call, to_onednn=args[1] is self._for_onednn))
            self._for_onednn = None

    def _run(self, operator: OpOverload, args: Any, kwargs: Any, tensors: Any) -> Any:
        """An operator on small tensors with values."""
        result = operator(*args, **kwargs)
        if self.trace is not None:
            forms = tree_map_only(torch.Tensor, form_of, result)
            read = bytes_of(tensors)
            known = CallCosts(forms, read, bytes_of(tensors_in(result)), True, {})
            self._note(operator, call_of(operator, args, kwargs), known)
        return result

    def _write(self, operator: OpOverload, args: Any, kwargs: Any, tensors: Any) -> Any:
        """An operator that writes into its operands; what it would write is nowhere."""
        call = call_of(operator, args, kwargs)
        written = written_operands(operator, args, kwargs)
        for tensor in tensors_in([value for _, value in written]):
            if not self.nothing.has(tensor):
                self._overwritten.append(tensor.untyped_storage())
        known = self._known.get(call)
        results = [target_of(result.alias_info, written) for result in operator._schema.returns]
        if known is None:
            new = None
            if any(result is None for result in results):
                new = self._look_up(operator, args, kwargs, tensors).result
            nbytes = bytes_of(tensors_in([value for _, value in written]))
            read = bytes_of(tensors) - (nbytes if operator.namespace == FILLING else 0)
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
        """The form of what an operator returns, by its meta form or else on zeros."""
        form: Any = META_FORMS.get(operator.overloadpacket, operator)
        traced = True
        options = {**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs
        try:
            metas = tree_map_only(torch.Tensor, meta_of, (args, options))
            result = form(*metas[0], **metas[1])
        except RuntimeError as error:  # NotImplementedError is one
            if torch.Tag.dynamic_output_shape in operator.tags:
                words = _reads_values(operator, tensors, self.layers.current)
                raise UnsupportedOp(words) from error
            if not any(words in str(error) for words in NO_META_FORM):
                raise
            traced = False
            result = _on_zeros(operator, args, kwargs, tensors)
        forms = tree_map_only(torch.Tensor, form_of, result)
        new = [v for v in tree_leaves(forms) if isinstance(v, TensorSpec)]
        return CallCosts(forms, bytes_of(tensors), sum(v.nbytes for v in new), traced, {})

    def _new(self, form: TensorSpec) -> torch.Tensor:
        return self.nothing.empty(form.shape, form.strides, form.dtype)

    def _note(self, operator: OpOverload, call: Call, known: CallCosts) -> None:
        trace = self.trace
        if trace is None or operator.overloadpacket in WITHOUT_WORK:
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
    taken = bytes_of(tensors)
    if taken > AFFORDABLE:
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
