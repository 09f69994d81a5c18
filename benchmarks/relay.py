"""Forwards packets between TUN devices at a rate and with a delay, as a switch with slow ports.

    python benchmarks/relay.py RATE DELAY FD...

Device i has the address 10.78.0.(i + 1). It sends and receives RATE [B/s] at once, and a packet
arrives DELAY [s] after its last byte has left. The flows of a sender take turns, as Linux has it
(fq_codel); none is ever dropped.
"""

from __future__ import annotations

import heapq
import os
import select
import sys
import time
from collections import deque

LARGEST_PACKET = 65535  # [B]
NETWORK = bytes((10, 78, 0))


class Port:
    """Queues what a device sends, by flow, and knows when its two directions are free [s]."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.flows: dict[bytes, deque[tuple[float, bytes]]] = {}
        self.sending = 0.0
        self.receiving = 0.0
        os.set_blocking(fd, False)

    def read(self, now: float) -> None:
        """Take all that the device has to send."""
        while True:
            try:
                packet = os.read(self.fd, LARGEST_PACKET)
            except BlockingIOError:
                return
            if packet[16:19] == NETWORK:  # others look for routers and groups
                flow = packet[12:24]  # both addresses and ports
                self.flows.setdefault(flow, deque()).append((now, packet))

    def next(self) -> tuple[float, bytes]:
        """Return a packet of the flow whose turn it is, and when it came."""
        flow = next(iter(self.flows))
        waiting = self.flows.pop(flow)
        first = waiting.popleft()
        if waiting:
            self.flows[flow] = waiting  # behind all others
        return first


def relay(rate: float, delay: float, ports: list[Port]) -> None:
    """Forward for ever."""
    under_way: list[tuple[float, int, Port, bytes]] = []  # by when they arrive
    count = 0
    while True:
        now = time.monotonic()
        for port in ports:
            port.read(now)
            while port.flows and port.sending <= now:
                came, packet = port.next()
                to = ports[packet[19] - 1]  # the last byte of the receiver's address
                takes = len(packet) / rate
                port.sending = max(port.sending, came) + takes
                # It is received while it is sent, unless others are in its way.
                to.receiving = max(to.receiving + takes, port.sending)
                count += 1
                heapq.heappush(under_way, (to.receiving + delay, count, to, packet))
        while under_way and under_way[0][0] <= now:
            _, _, to, packet = heapq.heappop(under_way)
            os.write(to.fd, packet)
        moments = [port.sending for port in ports if port.flows] + [at for at, *_ in under_way[:1]]
        wait = max(0.0, min(moments) - time.monotonic()) if moments else None
        select.select([port.fd for port in ports], [], [], wait)


if __name__ == "__main__":
    relay(float(sys.argv[1]), float(sys.argv[2]), [Port(int(fd)) for fd in sys.argv[3:]])
