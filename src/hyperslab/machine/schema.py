"""A machine: what its file says, and the times that follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import date as Date
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from hyperslab.machine.links import (
    LINKS,
    Hidden,
    Line,
    LinkClass,
    Reading,
    Sums,
    piece_for,
    ring_or_tree,
)
from hyperslab.machine.part import Part
from hyperslab.machine.placement import Placement
from hyperslab.machine.setting import Setting

FORMAT = 1
"""Of machine files; a later one may mean other things by the same keys."""


class Reference(Part):
    """Where a published number comes from."""

    key: str  # of this file, such as links.network
    text: str  # what the source says
    where: str  # the publication


class Machine(Part):
    """A machine file. Times are in s, sizes in B, speeds in B/s and flop/s."""

    format: int = FORMAT
    name: str
    date: Date  # of the measurement, or of the collection of published numbers
    versions: dict[str, str]  # of what it was measured with: hyperslab, torch, python
    processor: str
    note: str = ""  # for the reader
    device: str = "cpu"  # as torch calls it
    ranks_per_node: PositiveInt
    ranks_per_socket: PositiveInt  # of a CPU socket, or of devices that are joined directly
    memory: PositiveInt  # [B] of each rank
    settings: Annotated[tuple[Setting, ...], Field(min_length=1)]
    links: dict[LinkClass, tuple[Line, ...]] = Field(default_factory=dict)
    node_bandwidth: PositiveFloat | None = None  # [B/s] to the network; None: a link for each rank
    sums: tuple[Sums, ...] = ()  # none: all-reduces follow from links
    reading: Reading | None = None  # None: not known, reads take no time
    hidden: Hidden = Hidden()
    sources: tuple[Reference, ...] = ()

    @field_validator("links")
    @classmethod
    def _with_pieces(cls, links: dict[LinkClass, tuple[Line, ...]]) -> object:
        for name, pieces in links.items():
            if not pieces or pieces[-1].up_to is not None:
                raise ValueError(f"the last piece of {name} must be for any size: leave out up_to")
        return links

    @model_validator(mode="after")
    def _one_setting_each(self) -> Machine:
        counts = [setting.ranks for setting in self.settings]
        if len(set(counts)) < len(counts):
            raise ValueError(f"settings are for {counts} ranks: give each number once")
        return self

    @property
    def measured(self) -> bool:
        """Whether `hyperslab calibrate` wrote it; if not, its numbers are published ones."""
        return not self.sources

    def setting(self, ranks: int) -> Setting:
        """That of a run on so many ranks: memory bandwidth is shared by those of a node."""
        together = min(ranks, self.ranks_per_node)
        settings = sorted(self.settings, key=lambda setting: setting.ranks)
        return next((s for s in settings if s.ranks >= together), settings[-1])

    def at(self, ranks: int) -> Setting | None:
        """The setting of exactly so many ranks on a node."""
        return next((setting for setting in self.settings if setting.ranks == ranks), None)

    def link(self, rank: int, peer: int) -> LinkClass:
        """What joins two ranks, which fill sockets and nodes in order."""
        per_node = self.ranks_per_node
        ranks = max(rank, peer) + 1
        return Placement(ranks, per_node, self.ranks_per_socket).link(rank, peer)

    def with_setting(self, setting: Setting) -> Machine:
        """The same with another or a new setting of its number of ranks."""
        others = [other for other in self.settings if other.ranks != setting.ranks]
        settings = sorted([*others, setting], key=lambda setting: setting.ranks)
        return self.model_copy(update={"settings": tuple(settings)})

    def joined(self, other: Machine) -> Machine:
        """With the settings of a measurement on another number of ranks of the same machine.

        All else is of the one with the most ranks on a node.
        """
        larger = other if other.ranks_per_node > self.ranks_per_node else self
        joined = larger.model_copy(update={"name": self.name, "settings": self.settings})
        for setting in other.settings:
            joined = joined.with_setting(setting)
        return joined

    @property
    def missing_links(self) -> list[LinkClass]:
        """Classes that the file has no numbers of; the nearest class stands in for them."""
        return [name for name in LINKS if name not in self.links]

    def message_seconds(self, nbytes: int, link: LinkClass) -> float:
        """One message between two ranks [s]; SR of Oyama et al. 2020, section III-C."""
        pieces = self._pieces(link)
        return piece_for(nbytes, pieces).seconds(nbytes) if pieces else 0.0

    def send_seconds(self, nbytes: int, rank: int, peer: int) -> float:
        """A message from one rank to another, while all others send as far [s]; SR as well.

        Of a node's ranks as many send out of it as the peer's number is away, and share
        `node_bandwidth`.
        """
        link = self.link(rank, peer)
        leaving = min(abs(peer - rank), self.ranks_per_node) if link == "network" else 0
        shared = nbytes * leaving / (self.node_bandwidth or math.inf)
        return max(self.message_seconds(nbytes, link), self.message_seconds(0, link) + shared)

    def all_reduce_seconds(self, nbytes: int, ranks: int) -> float:
        """A sum over the first ``ranks`` ranks, all of them waiting [s]; AR of the same."""
        return self.sum_seconds(nbytes, range(ranks))

    def sum_seconds(self, nbytes: int, ranks: Sequence[int]) -> float:
        """A sum over these ranks, while all others sum over such groups [s]; AR of the same.

        Over several nodes: within each, then over the nodes on the network, where every rank of a
        node has its share of the bytes, and of `node_bandwidth`.
        """
        together, nodes = _spread(ranks, self.ranks_per_node)
        seconds = self._sum_in_node(nbytes, together)
        pieces = self._pieces("network")
        if nodes > 1 and pieces:
            share = nbytes / together
            across = ring_or_tree(share, nodes, piece_for(share, pieces))
            leaving = share * self.ranks_per_node
            shared = 2 * leaving * (nodes - 1) / nodes / (self.node_bandwidth or math.inf)
            seconds += max(across, shared)
        return seconds

    def read_seconds(self, nbytes: int, ranks: int) -> float:
        """Every one of ``ranks`` ranks reads so many bytes from files at once [s].

        Mathuriya et al. 2018, equation 1.
        """
        return self.reading.seconds(nbytes, ranks) if self.reading else 0.0

    def _pieces(self, link: LinkClass) -> tuple[Line, ...]:
        """Of the class, else of the next slower, else of the next faster one."""
        at = LINKS.index(link)
        order = [*LINKS[at:], *reversed(LINKS[:at])]
        return next((self.links[name] for name in order if name in self.links), ())

    def _sum_in_node(self, nbytes: int, ranks: int) -> float:
        if ranks < 2:
            return 0.0
        if not self.sums:
            pieces = self._pieces("device" if ranks <= self.ranks_per_socket else "node")
            return ring_or_tree(nbytes, ranks, piece_for(nbytes, pieces)) if pieces else 0.0
        nearest = min(self.sums, key=lambda sums: abs(sums.ranks - ranks))
        seconds = piece_for(nbytes, nearest.pieces).seconds(nbytes)
        # What each rank moves of a sum is 2 (n - 1) / n of its bytes.
        return seconds * ((ranks - 1) / ranks) / ((nearest.ranks - 1) / nearest.ranks)


def _spread(ranks: Sequence[int], per_node: int) -> tuple[int, int]:
    """How many of some ranks are on one node at most, and on how many nodes they are."""
    count = len(ranks)
    if ranks[0] % per_node == 0 and ranks[-1] - ranks[0] == count - 1:  # thousands, quickly
        return min(count, per_node), -(-count // per_node)
    on_node = Counter(rank // per_node for rank in ranks)
    return max(on_node.values()), len(on_node)
