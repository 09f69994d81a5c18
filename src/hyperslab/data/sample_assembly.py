"""`SampleAssembly`: one sample's box, assembled from what this rank keeps, reads and receives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyperslab.comm.host import BoxTransport, Receiving, tag_of
from hyperslab.data.augment import IDENTITY, Symmetry
from hyperslab.data.store.boxes import SampleBox
from hyperslab.formats.source import Array, Source
from hyperslab.geometry import Box

WORDS = ("values", "labels or target")
"""The two messages of which a box consists."""


class TargetKind(ABC):
    """What the target of a sample is: how much of it goes with a box of the volume."""

    dtype: np.dtype[Any]

    @abstractmethod
    def shape(self, voxels: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what goes with so many voxels (d, h, w)."""

    @abstractmethod
    def part(self, target: Array, inside: tuple[slice, ...]) -> Array:
        """A view of what goes with a part of the voxels."""

    @abstractmethod
    def augmented(self, target: Array, augmentation: Symmetry) -> Array:
        """The target of the augmented voxels; a view."""


class Labels(TargetKind):
    """The classes of the voxels (d, h, w): they are cut and augmented as the voxels are."""

    dtype = np.dtype(np.uint8)

    def shape(self, voxels: tuple[int, ...]) -> tuple[int, ...]:
        return voxels

    def part(self, target: Array, inside: tuple[slice, ...]) -> Array:
        return target[inside]

    def augmented(self, target: Array, augmentation: Symmetry) -> Array:
        return augmentation.apply(target[None])[0]


@dataclass(frozen=True)
class Numbers(TargetKind):
    """The numbers (P,) of a sample: they go with every part of it, however it is augmented."""

    count: int
    dtype = np.dtype(np.float64)

    def shape(self, voxels: tuple[int, ...]) -> tuple[int, ...]:
        return (self.count,)

    def part(self, target: Array, inside: tuple[slice, ...]) -> Array:
        return target

    def augmented(self, target: Array, augmentation: Symmetry) -> Array:
        return target


def target_kind(source: Source) -> TargetKind:
    """Labels where voxels have classes, else numbers."""
    return Labels() if source.classes else Numbers(len(source.parameters.names))


def part_of(whole: SampleBox, box: Box, part: Box, kind: TargetKind) -> SampleBox:
    """Of what holds ``box`` the views of ``part``."""
    inside = part.slices(box)
    return SampleBox(whole.values[inside], kind.part(whole.target, inside[1:]))


@dataclass
class SampleAssembly:
    """The stored ``box`` becomes, by ``augmentation``, a ``slot`` of the mini-batch."""

    box: Box
    augmentation: Symmetry
    slot: SampleBox
    kind: TargetKind
    _waiting: list[tuple[Receiving, Array, Array]] = field(default_factory=list)
    _stored: SampleBox | None = None

    @property
    def stored(self) -> SampleBox:
        """Room for the box as it is stored; where that is what is wanted, the slot itself."""
        if self._stored is None and self.augmentation == IDENTITY:
            self._stored = self.slot
        if self._stored is None:
            values = np.empty(self.box.shape, self.slot.values.dtype)
            target = np.empty(self.kind.shape(self.box.shape[1:]), self.slot.target.dtype)
            self._stored = SampleBox(values, target)
        return self._stored

    def expect(
        self, part: Box, peer: int, transport: BoxTransport, key: tuple[int, int, int]
    ) -> None:
        """Begin to receive a part from another rank; ``key`` is epoch, step and slot."""
        for word, view in enumerate(part_of(self.stored, self.box, part, self.kind)):
            out = view if view.flags.c_contiguous else np.empty(view.shape, view.dtype)
            receiving = transport.receive(out, peer, tag_of(*key, word))
            self._waiting.append((receiving, out, view))

    def put(self, part: Box, kept: SampleBox) -> None:
        """Fill in a part that this rank keeps."""
        views = part_of(self.stored, self.box, part, self.kind)
        for view, value in zip(views, kept, strict=True):
            view[...] = value

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
        """Put the whole box, augmented, into the slot."""
        if self.augmentation == IDENTITY:
            self.slot.values[...] = stored.values
            self.slot.target[...] = stored.target
            return
        self.slot.values[...] = self.augmentation.apply(stored.values)
        self.slot.target[...] = self.kind.augmented(stored.target, self.augmentation)


def send(
    part: SampleBox, peer: int, transport: BoxTransport, key: tuple[int, int, int], sample: int
) -> None:
    """Begin to send a part of what this rank keeps; the other end of `SampleAssembly.expect`."""
    epoch, step, _ = key
    for word, view in enumerate(part):
        what = f"epoch {epoch}, step {step}, sample {sample}: {WORDS[word]}"
        transport.send(np.ascontiguousarray(view), peer, tag_of(*key, word), what)
