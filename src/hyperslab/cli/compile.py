"""Runs `hyperslab compile`: compiles the kernels before the first run would."""

from __future__ import annotations

from hyperslab.cli.terminal import say
from hyperslab.kernels.compile import cached_library, load_library


def compile_command() -> None:
    """Compile the kernels for this machine's processor now; a first run would wait for it."""
    path = cached_library()
    load_library(path)
    say(f"kernels for this processor: {path}")
