"""Distributes elementwise operators: pointwise ones, activations, dropout, creation of tensors.

In reading order: the allow-list of pointwise operators and its one rule; ReLU and leaky ReLU,
which join a fused epilogue where they can; activations that know one dim from another;
differences of neighbours along dims, and the place of values among boundaries. Then random
numbers that do not depend on the grid: dropout, whose mask is torch's own where it is small, and
a hash of a seed and the global index for a volume; creation of tensors from a cut one
(new_zeros, rand_like and their kin); numbers that are written into a tensor, or drawn by its
probabilities; dropout for networks of SELUs (Klambauer et al. 2017).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import sys
import types
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from hyperslab.comm import Grid, fetch, log_once, per_grid, plan_exchange
from hyperslab.errors import CommError, LayoutError
from hyperslab.geometry import Cover, Cut, Partition
from hyperslab.kernels.random_bits import draw_seed, least_kept, scale_of, uniform_bits
from hyperslab.kernels.registry import device_kind
from hyperslab.ops.fusion import FusedEpilogue, begin_epilogue, epilogue_result, is_launch_bound
from hyperslab.ops.operands import (
    check_cut,
    check_only_reference_of_part,
    check_writable,
    common_partition,
    operand_block,
    turn_into_cut,
    whole_of,
    without_empty_shards,
)
from hyperslab.ops.overloads import Integers, Operator, integers, overloads_of, register_each
from hyperslab.ops.placement import check_unbatched, with_whole
from hyperslab.ops.views import Span, concatenate, crop
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.attributes import lies_as_whole
from hyperslab.tensor.deferred import python_looks, wrap_while_cut
from hyperslab.tensor.dispatch import describe, gather_first, read_dims
from hyperslab.util.capture import do_beside
from hyperslab.util.derivatives import LinearMap
from hyperslab.util.torch_internals import (
    BlockFunction,
    DisableTorchFunctionSubclass,
    EnableTorchFunction,
    base_of_view,
    keep_known,
)

POINTWISE = """
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
bitwise_right_shift bitwise_xor ceil celu clamp
clamp_max clamp_min clip complex copysign cos cosh deg2rad digamma div divide eq erf erfc erfinv exp
exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac ge greater greater_equal gt
hypot isclose isfinite isinf isnan isneginf isposinf isreal le lerp less less_equal lgamma
log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
masked_fill maximum minimum mul multiply nan_to_num ne neg negative nextafter not_equal polar
positive pow rad2deg reciprocal relu remainder round rrelu rsqrt rsub selu sgn sigmoid sign signbit
sin sinc sinh sqrt square sub subtract tan tanh true_divide trunc where xlogy
threshold elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 silu
softplus softshrink softsign tanhshrink
clone detach ones_like full_like
conj_physical gcd i0 igamma igammac lcm ldexp mvlgamma polygamma
airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx expit gammainc gammaincc gammaln i0e i1
i1e log_ndtr modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
multigammaln ndtr ndtri psi scaled_modified_bessel_k0 scaled_modified_bessel_k1
spherical_bessel_j0 xlog1py zeta
chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
shifted_chebyshev_polynomial_w
""".split()
"""Lists names in torch, torch.Tensor, torch.nn.functional and torch.special, also ``name_``."""

POINTWISE_METHODS = """
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__
__rtruediv__ __itruediv__ __rdiv__ __idiv__ __div__ __floordiv__ __rfloordiv__ __ifloordiv__
__mod__ __rmod__ __imod__ __pow__ __rpow__ __ipow__ __neg__ __pos__ __abs__ __invert__ __and__
__rand__ __iand__ __or__ __ror__ __ior__ __xor__ __rxor__ __ixor__ __lshift__ __rlshift__
__ilshift__ __rshift__ __rrshift__ __irshift__ __eq__ __ne__ __lt__ __le__
__gt__ __ge__ bfloat16 bool byte cdouble cfloat char copy_ cpu cuda double fill_ float half
int long short zero_
""".split()
"""Lists names looked up in torch.Tensor only."""

MAY_ALIAS = """
detach conj_physical positive __pos__ bfloat16 bool byte cdouble cfloat char cpu cuda double float
half int long short
""".split()
"""Lists operators whose result may share the operand's memory; torch makes most return it."""

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

    Distribution scheme: 1. derive the common partition from the cut operands, 2. redistribute a
    `Sharded` that is cut otherwise, and take this rank's part of an ordinary tensor (equal on all
    ranks), 3. run the operator on the blocks. In place, the first operand keeps its cut; an
    ordinary one can be changed by operands that are not cut, because every rank has all of them.
    """
    args = tuple(args)
    operands = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    like = next(v for v in operands if isinstance(v, Sharded))
    target = common_partition(operands, function)
    first = args[0] if args else kwargs.get("input")
    in_place = bool(kwargs.get("inplace")) or _is_in_place(function)
    unwrapped = False
    if in_place and isinstance(first, torch.Tensor) and not isinstance(first, Sharded):
        base = base_of_view(first)
        if target.axes and base is not None and first.shape == target.shape:
            _turn_part_into_cut(first, base, target, like, function.__name__)
            return apply_pointwise(function, args, kwargs)
        unwrapped = not target.axes  # every rank changes its copy alike
    in_place = in_place and not unwrapped
    replaced = False
    written_back = False
    if in_place and (first is not like or like.partition.shape != target.shape):
        part = isinstance(first, torch.Tensor) and first.is_inference()
        hint = "\n    a part of zeros needs torch.no_grad() in place of torch.inference_mode()"
        raise LayoutError(
            f"{function.__name__} in place would change the cut of its first operand; "
            f"use the operator that returns a new tensor{hint if part else ''}\n"
            f"{describe(operands)}"
        )
    if in_place:
        written_back = like.knows_its_place
        if written_back:
            like.begin_change_of_copy()
        else:
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
            # A new block takes the place of the old one, which nothing then writes into.
            function = getattr(torch.Tensor, OUT_OF_PLACE[function.__name__])
            replaced = True
    # What changes a view copies the whole gradient for it, in another order.
    changes_itself = in_place and not replaced and like.is_its_block and not python_looks()

    def local(value: object) -> object:
        if changes_itself and value is like:
            return value
        return operand_block(value, target=target, like=like)

    with DisableTorchFunctionSubclass() if changes_itself else nullcontext():
        result = function(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    if replaced:
        like.replace_storage(result.to(like.dtype))
        if written_back:
            like.end_change_of_copy()
        return like
    if unwrapped:
        return result
    if not isinstance(result, torch.Tensor):  # torch.where(condition) lists indices
        with EnableTorchFunction():  # or torch would ask for no rule inside of one
            return like.nonzero(as_tuple=True)
    if in_place:
        like.note_change()
        if written_back:
            like.end_change_of_copy()
        return like
    reordered = any(value.reordered for value in operands if isinstance(value, Sharded))
    if kwargs.get("requires_grad"):  # of zeros_like and its kin: the cut tensor is to be the leaf
        y = like.like(result.detach(), target, reordered=reordered, fresh=True)
        return torch.Tensor.requires_grad_(y)
    return like.like(result, target, reordered=reordered, fresh=True)


def _turn_part_into_cut(
    x: torch.Tensor, base: torch.Tensor, target: Partition, like: Sharded, name: str
) -> None:
    """Turn an ordinary tensor of which cut values change a part in place into a cut one.

    Along the same axes, as by `sums[:, :, 4:8] += y`: a dim all of which is changed is cut as the
    values are, others in balanced shards.
    """
    spans = check_only_reference_of_part(x, base, like, name)
    cuts: list[Cut | None] = []
    for cut, extent in zip(target.cuts, base.shape, strict=True):
        new = cut if cut is None or cut.extent == extent else cut.rebalanced(extent)
        cuts.append(None if new is None or new.thin else new)
    whole = turn_into_cut(base, Partition(tuple(base.shape), tuple(cuts)), like)
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        part = whole[tuple(slice(lo, hi) for lo, hi in spans)]
    cast(Sharded, part).take_place_of_view(x)


def _is_in_place(function: Operator) -> bool:
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") and name != "__invert__"
    return name.endswith("_")


def _pointwise_rule(function: Operator) -> Operator:
    last = _inplace_position(function)
    random = function in RANDOM_IN_TRAINING
    aliases = function.__name__ in MAY_ALIAS
    quick = not random and not _is_in_place(function)
    written_in_c = not isinstance(function, types.FunctionType)

    def rule(*args: Any, **kwargs: Any) -> Sharded:
        """Runs block by block; operands are broadcast by global shape, ordinary ones are shared."""
        if aliases:
            return _alias_of(function, *args, **kwargs)
        if quick and len(args) <= last and not (kwargs and _ask_for_more(kwargs)):
            found = _applied_to_alike(function, args, kwargs, written_in_c)
            if found is not None:
                return found
        if random and kwargs.get("training", len(args) > 3 and args[3]):
            raise LayoutError(
                "rrelu draws random slopes in training, which has no rule; use leaky_relu"
            )
        if len(args) > last:  # modules pass it by position
            kwargs["inplace"] = args[last]
            args = args[:last]
        return apply_pointwise(function, args, kwargs)

    return rule


def _ask_for_more(options: Mapping[str, object]) -> bool:
    """Tell whether options have operands among them, or change what becomes of the result."""
    if options.get("inplace") or options.get("requires_grad"):
        return True
    return any(isinstance(value, torch.Tensor) for value in options.values())


def _applied_to_alike(
    function: Operator, args: Sequence[object], options: Mapping[str, object], written_in_c: bool
) -> Sharded | None:
    """Run an operator that makes a new tensor, on operands that are cut alike nearly always.

    As `apply_pointwise` would, which asks more of its operands than that takes. None for operators
    that make no new tensor.
    """
    like: Sharded | None = None
    reordered = False
    blocks: list[object] = []
    as_they_are = written_in_c and not python_looks()
    for value in args:
        kind = type(value)
        if isinstance(value, Sharded):
            if like is None:
                like = value
            elif value._partition is not like._partition:
                return _applied_to_aligned(function, args, options)
            reordered = reordered or value.reordered
            blocks.append(value if as_they_are and value.is_its_block else value.block)
        elif kind is float or kind is int or kind is bool:
            blocks.append(value)
        else:
            return _applied_to_aligned(function, args, options)
    result = None if like is None else function(*blocks, **options)
    if like is None or type(result) is not torch.Tensor:
        return None
    return like.like(result, fresh=True, reordered=reordered)


def _applied_to_aligned(
    function: Operator, args: Sequence[object], options: Mapping[str, object]
) -> Sharded | None:
    """Run it on operands of any cuts, ordinary ones too."""
    operands = [value for value in args if isinstance(value, torch.Tensor)]
    cut = [value for value in operands if isinstance(value, Sharded)]
    if not cut:
        return None
    target = common_partition(operands, function)
    blocks = [operand_block(value, target=target, like=cut[0]) for value in args]
    result = function(*blocks, **options)
    if type(result) is not torch.Tensor:
        return None
    reordered = any(value.reordered for value in cut)
    return cut[0].like(result, target, fresh=True, reordered=reordered)


def _alias_of(function: Operator, input: Sharded, *args: Any, **kwargs: Any) -> Sharded:
    """Run an operator of one operand that it returns, or a view, where nothing has to change."""
    formats = (None, torch.preserve_format)
    serial = function.__name__ == "detach" or kwargs.get("memory_format") not in formats
    # Of one order with its view, or as torch compares it.
    block = input.local if serial else input.block
    result = function(block, *args, **kwargs)
    return input if result is block else input.like(result)


def _inplace_position(function: Operator) -> int:
    """Finds the position of the argument ``inplace``; far away if there is none."""
    try:
        return list(inspect.signature(function).parameters).index("inplace")
    except ValueError:
        return sys.maxsize


@register(torch.Tensor.to, torch.Tensor.type_as, merged=True)
def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Converts to another dtype, device or memory format, or to those of another tensor."""
    other = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
    if other is not None:
        args = (other.device, other.dtype, *args[1:])
        kwargs = {name: value for name, value in kwargs.items() if value is not other}
    if not isinstance(self, Sharded):
        return self.to(*args, **kwargs)
    return _alias_of(torch.Tensor.to, self, *args, **kwargs)


