"""One folder takes the place of another, and at every moment one of them is there, complete.

Where the file system can, they are exchanged in one go. Where not, the old one is put aside first,
under a name by which it is found until the new one has its place.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from hyperslab.errors import CheckpointError

AT_FDCWD = -100
RENAME_EXCHANGE = 2  # linux/fs.h

CANNOT = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM}
"""What file systems and kernels without an exchange say."""

OURS = re.compile(
    r"((model|optimizer)(-\d+-of-\d+)?|extra)\.safetensors|model\.safetensors\.index\.json"
    r"|(state|manifest)\.json|\.metadata|__\d+_\d+\.distcp|extra\.pt|\.nfs.*|\.DS_Store|\._.*"
)
"""The files of checkpoints, old ones too, and what systems put beside any."""


def put_in_place(new: Path, path: Path) -> None:
    """Give ``new`` the name ``path``; what had it goes, once that is on the disk.

    Raises:
        CheckpointError: a file, or a folder with other things, has that name.
        OSError: it cannot be.
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
    """Where the checkpoint of this name is: aside, if it was being replaced when all ended."""
    old = aside(path)
    return old if not os.path.lexists(path) and _is_folder(old) else path


def put_back(path: Path) -> None:
    """If it is aside, give it its name again."""
    if standing(path) != path:
        aside(path).rename(path)


def aside(path: Path) -> Path:
    """The name that it has while another takes its place."""
    return path.with_name(f".{path.name}.replaced")


def check_replaceable(path: Path) -> None:
    """Refuse to throw away what is no checkpoint.

    Raises:
        CheckpointError: it is a file with something in it, or a folder; names a file in that.
        OSError: it cannot be read.
    """
    if path.is_file() and not path.is_symlink() and path.stat().st_size > 0:
        raise CheckpointError(
            f"{path} is a file, and stays as it is: a checkpoint is a folder\n"
            "    give the checkpoint a name of its own"
        )
    if _is_folder(path):
        others = [name for name in sorted(os.listdir(path)) if not OURS.fullmatch(name)]
        if others:
            raise CheckpointError(
                f"{path} is a folder with other things, such as {others[0]}, and stays as it is\n"
                "    give the checkpoint a name of its own in it"
            )


def remove(path: Path) -> None:
    """A folder, a file or a link, if it is there.

    Raises:
        OSError: it cannot be.
    """
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def exchange(a: Path, b: Path) -> bool:
    """Let two names change places in one go; False where that cannot be.

    Raises:
        OSError: it failed for another reason.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if sys.platform != "linux" or rename is None:
        return False
    sys.audit("os.rename", os.fspath(a), os.fspath(b), -1, -1)
    names = (AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b))
    if rename(*names, RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in CANNOT:
        return False
    raise OSError(number, os.strerror(number), os.fspath(b))


def _is_folder(path: Path) -> bool:
    """Itself, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def sync(path: Path) -> None:
    """Wait until a file or a folder's names are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
