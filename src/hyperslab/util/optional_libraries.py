"""Guards imports of optional libraries, and reads the versions of installed ones."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from hyperslab.errors import HyperslabError
from hyperslab.util.startup import away_from_current_folder


def how_to_install(extra: str) -> str:
    """Return the command that installs the libraries of an extra.

    Not ``pip install hyperslab[...]``, which would look for hyperslab on the package index.
    For example ``pip install "zarr<4,>=3"``.
    """
    from importlib import metadata  # 50 ms, for errors and versions alone

    try:
        needs = metadata.requires("hyperslab") or []
    except metadata.PackageNotFoundError:  # run from its sources
        needs = []
    pairs = (need.split(";", 1) for need in needs if ";" in need)
    words = [f'"{need.strip()}"' for need, of in pairs if f'extra == "{extra}"' in of]
    return f"pip install {' '.join(words)}" if words else f"install hyperslab's extra [{extra}]"


@contextmanager
def importing(
    extra: str, what: str, error: type[HyperslabError] = HyperslabError
) -> Iterator[None]:
    """Surround the import of an extra's library.

    Raises:
        HyperslabError: it is not installed; ``what`` it is for begins the words.
    """
    try:
        yield
    except ImportError as missing:
        raise error(
            f"{what} needs another library ({missing}): {how_to_install(extra)}"
        ) from missing


@contextmanager
def importing_figures() -> Iterator[None]:
    """Guards the import of matplotlib, which reads settings in the current folder."""
    with importing("report", "drawing"), away_from_current_folder():
        yield


def current_versions() -> dict[str, str]:
    """Read the versions that a measurement depends on: hyperslab's, torch's and Python's.

    Torch is not imported for it, which takes seconds. Its own word is exact, with what it was
    built for, which the metadata of its package may leave out.
    """
    from importlib import metadata

    try:
        own = metadata.version("hyperslab")
    except metadata.PackageNotFoundError:  # run from its sources
        own = "unknown"
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    text = Path(found.origin).with_name("version.py").read_text()
    torch = re.search(r"^__version__ = ['\"](.+)['\"]$", text, re.MULTILINE)
    known = "unknown" if torch is None else torch[1]
    return {"hyperslab": own, "torch": known, "python": platform.python_version()}