@functools.cache
def _converting_cut_tensors(original: Operator) -> Operator:
    """Wraps a function that asks no ``__torch_function__``: it would return the block alone."""

    # Torch 2.11 detaches what `asarray` gets; later ones do not, and warn of the change.
    with warnings.catch_warnings(action="ignore"):
        attaches = original(torch.ones((), requires_grad=True)).requires_grad

    @functools.wraps(original)
    def run(*args: Any, **options: Any) -> Any:
        x = args[0] if args else options.get("data", options.get("obj"))
        if not isinstance(x, Sharded):
            return original(*args, **options)
        attached = options.pop("requires_grad", attaches)
        given = {name: v for name, v in options.items() if v is not None and v is not x}
        y = x.to(**given) if given else x
        return y if attached else y.detach()

    keep_known(run, original)
    return run


for _name in ("as_tensor", "asarray"):
    wrap_while_cut(torch, _name, _converting_cut_tensors)


def _copying_cut_tensors(original: Operator) -> Operator:
    """Wraps ``torch.tensor``, which would return a copy of the block alone."""

    @functools.wraps(original)
    def run(*args: Any, **options: Any) -> Any:
        x = args[0] if args else options.get("data")
        if not isinstance(x, Sharded):
            return original(*args, **options)
        trained = options.pop("requires_grad", False)
        given = {name: v for name, v in options.items() if v is not x and v not in (None, False)}
        return x.detach().clone().to(**given).requires_grad_(trained)

    keep_known(run, original)
    return run


