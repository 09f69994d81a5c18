"""Linear maps along one dim in which every result is made of a few elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class SparseMap:
    """Result ``o`` is the sum of ``weight[e] * x[source[e]]`` over its entries ``e``.

    They are ``begin[o]`` to ``begin[o + 1]``: ``begin`` has one number more than there are results.
    ``extent``: how many elements there are.
    """

    begin: torch.Tensor
    source: torch.Tensor
    weight: torch.Tensor
    extent: int

    @staticmethod
    def of_taps(index: torch.Tensor, weight: torch.Tensor, extent: int) -> SparseMap:
        """From the elements and their weights for each result: (taps, results)."""
        taps, results = index.shape
        begin = torch.arange(results + 1) * taps
        # Dense: of a single result the transposed view keeps its stride.
        source = index.T.contiguous().view(-1)
        return SparseMap(begin, source, weight.T.float().contiguous().view(-1), extent)

    @property
    def results(self) -> int:
        """How many there are."""
        return len(self.begin) - 1

    @property
    def tensors(self) -> list[torch.Tensor]:
        """As the operator takes them."""
        return [self.begin, self.source, self.weight]

    def adjoint(self) -> SparseMap:
        """From the gradients of the results to those of the elements."""
        order = torch.argsort(self.source, stable=True)
        result = torch.arange(self.results).repeat_interleave(self.begin.diff())
        counts = torch.bincount(self.source, minlength=self.extent)
        begin = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return SparseMap(begin, result[order], self.weight[order], self.results)
