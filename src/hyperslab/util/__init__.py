"""Holds what every layer uses: files, documents, processes, and the private names of torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def importing_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports its names when they are asked for.

    ``modules`` has the names by the modules that define them, in the package or, with their whole
    names, elsewhere; modules of the package are found by their own.
    """
    top = f"{package.partition('.')[0]}."
    homes = {
        name: module if module.startswith(top) else f"{package}.{module}"
        for module, names in modules.items()
        for name in names
    }

    def find(name: str) -> Any:
        if name in homes:
            found = getattr(importlib.import_module(homes[name]), name)
            setattr(sys.modules[package], name, found)
            return found
        if not name.startswith("_"):
            try:
                return importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError as missing:
                if missing.name != f"{package}.{name}":
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