wrap_while_cut(torch, "tensor", _copying_cut_tensors)


def _variable(original: Operator) -> Operator:
    """Wraps what programs of before torch 0.4 call: it would be the block alone."""

    @functools.wraps(original)
    def run(cls: type, *args: Any, **options: Any) -> Any:
        x = args[0] if args else options.get("data")
        if not isinstance(x, Sharded):
            return original(cls, *args, **options)
        trained = args[1] if len(args) > 1 else options.get("requires_grad", False)
        return x.detach().requires_grad_(trained)

    return run


wrap_while_cut(torch.autograd.Variable, "__new__", _variable)


@register(torch.Tensor.type, merged=True)
def to_type(
    self: Sharded, dtype: torch.dtype | str | None = None, non_blocking: bool = False
) -> Sharded | str:
    """Converts to another dtype, as ``to``; without one returns the name of the block's type."""
    if dtype is None:
        return self.block.type()
    return _alias_of(torch.Tensor.type, self, dtype, non_blocking)


@register(torch.Tensor.contiguous, merged=True)
def contiguous(
    self: Sharded, memory_format: torch.memory_format = torch.contiguous_format
) -> Sharded:
    """Copies the block if the whole is not contiguous, even if the block is."""
    known = lies_as_whole(self, memory_format)
    if known:
        block = self.local.contiguous(memory_format=memory_format)
        return self.like(block, consumed=True)
    y = self.like(self.local.clone(memory_format=memory_format))
    if known is None:
        y.mark_as_copy(self)
    return y


for _name in POINTWISE:
    for _form in (*overloads_of(_name), *overloads_of(f"{_name}_")):
        register(_form, merged=True)(_pointwise_rule(_form))
