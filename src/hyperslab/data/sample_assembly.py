"""One sample's box, put together of the parts that ranks keep."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hyperslab.data.augment import STILL, Symmetry
from hyperslab.data.store.boxes import Piece
from hyperslab.data.store.transport import Courier, Receiving, tag_of
from hyperslab.formats.source import Array
from hyperslab.geometry import Box

KINDS = ("values", "labels or target")


def part_of(whole: Piece, box: Box, part: Box) -> Piece:
    """Of what holds ``box`` the views of ``part``; a target goes with every part."""
    values, rest = whole
    inside = part.slices(box)
    return Piece(values[inside], rest[inside[1:]] if rest.ndim == 3 else rest)


@dataclass
class Assembly:
    """``box`` of the file becomes, by ``turn``, what a slot of the mini-batch shall hold."""

    box: Box
    turn: Symmetry
    slot: Piece
    _waiting: list[tuple[Receiving, Array, Array]] = field(default_factory=list)
    _stored: Piece | None = None

    @property
    def stored(self) -> Piece:
        """Room for the box as it is in the file; if that is as wanted, the slot itself."""
        if self._stored is None:
            values, rest = self.slot
            labels = np.empty(self.box.shape[1:], rest.dtype) if rest.ndim == 3 else rest
            turned = Piece(np.empty(self.box.shape, values.dtype), labels)
            self._stored = self.slot if self.turn == STILL else turned
        return self._stored

    def put(self, part: Box, piece: Piece) -> None:
        """Fill in a part that is here."""
        for view, value in zip(part_of(self.stored, self.box, part), piece, strict=True):
            view[...] = value

    def expect(self, part: Box, peer: int, courier: Courier, key: tuple[int, ...]) -> None:
        """Begin to receive a part from another rank."""
        for kind, view in enumerate(part_of(self.stored, self.box, part)):
            out = view if view.flags.c_contiguous else np.empty(view.shape, view.dtype)
            receiving = courier.receive(out, peer, tag_of(*key, kind))
            self._waiting.append((receiving, out, view))

    def finish(self) -> None:
        """Wait for all parts and turn them into the slot.

        Raises:
            CommError: see `Receiving.wait`.
        """
        for receiving, out, view in self._waiting:
            receiving.wait()
            if out is not view:
                view[...] = out
        if self._stored is not None and self._stored is not self.slot:
            self.fill(self._stored)

    def fill(self, stored: Piece) -> None:
        """Turn the whole box into the slot."""
        values, rest = self.slot
        values[...] = self.turn.apply(stored.values)
        turned = rest.ndim == 3
        rest[...] = self.turn.apply(stored.rest[None])[0] if turned else stored.rest


def send(
    piece: Piece, home: Box, part: Box, peer: int, courier: Courier, key: tuple[int, ...], what: str
) -> None:
    """Begin to send a part of what this rank keeps; the twin of `Assembly.expect`."""
    for kind, view in enumerate(part_of(piece, home, part)):
        courier.send(np.ascontiguousarray(view), peer, tag_of(*key, kind), f"{what}: {KINDS[kind]}")
