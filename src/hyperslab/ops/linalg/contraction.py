"""Tensor contraction over labelled dims, to which all matrix products come down."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from hyperslab.comm import all_reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.geometry import Cut, Partition
from hyperslab.ops.common.operands import block_of, first_cuts
from hyperslab.tensor import Sharded
from hyperslab.tensor.dispatch import describe, gather_first

DimLabel = Hashable
"""The name of a dim, the same in every operand; extents of 1 are broadcast."""


def contract(
    name: str,
    operands: Sequence[torch.Tensor],
    inputs: Sequence[Sequence[DimLabel]],
    output: Sequence[DimLabel],
    run: Callable[..., torch.Tensor],
    *,
    linear: bool = True,
) -> torch.Tensor:
    """``run(*blocks)``; labels that are not in ``output`` are contracted, new ones are whole.

    Distribution scheme: 1. every label is cut as in the first operand that is cut there, and an
    axis cuts one label only, 2. the operands are brought to these cuts, of ordinary ones this rank
    takes its part, 3. every rank contracts its blocks, 4. partial results are summed over the
    ranks that share a contracted label.

    Args:
        linear: whether the result is a sum over the contracted labels; if not, they must be whole.

    Raises:
        LayoutError: extents differ, or a contracted label is cut and the result is no sum.
    """
    like = next(t for t in operands if isinstance(t, Sharded))
    extents = _extents(name, operands, inputs)
    cuts = _cuts(name, operands, inputs)
    inner = [cut.axis for label, cut in cuts.items() if label not in output]
    if inner and not linear:
        raise LayoutError(
            f"{name} needs the whole of a dim that is cut along {', '.join(inner)} of {like.grid}\n"
            f"{describe(operands)}{gather_first(*inner)}"
        )
    what = f"aligning operands of {name}"
    blocks = [
        block_of(tensor, _operand_partition(tensor, labels, extents, cuts), like.grid, what)
        for tensor, labels in zip(operands, inputs, strict=True)
    ]
    result = all_reduce_sum(run(*blocks), like.grid.group(inner), f"the sum of {name}")
    kept = tuple(cuts.get(label) for label in output)
    first = next(own for t, own in zip(operands, inputs, strict=True) if t is like)
    if not any(kept) and (not first or first[0] not in output):
        return result  # ordinary once the first dim is gone and nothing is cut, as for sums
    shape = (extents.get(label, n) for label, n in zip(output, result.shape, strict=True))
    return like.like(result, Partition(tuple(shape), kept))


def _extents(
    name: str, operands: Sequence[torch.Tensor], inputs: Sequence[Sequence[DimLabel]]
) -> dict[DimLabel, int]:
    extents: dict[DimLabel, int] = {}
    for tensor, labels in zip(operands, inputs, strict=True):
        for label, extent in zip(labels, tensor.shape, strict=True):
            known = extents.get(label, 1)
            if 1 not in (known, extent) and known != extent:
                raise LayoutError(
                    f"{name}: {known} and {extent} elements in one dim of the global shapes\n"
                    f"{describe(operands)}"
                )
            extents[label] = extent if known == 1 else known
    return extents


def _cuts(
    name: str, operands: Sequence[torch.Tensor], inputs: Sequence[Sequence[DimLabel]]
) -> dict[DimLabel, Cut]:
    dims = [
        (tensor, labels, label, cut)
        for tensor, labels in zip(operands, inputs, strict=True)
        if isinstance(tensor, Sharded)
        for label, cut in zip(labels, tensor.partition.cuts, strict=True)
    ]
    for tensor, labels, label, cut in dims:
        if cut is not None and list(labels).count(label) > 1:
            raise LayoutError(
                f"{name}: the diagonal of a dim that is cut: {tensor.partition}\n"
                f"{gather_first(cut.axis)}"
            )
    return first_cuts((label, cut) for _, _, label, cut in dims)


def _operand_partition(
    tensor: torch.Tensor,
    labels: Sequence[DimLabel],
    extents: dict[DimLabel, int],
    cuts: dict[DimLabel, Cut],
) -> Partition:
    """The operand, cut as its labels are; not where it is broadcast."""
    own = tuple(tensor.shape)
    kept = [
        cuts.get(label) if extent == extents[label] else None
        for label, extent in zip(labels, own, strict=True)
    ]
    return Partition(own, tuple(kept))


def batch_labels(count: int) -> list[DimLabel]:
    """Labels of leading dims, which are broadcast from the right."""
    return [("batch", index) for index in range(-count, 0)]
