"""Tiles of a block, by torch: mean, maximum with its winner, and their adjoints."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch


def elements_of_tiles(x: torch.Tensor, pool: Sequence[int]) -> list[torch.Tensor]:
    """For each place in a tile, row by row, the elements of ``x`` there: views of it."""
    steps = [[slice(place, None, k) for place in range(k)] for k in pool]
    return [x[(slice(None), slice(None), *place)] for place in itertools.product(*steps)]


def mean_of_tiles(x: torch.Tensor, pool: Sequence[int]) -> torch.Tensor:
    """(N, C, *extents) -> (N, C, *extents / pool)."""
    first, *others = elements_of_tiles(x, pool)
    return sum(others, first) / math.prod(pool)


def maximum_of_tiles(x: torch.Tensor, pool: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The maxima, and which element of its tile each is (uint8): as in torch the last NaN, else
    the first that is not less than any other.
    """
    best, *others = elements_of_tiles(x, pool)
    winner = torch.zeros_like(best, dtype=torch.uint8)
    for number, other in enumerate(others, start=1):
        wins = (other > best) | other.isnan()
        best = torch.where(wins, other, best)
        winner = torch.where(wins, number, winner)
    return best, winner


def spread_mean(g: torch.Tensor, pool: Sequence[int]) -> torch.Tensor:
    """Adjoint of `mean_of_tiles`."""
    g = g / math.prod(pool)
    for dim, k in enumerate(pool, start=2):
        g = g.repeat_interleave(k, dim)
    return g


def spread_maximum(g: torch.Tensor, winner: torch.Tensor, pool: Sequence[int]) -> torch.Tensor:
    """Adjoint of `maximum_of_tiles`: each gradient goes to the winner."""
    shape = [*g.shape[:2], *(e * k for e, k in zip(g.shape[2:], pool, strict=True))]
    spread = g.new_zeros(shape)
    for number, part in enumerate(elements_of_tiles(spread, pool)):
        part.copy_(torch.where(winner == number, g, 0))
    return spread
