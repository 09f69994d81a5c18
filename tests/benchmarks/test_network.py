"""The relay of a slow network (tier: two processes in network namespaces, as root)."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from network import SlowNetwork

RATE = 25e6  # [B/s]
DELAY = 0.02  # [s]
SENT = 5_000_000  # [B]
FACTOR = 4  # between what was asked for and what a busy machine makes of it

SERVER = f"""
import socket, time
server = socket.create_server(("10.78.0.2", 9000))
other, _ = server.accept()
for _ in range(7):
    other.sendall(other.recv(1))
begin, left = time.monotonic(), {SENT}
while left:
    left -= len(other.recv(1 << 20))
print({SENT} / (time.monotonic() - begin))
"""

CLIENT = f"""
import socket, sys, time
while True:
    try:
        server = socket.create_connection(("10.78.0.2", 9000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(7):
    begin = time.monotonic()
    server.sendall(b"x")
    server.recv(1)
    print(time.monotonic() - begin)
server.sendall(bytes({SENT}))
server.recv(1)
"""


def test_delay_and_rate_are_what_was_asked_for(tmp_path: Path) -> None:
    try:
        network = SlowNetwork(2, RATE, DELAY)
    except (OSError, subprocess.CalledProcessError) as reason:
        pytest.skip(f"no namespaces or TUN devices here: {reason}")
    with network:
        told = [tmp_path / "server.txt", tmp_path / "client.txt"]
        running = [
            network.start(node, [sys.executable, "-c", program], told[at])
            for at, (node, program) in enumerate([(1, SERVER), (0, CLIENT)])
        ]
        assert [one.wait(60) for one in running] == [0, 0]
    (rate,) = map(float, told[0].read_text().split())
    trips = [*map(float, told[1].read_text().split())]
    assert min(trips) >= 2 * DELAY
    assert statistics.median(trips) <= FACTOR * 2 * DELAY
    assert RATE / FACTOR <= rate <= 1.1 * RATE
