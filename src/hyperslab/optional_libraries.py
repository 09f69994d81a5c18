"""What to install where a library of an extra is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires


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
