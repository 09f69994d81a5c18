"""Pointwise operators: the allow-list, and their one rule."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import log_once
from hyperslab.errors import LayoutError
from hyperslab.ops.common.forms import Operator, forms_of
from hyperslab.ops.common.operands import (
    check_writable,
    common_partition,
    operand_block,
)
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import refuse

POINTWISE = """
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
arctanh asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp
clamp_max clamp_min clip complex copysign cos cosh deg2rad digamma div divide eq erf erfc erfinv exp
exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac ge greater greater_equal gt
hypot isclose isfinite isinf isnan isneginf isposinf isreal le lerp less less_equal lgamma
log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
masked_fill maximum minimum mul multiply nan_to_num ne neg negative nextafter not_equal polar
positive pow rad2deg reciprocal relu remainder round rrelu rsqrt rsub selu sgn sigmoid sign signbit
sin sinc sinh sqrt square sub subtract tan tanh true_divide trunc where xlogy
threshold elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 silu
softplus softshrink softsign tanhshrink
clone detach ones_like zeros_like full_like
""".split()
"""Names looked up in torch, torch.Tensor and torch.nn.functional, also as ``name_`` in place."""

POINTWISE_METHODS = """
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__
__rtruediv__ __itruediv__ __rdiv__ __idiv__ __div__ __floordiv__ __rfloordiv__ __ifloordiv__
__mod__ __rmod__ __imod__ __pow__ __rpow__ __ipow__ __neg__ __pos__ __abs__ __invert__ __and__
__rand__ __iand__ __or__ __ror__ __ior__ __xor__ __rxor__ __ixor__ __eq__ __ne__ __lt__ __le__
__gt__ __ge__ bfloat16 bool byte char copy_ cpu cuda double fill_ float half int long
short zero_
""".split()
"""Names looked up in torch.Tensor only."""

MAY_ALIAS = """
detach positive __pos__ bfloat16 bool byte char cpu cuda double float half int long short
""".split()
"""Those whose result may show the operand's own memory."""

OUT_OF_PLACE = {
    form: f"__{name}__" if form.startswith("__") else name
    for name in ("add", "sub", "mul")
    for form in (f"{name}_", f"__i{name}__")
}
"""Operators in place, and those that return a new tensor."""

RANDOM_IN_TRAINING = (F.rrelu, torch.rrelu, torch.rrelu_)


def apply_pointwise(
    function: Operator, args: Iterable[object], kwargs: Mapping[str, object]
) -> Any:
    """Run a pointwise operator on blocks; its operands are broadcast by their global shapes.

    Distribution scheme: 1. the common partition follows from the cut operands, 2. a `Sharded`
    that is cut otherwise is redistributed, of an ordinary tensor (equal on all ranks) this rank's
    part is taken, 3. the operator runs on the blocks. In place, the first operand keeps its cut; an
    ordinary one is changed by operands that are not cut, of which every rank has all.
    """
    args = tuple(args)
    operands = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    like = next(v for v in operands if isinstance(v, Sharded))
    target = common_partition(operands, function)
    in_place = bool(kwargs.get("inplace")) or _is_in_place(function)
    first = args[0]
    ordinary = isinstance(first, torch.Tensor) and not isinstance(first, Sharded)
    if in_place and ordinary and not target.axes:
        return _changed(function, args, kwargs)
    if in_place and (args[0] is not like or like.partition.shape != target.shape):
        raise LayoutError(
            f"{function.__name__} in place would change the cut of its first operand; "
            "use the operator that returns a new tensor"
        )
    if in_place:
        check_writable(like, function.__name__)
        more = [axis for axis in target.axes if axis not in like.partition.axes]
        if more:
            log_once(
                like.grid,
                f"{function.__name__} in place: {like.partition} stays as it is; other operands "
                f"are gathered along {', '.join(more)}, its ranks repeat the work from here on",
            )
        target = like.partition
        real = not any(value.is_complex() for value in operands)
        if real and like.replaceable and function.__name__ in OUT_OF_PLACE:
            function = getattr(torch.Tensor, OUT_OF_PLACE[function.__name__])
            return _replaced(like, function, args, kwargs)
    local = partial(operand_block, target=target, like=like)
    blocks = [like.block if in_place and value is like else local(value) for value in args]
    result = function(*blocks, **{key: local(value) for key, value in kwargs.items()})
    if not isinstance(result, torch.Tensor):  # torch.where(condition) lists indices
        raise refuse(function, args, kwargs)
    if in_place:
        like.note_change()
        return like
    reordered = any(value.reordered for value in operands if isinstance(value, Sharded))
    fresh = function.__name__ not in MAY_ALIAS
    return like.like(result, target, reordered=reordered, fresh=fresh)