for _name in POINTWISE_METHODS:
    _method = getattr(torch.Tensor, _name, None)
    if callable(_method):
        register(_method, merged=True)(_pointwise_rule(_method))


@register(torch.detach_, torch.Tensor.detach_, merged=True)
def detach_(input: Sharded) -> Sharded:
    """Takes the tensor out of its graph; torch itself detaches no view in place."""
    input.replace_storage(input.block.detach())
    return input


_DATA: Any = torch.Tensor.data


@register(_DATA.__get__, merged=True)
def data(self: Sharded) -> Sharded:
    """Is ``detach``: autograd sees changes of it, unlike torch's, and refuses what they spoil."""
    return _alias_of(torch.Tensor.detach, self)


@register(torch.frexp, torch.Tensor.frexp, merged=True)
def frexp(input: Sharded) -> Any:
    """Runs block by block; returns mantissas and exponents."""
    mantissa, exponent = torch.frexp(input.block)
    return torch.return_types.frexp((input.like(mantissa), input.like(exponent)))


@register(F.relu, torch.relu, torch.Tensor.relu, lazy=True, merged=True)
def relu(input: Sharded, inplace: bool = False) -> Sharded:
    """Runs block by block, in one pass with a normalisation before and a pooling after it."""
    return _activated(F.relu, input, 0.0, {"inplace": inplace})


@register(F.leaky_relu, lazy=True, merged=True)
def leaky_relu(input: Sharded, negative_slope: float = 0.01, inplace: bool = False) -> Sharded:
    """Runs block by block, in one pass with a normalisation before and a pooling after it."""
    options = {"negative_slope": negative_slope, "inplace": inplace}
    return _activated(F.leaky_relu, input, float(negative_slope), options)


def _activated(operator: Operator, x: Sharded, slope: float, options: dict[str, Any]) -> Sharded:
    """Appends an activation to the deferred epilogue of ``x`` where it can be deferred."""
    pending = x.pending
    joins = isinstance(pending, FusedEpilogue) and pending.goes_on
    begins = torch.is_grad_enabled() and not is_launch_bound(x)
    # A slope of zero is not relu: it makes NaN of infinities.
    fuses = operator is F.relu or (slope > 0 and slope != 1)
    if fuses and (joins or begins):
        if options["inplace"]:
            if _joined_in_place(x, slope):
                return x
        elif x.private:
            if isinstance(pending, FusedEpilogue) and not pending.links.takes_activation:
                x.force()
            chain = begin_epilogue(x)
            if chain is not None:
                return epilogue_result(chain.linked(slope=slope), x, x.partition)
    x.force()
    if not options["inplace"]:
        return x.like(operator(x.native, **options), fresh=True)
    if x.replaceable:
        check_writable(x, operator.__name__)
        x.replace_storage(operator(x.block, **{**options, "inplace": False}))
        return x
    return apply_pointwise(operator, (x,), options)


def _joined_in_place(x: Sharded, slope: float) -> bool:
    x.force_readers()
    pending = x.pending
    if isinstance(pending, FusedEpilogue) and pending.goes_on and pending.links.takes_activation:
        x.extend(pending.linked(slope=slope))
        return True
    if not x.replaceable:
        return False
    source = x.like(x.block, fresh=True)
    chain = begin_epilogue(source)
    if chain is None:
        return False
    x.put_off_in_place(chain.linked(slope=slope))
    return True


@register(F.prelu, torch.prelu, torch.Tensor.prelu)
def prelu(input: torch.Tensor, weight: torch.Tensor) -> Sharded:
    """Takes one slope, or one for each channel; channels become whole if they are cut."""
    x = check_cut("prelu", input, weight)
    if weight.numel() != 1 and x.dim() > 1:
        x = with_whole(x, (1,), "prelu")
    run = _PReLU.apply if device_kind(x) == "cpu" else torch.prelu
    return x.like(run(x.block, weight), fresh=True)


class _PReLU(BlockFunction):
    """Computes PReLU, and its gradients by operators that take a processor's wide registers.

    Torch's own backward pass goes number by number (2.13).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.prelu(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # torch's second derivative at zero is that of another first
            needs = ctx.needs_input_grad
            operands = [t.view_as(t) for t in ctx.saved_tensors]  # without the hooks of these
            inputs = [t for t, needed in zip(operands, needs, strict=True) if needed]
            y = torch.prelu(*operands)
            found = iter(torch.autograd.grad(y, inputs, gradient, create_graph=True))
            return tuple(next(found) if needed else None for needed in needs)
        x, weight = (saved.to(gradient.dtype) for saved in ctx.saved_tensors)
        one = weight.numel() == 1
        slopes = weight.reshape(() if one else (-1, *[1] * (x.dim() - 2)))
        side = x.sign()  # 0 of what is no number, as torch takes the slope there
        above = torch.ops.aten.threshold_backward(gradient, side, 0)
        below = torch.ops.aten.threshold_backward(gradient, -side, -0.5)
        dx = torch.addcmul(above, below, slopes)
        return dx, (below * x.clamp(max=0)).sum_to_size(slopes.shape).view_as(weight)


@register(F.glu, dims=["dim"])
def glu(input: Sharded, dim: int = -1) -> Sharded:
    """Splits a dim in halves; the dim becomes whole if it is cut."""
    input = with_whole(input, (dim,), "glu")
    block = F.glu(input.block, dim)
    return input.like(block, input.partition.with_dim(dim, block.shape[dim], None))


@register(torch.diff, torch.Tensor.diff, dims=["dim"])
def diff(
    input: torch.Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: torch.Tensor | None = None,
    append: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs along any dim; along a cut dim each rank fetches the neighbour's plane.

    Distribution scheme: ``n`` times 1. crop the tensor to all elements but the last, and to all but
    the first, which gives two aligned tensors, 2. subtract them block by block.
    """
    if n < 0:
        raise RuntimeError(f"diff: order must be non-negative but got {n}")
    if n == 0:  # torch leaves out what would come beside it
        return input.like(input.local.clone()) if isinstance(input, Sharded) else input.clone()
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


