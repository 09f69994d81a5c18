"""The system's C compiler: which one, what it is asked for, what it made."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperslab.errors import HyperslabError, reason

COMPILERS = ("cc", "gcc", "clang")
"""Tried after ``$CC``, in this order."""

FLAGS = (
    "-std=gnu11",
    "-O3",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",  # equal to the reference, which rounds the product
    "-fno-math-errno",
    "-fno-trapping-math",  # values are as without it; only exception flags are not
)

FOR_THIS_PROCESSOR = ("-march=native", "-mcpu=native")
"""Tried in this order: older compilers for ARM know the second only."""

TIME_LIMIT = 120.0
"""[s] Of one run of the compiler."""


class CannotCompile(HyperslabError):
    """There is no compiler, or it failed; says why."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler by its command, and what it says of its version."""

    command: tuple[str, ...]
    version: str

    def compile(self, sources: Sequence[Path], target: Path) -> None:
        """Make a shared library of the sources.

        Raises:
            CannotCompile: it failed or took too long.
        """
        words = ""
        for flag in FOR_THIS_PROCESSOR:
            command = [*self.command, *FLAGS, flag, *map(str, sources), "-o", str(target)]
            done = _run(command, TIME_LIMIT)
            if done.returncode == 0:
                return
            words = words or done.stderr.strip().partition("\n")[0]
        raise CannotCompile(f"{shlex.join(self.command)} failed: {words}")


def find_compiler() -> Compiler:
    """``$CC`` if it is set, else the first of `COMPILERS` that there is.

    Raises:
        CannotCompile: there is none, or it does not tell its version.
    """
    asked = os.environ.get("CC", "").strip()
    commands = [tuple(shlex.split(asked))] if asked else [(name,) for name in COMPILERS]
    for command in commands:
        if shutil.which(command[0]):
            version = _run([*command, "--version"], TIME_LIMIT)
            if version.returncode:
                raise CannotCompile(f"{shlex.join(command)} --version failed")
            return Compiler(command, version.stdout)
    raise CannotCompile(f"no C compiler ({asked or ', '.join(COMPILERS)})")


def _run(command: Sequence[str], limit: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotCompile(f"{command[0]} took more than {limit:.0f} s") from error
    except OSError as error:
        raise CannotCompile(f"{command[0]}: {reason(error)}") from error


def processor() -> str:
    """What the compiled code depends on: model and instructions of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(told))])
