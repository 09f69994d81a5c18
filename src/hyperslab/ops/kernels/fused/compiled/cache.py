"""The compiled library in the user's cache folder: made once, whole, by its owner."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from hyperslab.errors import reason
from hyperslab.ops.kernels.fused.compiled.compiler import (
    FLAGS,
    FOR_THIS_PROCESSOR,
    CannotCompile,
    Compiler,
    find_compiler,
    processor,
)

SOURCES = Path(__file__).parent
DIGEST = hashlib.sha256


def cached_library() -> Path:
    """The library of these sources for this compiler and processor, compiled if it is not there.

    Its last bytes are a digest of those before: what was cut or changed is compiled again. Several
    processes may do so at once, each under a name of its own.

    Raises:
        CannotCompile: it can be neither compiled nor kept; says why.
    """
    compiler = find_compiler()
    try:
        folder = _own_folder(_cache_home() / "hyperslab" / "kernels")
        path = folder / f"{_key(compiler)}.so"
        if not _is_whole(path):
            _compile(compiler, path)
    except OSError as error:
        raise CannotCompile(f"{reason(error)}; XDG_CACHE_HOME names another folder") from error
    return path


def _cache_home() -> Path:
    """As the XDG base directory specification has it."""
    asked = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(asked) if Path(asked).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise CannotCompile("there is no home folder to keep the library in") from error


def _own_folder(folder: Path) -> Path:
    """The folder, which nobody else may write to: what is in it is run."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.geteuid():
        raise CannotCompile(f"{folder} belongs to somebody else")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CannotCompile(f"others may write to {folder}: chmod go-w it")
    return folder


def _key(compiler: Compiler) -> str:
    parts = [*compiler.command, compiler.version, *FLAGS, *FOR_THIS_PROCESSOR, processor()]
    parts.extend(path.read_text() for path in sorted(SOURCES.glob("*.[ch]")))
    return DIGEST("\0".join(parts).encode()).hexdigest()[:32]


def _is_whole(path: Path) -> bool:
    try:
        state = path.lstat()
        data = path.read_bytes()
    except FileNotFoundError:
        return False
    size = DIGEST().digest_size
    own = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid()
    return own and DIGEST(data[:-size]).digest() == data[-size:]


def _compile(compiler: Compiler, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        compiler.compile(sorted(SOURCES.glob("*.c")), made)
        with made.open("ab") as file:
            file.write(DIGEST(made.read_bytes()).digest())
        made.replace(path)
