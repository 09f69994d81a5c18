"""One sample's box, put together of the parts that ranks keep."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hyperslab.data.augment import IDENTITY, Symmetry
from hyperslab.data.store.boxes import SampleBox
from hyperslab.data.store.transport import BoxTransport, Receiving, tag_of
from hyperslab.formats.source import Array
from hyperslab.geometry import Box

KINDS = ("values", "labels or target")


def part_of(whole: SampleBox, box: Box, part: Box) -> SampleBox:
    """Of what holds ``box`` the views of ``part``; a target goes with every part."""
    values, target = whole
    inside = part.slices(box)
    return SampleBox(values[inside], target[inside[1:]] if target.ndim == 3 else target)


@dataclass
class SampleAssembly:
    """``box`` of the file becomes, by ``augmentation``, a slot of the mini-batch."""

    box: Box
    augmentation: Symmetry
    slot: SampleBox
    _waiting: list[tuple[Receiving, Array, Array]] = field(default_factory=list)
    _stored: SampleBox | None = None

    @property
    def stored(self) -> SampleBox:
        """Room for the box as it is in the file; if that is as wanted, the slot itself."""
        if self._stored is None:
            values, target = self.slot
            labels = np.empty(self.box.shape[1:], target.dtype) if target.ndim == 3 else target
            turned = SampleBox(np.empty(self.box.shape, values.dtype), labels)
            self._stored = self.slot if self.augmentation == IDENTITY else turned
        return self._stored

    def put(self, part: Box, sample_box: SampleBox) -> None:
        """Fill in a part that is here."""
        for view, value in zip(part_of(self.stored, self.box, part), sample_box, strict=True):
            view[...] = value

    def expect(self, part: Box, peer: int, transport: BoxTransport, key: tuple[int, ...]) -> None:
        """Begin to receive a part from another rank."""
        for kind, view in enumerate(part_of(self.stored, self.box, part)):
            out = view if view.flags.c_contiguous else np.empty(view.shape, view.dtype)
            receiving = transport.receive(out, peer, tag_of(*key, kind))
            self._waiting.append((receiving, out, view))

    def finish(self) -> None:
        """Wait for all parts and put them, augmented, into the slot.

        Raises:
            CommError: see `Receiving.wait`.
        """
        for receiving, out, view in self._waiting:
            receiving.wait()
            if out is not view:
                view[...] = out
        if self._stored is not None and self._stored is not self.slot:
            self.fill(self._stored)

    def fill(self, stored: SampleBox) -> None:
        """Turn the whole box into the slot."""
        values, target = self.slot
        values[...] = self.augmentation.apply(stored.values)
        turned = target.ndim == 3
        target[...] = self.augmentation.apply(stored.target[None])[0] if turned else stored.target


def send(
    sample_box: SampleBox,
    home: Box,
    part: Box,
    peer: int,
    transport: BoxTransport,
    key: tuple[int, ...],
    what: str,
) -> None:
    """Begin to send a part of what this rank keeps; the twin of `SampleAssembly.expect`."""
    for kind, view in enumerate(part_of(sample_box, home, part)):
        transport.send(
            np.ascontiguousarray(view), peer, tag_of(*key, kind), f"{what}: {KINDS[kind]}"
        )