def _changed(function: Operator, args: Iterable[object], kwargs: Mapping[str, object]) -> Any:
    """An ordinary tensor, changed in place by operands of which every rank holds all."""

    def whole(value: object) -> object:
        return value.block if isinstance(value, Sharded) else value

    return function(*map(whole, args), **{key: whole(value) for key, value in kwargs.items()})


def _replaced(
    x: Sharded, function: Operator, args: Sequence[object], kwargs: Mapping[str, object]
) -> Sharded:
    """``x``, changed: a new block instead of a write into the old one."""
    local = partial(operand_block, target=x.partition, like=x)
    result = function(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    x.become(result.to(x.dtype))
    return x


def _is_in_place(function: Operator) -> bool:
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") and name != "__invert__"
    return name.endswith("_")


def _rule(function: Operator) -> Operator:
    last = _inplace_position(function)
    random = function in RANDOM_IN_TRAINING

    def rule(*args: object, **kwargs: object) -> Sharded:
        """Block by block; operands are broadcast by global shape, ordinary ones are shared."""
        if random and kwargs.get("training", len(args) > 3 and args[3]):
            raise LayoutError(
                "rrelu draws random slopes in training, which has no rule; use leaky_relu"
            )
        if len(args) > last:  # modules pass it by position
            kwargs["inplace"] = args[last]
            args = args[:last]
        return apply_pointwise(function, args, kwargs)

    return rule


def _inplace_position(function: Operator) -> int:
    """Where the option ``inplace`` stands among the arguments; far away if there is none."""
    try:
        return list(inspect.signature(function).parameters).index("inplace")
    except ValueError:
        return sys.maxsize


@register(torch.Tensor.to, torch.Tensor.type_as, family="elementwise", merged=True)
def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """To another dtype, device or memory format, or to those of another tensor."""
    other = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
    if other is not None:
        args = (other.device, other.dtype)
        kwargs = {}
    if not isinstance(self, Sharded):
        return self.to(*args, **kwargs)
    return self.like(self.block.to(*args, **kwargs))


@register(torch.Tensor.type, family="elementwise", merged=True)
def to_type(
    self: Sharded, dtype: torch.dtype | str | None = None, non_blocking: bool = False
) -> Sharded | str:
    """To another dtype, as ``to``; without one the name of the block's type."""
    if dtype is None:
        return self.block.type()
    return self.like(self.block.type(dtype, non_blocking))


@register(torch.Tensor.contiguous, family="elementwise", merged=True)
def contiguous(
    self: Sharded, memory_format: torch.memory_format = torch.contiguous_format
) -> Sharded:
    """Of the block; a copy where the whole is not contiguous, also if this block is."""
    block = self.local
    plain = torch.empty(block.shape, device="meta", memory_format=memory_format)
    strides = zip(self.shape, block.stride(), plain.stride(), strict=True)
    # Torch takes any stride of an extent of 1, which a dim may have on some ranks only.
    single = [c for c in self.partition.cuts if c and min(b - a for a, b in c.intervals) < 2]
    unclear = self.is_crop or len(single) > (memory_format is torch.contiguous_format)
    if not unclear and all(a == b for extent, a, b in strides if extent > 1):
        return self.like(block.contiguous(memory_format=memory_format))
    y = self.like(block.clone(memory_format=memory_format))
    if unclear:
        y.mark_as_copy(self)
    return y


def _register_all() -> None:
    for name in POINTWISE:
        for function in (*forms_of(name), *forms_of(f"{name}_")):
            register(function, family="elementwise", merged=True)(_rule(function))
    for name in POINTWISE_METHODS:
        method = getattr(torch.Tensor, name, None)
        if callable(method):
            register(method, family="elementwise", merged=True)(_rule(method))


_register_all()
