"""Which ranks share a socket and a node."""

from __future__ import annotations

from dataclasses import dataclass

from hyperslab.machine.links import LINKS, LinkClass


@dataclass(frozen=True, slots=True)
class Placement:
    """Ranks fill sockets (or groups of devices that are joined directly) and nodes in order."""

    ranks: int
    per_node: int
    per_socket: int

    def link(self, rank: int, peer: int) -> LinkClass:
        """What joins two ranks."""
        if rank // self.per_node != peer // self.per_node:
            return "network"
        here, there = (r % self.per_node // self.per_socket for r in (rank, peer))
        return "device" if here == there else "node"

    def partner(self, rank: int, link: LinkClass) -> int | None:
        """Whom a rank talks to while all talk in pairs over links of a class; None: nobody.

        >>> placement = Placement(ranks=8, per_node=4, per_socket=2)
        >>> [placement.partner(0, link) for link in LINKS]
        [1, 2, 4]
        >>> placement.partner(3, "node")
        1
        """
        far = {"device": 1, "node": self.per_socket, "network": self.per_node}[link]
        peer = rank + far if rank // far % 2 == 0 else rank - far
        return peer if peer < self.ranks and self.link(rank, peer) == link else None

    @property
    def nearest(self) -> LinkClass:
        """The class of link of rank 0 to its nearest peer."""
        return self.link(0, 1) if self.ranks > 1 else LINKS[0]
