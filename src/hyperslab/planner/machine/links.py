"""Models messages between ranks, sums over them, and reads, by a few fitted numbers each.

`MachineSection` is the base of all sections of a machine file. `LinearFit` and `PowerFit` give
the time of a message and of an all-reduce by bytes; `Placement` says which ranks share a socket
and a node, and so which class of link joins two of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt


class MachineSection(BaseModel):
    """Refuses unknown keys, changes and infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copies the section without the properties cached from the old values."""
        copy = super().model_copy(update=update, deep=deep)
        for name in copy.__dict__.keys() - type(self).model_fields.keys():
            del copy.__dict__[name]
        return copy


LinkClass = Literal["device", "node", "network"]
"""Names what joins two ranks: one socket (or devices that are joined directly), one node, or the
network between nodes."""

LINKS: tuple[LinkClass, ...] = get_args(LinkClass)
"""Orders the classes of links, the nearest ranks first."""


class FitResidual(MachineSection):
    """Says how far measured times are from a fit, as a share of them."""

    median: NonNegativeFloat
    worst: NonNegativeFloat


class LinearFit(MachineSection):
    """Fits time linearly in bytes; SR of Oyama et al. 2020, section III-C."""

    up_to: PositiveInt | None = None  # [B] the largest message that it is for; None: any
    latency: NonNegativeFloat  # [s]
    bandwidth: PositiveFloat  # [B/s]
    residual: FitResidual | None = None  # None: published, not measured

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


class PowerFit(MachineSection):
    """Fits log time linearly in log bytes, over ``ranks`` ranks; AR of the same."""

    up_to: PositiveInt | None = None  # [B] the largest sum that it is for; None: any
    scale: PositiveFloat  # [s] for one byte
    exponent: float  # of bytes
    residual: FitResidual | None = None

    def seconds(self, nbytes: float) -> float:
        return self.scale * max(nbytes, 1) ** self.exponent


class AllReduceFits(MachineSection):
    """Holds the fits of measured all-reduces over ``ranks`` ranks of a node."""

    ranks: PositiveInt
    pieces: tuple[PowerFit, ...]


class ReadSpeed(MachineSection):
    """Models reading files: the speed of one rank, and of all on a shared file system."""

    bandwidth: PositiveFloat  # [B/s] of a rank
    total: PositiveFloat | None = None  # [B/s] of all ranks; None: each has its own
    latency: NonNegativeFloat = 0  # [s]
    cached: bool = False  # whether the measured file was in the page cache
    residual: FitResidual | None = None

    def seconds(self, nbytes: float, ranks: int) -> float:
        shared = nbytes * ranks / self.total if self.total else 0.0
        return self.latency + max(nbytes / self.bandwidth, shared)


class HiddenShares(MachineSection):
    """Holds the shares of communication that work hides; the paper assumes 1."""

    halos: float = 1.0
    gradients: float = 1.0


AnyFit = TypeVar("AnyFit", LinearFit, PowerFit)


def fit_for(nbytes: float, pieces: tuple[AnyFit, ...]) -> AnyFit:
    """Chooses the piece of a fit for a message, or a sum, of so many bytes."""
    return next((p for p in pieces if p.up_to is None or nbytes <= p.up_to), pieces[-1])


def ring_or_tree(nbytes: float, ranks: int, line: LinearFit) -> float:
    """Computes the time [s] of an all-reduce whose messages all travel on such a link.

    Ring: 2 (n - 1) messages of 1/n of the bytes. Tree: up and down, 2 log2 n latencies, with the
    bytes travelling in a pipeline. The libraries take whichever is faster.
    """
    if ranks < 2:
        return 0.0
    moved = 2 * nbytes * (ranks - 1) / ranks / line.bandwidth
    ring = 2 * (ranks - 1) * line.latency + moved
    tree = 2 * math.ceil(math.log2(ranks)) * line.latency + 2 * nbytes / line.bandwidth
    return min(ring, tree)


@dataclass(frozen=True, slots=True)
class Placement:
    """Places ranks: they fill sockets (or groups of joined devices) and nodes in order."""

    ranks: int
    per_node: int
    per_socket: int

    def link(self, rank: int, peer: int) -> LinkClass:
        """Returns the class of link that joins two ranks."""
        if rank // self.per_node != peer // self.per_node:
            return "network"
        here, there = (r % self.per_node // self.per_socket for r in (rank, peer))
        return "device" if here == there else "node"

    def partner(self, rank: int, link: LinkClass) -> int | None:
        """Returns a rank's peer while all talk in pairs over links of a class; None: nobody.

        >>> placement = Placement(ranks=8, per_node=4, per_socket=2)
        >>> [placement.partner(0, link) for link in LINKS]
        [1, 2, 4]
        >>> placement.partner(3, "node")
        1
        """
        far = {"device": 1, "node": self.per_socket, "network": self.per_node}[link]
        peer = rank + far if rank // far % 2 == 0 else rank - far
        return peer if peer < self.ranks and self.link(rank, peer) == link else None
