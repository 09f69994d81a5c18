"""Distributes Fourier transforms of any dims by the pencil method, and complex numbers.

In reading order: a plan of re-partitions, after which every dim was whole once; the transforms;
shifts of the zero frequency; real and imaginary parts as views.

Legend: a *pencil* is a block that is whole in the dims that are transformed next. The axes that
cut those dims cut another one meanwhile, their *home*, so that every rank has as much as before.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import GetSetDescriptorType

import torch

from hyperslab.comm import log_once
from hyperslab.geometry import Partition
from hyperslab.ops.operands import check_uncut
from hyperslab.ops.overloads import Operator, register_each
from hyperslab.ops.placement import cut_elsewhere, cut_of_result
from hyperslab.ops.spatial import rolled
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import read_dims

_PLANS_KEPT = 4096
"""Limits the plans that are cached, of transforms of one partition each."""


@dataclass(frozen=True, slots=True)
class Pencil:
    """Names a partition and the dims that are whole in it and are transformed there."""

    partition: Partition
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PencilPlan:
    """Lists the pencils in order, the result's partition, and axes that find no other dim."""

    pencils: tuple[Pencil, ...]
    result: Partition
    gathered: tuple[str, ...]


@functools.lru_cache(_PLANS_KEPT)
def plan_pencils(
    partition: Partition, groups: tuple[tuple[int, ...], ...], extents: tuple[int, ...]
) -> PencilPlan:
    """Plans the transform of each group's dims in any order, one group after the other.

    Scheme: 1. dims that are whole are transformed at once, 2. of those that are left each axis that
    cuts one moves to its home, in one exchange, 3. again, until none is left. The result is cut
    where the input is. An axis that finds no home, because no other dim is free that has as many
    elements as it has ranks, cuts nothing meanwhile: its ranks repeat the work.

    Args:
        partition: how the tensor is cut.
        groups: the dims to transform.
        extents: of all dims after the transform.

    >>> from hyperslab.geometry import Cut
    >>> halves = Cut.balanced("depth", 4, 2)
    >>> plan = plan_pencils(Partition((1, 4, 6), (None, halves, None)), ((1, 2),), (1, 4, 6))
    >>> [(str(pencil.partition), pencil.dims) for pencil in plan.pencils]
    [('1 x 4 x 6 (dim 1 in 2 by depth)', (2,)), ('1 x 4 x 6 (dim 2 in 2 by depth)', (1,))]
    """
    now = partition
    pencils: list[Pencil] = []
    gathered: list[str] = []
    for index, group in enumerate(groups):
        left = list(group)
        later = {dim for after in groups[index + 1 :] for dim in after}
        while left:
            whole = tuple(dim for dim in left if now.cuts[dim] is None)
            if not whole:
                now, alone = cut_elsewhere(now, left, left[:1], later)
                gathered += alone
                continue
            pencils.append(Pencil(now, whole))
            left = [dim for dim in left if dim not in whole]
            for dim in whole:
                now = now.with_dim(dim, extents[dim], None)
    result = Partition(extents, tuple(map(cut_of_result, partition.cuts, extents)))
    return PencilPlan(tuple(pencils), result, tuple(gathered))


