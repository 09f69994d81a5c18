"""One recorded call, run again on real tensors of the same form.

Memory is in the state in which a step finds it. Operands rotate through several sets, so that small
ones come from a cache that other work went through in the meantime, and large ones from memory;
results go to memory that was used before, because they are kept for one turn of the sets.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from hyperslab.trace.records import Call, TensorSpec

ROTATED = 256 << 20  # [B] that all sets of operands take together: more than caches hold
MOST_SETS = 64
FRESH = 8  # times that an operand is written to before it gets new values

aten = torch.ops.aten


class Replay:
    """Runs a call; `refresh` before each time.

    With ``library`` the input of a convolution's gradients is oneDNN's, which chooses its kernels.

    Raises:
        LookupError: torch has no such operator.
    """

    def __init__(self, call: Call, device: torch.device, *, library: bool = False) -> None:
        self.operator = operator_of(call.name)
        self._device = device
        self._library = library
        nbytes = sum(spec.nbytes for spec in call.tensors())
        count = int(min(max(ROTATED / max(nbytes, 1), 1), MOST_SETS))
        self._sets = [self._operands(call) for _ in range(count)]
        self._kept: deque[object] = deque(maxlen=count)
        self._writes = self.operator._schema.is_mutable
        self._turn = 0

    def refresh(self) -> None:
        """The next operands; ones that are written to must not fade to zeros, which are slower."""
        self._turn += 1
        if self._writes and self._turn % (FRESH * len(self._sets)) == 0:
            for args, kwargs in self._sets:
                _fill_all((args, kwargs))

    def __call__(self) -> None:
        args, kwargs = self._sets[self._turn % len(self._sets)]
        self._kept.append(self.operator(*args, **kwargs))

    def _operands(self, call: Call) -> tuple[list[Any], dict[str, Any]]:
        args = [self._value(value) for value in call.arguments]
        if self._library and self.operator is aten.convolution_backward.default:
            args[1] = args[1].to_mkldnn()
        return args, {name: self._value(value) for name, value in call.options}

    def _value(self, value: object) -> Any:
        if isinstance(value, TensorSpec):
            return tensor_of(value, self._device)
        if isinstance(value, tuple):
            return [self._value(part) for part in value]
        if isinstance(value, torch.device):
            return self._device
        return value


def operator_of(name: str) -> torch._ops.OpOverload:
    """The operator of a name such as ``aten.convolution.default``.

    Raises:
        LookupError: there is none.
    """
    at: Any = torch.ops
    for part in name.split("."):
        try:
            at = getattr(at, part)
        except AttributeError:
            raise LookupError(f"this torch has no operator {name}") from None
    if not isinstance(at, torch._ops.OpOverload):
        raise LookupError(f"{name} names no overload of an operator")
    return at


def tensor_of(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """A tensor of this form, with values that no kernel takes a short or a long way for."""
    steps = zip(spec.shape, spec.strides, strict=True)
    extent = 0 if 0 in spec.shape else 1 + sum((n - 1) * stride for n, stride in steps)
    flat = torch.empty(extent, dtype=spec.dtype, device=device)
    _fill(flat)
    return flat.as_strided(spec.shape, spec.strides)


def _fill(flat: torch.Tensor) -> None:
    if flat.is_floating_point() or flat.is_complex():
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        real.fill_(0.5)
    else:
        flat.zero_()  # also a valid index, and a valid class


def _fill_all(operands: object) -> None:
    if isinstance(operands, torch.Tensor):
        if operands.layout == torch.strided and operands.is_floating_point():
            operands.as_strided((_extent(operands),), (1,)).fill_(0.5)
    elif isinstance(operands, (list, tuple)):
        for part in operands:
            _fill_all(part)
    elif isinstance(operands, dict):
        _fill_all(list(operands.values()))


def _extent(x: torch.Tensor) -> int:
    return 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
