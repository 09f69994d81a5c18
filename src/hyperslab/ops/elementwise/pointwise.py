"""Distributes pointwise operators: an allow-list with one rule, and those with one of their own.

In reading order: the allow-list and its rule; ReLU and leaky ReLU, which join a fused epilogue
where they can; activations that know one dim from another; differences of neighbours along
dims, and the place of values among boundaries.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import log_once
from hyperslab.errors import LayoutError
from hyperslab.ops.fusion import FusedEpilogue, begin_epilogue, epilogue_result
from hyperslab.ops.operands import check_uncut, check_writable, common_partition, operand_block
from hyperslab.ops.overloads import Operator, overloads_of
from hyperslab.ops.views.concat import concatenate
from hyperslab.ops.views.slicing import Span, crop
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import read_dims, refuse

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
"""Lists names looked up in torch, torch.Tensor and torch.nn.functional, with ``name_`` in place."""

POINTWISE_METHODS = """
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__
__rtruediv__ __itruediv__ __rdiv__ __idiv__ __div__ __floordiv__ __rfloordiv__ __ifloordiv__
__mod__ __rmod__ __imod__ __pow__ __rpow__ __ipow__ __neg__ __pos__ __abs__ __invert__ __and__
__rand__ __iand__ __or__ __ror__ __ior__ __xor__ __rxor__ __ixor__ __eq__ __ne__ __lt__ __le__
__gt__ __ge__ bfloat16 bool byte char copy_ cpu cuda double fill_ float half int long
short zero_
""".split()
"""Lists names looked up in torch.Tensor only."""

MAY_ALIAS = """
detach positive __pos__ bfloat16 bool byte char cpu cuda double float half int long short
""".split()
"""Lists operators whose result may share the operand's memory."""

OUT_OF_PLACE = {
    form: f"__{name}__" if form.startswith("__") else name
    for name in ("add", "sub", "mul")
    for form in (f"{name}_", f"__i{name}__")
}
"""Maps operators in place to those that return a new tensor."""

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
        return _changed_in_place(function, args, kwargs)
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


def _changed_in_place(
    function: Operator, args: Iterable[object], kwargs: Mapping[str, object]
) -> Any:
    """Changes an ordinary tensor in place by operands that every rank holds whole."""

    def whole(value: object) -> object:
        return value.block if isinstance(value, Sharded) else value

    return function(*map(whole, args), **{key: whole(value) for key, value in kwargs.items()})