@dataclass(frozen=True, slots=True)
class FourierKind:
    """Describes how a transform of several dims is composed of simpler ones.

    Args:
        rest: of dims from complex to complex numbers, the name of torch's function of several.
        last: of the last dim, from or to real numbers, of one dim; None if it is like the rest.
        from_real: the last dim comes first, and its result is about half as long; else it comes at
            the end, and its result is about twice as long.
    """

    rest: str
    last: str | None = None
    from_real: bool = False

    def groups(self, dims: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Groups dims that may be transformed in any order; the groups go one after the other."""
        *rest, last = dims
        if self.last is None or not rest:
            return (tuple(dims),)
        return ((last,), tuple(rest)) if self.from_real else (tuple(rest), (last,))

    def extent(self, length: int, *, given: bool) -> int:
        """Returns the extent of the last dim's result; ``length`` is given or the operand's."""
        if self.last is None:
            return length
        if self.from_real:
            return length // 2 + 1
        return length if given else 2 * (length - 1)


KINDS = {
    "fft": FourierKind("fftn"),
    "ifft": FourierKind("ifftn"),
    "rfft": FourierKind("fftn", "rfft", from_real=True),
    "irfft": FourierKind("ifftn", "irfft"),
    "hfft": FourierKind("fftn", "hfft"),
    "ihfft": FourierKind("ifftn", "ihfft", from_real=True),
}


@register_each(*(getattr(torch.fft, kind) for kind in KINDS), family="fourier", dims=["dim"])
def one_dim(
    operator: Operator,
    input: Sharded,
    n: int | None = None,
    dim: int = -1,
    norm: str | None = None,
) -> Sharded:
    """Transforms any dim; a cut one becomes whole while another one is cut, and back."""
    if input.partition.cuts[dim] is None:
        return _transform_block(input, operator(input.local, n, dim, norm))
    return transformed(_kind(operator), input, (dim,), {} if n is None else {dim: n}, norm)


@register_each(
    *(getattr(torch.fft, f"{kind}{dims}") for kind in KINDS for dims in "2n"),
    family="fourier",
    dims=["dim"],
)
def several_dims(
    operator: Operator,
    input: Sharded,
    s: Sequence[int] | None = None,
    dim: int | tuple[int, ...] | None = None,
    norm: str | None = None,
) -> Sharded:
    """Transforms any dims; cut ones become whole while others are cut, and back."""
    if dim is None and operator.__name__.endswith("2"):
        dim = read_dims((-2, -1), input.dim(), operator.__name__)
    given = dim
    if dim is None:
        count = input.dim() if s is None else len(s)
        dim = tuple(range(input.dim() - count, input.dim()))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    # What torch refuses it refuses in its own words.
    odd = len(set(dims)) < len(dims) or (s is not None and len(s) != len(dims))
    if odd or all(input.partition.cuts[d] is None for d in dims):
        return _transform_block(input, operator(input.local, s, given, norm))
    lengths = {d: n for d, n in zip(dims, s or (), strict=False) if n != -1}
    return transformed(_kind(operator), input, dims, lengths, norm)


def transformed(
    kind: FourierKind, x: Sharded, dims: Sequence[int], lengths: Mapping[int, int], norm: str | None
) -> Sharded:
    """Transforms ``dims``, padded or cropped to ``lengths`` where given.

    Distribution scheme: 1. transform the dims that are whole on the block, 2. in one exchange, cut
    the tensor along other dims instead of the remaining ones (`plan_pencils`), and transform these,
    3. cut the result like the input. Every exchange has its adjoint.
    """
    extents = list(x.shape)
    for dim in dims:
        extents[dim] = lengths.get(dim, extents[dim])
    extents[dims[-1]] = kind.extent(extents[dims[-1]], given=dims[-1] in lengths)
    plan = plan_pencils(x.partition, kind.groups(dims), tuple(extents))
    if plan.gathered:
        log_once(
            x.grid,
            f"Fourier transform of {x.partition}: no other dim can be cut along "
            f"{', '.join(plan.gathered)}; gathered there, its ranks repeat the work meanwhile",
        )
    last = None if kind.last is None else dims[-1]
    for pencil in plan.pencils:
        x = x.redistribute(pencil.partition, "a pencil of a Fourier transform")
        block = x.local
        if last in pencil.dims:
            one = getattr(torch.fft, str(kind.last))
            block = one(block, lengths.get(last), last, norm)
        else:
            sizes = [lengths.get(dim, block.shape[dim]) for dim in pencil.dims]
            block = getattr(torch.fft, kind.rest)(block, sizes, pencil.dims, norm)
        x = _transform_block(x, block)
    return x.redistribute(plan.result, "the way back from a Fourier transform")


def _transform_block(x: Sharded, block: torch.Tensor) -> Sharded:
    """Wrap a transform, which may have changed the extents of dims that are not cut."""
    cuts = x.partition.cuts
    shape = (block.shape[d] if cut is None else x.shape[d] for d, cut in enumerate(cuts))
    return x.like(block, Partition(tuple(shape), cuts))


def _kind(operator: Operator) -> FourierKind:
    name = operator.__name__.removeprefix("fft_")
    return KINDS[name] if name in KINDS else KINDS[name[:-1]]


@register_each(torch.fft.fftshift, torch.fft.ifftshift, family="fourier", dims=["dim"])
def shift(operator: Operator, input: Sharded, dim: int | tuple[int, ...] | None = None) -> Sharded:
    """Shifts any dims; along cut dims as roll."""
    dims = (dim,) if isinstance(dim, int) else tuple(range(input.dim())) if dim is None else dim
    cut = [d for d in dims if input.partition.cuts[d] is not None]
    whole = tuple(d for d in dims if d not in cut)
    if whole or not cut:
        input = input.like(operator(input.local, whole))
    for d in cut:
        extent = input.shape[d]
        back = operator is torch.fft.ifftshift
        input = rolled(input, (extent + 1) // 2 if back else extent // 2, d)
    return input


@register(torch.view_as_real, family="fourier")
def view_as_real(input: Sharded) -> Sharded:
    """Is a view, with real and imaginary part as a new last dim."""
    block = torch.view_as_real(input.local)
    return input.like(block, Partition((*input.shape, 2), (*input.partition.cuts, None)))


@register(torch.view_as_complex, family="fourier")
def view_as_complex(input: Sharded) -> Sharded:
    """Is a view, with a last dim of 2 that is not cut."""
    check_uncut(input, (input.dim() - 1,), "view_as_complex needs all of")
    block = torch.view_as_complex(input.local)
    return input.like(block, Partition(input.partition.shape[:-1], input.partition.cuts[:-1]))


def _complex_overloads(name: str) -> tuple[Operator, Operator]:
    """Returns an operator as a function, and as a method or an attribute."""
    method = getattr(torch.Tensor, name)
    attribute = isinstance(method, GetSetDescriptorType)
    return getattr(torch, name), method.__get__ if attribute else method


@register_each(*map(_complex_overloads, ("real", "imag", "conj", "resolve_conj")), family="fourier")
def complex_view(operator: Operator, input: Sharded, *_: object) -> Sharded:
    """Is a view of the block."""
    return input.like(operator(input.local))
