"""The average of gradients over ranks that share memory, where they are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hyperslab.comm import Grid, Shown, shared_buffers, shared_channels
from hyperslab.geometry import Cut
from hyperslab.tensor.gradient_homes import GradientHomes

LINE = 64  # [B] at which a gradient begins: a cache line


# What a rank tells the others of a parameter.
NOTHING = 0  # no gradient
OLD = 1  # one of earlier backward passes, averaged then
NEW = 2  # one to which this backward pass has added
IN_ROWS = 3  # NEW, and zero but for the rank's own rows


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a gradient: numbers ``begin`` to ``end`` of those of its type, ``row`` in each row.

    ``index``: of the byte that tells the others of it.
    """

    index: int
    dtype: int
    begin: int
    end: int
    row: int


class SharedGradients:
    """What DistributedDataParallel does for the gradients of a module, of ranks of one machine.

    Every ``.grad`` lies in memory that all ranks map. When the last gradient of a backward
    pass is there, each rank averages its share of the numbers, in place: nothing is sent. A rank
    of the CPU has no other core that could do it meanwhile. Of a layer whose filters ranks share
    only the rank that has them reads its gradient. What a pass brought on some ranks alone (the
    branch that one replica's samples took) is zero on the others.

    ``require_backward_grad_sync``: whether the next forward's gradients will be averaged, as
    DistributedDataParallel has it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[torch.Tensor],
        grid: Grid,
        homes: GradientHomes,
    ) -> None:
        """``buffers`` are bytes, by rank: as many as `bytes_needed`, and one of each parameter."""
        self.require_backward_grad_sync = True
        self.homes = homes
        self._parts: list[list[torch.Tensor]] = []  # of each dtype, by rank
        self._places: dict[int, _Place] = {}  # in the order of memory
        self._size = grid.size
        self._rank = grid.rank
        self._ranks = {axis: _ranks_along(axis, grid) for axis in grid.extents}
        self._rows: dict[int, Cut] = {}
        self._collected: list[tuple[torch.Tensor, int]] = []  # with the version of its gradient
        begin = 0
        for dtype in _dtypes(parameters):
            of_dtype = [p for p in parameters if p.dtype == dtype]
            end = begin + bytes_needed(of_dtype)
            self._parts.append([buffer[begin:end].view(dtype) for buffer in buffers])
            self._make_homes(of_dtype, self._parts[-1][grid.rank])
            begin = end
        self._nbytes = begin + len(self._places)
        self._told = [buffer[begin : self._nbytes] for buffer in buffers]

    def _make_homes(self, parameters: Sequence[nn.Parameter], whole: torch.Tensor) -> None:
        begin = 0
        for parameter in parameters:
            flat = whole[begin : begin + parameter.numel()]
            self.homes.add(parameter, _as(parameter, flat))
            end = begin + bytes_needed([parameter]) // parameter.element_size()
            row = parameter.numel() // max(1, parameter.shape[0]) if parameter.dim() else 1
            index = len(self._places)
            self._places[id(parameter)] = _Place(index, len(self._parts) - 1, begin, end, row)
            begin = end

    def begin(self) -> None:
        """A forward pass begins."""
        self.homes.begin(averaged=self.require_backward_grad_sync)
        self._rows.clear()
        self._collected.clear()

    def collect(self, parameter: torch.Tensor) -> None:
        """Move a gradient to where it is averaged, unless it was made or accumulated there."""
        rows = self.homes.settle(parameter)
        assert parameter.grad is not None
        self._collected.append((parameter, parameter.grad._version))
        if rows is not None and parameter.stride(0) * parameter.shape[0] == parameter.numel():
            self._rows[id(parameter)] = rows

    def average(self) -> None:
        """All gradients that this rank's backward pass brought have been collected.

        Raises:
            CommError: a rank died or did not answer within the time limit.
        """
        shared = shared_channels()
        assert shared is not None
        what = "the average of the gradients"
        for parameter, version in self._collected:
            if not self.homes.bring_back(parameter, version):
                self._rows.pop(id(parameter), None)
        self._tell({id(parameter) for parameter, _ in self._collected})
        self._collected.clear()  # what a module keeps of a step is no tensor of it
        shared.average_shown(self._sums(), what, nbytes=self._nbytes)

    def _tell(self, collected: Collection[int]) -> None:
        """Write down what this rank has of every parameter, where the others look when all met."""
        told = []
        for key in self._places:
            if key in collected:
                told.append(IN_ROWS if key in self._rows else NEW)
            else:
                told.append(OLD if self.homes.stay(key) else NOTHING)
        self._told[self._rank].copy_(torch.tensor(told, dtype=torch.uint8))

    def _sums(self) -> Iterator[Shown]:
        """What is averaged, by what all ranks have told.

        A hook of one rank alone, say, may have made another gradient of one that is in rows.
        """
        everybody = range(self._size)
        all_told = torch.stack(self._told).T.tolist()
        for number, parts in enumerate(self._parts):
            adjacent: list[_Place] = []  # of gradients that come from all ranks
            for key, place in self._places.items():
                if place.dtype != number:
                    continue
                told = all_told[place.index]
                in_rows = min(told) == IN_ROWS
                if max(told) >= NEW and min(told) > NOTHING and not in_rows:
                    adjacent.append(place)
                    continue
                yield from _from_ranks(parts, adjacent, everybody)
                adjacent.clear()
                if in_rows:
                    yield from self._from_owners(parts, place, self._rows[key])
                elif max(told) >= NEW:
                    ranks = [rank for rank in everybody if told[rank] > NOTHING]
                    yield from _from_ranks(parts, [place], ranks)
                    self.homes.adopt(key)
            yield from _from_ranks(parts, adjacent, everybody)

    def _from_owners(
        self, parts: Sequence[torch.Tensor], place: _Place, rows: Cut
    ) -> Iterator[Shown]:
        """Of each interval of rows, which come from the ranks that have it."""
        for (lo, hi), ranks in zip(rows.intervals, self._ranks[rows.axis], strict=True):
            begin = place.begin + lo * place.row
            end = place.begin + hi * place.row
            yield Shown([part[begin:end] for part in parts], ranks)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients accumulate without communication."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def share_gradients(module: nn.Module, grid: Grid, homes: GradientHomes) -> SharedGradients | None:
    """For the trainable parameters of a module; None where ranks cannot share as much memory.

    All ranks call this.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    buffers = shared_buffers(bytes_needed(parameters) + len(parameters))
    return None if buffers is None else SharedGradients(parameters, buffers, grid, homes)


def _from_ranks(
    parts: Sequence[torch.Tensor], adjacent: Sequence[_Place], ranks: Sequence[int]
) -> Iterator[Shown]:
    """Of gradients that lie one after the other; other ranks have none."""
    if adjacent:
        begin = adjacent[0].begin
        end = adjacent[-1].end
        yield Shown([part[begin:end] for part in parts], ranks)


def bytes_needed(parameters: Sequence[torch.Tensor]) -> int:
    """Of their gradients, each on cache lines of its own.

    >>> bytes_needed([torch.zeros(3), torch.zeros(17)])
    192
    """
    return sum(-(-p.nbytes // LINE) * LINE for p in parameters)


def _ranks_along(axis: str, grid: Grid) -> list[list[int]]:
    """Of each place along an axis the ranks that are there."""
    places = [grid.coords_of(rank)[axis] for rank in range(grid.size)]
    return [
        [rank for rank, place in enumerate(places) if place == i] for i in range(grid.extents[axis])
    ]


def _dtypes(parameters: Sequence[nn.Parameter]) -> list[torch.dtype]:
    return list(dict.fromkeys(p.dtype for p in parameters))


def _as(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """In the parameter's memory format, where that leaves no gaps."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)