@register(torch.gradient)
def gradient(
    input: Sharded,
    *,
    spacing: float | Sequence[float] = 1.0,
    dim: int | Sequence[int] | None = None,
    edge_order: int = 1,
) -> tuple[Sharded, ...]:
    """Runs along any dims, at equal distances; along a cut dim ranks exchange planes.

    Distribution scheme: for each dim 1. fetch as many planes of the neighbours as one-sided
    differences take, ``edge_order``, 2. run torch's own operator on the block with them.
    """
    given = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = read_dims(given, input.dim(), "gradient")
    distances = list(spacing) if isinstance(spacing, Sequence) else [spacing] * len(dims)
    if any(isinstance(distance, torch.Tensor) for distance in (spacing, *distances)):
        raise LayoutError(
            "gradient of a cut tensor knows equal distances only: spacing is a number for each dim"
        )
    if len(distances) != len(dims):
        raise ValueError(f"gradient: {len(distances)} distances for {len(dims)} dims")
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


def _slope(x: Sharded, dim: int, distance: float, order: int) -> Sharded:
    """Runs torch's own operator on a block with planes of its neighbours, and keeps its own."""
    x = without_empty_shards(x, (dim,))
    cover = x.partition.cover
    intervals = list(cover.intervals)
    intervals[dim] = tuple(
        (max(lo - order, 0), min(hi + order, x.shape[dim])) for lo, hi in intervals[dim]
    )
    plan = plan_exchange(x.partition, Cover(cover.axes, tuple(intervals)), x.grid)
    block = fetch(x.block, plan, what="the planes of a gradient")
    (slope,) = torch.gradient(block, spacing=distance, dim=dim, edge_order=order)
    lo, hi = x.box.interval(dim)
    return x.like(slope.narrow(dim, lo - plan.wanted.lo[dim], hi - lo), fresh=True)


@register_each(
    {
        torch.bucketize: "Runs block by block; the boundaries are an ordinary tensor.",
        torch.isin: "Runs block by block; "
        "the values that are looked for are an ordinary tensor or a number.",
        torch.fake_quantize_per_tensor_affine: "Runs block by block; "
        "scale and zero point are numbers or ordinary tensors.",
    }
)
def with_ordinary(operator: Operator, *given: Any, **named: Any) -> Sharded:
    """Runs block by block; all operands but the first are ordinary."""
    names = [name for name in ("input", "elements") if name in named]
    first, *others = (*(named.pop(name) for name in names), *given)
    x = check_cut(operator.__name__, first, *others, *named.values())
    return x.like(operator(x.local, *others, **named))


@register(torch.searchsorted)
def searchsorted(sorted_sequence: torch.Tensor, input: torch.Tensor, **options: Any) -> Sharded:
    """Runs block by block; the sequence is an ordinary tensor of one dim."""
    x = check_cut("searchsorted", input, sorted_sequence, *options.values())
    if sorted_sequence.dim() != 1:
        raise LayoutError(
            f"searchsorted: a sequence {tuple(sorted_sequence.shape)} for a cut tensor; it takes "
            "one of one dim"
        )
    return x.like(torch.searchsorted(sorted_sequence, x.block, **options), fresh=True)


@register(torch.unravel_index)
def unravel_index(indices: Sharded, shape: Any) -> tuple[Sharded, ...]:
    """Runs block by block; returns a tensor for each dim."""
    found = torch.unravel_index(indices.block, shape)
    return tuple([indices.like(part, fresh=True) for part in found])


@register(torch.fake_quantize_per_channel_affine, dims=["axis"])
def fake_quantize_channels(
    input: Sharded,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    axis: int,
    quant_min: int,
    quant_max: int,
) -> Sharded:
    """Runs block by block; the dim that has a scale for each element becomes whole."""
    name = "fake_quantize_per_channel_affine"
    scale, zero_point = (whole_of(t, f"the scales of {name}") for t in (scale, zero_point))
    input = with_whole(check_cut(name, input), (axis,), name)
    how = (scale, zero_point, axis, quant_min, quant_max)
    return input.like(torch.fake_quantize_per_channel_affine(input.block, *how), fresh=True)


