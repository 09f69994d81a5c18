"""Fourier transforms of any dims, cut or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hyperslab.comm import log_once
from hyperslab.geometry import Partition
from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.ops.fourier.pencils import PencilPlan, plan_pencils
from hyperslab.tensor import Sharded


@dataclass(frozen=True, slots=True)
class FourierKind:
    """How a transform of several dims comes down to others.

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
        """The dims that may be transformed in any order; those of a group before the next one's."""
        *rest, last = dims
        if self.last is None or not rest:
            return (tuple(dims),)
        return ((last,), tuple(rest)) if self.from_real else (tuple(rest), (last,))

    def extent(self, length: int, *, given: bool) -> int:
        """Of the last dim's result; ``length`` is ``given``, or the operand's extent."""
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
    """Any dim; one that is cut becomes whole while another one is cut, and back."""
    if input.partition.cuts[dim] is None:
        return _local(input, operator(input.local, n, dim, norm))
    return transformed(_kind(operator), input, (dim,), {} if n is None else {dim: n}, norm)


@register_each(*(getattr(torch.fft, f"{kind}2") for kind in KINDS), family="fourier", dims=["dim"])
def two_dims(
    operator: Operator,
    input: Sharded,
    s: Sequence[int] | None = None,
    dim: int | tuple[int, ...] | None = (-2, -1),
    norm: str | None = None,
) -> Sharded:
    """Any dims; those that are cut become whole while others are cut, and back."""
    return several_dims(operator, input, s, dim, norm)


@register_each(*(getattr(torch.fft, f"{kind}n") for kind in KINDS), family="fourier", dims=["dim"])
def several_dims(
    operator: Operator,
    input: Sharded,
    s: Sequence[int] | None = None,
    dim: int | tuple[int, ...] | None = None,
    norm: str | None = None,
) -> Sharded:
    """Any dims; those that are cut become whole while others are cut, and back."""
    given = dim
    if dim is None:
        count = input.dim() if s is None else len(s)
        dim = tuple(range(input.dim() - count, input.dim()))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    # What torch refuses it refuses in its own words.
    odd = len(set(dims)) < len(dims) or (s is not None and len(s) != len(dims))
    if odd or all(input.partition.cuts[d] is None for d in dims):
        return _local(input, operator(input.local, s, given, norm))
    lengths = {d: n for d, n in zip(dims, s or (), strict=False) if n != -1}
    return transformed(_kind(operator), input, dims, lengths, norm)


def transformed(
    kind: FourierKind, x: Sharded, dims: Sequence[int], lengths: Mapping[int, int], norm: str | None
) -> Sharded:
    """The transform of ``dims``; ``lengths``: of operands that are padded or cropped to them.

    Distribution scheme: 1. dims that are whole are transformed on the block, 2. the tensor is cut
    along others in place of those that are left (`plan_pencils`), in one exchange, and these are
    transformed, 3. the result is cut where the input was. Every exchange has its adjoint.
    """
    extents = list(x.shape)
    for dim in dims:
        extents[dim] = lengths.get(dim, extents[dim])
    extents[dims[-1]] = kind.extent(extents[dims[-1]], given=dims[-1] in lengths)
    plan = plan_pencils(x.partition, kind.groups(dims), tuple(extents))
    _say(plan, x)
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
        x = _local(x, block)
    return x.redistribute(plan.result, "the way back from a Fourier transform")


def _local(x: Sharded, block: torch.Tensor) -> Sharded:
    """Wrap a transform, which may have changed the extents of dims that are not cut."""
    cuts = x.partition.cuts
    shape = (block.shape[d] if cut is None else x.shape[d] for d, cut in enumerate(cuts))
    return x.like(block, Partition(tuple(shape), cuts))


def _say(plan: PencilPlan, x: Sharded) -> None:
    if plan.gathered:
        log_once(
            x.grid,
            f"Fourier transform of {x.partition}: no other dim can be cut along "
            f"{', '.join(plan.gathered)}; gathered there, its ranks repeat the work meanwhile",
        )


def _kind(operator: Operator) -> FourierKind:
    name = operator.__name__.removeprefix("fft_")
    return KINDS[name] if name in KINDS else KINDS[name[:-1]]
