"""Ports for processes that meet: none that the system gives to somebody else meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import socket

EPHEMERAL = 32768  # from here on Linux gives ports to programs that ask for any


def unused_port(host: str = "127.0.0.1") -> int:
    """Find a port on which no other rank answers, and which nobody is given who asks for any.

    Process groups ask for many: a port that was theirs for a moment, and is let go of so that
    another process may listen there, may be somebody's again before that process has begun.
    """
    draw = random.Random(os.urandom(8))  # sessions side by side draw different ones
    while True:
        port = draw.randrange(20000, EPHEMERAL)
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
