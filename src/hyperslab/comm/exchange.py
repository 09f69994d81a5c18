"""Exchanges boxes of cut tensors point to point, and their gradients by the adjoint.

Legend: a *cover* says which box every rank wants, a *partition* which box every rank owns. A
rank's *plan* is what it sends and receives; it follows from geometry alone, without messages,
and is made once per (partition, cover).

A block that is cut along three axes has up to 26 neighbours, and a kernel for each of them costs
more to start than to run: on a CUDA device one kernel packs, or adds, all of its `Boxes`. What has
to be known of these is a table on the device, which is made once for a plan and the strides of a
block. On the CPU, and without Triton, each box is handled by torch; that is the reference, too.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from hyperslab.comm.communicator import (
    Arriving,
    Communicator,
    GroupCommunicator,
    PackedMessages,
    PeerTensor,
)
from hyperslab.comm.grid import Grid, per_grid
from hyperslab.geometry import Box, Cover, Partition, TransferPlan, plan_transfers
from hyperslab.kernels.conv_problem import no_view
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.kernels.registry import triton_runs
from hyperslab.util.capture import is_capturing
from hyperslab.util.derivatives import LinearMap
from hyperslab.util.torch_internals import dispatch_modes_active

ALIGNED_ELEMENTS = 64  # elements: every box begins on a boundary of at least 128 bytes
MOST_PACKED_DIMS = 5
PACKED_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoxTable:
    """Holds ``rows`` for a kernel, on the device; ``largest``: elements of the largest box."""

    rows: torch.Tensor
    largest: int
    pieces: int  # at most, that meet in one box


@dataclass(frozen=True, slots=True)
class Boxes:
    """Lists the boxes of a block ``own`` that travel, by the order of their messages."""

    own: Box
    parts: tuple[Box, ...]
    _tables: dict[object, BoxTable] = field(default_factory=dict, compare=False, repr=False)

    @property
    def offsets(self) -> list[int]:
        """Return where each begins in one buffer for all [elements], and the buffer's end."""
        sizes = (-(-part.size // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS for part in self.parts)
        return list(itertools.accumulate(sizes, initial=0))

    def allocate(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Allocate a contiguous tensor for each, in one buffer."""
        *begins, end = self.offsets
        buffer = like.new_empty(end)
        return [
            buffer[begin : begin + part.size].view(part.shape)
            for begin, part in zip(begins, self.parts, strict=True)
        ]

    def take_one_kernel(self, block: torch.Tensor) -> bool:
        """Tell whether one kernel handles all boxes of this block."""
        return (
            block.device.type == "cuda"
            and len(self.parts) > 1
            and block.dtype in PACKED_TYPES
            and block.dim() <= MOST_PACKED_DIMS
            and triton_runs()
        )

    def pack(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Copy the boxes of ``x``, each contiguous."""
        from hyperslab.comm.packing_triton import pack_boxes

        pieces = self.allocate(x)
        table = self.table(x, adding=False)
        pack_boxes(x, pieces[0], table.rows, table.largest)
        return pieces

    def add(self, block: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        """Add each piece to its box of ``block``, in place; the pieces are those of `allocate`.

        Where several meet they are added in their order, as one after the other would be.
        """
        from hyperslab.comm.packing_triton import add_boxes

        table = self.table(block, adding=True)
        add_boxes(block, pieces[0], table.rows, table.largest, table.pieces)

    def table(self, block: torch.Tensor, *, adding: bool) -> BoxTable:
        """Return where each box lies in a block of such strides, and where in the buffer; once.

        For ``adding`` the same for the disjoint boxes that the parts fall into: each has the parts
        that cover it, in their order.
        """
        key = (adding, block.stride(), block.device)
        if key not in self._tables:
            alone = [(part, [number]) for number, part in enumerate(self.parts)]
            cells = _split_disjoint(self.parts) if adding else alone
            self._tables[key] = self._write_table(cells, block.stride(), block.device)
        return self._tables[key]

    def _write_table(
        self, cells: Sequence[tuple[Box, list[int]]], strides: Strides, device: torch.device
    ) -> BoxTable:
        """Write a row for each cell, given the numbers of the parts that cover it.

        Its size, its first element in the block, the number of parts, five extents, five strides
        of the block; then, for each part, its first element in the buffer and its five strides.
        """
        most = max(len(covering) for _, covering in cells)
        offsets = self.offsets
        rows = []
        for cell, covering in cells:
            row = [cell.size, _first_element(cell, self.own, strides), len(covering)]
            row += [*_pad_to_dims(cell.shape, 1), *_pad_to_dims(strides, 0)]
            for number in covering:
                part = self.parts[number]
                lies = [math.prod(part.shape[dim + 1 :]) for dim in range(part.ndim)]
                row.append(offsets[number] + _first_element(cell, part, lies))
                row += _pad_to_dims(lies, 0)
            rows.append(row + [0] * (6 * (most - len(covering))))
        table = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
        return BoxTable(table, max(row[0] for row in rows), most)


def _first_element(part: Box, box: Box, strides: Sequence[int]) -> int:
    """Return the first element of ``part`` in a tensor that holds ``box``."""
    return sum((p - b) * s for p, b, s in zip(part.lo, box.lo, strides, strict=True))


def _pad_to_dims(values: Sequence[int], fill: int) -> list[int]:
    return [fill] * (MOST_PACKED_DIMS - len(values)) + list(values)


def _split_disjoint(parts: Sequence[Box]) -> list[tuple[Box, list[int]]]:
    """Boxes that tile the union of ``parts``, each with the numbers of those that cover it."""
    ends = [sorted({e for part in parts for e in part.interval(d)}) for d in range(parts[0].ndim)]
    cells = []
    for intervals in itertools.product(*(list(itertools.pairwise(e)) for e in ends)):
        cell = Box.of(list(intervals))
        covering = [number for number, part in enumerate(parts) if part.contains(cell)]
        if covering:
            cells.append((cell, covering))
    return cells


_KEPT = 4096
"""Answers about boxes, which all steps ask again."""


@dataclass(frozen=True)
class ExchangePlan(TransferPlan):
    """Plans a rank's part of an exchange in which every rank owns a box and wants one.

    With what its communicator asks for in every step, worked out once.
    """

    own: Box
    wanted: Box
    communicator: Communicator | None = field(compare=False, repr=False)

    @functools.cached_property
    def brought(self) -> tuple[Box, ...]:
        """Return the parts of the wanted box that this rank keeps or receives."""
        return (*self.kept_parts, *(t.box for t in self.receives))

    @functools.cached_property
    def kept_parts(self) -> tuple[Box, ...]:
        """Return the one that it keeps, if there is one."""
        return () if self.kept is None else (self.kept,)

    @functools.cached_property
    def in_place(self) -> bool:
        """Tell whether the wanted box is a part of the own one, and no rank wants anything else."""
        return self.local and self.own.contains(self.wanted)

    @functools.cached_property
    def parts_sent(self) -> list[tuple[int, tuple[slice, ...], tuple[int, ...]]]:
        """Return which rank gets which part of the own block, and its shape."""
        return [(t.rank, t.box.slices(self.own), t.box.shape) for t in self.sends]

    @functools.cached_property
    def boxes_sent(self) -> Boxes:
        """Return what others get of the own block."""
        return Boxes(self.own, tuple(t.box for t in self.sends))

    @functools.cached_property
    def largest(self) -> int:
        """Count the elements of the larger one of the two boxes."""
        return max(self.own.size, self.wanted.size)

    @functools.cached_property
    def gathers(self) -> dict[object, Gathers]:
        """Keeps the indices by which small boxes are put together; see `Gathers`."""
        return {}

    @functools.cached_property
    def parts_received(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return which ranks send pieces of which shapes."""
        return [(t.rank, t.box.shape) for t in self.receives]


def plan_exchange(partition: Partition, cover: Cover, grid: Grid) -> ExchangePlan:
    """Return the plan of this rank to get its box of ``cover`` from a tensor cut as ``partition``.

    Along axes that do not cut the tensor every rank has its own copy and needs nobody else's.
    """
    return _kept_plan(grid, partition, cover)


def new_exchange_plan(grid: Grid, partition: Partition, cover: Cover) -> ExchangePlan:
    """Plan as `plan_exchange` does, and keep nothing: for covers that follow from values."""
    own = partition.box(grid.coords)
    wanted = cover.box(grid.coords)
    owners = _near(partition, partition.cover, wanted, grid)
    askers = _near(partition, cover, own, grid)
    owned = {grid.rank_of(at): partition.box(at) for at in owners} | {grid.rank: own}
    asked = {grid.rank_of(at): cover.box(at) for at in askers} | {grid.rank: wanted}
    plan = plan_transfers(grid.rank, owned, asked)
    communicator = None if grid.size == 1 else grid.halos
    return ExchangePlan(own, wanted, plan.sends, plan.receives, communicator)


_kept_plan = per_grid(new_exchange_plan)


def _near(partition: Partition, cover: Cover, box: Box, grid: Grid) -> Iterator[dict[str, int]]:
    """Coordinates of the peers whose box of ``cover`` may meet ``box``.

    A box is an interval in every dim, so each axis is looked at by itself: with thousands of ranks
    it would take seconds to compare with them all.
    """
    choices = []
    for cut in (cut for cut in partition.cuts if cut is not None):
        dims = [dim for dim, axis in enumerate(cover.axes) if axis == cut.axis]
        choices.append([i for i in range(cut.parts) if _meets(cover, dims, i, box)])
    axes = partition.axes
    for index in itertools.product(*choices):
        yield {**grid.coords, **dict(zip(axes, index, strict=True))}


def _meets(cover: Cover, dims: Sequence[int], index: int, box: Box) -> bool:
    """Tell whether what the ranks at ``index`` of an axis hold meets ``box`` in the axis's dims."""
    for dim in dims:
        lo, hi = cover.intervals[dim][index]
        if max(lo, box.lo[dim]) >= min(hi, box.hi[dim]):
            return False
    return True


def start(x: torch.Tensor, plan: ExchangePlan, what: str) -> Arriving:
    """Send what others want of ``x``, the own box, and begin to receive what this rank wants."""
    boxes = plan.boxes_sent
    if boxes.take_one_kernel(x):
        sends = [(t.rank, piece) for t, piece in zip(plan.sends, boxes.pack(x), strict=True)]
    else:
        sends = [(rank, x[part]) for rank, part, _ in plan.parts_sent]
    receives = [(rank, _receive_buffer(shape, x)) for rank, shape in plan.parts_received]
    return _exchange(plan, sends, receives, what)


def start_adjoint(
    pieces: Sequence[torch.Tensor], like: torch.Tensor, plan: ExchangePlan, what: str
) -> Arriving:
    """Start the adjoint of `start`: received pieces' gradients travel back to the boxes' owners."""
    sends = [(rank, piece) for (rank, _), piece in zip(plan.parts_received, pieces, strict=True)]
    boxes = plan.boxes_sent
    if boxes.take_one_kernel(like):
        buffers = boxes.allocate(like)
    else:
        buffers = [_receive_buffer(shape, like) for _, _, shape in plan.parts_sent]
    receives = [(rank, piece) for (rank, _, _), piece in zip(plan.parts_sent, buffers, strict=True)]
    return _exchange(plan, sends, receives, f"the adjoint of {what}")


def _receive_buffer(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Allocate for a message that is to lie in memory as ``like``; on a GPU it is contiguous."""
    on_cpu = like.device.type == "cpu"
    order = memory_format_of(like) if on_cpu else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=order)


class _Nothing:
    """Return what arrives where no rank sends."""

    def wait(self) -> list[torch.Tensor]:
        return []


def _exchange(
    plan: ExchangePlan, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
) -> Arriving:
    if plan.communicator is None or plan.local:
        return _Nothing()
    return plan.communicator.exchange(sends, receives, what)


def add_returned(
    gradient: torch.Tensor, returned: Sequence[torch.Tensor], plan: ExchangePlan
) -> None:
    """Add what `start_adjoint` brought home to the gradient of the own box, in place."""
    boxes = plan.boxes_sent
    # They may have arrived elsewhere than where `start_adjoint` makes room for all of them.
    if (
        boxes.take_one_kernel(gradient)
        and len({piece.untyped_storage().data_ptr() for piece in returned}) == 1
    ):
        return boxes.add(gradient, returned)
    for (_, part, _), piece in zip(plan.parts_sent, returned, strict=True):
        gradient[part].add_(piece)


def new_box(
    box: Box, parts: Sequence[Box], like: torch.Tensor, fill: complex = 0.0
) -> torch.Tensor:
    """Allocate a tensor for ``box`` that ``parts`` cover: ``fill`` where they leave a gap."""
    out = torch.empty(
        box.shape, dtype=like.dtype, device=like.device, memory_format=memory_format_of(like)
    )
    for gap in gaps_in(box, tuple(parts)):
        out[gap].fill_(fill)
    return out


@functools.lru_cache(maxsize=_KEPT)
def gaps_in(box: Box, parts: tuple[Box, ...]) -> tuple[tuple[slice, ...], ...]:
    """Boxes in ``box`` that hold all that disjoint ``parts`` of it leave: a few thin ones, or all.

    Usually the parts make up one box, and what is left are slabs of padding at its sides.
    """
    inside = [part for part in map(box.intersect, parts) if not part.empty]
    covered = sum(part.size for part in inside)
    if covered == box.size:
        return ()
    whole = Box.around(inside) if inside else box
    if whole.size > covered:
        return (box.slices(box),)
    return tuple(slab.slices(box) for slab in box.without(whole))


def copy_overlap(out: torch.Tensor, box: Box, part: torch.Tensor, at: Box) -> None:
    """Copy what ``part``, which holds the box ``at``, has of ``box`` into ``out``."""
    places = overlap(box, at)
    if places is not None:
        out[places[0]] = part[places[1]]


@functools.lru_cache(maxsize=_KEPT)
def overlap(box: Box, at: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where the common part of two boxes lies in each."""
    common = box.intersect(at)
    return None if common.empty else (common.slices(box), common.slices(at))


def bring(
    x: torch.Tensor, plan: ExchangePlan, box: Box, what: str, fill: complex = 0.0
) -> torch.Tensor:
    """Return ``box`` of a cut tensor, of which ``x`` is the own box, in new memory.

    It is the wanted box of the plan, or one around it or within it, ``fill`` where nobody has
    anything. Elements travel as in `start`.
    """
    if _is_few(x, plan, box):
        return _gathers_of(x, plan, box).bring(x, plan, what, fill)
    pending = start(x, plan, what)
    out = new_box(box, plan.brought, x, fill)
    copy_overlap(out, box, x, plan.own)
    for t, piece in zip(plan.receives, pending.wait(), strict=True):
        copy_overlap(out, box, piece, t.box)
    return out


def receive_halo(x: torch.Tensor, plan: ExchangePlan, box: Box, what: str) -> list[torch.Tensor]:
    """Return what other ranks have of ``box``, as `join_halo` takes it.

    Each rank's piece; where the boxes are small one flat tensor with all of them.
    """
    if plan.local:
        return []
    if not _is_few(x, plan, box):
        return start(x, plan, what).wait()
    gathers = _gathers_of(x, plan, box)
    return [gathers.receive(x, plan, what)]


def are_packed(halo: Sequence[torch.Tensor], plan: ExchangePlan) -> bool:
    """Tell if what was received is one flat tensor, as of small boxes, that `join_halo` takes."""
    return len(halo) == 1 and halo[0].dim() == 1 < plan.own.ndim


def join_halo(
    x: torch.Tensor,
    halo: Sequence[torch.Tensor],
    plan: ExchangePlan,
    box: Box,
    fill: complex = 0.0,
) -> torch.Tensor:
    """Put the own box ``x`` and what was received together, as `bring` does both."""
    if are_packed(halo, plan):
        return _gathers_of(x, plan, box).join(x, halo[0], fill)
    out = new_box(box, plan.brought, x, fill)
    copy_overlap(out, box, x, plan.own)
    for t, piece in zip(plan.receives, halo, strict=True):
        copy_overlap(out, box, piece, t.box)
    return out


def send_home(
    gradient: torch.Tensor, plan: ExchangePlan, box: Box, what: str, *, private: bool = False
) -> torch.Tensor:
    """Return the gradient of the own box from that of ``box``: the adjoint of `bring`.

    ``private``: nobody else sees the memory of ``gradient``, which the result may take.
    """
    if _is_few(gradient, plan, box) and not plan.local:
        return _gathers_of(gradient, plan, box).send_home(gradient, plan, what)
    pieces = [gradient[t.box.slices(box)] for t in plan.receives]
    pending = start_adjoint(pieces, gradient, plan, what)
    if private and box.contains(plan.own):
        own = gradient[plan.own.slices(box)]
    else:
        own = new_box(plan.own, plan.kept_parts, gradient)
        copy_overlap(own, plan.own, gradient, box)
    add_returned(own, pending.wait(), plan)
    return own


FEW_ELEMENTS = 1 << 14
"""Limits the boxes that are put together by one index: piece by piece it takes the host longer."""


def _is_few(x: torch.Tensor, plan: ExchangePlan, box: Box) -> bool:
    """Tell if boxes are put together by one index; a mode that looks on sees them piece by piece.

    A flat halo is told from a piece by its dims, so boxes have several.
    """
    return (
        x.numel() <= FEW_ELEMENTS
        and x.dtype in PACKED_TYPES
        and plan.largest <= FEW_ELEMENTS
        and len(box.lo) > 1
        and not dispatch_modes_active()
    )


def _gathers_of(x: torch.Tensor, plan: ExchangePlan, box: Box) -> Gathers:
    """Return the indices for small boxes, made once for each order of memory."""
    last = memory_format_of(x) is not torch.contiguous_format
    key = (None if box is plan.wanted else box, last, x.device)
    found = plan.gathers.get(key)
    if found is None:
        found = plan.gathers[key] = Gathers.of(plan, box, last, x.device)
    return found


class Meeting:
    """Keeps memory in which the elements of small boxes meet, and its parts that are messages.

    First the elements of a box, then all that arrives, then one of filling. Whoever writes to it
    has read what was there before: it belongs to one thread and to one stream.
    """

    def __init__(self, own: torch.Tensor, sends: PackedMessages, receives: PackedMessages) -> None:
        sizes = [own.numel(), sum(receives.sizes), 1]
        with torch.inference_mode(False):
            self.all = own.new_zeros(sum(sizes))
            place, self.arrived, self._filling = self.all.split(sizes)
            self.own = place.view(own.shape)
            self.leaving = own.new_empty(sum(sends.sizes))
        self._fill: complex = 0.0
        self._sends = sends.pieces(self.leaving)
        self._receives = receives.pieces(self.arrived)

    def fill_with(self, fill: complex) -> None:
        """Write the filling, unless it is there."""
        # Not a number is never equal, and 0.0 is to -0.0.
        if fill is not self._fill and (fill != self._fill or fill == 0):
            self._filling.fill_(fill)
            self._fill = fill

    def exchange(
        self, own: torch.Tensor, sent: torch.Tensor, plan: ExchangePlan, what: str
    ) -> None:
        """Send the elements ``sent`` of a box, and have others' in `arrived`."""
        communicator = plan.communicator
        if communicator is None or plan.local:
            return
        torch.take(own, sent, out=self.leaving)
        if isinstance(communicator, GroupCommunicator) and communicator.sends_alone(self.leaving):
            communicator.exchange_flat(self._sends, self._receives, what)
        else:
            communicator.exchange(self._sends, self._receives, what).wait()

    def joined_with(
        self,
        own: torch.Tensor,
        sent: torch.Tensor,
        plan: ExchangePlan,
        what: str,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """Return what lies at some ``places`` once everything is there, in their shape."""
        self.exchange(own, sent, plan, what)
        self.own.copy_(own)
        return self.all.take(places)


@dataclass(frozen=True, slots=True, eq=False)
class Gathers:
    """Holds where each element of small boxes comes from, so that one operator moves all of them.

    A block with 7 neighbours falls into as many pieces each way, which cost the host some 50
    operators. Here ``sent`` and ``returned`` say what all messages together take of the own box
    and of the other one, in the order of memory of either (channels ``last`` or not); a
    message has its box's elements in the order of a contiguous tensor, whatever the others do.
    ``brought`` says what the box takes of the own one, of all that arrived, and of one element of
    filling, joined in this order; ``home``, a part for each of the pieces that meet in an
    element, what the own gradient adds up of the box's gradient, of all that came home, and of
    a zero. Both are of the shape of what they make, in the order of memory.
    """

    last: bool
    sent: torch.Tensor
    brought: torch.Tensor
    returned: torch.Tensor
    home: torch.Tensor
    sends: PackedMessages
    receives: PackedMessages
    meetings: dict[object, Meeting] = field(default_factory=dict)

    @staticmethod
    def of(plan: ExchangePlan, box: Box, last: bool, device: torch.device) -> Gathers:
        """Return the indices: places are moved as values would be, on the host."""
        sends = PackedMessages([(t.rank, t.box.shape) for t in plan.sends])
        receives = PackedMessages(plan.parts_received)
        with torch.inference_mode(False):
            own, whole = _places(plan.own, last), _places(box, last)
            arriving = _numbered(receives, plan.own.size)
            nothing = plan.own.size + sum(receives.sizes)
            brought = join_halo(own, arriving, plan, box, nothing)
            nothing = box.size + sum(sends.sizes)
            terms = [own.new_full(plan.own.shape, nothing) for _ in range(1 + len(plan.sends))]
            copy_overlap(terms[0], plan.own, whole, box)
            for t, term, places in zip(
                plan.sends, terms[1:], _numbered(sends, box.size), strict=True
            ):
                term[t.box.slices(plan.own)] = places
            # Few pieces meet in an element: what is nothing goes last, and parts of nothing go.
            home = torch.stack([_in_memory(term, last) for term in terms]).sort(0).values
            home = home[: max(1, int((home != nothing).flatten(1).any(1).sum()))]
            sent = [own[t.box.slices(plan.own)] for t in plan.sends]
            returned = [whole[t.box.slices(box)] for t in plan.receives]

            def index(places: torch.Tensor) -> torch.Tensor:
                return places.contiguous().to(device, non_blocking=True)

            def joined(places: Sequence[torch.Tensor]) -> torch.Tensor:
                return torch.cat([own.new_empty(0), *(part.flatten() for part in places)])

            return Gathers(
                last,
                index(joined(sent)),
                index(_in_memory(brought, last)),
                index(joined(returned)),
                index(home if len(home) > 1 else home[0]),
                sends,
                receives,
            )

    def bring(self, x: torch.Tensor, plan: ExchangePlan, what: str, fill: complex) -> torch.Tensor:
        own = _in_memory(x, self.last)
        meeting = self._meeting(own, self.sends, self.receives, fill)
        return self._shaped(meeting.joined_with(own, self.sent, plan, what, self.brought))

    def receive(self, x: torch.Tensor, plan: ExchangePlan, what: str) -> torch.Tensor:
        own = _in_memory(x, self.last)
        meeting = self._meeting(own, self.sends, self.receives, 0.0)
        meeting.exchange(own, self.sent, plan, what)
        return meeting.arrived.clone()

    def join(self, x: torch.Tensor, arrived: torch.Tensor, fill: complex) -> torch.Tensor:
        own = _in_memory(x, self.last).flatten()
        joined = torch.cat((own, arrived, filling(fill, str(fill), own.dtype, own.device)))
        return self._shaped(joined.take(self.brought))

    def send_home(self, gradient: torch.Tensor, plan: ExchangePlan, what: str) -> torch.Tensor:
        whole = _in_memory(gradient, self.last)
        meeting = self._meeting(whole, self.receives, self.sends, 0.0)
        what = f"the adjoint of {what}"
        found = meeting.joined_with(whole, self.returned, plan, what, self.home)
        return self._shaped(found if found.dim() == whole.dim() else found.sum(0))

    def _meeting(
        self, own: torch.Tensor, sends: PackedMessages, receives: PackedMessages, fill: complex
    ) -> Meeting:
        if is_capturing():  # a graph's memory is its own, and is not filled before it is replayed
            found = Meeting(own, sends, receives)
        else:
            stream = torch.cuda.current_stream(own.device).cuda_stream if own.is_cuda else 0
            key = (sends is self.sends, own.dtype, stream, threading.get_ident())
            kept = self.meetings.get(key)
            if kept is None:
                kept = self.meetings[key] = Meeting(own, sends, receives)
            found = kept
        found.fill_with(fill)
        return found

    def _shaped(self, y: torch.Tensor) -> torch.Tensor:
        return y.movedim(-1, 1) if self.last else y


@functools.lru_cache
def filling(value: complex, _text: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return one element that nobody writes to; the text of the value tells -0.0 from 0.0."""
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=dtype, device=device)


def _places(box: Box, last: bool) -> torch.Tensor:
    """Number a box's elements by their places in memory; the result has the box's shape."""
    shape = (box.shape[0], *box.shape[2:], box.shape[1]) if last else box.shape
    places = torch.arange(box.size, device="cpu").view(shape)
    return places.movedim(-1, 1) if last else places


def _in_memory(values: torch.Tensor, last: bool) -> torch.Tensor:
    """Return a box's elements in the order of memory."""
    return values.movedim(1, -1) if last else values


def _numbered(messages: PackedMessages, first: int) -> list[torch.Tensor]:
    """Number the elements of messages, one behind the other; each has its message's shape."""
    places = torch.arange(first, first + sum(messages.sizes), device="cpu")
    return [piece for _, piece in messages.pieces(places)]


def fetch(
    x: torch.Tensor, plan: ExchangePlan, *, fill: complex = 0.0, box: Box | None = None, what: str
) -> torch.Tensor:
    """Return the wanted box of a cut tensor, differentiable; ``x`` is the own box.

    Or another ``box`` around it or within it. Elements outside the volume are ``fill`` and have no
    gradient. Where the plan needs no message and stays inside the own box the result is a view.

    Distribution scheme, forward: 1. send what others want of the own box, 2. copy what is kept,
    3. receive the rest. Backward: 1. send received pieces' gradients home, 2. copy the kept part's
    gradient, 3. add what came home.
    """
    if plan.in_place and box in (None, plan.wanted):
        return x if plan.own == plan.wanted else x[plan.wanted.slices(plan.own)]
    there, back = _maps(plan, box or plan.wanted, what)
    return LinearMap.apply(x, partial(there, fill=fill), back, there)


def give_back(gradient: torch.Tensor, plan: ExchangePlan, *, what: str) -> torch.Tensor:
    """Apply the adjoint of `fetch`, differentiable; ``gradient`` is that of the wanted box."""
    there, back = _maps(plan, plan.wanted, what)
    return LinearMap.apply(gradient, back, there)


def _maps(plan: ExchangePlan, box: Box, what: str) -> tuple[Callable[..., torch.Tensor], ...]:
    """Return the map from the own box to another one, and its adjoint."""

    def there(x: torch.Tensor, fill: complex = 0.0) -> torch.Tensor:
        return no_view(bring(x, plan, box, what, fill))

    def back(gradient: torch.Tensor) -> torch.Tensor:
        return no_view(send_home(gradient, plan, box, what))

    return there, back
