"""Writes, verifies and replaces the files of a checkpoint, without torch; reads its plain values.

In reading order:

The *manifest* says which files a checkpoint has and the SHA-256 of each; it is written last. A
checkpoint may come from anybody, and disks fail, so nothing in it is taken for what it should
be: a manifest says little, is short, and names only plain files beside it.

One folder takes the place of another, and at every moment one of them is there, complete. Where
the file system can, they are exchanged in one go. Where not, the old one is put aside first,
under a name by which it is found until the new one has its place.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hyperslab.errors import CheckpointError, reason
from hyperslab.util.documents import open_plain, value_of_json

MANIFEST = "manifest.json"

STATE_FILE = "state.json"

CHECKPOINT_FORMAT = 2
"""Counts the formats of the files."""

MANIFEST_LIMIT = 16 << 20
"""A manifest has at most so much [B]; that of ten thousand ranks has 3 MiB."""

STATE_LIMIT = 64 << 20
"""Values that are no tensors have at most so much [B]: reading them must not fill a machine."""

FILE_NAME = re.compile(r"(?!\.{1,2}$)[\w.-]{1,255}", re.ASCII)

SHA256_DIGITS = re.compile(r"[0-9a-f]{64}")


Checksums = dict[str, str]
"""The SHA-256 of each file of a checkpoint, by its name."""


def manifest_text(sums: Checksums) -> bytes:
    """Return the manifest as its file has it."""
    content = {"format": CHECKPOINT_FORMAT, "sha256": dict(sorted(sums.items()))}
    return json.dumps(content, indent=1).encode()


def read_checksum_manifest(path: Path) -> Checksums:
    """Returns the checksums of the checkpoint ``path``; its files are not looked at."""
    try:
        values = value_of_json(read_limited(path / MANIFEST, MANIFEST_LIMIT))
        return _check_manifest(values)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {_reason(error)}") from None


def verify_checksums(path: Path) -> Checksums:
    """Compares files with their checksums; refuses the first that is missing or differs."""
    sums = read_checksum_manifest(path)
    for name, expected in sums.items():
        corrupt = _corrupt(path, name)
        try:
            with open_own(path / name) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise CheckpointError(f"{corrupt} is missing") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{corrupt} cannot be read: {_reason(error)}") from None
        if found != expected:
            raise CheckpointError(f"{corrupt} {DIFFERS}")
    return sums


DIFFERS = "differs from what was written"


def _corrupt(path: Path, name: str) -> str:
    return f"the checkpoint {path} is corrupt: {name}"


def read_values(path: Path) -> dict[str, dict[str, Any]]:
    """Reads what a checkpoint holds besides tensors, as JSON, see `hyperslab.checkpoint.state`."""
    sums = read_checksum_manifest(path)
    try:
        text = read_limited(path / STATE_FILE, STATE_LIMIT)
        values = value_of_json(text)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {reason(error)}") from None
    except ValueError as error:
        raise damaged_state(path, str(error)) from None
    if hashlib.sha256(text).hexdigest() != sums[STATE_FILE]:
        raise CheckpointError(f"{_corrupt(path, STATE_FILE)} {DIFFERS}")
    kinds = {"model": dict, "optimizer": dict | None, "extra": dict}
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise damaged_state(path, f"it lacks {', '.join(kinds)}")
    for key, kind in kinds.items():
        if not isinstance(values[key], kind):
            raise damaged_state(path, f"its {key} is not an object")
    return values


def damaged_state(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path} is damaged: {STATE_FILE}: {why}")


def open_own(path: Path) -> io.BufferedReader:
    """Opens a plain file of a checkpoint; anything else is an OSError, a link a ValueError."""
    if path.is_symlink():  # an error of its own, for who keeps large files elsewhere
        raise ValueError(f"{path.name} is a link\n    copy the files it points to: cp -rL OLD NEW")
    return open_plain(path, links=False)


def read_limited(path: Path, limit: int) -> bytes:
    """Read a plain file of no more than ``limit`` [B]; raises as `open_own`."""
    with open_own(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path.name} has more than {limit >> 20} MiB")
    return data


def _check_manifest(values: Any) -> Checksums:
    if not isinstance(values, dict):
        raise ValueError(f"{MANIFEST} does not hold an object")
    unknown = values.keys() - {"format", "sha256"}
    if unknown:
        raise ValueError(f"{MANIFEST} has the unknown key {min(unknown)[:20]!r}")
    format = values.get("format")
    sums = values.get("sha256")
    if type(format) is not int or format != CHECKPOINT_FORMAT:
        raise ValueError(
            f"{MANIFEST} has the format {str(format)[:20]!r}; this version reads "
            f"{CHECKPOINT_FORMAT}"
        )
    if not isinstance(sums, dict) or not sums:
        raise ValueError(f"{MANIFEST} has no checksums")
    for name, value in sums.items():
        if not FILE_NAME.fullmatch(name):
            raise ValueError(
                f"{MANIFEST} names {name[:80]!r}, which cannot be a file of a checkpoint"
            )
        if not isinstance(value, str) or not SHA256_DIGITS.fullmatch(value):
            raise ValueError(f"{MANIFEST} has no checksum of {name}")
    if STATE_FILE not in sums:
        raise ValueError(f"{MANIFEST} does not name {STATE_FILE}")
    return sums


def _reason(error: Exception) -> str:
    return str(error) if type(error) is ValueError else reason(error)


def write_new(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Writes a new file onto the disk and returns its SHA-256; a name in use is an OSError."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "wb", buffering=0) as file:
        for part in parts:
            digest.update(part)
            rest = memoryview(part)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(descriptor)
    return digest.hexdigest()


AT_FDCWD = -100
RENAME_EXCHANGE = 2  # linux/fs.h

NO_EXCHANGE_ERRORS = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM}
"""File systems and kernels without an exchange say so."""

CHECKPOINT_FILE_NAMES = re.compile(
    r"((model|optimizer)(-\d+-of-\d+)?|extra)\.safetensors|model\.safetensors\.index\.json"
    r"|(state|manifest)\.json|\.nfs.*|\.DS_Store|\._.*"
)
"""The files of checkpoints, and what systems put beside any."""


def put_in_place(new: Path, path: Path) -> None:
    """Gives ``new`` the name ``path``; what had it goes, once that is on the disk.

    A file, or a folder with other things, keeps the name: see `check_replaceable`.
    """
    check_replaceable(path)
    old = new
    if not os.path.lexists(path):
        new.rename(path)
    elif not exchange(new, path):
        old = aside(path)
        remove(old)
        path.rename(old)
        new.rename(path)
    sync(path.parent)
    with suppress(OSError):  # it has no name of a checkpoint any more, and nobody waits for it
        remove(old)


def standing(path: Path) -> Path:
    """Find the checkpoint of this name: aside, if it was being replaced when all ended."""
    old = aside(path)
    return old if not os.path.lexists(path) and _is_folder(old) else path


def put_back(path: Path) -> None:
    """Give the checkpoint its name again if it is aside."""
    if standing(path) != path:
        aside(path).rename(path)


def aside(path: Path) -> Path:
    """Return the name that it has while another takes its place."""
    return path.with_name(f".{path.name}.replaced")


def check_replaceable(path: Path) -> None:
    """Refuses to throw away what is no checkpoint: a file with something in it, or a folder."""
    if path.is_file() and not path.is_symlink() and path.stat().st_size > 0:
        raise CheckpointError(
            f"{path} is a file, and stays as it is: a checkpoint is a folder\n"
            "    give the checkpoint a name of its own"
        )
    if _is_folder(path):
        others = [
            name for name in sorted(os.listdir(path)) if not CHECKPOINT_FILE_NAMES.fullmatch(name)
        ]
        if others:
            raise CheckpointError(
                f"{path} is a folder with other things, such as {others[0]}, and stays as it is\n"
                "    give the checkpoint a name of its own in it"
            )


def remove(path: Path) -> None:
    """Removes a folder, a file or a link, if it is there."""
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def exchange(a: Path, b: Path) -> bool:
    """Lets two names change places in one go; False where that cannot be."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if sys.platform != "linux" or rename is None:
        return False
    sys.audit("os.rename", os.fspath(a), os.fspath(b), -1, -1)
    names = (AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b))
    if rename(*names, RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NO_EXCHANGE_ERRORS:
        return False
    raise OSError(number, os.strerror(number), os.fspath(b))


def _is_folder(path: Path) -> bool:
    """Tell if the path is a folder itself, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def sync(path: Path) -> None:
    """Wait until a file or a folder's names are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
