"""Describes how a tensor is cut into boxes over the ranks of a grid."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hyperslab.geometry.box import Box, Interval

Coords = Mapping[str, int]
"""Position of a rank on the grid: axis name to index."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Describes one dim that one axis of the grid cuts into shards.

    Shard ``i`` is ``[bounds[i], bounds[i + 1])``. Shards may differ in extent. ``merged``: the
    extents of the dims that a reshape merged into this one, of which the first one is cut; its own
    extent alone if a reshape has split it off. ``before``: which of the merged dims was cut before
    them, and its bounds, where these have moved.

    >>> Cut.balanced("depth", 7, 3).bounds
    (0, 3, 5, 7)
    """

    axis: str
    bounds: tuple[int, ...]
    merged: tuple[int, ...] = ()
    before: tuple[int, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        if self.bounds[0] != 0 or any(a > b for a, b in itertools.pairwise(self.bounds)):
            raise ValueError(f"bounds must start at 0 and never fall: {self.bounds}")

    @classmethod
    def balanced(cls, axis: str, extent: int, parts: int) -> Cut:
        """Makes shards whose extents differ by at most one, the larger ones first."""
        small, larger = divmod(extent, parts)
        return cls(axis, tuple(i * small + min(i, larger) for i in range(parts + 1)))

    def rebalanced(self, extent: int) -> Cut | None:
        """Return as many balanced shards of ``extent``; none where some would be empty."""
        cut = Cut.balanced(self.axis, extent, self.parts)
        return None if cut.thin else cut

    @property
    def extent(self) -> int:
        return self.bounds[-1]

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1

    @property
    def largest(self) -> int:
        return max(b - a for a, b in itertools.pairwise(self.bounds))

    @property
    def thin(self) -> bool:
        """Tell whether some shard is empty, so that the axis has to be gathered."""
        return any(a == b for a, b in itertools.pairwise(self.bounds))

    @property
    def single(self) -> bool:
        """Tell whether some shard is one element or none, of which torch takes any stride."""
        return any(b - a < 2 for a, b in itertools.pairwise(self.bounds))

    def interval(self, index: int) -> Interval:
        return self.bounds[index], self.bounds[index + 1]

    @property
    def intervals(self) -> tuple[Interval, ...]:
        return tuple(itertools.pairwise(self.bounds))


@dataclass(frozen=True, slots=True)
class Cover:
    """Gives every rank one box, dim by dim; boxes of different ranks may overlap.

    ``axes[i]`` names the axis whose coordinate chooses among ``intervals[i]``; a dim without
    an axis has one interval for all ranks.
    """

    axes: tuple[str | None, ...]
    intervals: tuple[tuple[Interval, ...], ...]

    def box(self, coords: Coords) -> Box:
        """Return the box of the rank at ``coords``."""
        return Box.of(
            [
                choices[coords[axis]] if axis is not None else choices[0]
                for axis, choices in zip(self.axes, self.intervals, strict=True)
            ]
        )


@dataclass(frozen=True, slots=True)
class Partition:
    """Holds the global shape of a tensor and the cut of each dim (``None``: all ranks hold all).

    >>> p = Partition((2, 4, 7), (None, None, Cut.balanced("depth", 7, 2)))
    >>> p.box({"depth": 1})
    Box(lo=(0, 0, 4), hi=(2, 4, 7))
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut | None, ...]
    merged: bool = field(init=False, repr=False, compare=False)
    """Tells whether a dim that is cut is merged of several."""
    axes: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Names the axes of the grid that cut some dim."""
    thin: bool = field(init=False, repr=False, compare=False)
    """Tells whether some shard is empty."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Every operator of every step looks up its geometry by a partition.
        object.__setattr__(self, "_hash", hash((self.shape, self.cuts)))
        cuts = [cut for cut in self.cuts if cut is not None]
        object.__setattr__(self, "merged", any(cut.merged for cut in cuts))
        object.__setattr__(self, "axes", tuple(cut.axis for cut in cuts))
        object.__setattr__(self, "thin", any(cut.thin for cut in cuts))
        if len(self.shape) != len(self.cuts):
            raise ValueError(f"{len(self.shape)} dims but {len(self.cuts)} cuts")
        for extent, cut in zip(self.shape, self.cuts, strict=True):
            if cut is not None and cut.extent != extent:
                raise ValueError(f"cut {cut.bounds} does not fit extent {extent}")
        if len(set(self.axes)) != len(self.axes):
            raise ValueError(f"an axis cuts two dims: {self.axes}")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:  # another process hashes strings otherwise
        return Partition, (self.shape, self.cuts)

    @staticmethod
    def whole(shape: Sequence[int]) -> Partition:
        """Return the partition that cuts nothing."""
        return _whole(tuple(shape))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def cut_dims(self) -> tuple[int, ...]:
        return tuple(dim for dim, cut in enumerate(self.cuts) if cut is not None)

    def box(self, coords: Coords) -> Box:
        """Return the box that the rank at ``coords`` holds."""
        return Box.of(
            [
                cut.interval(coords[cut.axis]) if cut is not None else (0, extent)
                for extent, cut in zip(self.shape, self.cuts, strict=True)
            ]
        )

    @property
    def cover(self) -> Cover:
        """Return the same boxes as a `Cover`."""
        return Cover(
            tuple(cut.axis if cut is not None else None for cut in self.cuts),
            tuple(
                cut.intervals if cut is not None else ((0, extent),)
                for extent, cut in zip(self.shape, self.cuts, strict=True)
            ),
        )

    def with_dim(self, dim: int, extent: int, cut: Cut | None) -> Partition:
        """Return the same partition with one dim changed."""
        shape = list(self.shape)
        shape[dim] = extent
        cuts = list(self.cuts)
        cuts[dim] = cut
        return replace(self, shape=tuple(shape), cuts=tuple(cuts))

    def without_dim(self, dim: int) -> Partition:
        """Return the same partition of a tensor that lacks one dim, its channels say."""
        shape = self.shape[:dim] + self.shape[dim + 1 :]
        return Partition(shape, self.cuts[:dim] + self.cuts[dim + 1 :])

    def without(self, axes: Sequence[str]) -> Partition:
        """Return the partition after gathering along ``axes``."""
        return replace(
            self,
            cuts=tuple(None if c is not None and c.axis in axes else c for c in self.cuts),
        )

    def peers(self, coords: Coords) -> Iterator[dict[str, int]]:
        """Yields coordinates of the ranks that share this tensor with the rank at ``coords``."""
        cuts = [cut for cut in self.cuts if cut is not None]
        for index in itertools.product(*(range(cut.parts) for cut in cuts)):
            yield {**coords, **{cut.axis: i for cut, i in zip(cuts, index, strict=True)}}

    def is_first_copy(self, coords: Coords) -> bool:
        """Tell whether the rank at ``coords`` is the first one that holds its box."""
        return all(at == 0 for axis, at in coords.items() if axis not in self.axes)

    def __str__(self) -> str:
        extents = " x ".join(str(extent) for extent in self.shape)
        cuts = [
            f"dim {dim} in {cut.parts} by {cut.axis}"
            for dim, cut in enumerate(self.cuts)
            if cut is not None
        ]
        return f"{extents} ({', '.join(cuts) if cuts else 'not cut'})"


@functools.lru_cache(4096)
def _whole(shape: tuple[int, ...]) -> Partition:
    return Partition(shape, (None,) * len(shape))
