"""The manifest of a checkpoint: which files it has, and the SHA-256 of each; written last.

A checkpoint may come from anybody, and disks fail, so nothing in it is taken for what it should be:
a manifest says little, is short, and names only plain files beside it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperslab.errors import CheckpointError, reason

MANIFEST = "manifest.json"

STATE_FILE = "state.json"

EXTRA_PICKLED = "extra.pt"
"""What earlier versions had in its place."""

CHECKPOINT_FORMAT = 2
"""Of the files; 1, which no manifest says, was pickled."""

LIMIT = 16 << 20
"""Of a manifest [B]: that of ten thousand ranks has three."""

FILE_NAME = re.compile(r"(?!\.{1,2}$)[\w.-]{1,255}", re.ASCII)

SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ChecksumManifest:
    """``sha256`` by names of files."""

    sha256: dict[str, str]
    format: int = CHECKPOINT_FORMAT

    @property
    def pickled(self) -> bool:
        """Whether reading it may run code that is in it."""
        return self.format < CHECKPOINT_FORMAT

    def text(self) -> bytes:
        """As the file has it."""
        return json.dumps({"format": self.format, "sha256": self.sha256}, indent=1).encode()


def read_checksum_manifest(path: Path) -> ChecksumManifest:
    """The manifest of the checkpoint ``path``; its files are not looked at.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        values = parse_json(read_limited(path / MANIFEST, LIMIT))
        return _checked(values)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no complete checkpoint: {_why(error)}") from None


def verify_checksums(path: Path) -> ChecksumManifest:
    """Compare every file with the checksum that was written with it.

    Raises:
        CheckpointError: names the first file that is missing or differs.
    """
    manifest = read_checksum_manifest(path)
    for name, expected in manifest.sha256.items():
        corrupt = f"the checkpoint {path} is corrupt: {name}"
        try:
            with open_plain(path / name) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise CheckpointError(f"{corrupt} is missing") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{corrupt} cannot be read: {_why(error)}") from None
        if found != expected:
            raise CheckpointError(f"{corrupt} is not as written")
    return manifest


def open_plain(path: Path) -> io.BufferedReader:
    """Open a file that is one: no link, no pipe, no device, of which there might be no end.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else.
    """
    if path.is_symlink():  # an error of its own, for who keeps large files elsewhere
        raise ValueError(f"{path.name} is a link\n    copy what it leads to: cp -rL OLD NEW")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path.name} is no plain file")
    return os.fdopen(descriptor, "rb")


def read_limited(path: Path, limit: int) -> bytes:
    """A plain file of no more than ``limit`` [B]; raises as `open_plain`."""
    with open_plain(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path.name} has more than {limit >> 20} MiB")
    return data


def parse_json(data: bytes) -> Any:
    """Raises ValueError alone, whatever it is."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _checked(values: Any) -> ChecksumManifest:
    if not isinstance(values, dict):
        raise ValueError(f"{MANIFEST} holds no object")
    unknown = values.keys() - {"format", "sha256"}
    if unknown:  # a damaged "format" is not to be taken for the format that says none
        raise ValueError(f"{MANIFEST} has {min(unknown)[:20]!r}, which is not known")
    format = values.get("format", 1)
    sums = values.get("sha256")
    if type(format) is not int or format not in (1, CHECKPOINT_FORMAT):
        raise ValueError(
            f"{MANIFEST} says format {str(format)[:20]!r}, known is {CHECKPOINT_FORMAT}"
        )
    if not isinstance(sums, dict) or not sums:
        raise ValueError(f"{MANIFEST} has no checksums")
    for name, value in sums.items():
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"{MANIFEST} names {name[:80]!r}, which is no file beside it")
        if not isinstance(value, str) or not SHA256.fullmatch(value):
            raise ValueError(f"{MANIFEST} has no checksum of {name}")
    state = STATE_FILE if format == CHECKPOINT_FORMAT else EXTRA_PICKLED
    if state not in sums:
        raise ValueError(f"{MANIFEST} does not name {state}")
    return ChecksumManifest(sums, format)


def _why(error: Exception) -> str:
    return str(error) if type(error) is ValueError else reason(error)
