"""Averages gradients over ranks that share memory, where they are kept, whole or in part.

`SharedGradients` does what DistributedDataParallel does, for ranks of one machine.
`MissingGradients` handles backward passes that bring no gradient to some parameters, for either
of the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hyperslab.comm import Grid, Shown, log_once, shared_buffers, shared_channels
from hyperslab.geometry import Cut
from hyperslab.tensor.gradient_buffers import GradientBuffers
from hyperslab.util.torch_internals import version_of

GRADIENT_ALIGNMENT = 64  # [B] at which a gradient begins: a cache line


# What a rank tells the others of a parameter.
NO_GRADIENT = 0  # no gradient
OLD_GRADIENT = 1  # one of earlier backward passes, averaged then
NEW_GRADIENT = 2  # one to which this backward pass has added
NEW_GRADIENT_IN_ROWS = 3  # NEW, and zero but for the rank's own rows


@dataclass(frozen=True, slots=True)
class _GradientSpan:
    """Locates a gradient: numbers ``begin`` to ``end`` of those of its type, ``row`` in a row.

    ``index``: of the byte that tells the others of it.
    """

    index: int
    dtype: int
    begin: int
    end: int
    row: int


class SharedGradients:
    """Averages a module's gradients over ranks of one machine, as DistributedDataParallel does.

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
        homes: GradientBuffers,
    ) -> None:
        """``buffers`` are bytes, by rank: as many as `bytes_needed`, and one of each parameter."""
        self.require_backward_grad_sync = True
        self.homes = homes
        self._parts: list[list[torch.Tensor]] = []  # of each dtype, by rank
        self._places: dict[int, _GradientSpan] = {}  # in the order of memory
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
            self.homes.add(parameter, _laid_out_like(parameter, flat))
            end = begin + bytes_needed([parameter]) // parameter.element_size()
            row = parameter.numel() // max(1, parameter.shape[0]) if parameter.dim() else 1
            index = len(self._places)
            self._places[id(parameter)] = _GradientSpan(
                index, len(self._parts) - 1, begin, end, row
            )
            begin = end

    def begin(self) -> None:
        """Begin a forward pass."""
        self.homes.begin(averaged=self.require_backward_grad_sync)
        self._rows.clear()
        self._collected.clear()

    def collect(self, parameter: torch.Tensor) -> None:
        """Move a gradient to where it is averaged, unless it was made or accumulated there."""
        rows = self.homes.copy_in(parameter)
        assert parameter.grad is not None
        self._collected.append((parameter, version_of(parameter.grad)))
        if rows is not None and parameter.stride(0) * parameter.shape[0] == parameter.numel():
            self._rows[id(parameter)] = rows

    def average(self) -> None:
        """Average, once all gradients that this rank's backward pass brought have been collected.

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
                told.append(NEW_GRADIENT_IN_ROWS if key in self._rows else NEW_GRADIENT)
            else:
                told.append(OLD_GRADIENT if self.homes.stay(key) else NO_GRADIENT)
        self._told[self._rank].copy_(torch.tensor(told, dtype=torch.uint8))

    def _sums(self) -> Iterator[Shown]:
        """Yield what is averaged, by what all ranks have told.

        A hook of one rank alone, say, may have made another gradient of one that is in rows.
        """
        everybody = range(self._size)
        all_told = torch.stack(self._told).T.tolist()
        for number, parts in enumerate(self._parts):
            adjacent: list[_GradientSpan] = []  # of gradients that come from all ranks
            for key, place in self._places.items():
                if place.dtype != number:
                    continue
                told = all_told[place.index]
                in_rows = min(told) == NEW_GRADIENT_IN_ROWS
                if max(told) >= NEW_GRADIENT and min(told) > NO_GRADIENT and not in_rows:
                    adjacent.append(place)
                    continue
                yield from _from_ranks(parts, adjacent, everybody)
                adjacent.clear()
                if in_rows:
                    yield from self._from_owners(parts, place, self._rows[key])
                elif max(told) >= NEW_GRADIENT:
                    ranks = [rank for rank in everybody if told[rank] > NO_GRADIENT]
                    yield from _from_ranks(parts, [place], ranks)
                    self.homes.attach(key)
            yield from _from_ranks(parts, adjacent, everybody)

    def _from_owners(
        self, parts: Sequence[torch.Tensor], place: _GradientSpan, rows: Cut
    ) -> Iterator[Shown]:
        """Show each interval of rows, which come from the ranks that have it."""
        for (lo, hi), ranks in zip(rows.intervals, self._ranks[rows.axis], strict=True):
            begin = place.begin + lo * place.row
            end = place.begin + hi * place.row
            yield Shown([part[begin:end] for part in parts], ranks)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate without communication within it."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def share_gradients(
    module: nn.Module, grid: Grid, homes: GradientBuffers
) -> SharedGradients | None:
    """Share the gradients of a module's trainable parameters; None where memory does not suffice.

    All ranks call this.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    buffers = shared_buffers(bytes_needed(parameters) + len(parameters))
    return None if buffers is None else SharedGradients(parameters, buffers, grid, homes)


