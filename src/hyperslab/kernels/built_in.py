"""Builds libraries of the kernels for common processors into a wheel, and finds the one to load.

`setup.py` runs this file by itself, without torch: it needs the standard library alone. There is
a library for each of `VARIANTS` beside the sources, in ``built``. Its name has a digest of the
sources, of the flags and of the kind of machine, so a library of other sources is never loaded;
its last bytes are a digest of those before. Where no library fits, `hyperslab compile`
compiles one for this very processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parent / "built"
DIGEST = hashlib.sha256

FLAGS = (
    "-std=gnu11",
    "-O3",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",  # equal to the reference, which rounds the product
    "-fno-math-errno",
    "-fno-trapping-math",  # values are as without it; only exception flags are not
)

COMPILERS = ("cc", "gcc", "clang")
"""Tried after ``$CC``, in this order."""


class Variant(NamedTuple):
    """Names instructions by a compiler's flags, and by what Linux calls them (/proc/cpuinfo)."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
_BF16 = _V4 | {"avx512_bf16"}

VARIANTS = (
    Variant("avx512bf16", ("-march=x86-64-v4", "-mavx512bf16"), _BF16),
    Variant("avx512", ("-march=x86-64-v4",), _V4),
    Variant("avx2", ("-march=x86-64-v3",), _V3),
)
"""The best first; the kernels look for no other instructions."""


def library_name(variant: Variant) -> str:
    """Name the library of these very sources and flags."""
    kind = [sys.platform, platform.machine(), str(struct.calcsize("P")), *FLAGS, *variant.flags]
    texts = [f"{path.name}\0{path.read_text()}" for path in sorted(SOURCES.glob("*.[ch]"))]
    digest = DIGEST("\0".join([*kind, *texts]).encode()).hexdigest()
    return f"{variant.name}-{digest[:32]}.so"


def built_in_library() -> Path | None:
    """Find the library for the best of the variants that this processor has; None without one."""
    here = processor_flags()
    for variant in VARIANTS:
        if variant.needs <= here and is_whole(path := BUILT / library_name(variant)):
            return path
    return None


def processor_flags() -> frozenset[str]:
    """List the instructions that the system lets programs use; none but on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def is_whole(path: Path) -> bool:
    """Tell whether a library is there and ends in the digest of what comes before."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    size = DIGEST().digest_size
    return DIGEST(data[:-size]).digest() == data[-size:]


def add_digest(path: Path) -> None:
    """End a library in the digest of what comes before."""
    digest = DIGEST(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)


def known_variants() -> tuple[Variant, ...]:
    """List the variants that can be built here: on Linux and x86, by a compiler that knows them."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not compiler_command():
        return ()
    return tuple(variant for variant in VARIANTS if _knows(variant))


def build(folder: Path, variants: Sequence[Variant]) -> None:
    """Compile the variants into a folder, as many files at once as there are cores."""
    shutil.rmtree(folder, ignore_errors=True)  # older sources may have left some
    folder.mkdir(parents=True)
    files = sorted(SOURCES.glob("*.c"), key=lambda source: -source.stat().st_size)
    work = tempfile.TemporaryDirectory()
    with work as objects, ThreadPoolExecutor(os.cpu_count()) as pool:
        made = {v: [Path(objects, f"{v.name}-{file.stem}.o") for file in files] for v in variants}
        tasks = [
            pool.submit(_run, variant, "-c", str(file), "-o", str(target))
            for variant, targets in made.items()
            for file, target in zip(files, targets, strict=True)
        ]
        for task in tasks:
            task.result()
        for variant, targets in made.items():
            library = folder / library_name(variant)
            _run(variant, *map(str, targets), "-o", str(library))
            add_digest(library)


def compiler_command() -> list[str]:
    """Find ``$CC`` if it is set, else the first of `COMPILERS` that there is; empty without one."""
    given = os.environ.get("CC", "").strip()
    for command in [shlex.split(given)] if given else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    return []


def _knows(variant: Variant) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.write_text("#include <immintrin.h>\nint hyperslab_empty(void) { return 0; }\n")
        try:
            _run(variant, str(source), "-o", str(source.with_suffix(".so")))
        except (OSError, subprocess.CalledProcessError):
            return False
    return True


def _run(variant: Variant, *words: str) -> None:
    command = [*compiler_command(), *FLAGS, *variant.flags, *words]
    subprocess.run(command, check=True, capture_output=True, text=True)
