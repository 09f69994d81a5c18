"""Holds what every layer uses: files, documents, processes, and the private names of torch."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def importing_names(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports its names when they are asked for.

    They are where the package tells type checkers that they are, by its imports below
    ``if TYPE_CHECKING``; modules of the package are found by their own names.
    """
    homes = {
        name.name: str(line.module)
        for block in ast.parse(inspect.getsource(sys.modules[package])).body
        if isinstance(block, ast.If)
        for line in block.body
        if isinstance(line, ast.ImportFrom) and line.module != package
        for name in line.names
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