def _from_ranks(
    parts: Sequence[torch.Tensor], adjacent: Sequence[_GradientSpan], ranks: Sequence[int]
) -> Iterator[Shown]:
    """Show gradients that lie one after the other; other ranks have none."""
    if adjacent:
        begin = adjacent[0].begin
        end = adjacent[-1].end
        yield Shown([part[begin:end] for part in parts], ranks)


def bytes_needed(parameters: Sequence[torch.Tensor]) -> int:
    """Return the size of their gradients [B], each on cache lines of its own.

    >>> bytes_needed([torch.zeros(3), torch.zeros(17)])
    192
    """
    return sum(-(-p.nbytes // GRADIENT_ALIGNMENT) * GRADIENT_ALIGNMENT for p in parameters)


def _ranks_along(axis: str, grid: Grid) -> list[list[int]]:
    """List the ranks at each place along an axis."""
    places = [grid.coords_of(rank)[axis] for rank in range(grid.size)]
    return [
        [rank for rank, place in enumerate(places) if place == i] for i in range(grid.extents[axis])
    ]


def _dtypes(parameters: Sequence[nn.Parameter]) -> list[torch.dtype]:
    return list(dict.fromkeys(p.dtype for p in parameters))


def _laid_out_like(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """View memory in the parameter's memory format, where that leaves no gaps."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


MOST_NAMES_LOGGED = 3


class MissingGradients:
    """Averages those gradients of a module that a backward pass brought.

    Parameters that no loss uses keep the ``.grad`` that they have, None mostly, as in serial torch.
    Those that the losses of some replicas use have no gradient, zero, from the others.

    ``owed``: parameters, by id, whose gradients accumulated without an average (``no_sync``).
    """

    def __init__(self, module: nn.Module, grid: Grid) -> None:
        self.module = module
        self.grid = grid
        self.owed: set[int] = set()
        self.filling = False
        self._said = False

    def average(
        self, seen: Collection[int], averaged: Collection[int], gradients: SharedGradients
    ) -> None:
        """Average those of ``seen`` that have been collected, and what earlier passes left."""
        self._say(seen, averaged)
        for parameter in self._missing(seen, averaged):
            if id(parameter) in self.owed and parameter.grad is not None:
                gradients.collect(parameter)
        self.owed.clear()
        gradients.average()

    def complete(self, seen: set[int], averaged: Collection[int]) -> None:
        """Bring zeros to the others, for DistributedDataParallel waits for all of them.

        These are -0.0, which any other number turns into +0.0: what is still -0.0 after the average
        nobody has used, and no message has to tell. From then on they count as ``seen``:
        it averages once for each forward pass.
        """
        self._say(seen, averaged)
        missing = self._missing(seen, averaged)
        without = [p for p in missing if p.grad is None]
        frozen = [p for p in missing if not p.requires_grad]
        self.filling = True
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            zeros = [
                p.new_full((), complex(-0.0, -0.0) if p.is_complex() else -0.0).expand_as(p)
                for p in missing
            ]
            torch.autograd.backward(missing, zeros)
        finally:
            self.filling = False
            for parameter in frozen:
                parameter.requires_grad_(False)
        for parameter in self._unused(without):
            parameter.grad = None
        seen.update(averaged)
        self.owed.clear()

    def _unused(self, without: Sequence[nn.Parameter]) -> Iterable[nn.Parameter]:
        """Return the parameters without an earlier gradient to which no rank brought any."""
        if self.grid.data == 1 or not without:  # the ranks of a replica run the same program
            return without
        found = torch.stack([_was_used(p.grad) for p in without if p.grad is not None])
        return [p for p, other in zip(without, found.tolist(), strict=True) if not other]

    def _missing(self, seen: Collection[int], averaged: Collection[int]) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if id(p) in averaged and id(p) not in seen]

    def _say(self, seen: Collection[int], averaged: Collection[int]) -> None:
        if self._said:
            return
        self._said = True
        names = [
            name
            for name, p in self.module.named_parameters()
            if id(p) in averaged and id(p) not in seen
        ]
        some = ", ".join(names[:MOST_NAMES_LOGGED]) + (
            ", ..." if len(names) > MOST_NAMES_LOGGED else ""
        )
        log_once(
            self.grid,
            f"{len(names)} of {len(averaged)} parameters of {type(self.module).__name__} got no "
            f"gradient in a backward pass ({some}): their .grad stays as it is, as in serial torch",
        )


def _was_used(average: torch.Tensor) -> torch.Tensor:
    """Tell whether anything but -0.0 has entered it."""
    numbers = torch.view_as_real(average) if average.is_complex() else average
    return numbers.signbit().logical_not().any()