@register(torch.trapezoid, torch.trapz, dims=["dim"])
def trapezoid(
    y: torch.Tensor, x: torch.Tensor | None = None, *, dx: float = 1, dim: int = -1
) -> torch.Tensor:
    """Runs along any dim, at equal distances or at the places ``x``."""
    last = y.shape[dim] - 1
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        if last < 0:
            return y.sum(dim)
        if x is None:
            return (y.sum(dim) - (y.select(dim, 0) + y.select(dim, -1)) * 0.5) * dx
        if x.dim() == 1:
            x = x.reshape([-1 if d == dim else 1 for d in range(y.dim())])
        x = x.reshape([1] * (y.dim() - x.dim()) + list(x.shape))
        widths = x.narrow(dim, 1, last) - x.narrow(dim, 0, last)
        return (widths * (y.narrow(dim, 1, last) + y.narrow(dim, 0, last))).sum(dim) / 2


CHECK_EVERY = 64
"""Counts the calls between two checks that all ranks are in the same random state."""


def dropout_shape(x: Sharded, shape: tuple[int, ...], p: float, inplace: bool) -> Sharded:
    """Multiply by one global mask of ``shape``, drawn in full on every rank as torch draws it."""
    check_random_state(x)
    scale = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p, True)
    return _multiply_by_mask(x, own_part_of_mask(scale, x), 1.0, inplace)


def own_part_of_mask(mask: torch.Tensor, x: Sharded) -> torch.Tensor:
    """Narrows a global mask, whose extents are those of ``x`` or 1, to this rank's block."""
    for dim, extent in enumerate(mask.shape):
        if extent != 1:
            lo, hi = x.box.interval(dim)
            mask = mask.narrow(dim, lo, hi - lo)
    return mask


def dropout_volume(x: Sharded, p: float, inplace: bool) -> Sharded:
    """Drops elements by a hash of one drawn seed and each element's global index.

    A mask drawn in full would take the memory of the whole activation on every rank. On a GPU the
    same hash drops those of the gradient, and nothing is kept; on the CPU it takes longer than
    reading a mask.
    """
    check_random_state(x)
    if device_kind(x) == "cuda" and not inplace:
        given = ([*x.partition.shape], [*x.box.lo], draw_seed(x.device), p)

        def drop(block: torch.Tensor) -> torch.Tensor:
            return torch.ops.hyperslab.drop_elements(block, *given)

        return x.like(LinearMap.apply(x.block, drop, drop), fresh=True)
    keep = _random_bits(x, x.device) >= least_kept(p)
    return _multiply_by_mask(x, keep, scale_of(p), inplace)


def _multiply_by_mask(x: Sharded, mask: torch.Tensor, scale: float, inplace: bool) -> Sharded:
    if inplace:
        check_writable(x, "dropout")
        torch.Tensor.mul_(torch.Tensor.mul_(x, mask), scale)
        x.note_change()
        return x
    return x.like(x.block * mask * scale if scale != 1.0 else x.block * mask, fresh=True)


@per_grid
def _random_calls(_grid: Grid) -> Iterator[int]:
    """Counts the random operators that have run on a grid."""
    return itertools.count()


def check_random_state(x: Sharded) -> None:
    """Checks now and then that all ranks are in one random state, so that they draw alike."""
    if x.grid.size > 1:
        look = partial(_look_at_random_state, x.grid, x.device)
        do_beside(look, "a look at the ranks' random states")


def _look_at_random_state(grid: Grid, device: torch.device) -> None:
    if next(_random_calls(grid)) % CHECK_EVERY != 0:
        return
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    if not grid.same_on_all(zlib.crc32(state.numpy().tobytes())):
        raise CommError(
            "the ranks' random states differ, so they would not drop the same elements\n"
            "    call torch.manual_seed(seed) with the same seed on every rank, and draw random "
            "numbers on all ranks alike"
        )


def check_whole_mask(tensors: Sequence[torch.Tensor | None], p: float, name: str) -> None:
    """Refuses dropout inside ``name`` unless every rank has all: only then are its masks serial."""
    cut = [t for t in tensors if isinstance(t, Sharded)]
    if p <= 0:
        return
    axes = dict.fromkeys(axis for t in cut for axis in t.partition.axes)
    if axes:
        raise LayoutError(
            f"{name} draws its dropout mask for the block only\n{describe(cut)}"
            f"    use a dropout of 0 in it; or, for all of these,\n{gather_first(*axes)}"
        )
    check_random_state(cut[0])


@register_each(
    {
        (
            F.dropout,
            torch.dropout,
        ): "Draws one global mask, the same on every grid; torch's own for a contiguous matrix.",
        torch.dropout_: "Does the same in place.",
    },
    merged=True,
)
def dropout(
    operator: Operator,
    input: Sharded,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool | None = None,
) -> Sharded:
    """Draws one global mask."""
    if not drops_anything(p, training if train is None else train):
        return input
    inplace = inplace or operator is torch.dropout_
    if input.dim() > 2:
        return dropout_volume(input, p, inplace)
    return dropout_shape(input, tuple(input.shape), p, inplace)


BATCHED_DIMS = {
    "dropout1d": (3,),
    "dropout2d": (4,),
    "dropout3d": (5,),
    "feature_dropout": (2, 3, 4, 5),
}


