"""Guards imports of optional libraries and says which extra installs a missing one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires

from hyperslab.errors import HyperslabError


def how_to_install(extra: str) -> str:
    """The command that brings the libraries of an extra, as the installed package asks for them.

    Not ``pip install hyperslab[...]``, which would look for hyperslab on the package index.
    For example ``pip install "zarr<4,>=3"``.
    """
    try:
        needs = requires("hyperslab") or []
    except PackageNotFoundError:  # run from its sources
        needs = []
    pairs = (need.split(";", 1) for need in needs if ";" in need)
    words = [f'"{need.strip()}"' for need, of in pairs if f'extra == "{extra}"' in of]
    return f"pip install {' '.join(words)}" if words else f"install hyperslab's extra [{extra}]"


@contextmanager
def importing(
    extra: str, what: str, error: type[HyperslabError] = HyperslabError
) -> Iterator[None]:
    """Around the import of an extra's library.

    Raises:
        HyperslabError: it is not installed; ``what`` it is for begins the words.
    """
    try:
        yield
    except ImportError as missing:
        raise error(
            f"{what} needs another library ({missing}): {how_to_install(extra)}"
        ) from missing
