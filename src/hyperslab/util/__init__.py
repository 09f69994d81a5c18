"""Holds what every layer uses: files, documents, processes, and the private names of torch."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any


def importing_names(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports its names when they are asked for.

    They are the names that its source imports for type checkers, in ``if TYPE_CHECKING``, and are
    listed nowhere else; modules of the package are found by their own names.
    """

    @functools.cache
    def homes() -> dict[str, str | None]:
        import ast  # these two take as long as all else that ``import hyperslab`` does
        import inspect

        source = ast.parse(inspect.getsource(sys.modules[package]))
        guarded = [line for part in source.body if isinstance(part, ast.If) for line in part.body]
        imports = [line for line in guarded if isinstance(line, ast.ImportFrom)]
        return {name.name: line.module for line in imports for name in line.names}

    def find(name: str) -> Any:
        home = None if name.startswith("_") else homes().get(name, package)
        if home is not None and home != package:
            found = getattr(importlib.import_module(home), name)
            setattr(sys.modules[package], name, found)
            return found
        if home is not None:
            try:
                return importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError as missing:
                if missing.name != f"{package}.{name}":
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