@register_each(*BATCHED_DIMS)
def feature_dropout(
    operator: Operator,
    input: Sharded,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Sharded:
    """Drops whole channels by torch's own mask, the same on every grid."""
    name = operator.__name__
    active = drops_anything(p, training)
    alone = name in ("dropout1d", "dropout3d") and input.dim() == BATCHED_DIMS[name][0] - 1
    if alone:
        check_unbatched(input, name)
    elif input.dim() not in BATCHED_DIMS[name]:
        raise LayoutError(f"{name} needs a batched input, got {input.partition}")
    if not active:
        return input
    front = 1 if alone else 2
    shape = (*input.shape[:front], *[1] * (input.dim() - front))
    return dropout_shape(input, shape, p, inplace)


def drops_anything(p: float, training: bool) -> bool:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return training and p > 0.0


@register_each("new_zeros", "new_ones", "new_empty")
def new_constant(
    operator: Operator,
    self: Sharded,
    *sizes: Integers,
    size: Integers | None = None,
    requires_grad: bool = False,
    **options: object,
) -> torch.Tensor:
    """Is cut as x if the shape has x's extents in the cut dims; else an ordinary tensor."""
    shape = integers(*sizes) if size is None else integers(size)
    old = self.partition
    if len(shape) != old.ndim or any(shape[d] != old.shape[d] for d in old.cut_dims):
        whole: torch.Tensor = operator(self.local, shape, **options)
        return whole.requires_grad_(requires_grad)
    partition = Partition(shape, old.cuts)
    own = partition.box(self.grid.coords).shape
    y = self.like(operator(self.local, own, **options), partition)
    return torch.Tensor.requires_grad_(y, requires_grad)


@register(torch.Tensor.new_full)
def new_full(self: Sharded, size: Sequence[int], fill_value: float, **options: Any) -> torch.Tensor:
    """Is cut as x if the shape has x's extents in the cut dims; else an ordinary tensor."""
    return new_constant(torch.Tensor.new_full, self, size=size, fill_value=fill_value, **options)


@register(torch.Tensor.new_tensor)
def new_tensor(self: torch.Tensor, data: object, **options: Any) -> torch.Tensor:
    """Makes an ordinary tensor, equal on all ranks."""
    if isinstance(data, Sharded) or not isinstance(self, Sharded):
        raise LayoutError("new_tensor of a cut tensor has no rule; use x.clone().detach()")
    return self.local.new_tensor(data, **options)


@register(torch.empty_like)
def empty_like(input: Sharded, **options: object) -> Sharded:
    """Is cut as the other; its values are arbitrary."""
    return apply_pointwise(torch.empty_like, (input,), options)


@register_each("rand_like", "randn_like")
def random_like(
    operator: Operator,
    input: Sharded,
    *,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Sharded:
    """Draws the same on every grid; without spatial dims it equals torch's own."""
    _check_generator(generator, operator.__name__)
    check_random_state(input)
    uniform = operator is torch.rand_like
    kind = dtype or input.dtype
    if input.dim() <= 2:
        draw = torch.rand if uniform else torch.randn
        device = options.get("device") or input.device
        block = draw(input.shape, dtype=kind, device=device)[input.box.slices()]
    else:
        block = torch.empty_like(input.local, dtype=kind, **options)
        block.copy_((_uniform if uniform else _normal)(input, block))
    y = input.like(block)
    torch.Tensor.requires_grad_(y, requires_grad)
    return y


def _uniform(x: Sharded, like: torch.Tensor) -> torch.Tensor:
    """Draws multiples of the type's resolution in [0, 1), as torch does."""
    digits = min(31, 1 - round(math.log2(torch.finfo(like.dtype).eps)))
    return _random_bits(x, like.device).bitwise_right_shift(31 - digits).to(like.dtype) / 2**digits


def _normal(x: Sharded, like: torch.Tensor) -> torch.Tensor:
    """Transforms two uniform numbers in (0, 1] into a normal one (Box and Muller 1958)."""
    kind = torch.float64 if like.dtype == torch.float64 else torch.float32
    radius, angle = ((_random_bits(x, like.device).to(kind) + 1) / 2**31 for _ in range(2))
    return radius.log_().mul_(-2).sqrt_() * angle.mul_(2 * math.pi).cos_()


def _random_bits(x: Sharded, device: torch.device) -> torch.Tensor:
    """Hashes a drawn seed and each element's global index to 31 bits."""
    return uniform_bits(x.partition.shape, x.box, draw_seed(device), device)


def drawn_whole(x: Sharded) -> bool:
    """Returns whether the whole tensor is small, one number for a sample and channel."""
    return math.prod(x.shape[2:]) == 1


def bernoulli_block(x: Sharded, p: float | torch.Tensor) -> torch.Tensor:
    """Draws this rank's block of zeros and ones, which have the probability ``p``."""
    if drawn_whole(x):
        with torch.no_grad():
            return _drawn_by_torch(x, "bernoulli_", p.full() if isinstance(p, Sharded) else p)
    check_random_state(x)
    bits = _random_bits(x, x.device)
    if not isinstance(p, torch.Tensor):
        return (bits < math.floor(p * 2**31)).to(x.dtype)
    chances = operand_block(p, target=x.partition, like=x).detach()
    return (bits < chances.double() * 2**31).to(x.dtype)


@register(torch.normal)
def normal(
    mean: torch.Tensor | float,
    std: torch.Tensor | float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draws the same on every grid; the gradients of mean and deviation are zero, as torch's."""
    _check_generator(generator, "normal")
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        both: Any = mean + std
        low = std.min() if isinstance(std, torch.Tensor) and both.grid.has_values else std
        if not isinstance(low, Sharded) and low < 0:
            raise ValueError("normal: a standard deviation is below 0")
        with torch.no_grad():
            drawn = mean + std * torch.empty_like(both).normal_()
        return torch.where(torch.zeros_like(both, dtype=torch.bool), both, drawn)


def _check_generator(generator: torch.Generator | None, name: str) -> None:
    if generator is not None:
        raise LayoutError(
            f"{name} of a cut tensor draws from torch's own generator, which is the same on all "
            "ranks\n    leave generator= out, and call torch.manual_seed"
        )


@register(torch.bernoulli, torch.Tensor.bernoulli)
def bernoulli(
    input: Sharded, p: float | None = None, *, generator: torch.Generator | None = None
) -> Sharded:
    """Draws the same on every grid; torch's own for a contiguous matrix."""
    _check_generator(generator, "bernoulli")
    ones = bernoulli_block(input, input if p is None else p)
    return input.like(ones, fresh=True)


def exponential_block(x: Sharded, rate: float = 1.0) -> torch.Tensor:
    """Draws this rank's block of exponential numbers; their logarithm is finite, as torch's."""
    if not rate > 0:
        raise ValueError(f"exponential_ with the rate {rate}: it has to be above 0")
    if not x.is_floating_point():
        raise ValueError(f"exponential_ of {x.dtype}: takes floating-point numbers")
    if drawn_whole(x):
        return _drawn_by_torch(x, "exponential_", rate)
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    uniform = random_like(torch.rand_like, x, dtype=kind).block
    half_a_step = torch.finfo(kind).eps / 4
    return uniform.clamp_min_(half_a_step).log_().div_(-rate).to(x.dtype)


def _drawn_by_torch(x: Sharded, name: str, *options: Any) -> torch.Tensor:
    """Draws the whole tensor by torch's method ``name``; returns this rank's block."""
    check_random_state(x)
    whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return getattr(whole, name)(*options)[x.box.slices()]


def _uniform_block(x: Sharded, low: float, high: float) -> torch.Tensor:
    if drawn_whole(x):
        return _drawn_by_torch(x, "uniform_", low, high)
    return random_like(torch.rand_like, x).block * (high - low) + low


def _normal_block(x: Sharded, mean: float, std: float) -> torch.Tensor:
    if drawn_whole(x):
        return _drawn_by_torch(x, "normal_", mean, std)
    return random_like(torch.randn_like, x).block * std + mean


_DRAWS: Mapping[str, tuple[Mapping[str, float], Operator]] = {
    "bernoulli_": ({"p": 0.5}, bernoulli_block),
    "exponential_": ({"lambd": 1.0}, exponential_block),
    "normal_": ({"mean": 0.0, "std": 1.0}, _normal_block),
    "uniform_": ({"from": 0.0, "to": 1.0}, _uniform_block),
}
"""Lists the arguments of operators that draw in place, and what draws a block."""


@register_each(*_DRAWS)
def draw_in_place(
    operator: Operator, self: Sharded, *given: Any, generator: Any = None, **named: Any
) -> Sharded:
    """Draws in place the same on every grid; torch's own for a contiguous matrix."""
    name = operator.__name__
    _check_generator(generator, name)
    defaults, draw = _DRAWS[name]
    # By position or by name; torch has checked both before.
    numbers = {**defaults, **dict(zip(defaults, given, strict=False)), **named}
    return write_block(self, draw(self, *numbers.values()))


def write_block(x: Sharded, block: torch.Tensor) -> Sharded:
    return cast(Sharded, apply_pointwise(torch.Tensor.copy_, (x, x.like(block)), {}))


SELU_LIMIT = 1.7580993408473766
"""Replaces dropped values, negated, before all are scaled: the limit of SELU (section 2)."""


@register_each("alpha_dropout", "feature_alpha_dropout")
def alpha_dropout(
    operator: Operator,
    input: Sharded,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    train: bool | None = None,
) -> Sharded:
    """Draws the same on every grid; whole channels and contiguous matrices get torch's own mask."""
    whole_channels = operator.__name__ == "feature_alpha_dropout"
    active = drops_anything(p, training if train is None else train)
    if not input.is_floating_point():
        raise ValueError(f"alpha dropout of {input.dtype}: takes floating-point numbers")
    if whole_channels and input.dim() < 2:
        raise ValueError(f"alpha dropout of whole channels has no channels in {input.partition}")
    if not active:
        return input
    if whole_channels:
        check_random_state(input)
        shape = (*input.shape[:2], *[1] * (input.dim() - 2))
        kept = torch.empty(shape, dtype=input.dtype, device=input.device).bernoulli_(1 - p)
        kept = own_part_of_mask(kept, input)
    else:
        kept = bernoulli_block(input, 1 - p)
    scale = ((SELU_LIMIT**2 * p + 1) * (1 - p)) ** -0.5 if p < 1 else 0.0
    shift = (kept - (1 - p)) * (SELU_LIMIT * scale)
    y = input.block * (kept * scale) + shift
    return write_block(input, y) if inplace else input.like(y, fresh=True)
