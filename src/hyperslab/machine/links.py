"""Messages between ranks, sums over them, and reads, from a few fitted numbers each."""

from __future__ import annotations

import math
from typing import Literal, TypeVar, get_args

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from hyperslab.machine.part import Part

LinkClass = Literal["device", "node", "network"]
"""Between ranks of one socket (or of devices that are joined directly); between sockets of a
node; between nodes."""

LINKS: tuple[LinkClass, ...] = get_args(LinkClass)
"""From the nearest ranks to the farthest."""


class Residual(Part):
    """How far measured times are from a fit, as a share of them."""

    median: NonNegativeFloat
    worst: NonNegativeFloat


class Line(Part):
    """A linear regression of time in bytes; SR of Oyama et al. 2020, section III-C."""

    up_to: PositiveInt | None = None  # [B] the largest message that it is for; None: any
    latency: NonNegativeFloat  # [s]
    bandwidth: PositiveFloat  # [B/s]
    residual: Residual | None = None  # None: published, not measured

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


class Power(Part):
    """A linear regression of log time in log bytes, over ``ranks`` ranks; AR of the same."""

    up_to: PositiveInt | None = None  # [B] the largest sum that it is for; None: any
    scale: PositiveFloat  # [s] for one byte
    exponent: float  # of bytes
    residual: Residual | None = None

    def seconds(self, nbytes: float) -> float:
        return self.scale * max(nbytes, 1) ** self.exponent


class Sums(Part):
    """All-reduces over so many ranks of a node, measured."""

    ranks: PositiveInt
    pieces: tuple[Power, ...]


class Reading(Part):
    """Of files: what one rank gets, and all of them together where they share a file system."""

    bandwidth: PositiveFloat  # [B/s] of a rank
    total: PositiveFloat | None = None  # [B/s] of all ranks; None: each has its own
    latency: NonNegativeFloat = 0  # [s]
    cached: bool = False  # whether the measured file was in the page cache
    residual: Residual | None = None

    def seconds(self, nbytes: float, ranks: int) -> float:
        shared = nbytes * ranks / self.total if self.total else 0.0
        return self.latency + max(nbytes / self.bandwidth, shared)


class Hidden(Part):
    """The share of communication that work hides; the paper assumes 1."""

    halos: float = 1.0
    gradients: float = 1.0


Piece = TypeVar("Piece", Line, Power)


def piece_for(nbytes: float, pieces: tuple[Piece, ...]) -> Piece:
    """The one for a message, or for a sum, of so many bytes."""
    return next((p for p in pieces if p.up_to is None or nbytes <= p.up_to), pieces[-1])


def ring_or_tree(nbytes: float, ranks: int, line: Line) -> float:
    """The time [s] of an all-reduce of which all messages travel on such a link.

    Ring: 2 (n - 1) messages of 1/n of the bytes. Tree: up and down, 2 log2 n latencies, with the
    bytes travelling in a pipeline. The libraries take whichever is faster.
    """
    if ranks < 2:
        return 0.0
    moved = 2 * nbytes * (ranks - 1) / ranks / line.bandwidth
    ring = 2 * (ranks - 1) * line.latency + moved
    tree = 2 * math.ceil(math.log2(ranks)) * line.latency + 2 * nbytes / line.bandwidth
    return min(ring, tree)