def _replaced(
    x: Sharded, function: Operator, args: Sequence[object], kwargs: Mapping[str, object]
) -> Sharded:
    """Changes ``x`` by giving it a new block, instead of writing into the old one."""
    local = partial(operand_block, target=x.partition, like=x)
    result = function(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    x.replace_storage(result.to(x.dtype))
    return x


def _is_in_place(function: Operator) -> bool:
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") and name != "__invert__"
    return name.endswith("_")


def _pointwise_rule(function: Operator) -> Operator:
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
    """Finds the position of the argument ``inplace``; far away if there is none."""
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
        for function in (*overloads_of(name), *overloads_of(f"{name}_")):
            register(function, family="elementwise", merged=True)(_pointwise_rule(function))
    for name in POINTWISE_METHODS:
        method = getattr(torch.Tensor, name, None)
        if callable(method):
            register(method, family="elementwise", merged=True)(_pointwise_rule(method))


_register_all()


@register(F.relu, torch.relu, torch.Tensor.relu, family="elementwise", lazy=True, merged=True)
def relu(input: Sharded, inplace: bool = False) -> Sharded:
    """Block by block; in one pass with a normalisation before and a pooling after it."""
    if _joined_in_place(input, 0.0, inplace):
        return input
    chain = None if inplace else _with_activation(input, 0.0)
    if chain is None:
        input.force()
        return apply_pointwise(F.relu, (input,), {"inplace": inplace})
    return epilogue_result(chain, input, input.partition)


@register(F.leaky_relu, family="elementwise", lazy=True, merged=True)
def leaky_relu(input: Sharded, negative_slope: float = 0.01, inplace: bool = False) -> Sharded:
    """Block by block; in one pass with a normalisation before and a pooling after it."""
    slope = float(negative_slope)
    if _joined_in_place(input, slope, inplace):
        return input
    chain = None if inplace else _with_activation(input, slope)
    if chain is None:
        input.force()
        options = {"negative_slope": negative_slope, "inplace": inplace}
        return apply_pointwise(F.leaky_relu, (input,), options)
    return epilogue_result(chain, input, input.partition)


def _with_activation(x: Sharded, slope: float) -> FusedEpilogue | None:
    """Appends this activation to the deferred epilogue of ``x``, where it can be deferred."""
    if isinstance(x.pending, FusedEpilogue) and (
        x.pending.links.slope != 1 or x.pending.links.pool
    ):
        x.force()
    chain = begin_epilogue(x) if x.private and torch.is_grad_enabled() and slope >= 0 else None
    if chain is None or slope == 1:
        return None
    return chain.linked(chain.links.activated(slope))


def _joined_in_place(x: Sharded, slope: float, inplace: bool) -> bool:
    """Tries to defer an activation in place; returns whether ``x`` has become its result."""
    if not inplace or slope < 0 or slope == 1 or not torch.is_grad_enabled():
        return False
    x.force_readers()
    pending = x.pending
    if isinstance(pending, FusedEpilogue) and pending.links.slope == 1 and not pending.links.pool:
        x.extend(pending.linked(pending.links.activated(slope)))
        return True
    if not x.replaceable:
        return False
    source = x.like(x.block, fresh=True)
    chain = begin_epilogue(source)
    if chain is None:
        return False
    x.put_off_in_place(chain.linked(chain.links.activated(slope)))
    return True


@register(F.prelu, torch.prelu, torch.Tensor.prelu, family="elementwise")
def prelu(input: torch.Tensor, weight: torch.Tensor) -> Sharded:
    """One slope or one for each channel, which are not cut."""
    if not isinstance(input, Sharded) or isinstance(weight, Sharded):
        raise LayoutError("prelu: the input is cut, the slopes are an ordinary tensor")
    if weight.numel() != 1 and input.dim() > 1 and input.partition.cuts[1] is not None:
        raise LayoutError(
            f"prelu takes dim 1 for the channels, but it is cut: {input.partition}\n"
            "    use hyperslab.gather(x, axes) before it"
        )
    return input.like(torch.prelu(input.block, weight), fresh=True)


@register(F.glu, family="elementwise", dims=["dim"])
def glu(input: Sharded, dim: int = -1) -> Sharded:
    """Halves of a dim that is not cut; otherwise refused."""
    check_uncut(input, (dim,), "glu needs all of")
    block = F.glu(input.block, dim)
    return input.like(block, input.partition.with_dim(dim, block.shape[dim], None))


@register(torch.diff, torch.Tensor.diff, family="elementwise", dims=["dim"])
def diff(
    input: torch.Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: torch.Tensor | None = None,
    append: torch.Tensor | None = None,
) -> Sharded:
    """Along any dim; along a cut dim each rank fetches the neighbour's plane.

    Distribution scheme: ``n`` times 1. the elements without the last one, and without the first
    one, as two crops that are aligned, 2. their difference, block by block.
    """
    if n == 0 and isinstance(input, Sharded):  # torch leaves out what would come beside it
        return input.like(input.local.clone())
    parts = [part for part in (prepend, input, append) if part is not None]
    x = input if len(parts) == 1 else concatenate(parts, dim, "diff")
    if not isinstance(x, Sharded):
        raise LayoutError("diff: the input is cut, or what is put before or behind it")
    subtract = torch.logical_xor if x.dtype == torch.bool else torch.sub
    for _ in range(n):
        last = max(0, x.shape[dim] - 1)
        before, after = (crop(x, {dim: Span(min(at, last), last)}) for at in (0, 1))
        x = apply_pointwise(subtract, (after, before), {})
    return x


@register(torch.gradient, family="elementwise")
def gradient(
    input: Sharded,
    *,
    spacing: float | Sequence[float] = 1.0,
    dim: int | Sequence[int] | None = None,
    edge_order: int = 1,
) -> tuple[Sharded, ...]:
    """Along any dims, at equal distances; along a cut dim ranks exchange planes."""
    given = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = read_dims(given, input.dim(), "gradient")
    distances = _distances(spacing, len(dims))
    if edge_order not in (1, 2):
        raise ValueError(f"gradient: edge_order is 1 or 2, not {edge_order}")
    if len(set(dims)) < len(dims) or any(input.shape[d] <= edge_order for d in dims):
        raise ValueError(
            f"gradient along the dims {dims} of {input.partition}: each of them once, and with "
            f"more than {edge_order} elements"
        )
    if input.dtype in (torch.bool, torch.uint8):
        raise ValueError(f"gradient of {input.dtype}")
    return tuple(_slope(input, d, h, edge_order) for d, h in zip(dims, distances, strict=True))


def _distances(spacing: float | Sequence[float], count: int) -> list[float]:
    """Returns the distance of neighbours along each of ``count`` dims."""
    numbers = list(spacing) if isinstance(spacing, Sequence) else [spacing] * count
    if any(isinstance(number, torch.Tensor) for number in (spacing, *numbers)):
        raise LayoutError(
            "gradient of a cut tensor knows equal distances only: spacing is a number for each dim"
        )
    if len(numbers) != count:
        raise ValueError(f"gradient: {len(numbers)} distances for {count} dims")
    return numbers


def _slope(x: Sharded, dim: int, distance: float, order: int) -> Sharded:
    """Computes central differences, one-sided ones of ``order`` at both ends; rounds like torch."""
    count = x.shape[dim]

    def part(start: int, length: int = 1) -> Sharded:
        return crop(x, {dim: Span(start, length)})

    def over(y: Sharded, number: float) -> Sharded:
        return apply_pointwise(torch.div, (y, number), {})

    if order == 1:
        begin = apply_pointwise(torch.sub, (part(1), part(0)), {})
        end = apply_pointwise(torch.sub, (part(count - 1), part(count - 2)), {})
    else:
        begin = _weighted_sum([(-1.5, part(0)), (2.0, part(1)), (-0.5, part(2))])
        end = _weighted_sum(
            [(0.5, part(count - 3)), (-2.0, part(count - 2)), (1.5, part(count - 1))]
        )
    inner = []
    if count > 2:
        across = apply_pointwise(torch.sub, (part(2, count - 2), part(0, count - 2)), {})
        inner = [over(over(across, distance), 2)]
    return concatenate([over(begin, distance), *inner, over(end, distance)], dim, "gradient")


def _weighted_sum(terms: Sequence[tuple[float, Sharded]]) -> Sharded:
    products = (apply_pointwise(torch.mul, (x, weight), {}) for weight, x in terms)
    return functools.reduce(lambda a, b: apply_pointwise(torch.add, (a, b), {}), products)


@register(torch.bucketize, family="elementwise")
def bucketize(
    input: Sharded, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> Sharded:
    """Block by block; the boundaries are an ordinary tensor."""
    if isinstance(boundaries, Sharded) or not isinstance(input, Sharded):
        raise LayoutError("bucketize: the input is cut, the boundaries are an ordinary tensor")
    return input.like(torch.bucketize(input.local, boundaries, out_int32=out_int32, right=right))
