"""Makes folders of the user's own, of which what lies there is run or believed later.

A user who may write to such a folder, or put another one in its place, decides what this one runs.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from pathlib import Path

HOMES = {"XDG_CACHE_HOME": ".cache", "XDG_STATE_HOME": ".local/state"}
"""Variables of the XDG base directory specification, each with what is meant where it is unset."""


def user_folder(variable: str, name: str) -> Path:
    """Return hyperslab's folder of this name below the one that the variable names."""
    asked = os.environ.get(variable, "")
    try:
        home = Path(asked) if os.path.isabs(asked) else Path.home() / HOMES[variable]
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no home folder", variable) from error
    return home / "hyperslab" / name


def make_private(folder: Path) -> Path:
    """Make a folder, and those above it that are missing, for its owner alone; return where it is.

    Raises:
        OSError: it cannot be made, or `check_private` refuses it.
    """
    for place in reversed([folder, *folder.parents]):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)  # whatever the umask
    check_private(folder)
    return folder.resolve()


def check_private(folder: Path) -> None:
    """Refuse a folder that somebody else may write to, or may put another one in place of.

    Raises:
        PermissionError: names it, or the folder above it.
    """
    real = folder.resolve()
    for place in dict.fromkeys((real, *folder.parents, *real.parents)):
        state = place.stat()
        if state.st_uid != os.geteuid() and (place == real or state.st_uid != 0):
            raise PermissionError(errno.EPERM, "belongs to another user", str(place))
        others = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if place != real and state.st_mode & stat.S_ISVTX:
            others = 0  # they may not rename what is not theirs, as in /tmp
        if place != real and _is_of_user_alone(state.st_gid):
            others &= stat.S_IWOTH
        if others:
            raise PermissionError(errno.EPERM, "others may write to it, chmod go-w", str(place))


def _is_of_user_alone(group: int) -> bool:
    """Say if nobody but the user and root is in a group, to which folders are often open.

    Many systems make a group for each user. One without a name, as containers have them, is told
    by its number.
    """
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
        found = grp.getgrgid(group)
    except KeyError:
        return group in (0, os.geteuid())
    return (group == 0 or found.gr_name == user) and {*found.gr_mem} <= {user, "root"}
