"""Distributes Fourier transforms of any dims by the pencil method, and complex numbers.

In reading order: the transforms, which may be put off, and those of few frequencies; shifts of the
zero frequency; real and imaginary parts as views. `hyperslab.ops.spectra` plans them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import GetSetDescriptorType

import torch

from hyperslab.geometry import Partition
from hyperslab.ops.indexing import DeferredWrites
from hyperslab.ops.operands import check_uncut
from hyperslab.ops.overloads import Operator, register_each
from hyperslab.ops.placement import cut_of_result
from hyperslab.ops.spatial import rolled
from hyperslab.ops.spectra import (
    Arc,
    Spectrum,
    can_wait,
    note_gathered,
    plan_pencils,
    transform_block,
)
from hyperslab.ops.views import Span
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import read_dims


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

    @property
    def of_one(self) -> Operator:
        function: Operator = getattr(torch.fft, self.rest.removesuffix("n"))
        return function

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


@register_each(*(getattr(torch.fft, kind) for kind in KINDS), dims=["dim"], lazy=True)
def one_dim(
    operator: Operator,
    input: Sharded,
    n: int | None = None,
    dim: int = -1,
    norm: str | None = None,
) -> Sharded:
    """Transforms any dim; a cut one becomes whole while another one is cut, and back."""
    if input.partition.cuts[dim] is None:
        return transform_block(input, operator(input.local, n, dim, norm))
    return transformed(_kind(operator), input, (dim,), {} if n is None else {dim: n}, norm)


@register_each(
    *(getattr(torch.fft, f"{kind}{dims}") for kind in KINDS for dims in "2n"),
    dims=["dim"],
    lazy=True,
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
        return transform_block(input, operator(input.local, s, given, norm))
    lengths = {d: n for d, n in zip(dims, s or (), strict=False) if n != -1}
    return transformed(_kind(operator), input, dims, lengths, norm)


def transformed(
    kind: FourierKind, x: Sharded, dims: Sequence[int], lengths: Mapping[int, int], norm: str | None
) -> Sharded:
    """Transforms ``dims``, padded or cropped to ``lengths`` where given.

    Distribution scheme: 1. transform the dims that are whole on the block, 2. in one exchange, cut
    the tensor along other dims instead of the remaining ones (`plan_pencils`), and transform these,
    3. cut the result like the input. Every exchange has its adjoint. Where the frequencies that
    are read may be few the first dim is transformed, and the others wait for that (`Spectrum`).
    """
    extents = list(x.shape)
    for dim in dims:
        extents[dim] = lengths.get(dim, extents[dim])
    extents[dims[-1]] = kind.extent(extents[dims[-1]], given=dims[-1] in lengths)
    after = tuple(extents)
    writes = x.pending
    if isinstance(writes, DeferredWrites) and not kind.from_real and writes.only_in(dims):
        return _of_few(kind, writes, dims, after, norm)
    x.force()
    first = dims[-1]
    if not kind.from_real:
        first = next((d for d in reversed(dims) if x.partition.cuts[d] is None), -1)
    waits = can_wait(x) and (kind.last is None or kind.from_real) and first >= 0
    waits = waits and min(after) > 0
    groups = kind.groups(dims)
    if waits and len(dims) > 1:
        groups = ((first,), tuple(d for d in dims if d != first))
    plan = plan_pencils(x.partition, groups, after)
    note_gathered(x, plan)
    last = None if kind.last is None else dims[-1]
    for pencil in plan.pencils[:1] if waits else plan.pencils:
        x = x.redistribute(pencil.partition, "a pencil of a Fourier transform")
        block = x.local
        if last in pencil.dims:
            one = getattr(torch.fft, str(kind.last))
            block = one(block, lengths.get(last), last, norm)
        else:
            sizes = [lengths.get(dim, block.shape[dim]) for dim in pencil.dims]
            block = getattr(torch.fft, kind.rest)(block, sizes, pencil.dims, norm)
        x = transform_block(x, block)
    if not waits:
        return x.redistribute(plan.result, "the way back from a Fourier transform")
    left = {dim: after[dim] for dim in dims if dim != first}
    kept = tuple(Arc(0, extent) for extent in after)
    return x.will_be(Spectrum(x, kind.of_one, left, norm, kept, plan.result), plan.result)


def _of_few(
    kind: FourierKind,
    writes: DeferredWrites,
    dims: Sequence[int],
    after: tuple[int, ...],
    norm: str | None,
) -> Sharded:
    """Transforms zeros into which few frequencies were written.

    Distribution scheme: that of a `Spectrum`, backwards. 1. The frequencies of all parts, and what
    lies between them, are cut along other dims than those that are to be cut in the result, 2. the
    latter are filled up with zeros and transformed, 3. in one exchange, cut the tensor as the
    result is, and transform the other dims in the same way.
    """
    before = writes.partition
    kept = [Arc(0, extent) for extent in before.shape]
    for dim in dims:
        kept[dim] = Arc.around((spans[dim] for spans, _ in writes.parts), before.shape[dim])
    result = Partition(after, tuple(map(cut_of_result, before.cuts, after)))
    few = tuple(arc.count if d in dims else after[d] for d, arc in enumerate(kept))
    plan = plan_pencils(result, kind.groups(dims)[::-1], few)
    pencils = plan.pencils[::-1]
    places = [
        {d: Span((s.start - kept[d].start) % before.shape[d], s.count) for d, s in spans.items()}
        for spans, _ in writes.parts
    ]
    x: Sharded | None = None
    for pencil in pencils:
        partition = pencil.partition
        for dim in pencil.dims:
            partition = partition.with_dim(dim, few[dim], None)
        if x is None:
            x = writes.within(partition, places)
            note_gathered(x, plan)
        x = x.redistribute(partition, "a pencil of a Fourier transform")
        block = x.block
        for dim in pencil.dims:
            arc = Arc(kept[dim].start + writes.turns.get(dim, 0), kept[dim].count)
            block = arc.put_back(block, dim, before.shape[dim])
            real = kind.last is not None and dim == dims[-1]
            one = getattr(torch.fft, str(kind.last)) if real else kind.of_one
            block = one(block, after[dim], dim, norm)
        x = transform_block(x, block)
    assert x is not None
    return x.redistribute(result, "the way back from a Fourier transform")


def _kind(operator: Operator) -> FourierKind:
    name = operator.__name__.removeprefix("fft_")
    return KINDS[name] if name in KINDS else KINDS[name[:-1]]


@register_each(torch.fft.fftshift, torch.fft.ifftshift, dims=["dim"], lazy=True)
def shift(operator: Operator, input: Sharded, dim: int | tuple[int, ...] | None = None) -> Sharded:
    """Shifts any dims; along cut dims as roll."""
    dims = (dim,) if isinstance(dim, int) else tuple(range(input.dim())) if dim is None else dim
    back = operator is torch.fft.ifftshift
    turns = {d: (input.shape[d] + back) // 2 for d in dims}
    if isinstance(input.pending, Spectrum | DeferredWrites):
        pending = input.pending.rolled(turns)
        if pending is not None:
            return input.will_be(pending, input.partition)
    input.force()
    cut = [d for d in dims if input.partition.cuts[d] is not None]
    whole = tuple(d for d in dims if d not in cut)
    if whole or not cut:
        input = input.like(operator(input.local, whole))
    for d in cut:
        input = rolled(input, turns[d], d)
    return input


@register(torch.view_as_real)
def view_as_real(input: Sharded) -> Sharded:
    """Is a view, with real and imaginary part as a new last dim."""
    block = torch.view_as_real(input.local)
    return input.like(block, Partition((*input.shape, 2), (*input.partition.cuts, None)))


@register(torch.view_as_complex)
def view_as_complex(input: Sharded) -> Sharded:
    """Is a view, with a last dim of 2 that is not cut."""
    check_uncut(input, (input.dim() - 1,), "view_as_complex needs all of")
    block = input.local
    # Torch looks at strides, which a rank with one element of a dim has in any order.
    copied = any(cut is not None and cut.single for cut in input.partition.cuts)
    if copied:
        block = block.clone(memory_format=torch.contiguous_format)
    partition = input.partition.without_dim(input.dim() - 1)
    y = input.like(torch.view_as_complex(block), partition)
    if copied:
        y.mark_as_copy(input)
    return y


def _complex_overloads(name: str) -> tuple[Operator, Operator]:
    method = getattr(torch.Tensor, name)
    attribute = isinstance(method, GetSetDescriptorType)
    return getattr(torch, name), method.__get__ if attribute else method


@register_each(*map(_complex_overloads, ("real", "imag", "conj", "resolve_conj")))
def complex_view(operator: Operator, input: Sharded, *_: object) -> Sharded:
    """Is a view of the block."""
    return input.like(operator(input.local))
