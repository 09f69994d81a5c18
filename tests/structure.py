"""The source tree, parsed: its modules, what imports what, and the circles in it."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "hyperslab"


@cache
def parsed(text: str) -> ast.Module:
    """The tree of a file, which several tests look at: to parse them all takes a second.

    Looking for garbage among its nodes would take two more.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if collects:
            gc.enable()


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All below it, also in functions: a tenth of what `ast.walk` looks at."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        found = getattr(node, field, ())
        for inner in found if isinstance(found, list) else ():
            if isinstance(inner, ast.stmt):
                yield inner
            yield from statements(inner)


@dataclass(frozen=True)
class Tree:
    """The modules below a package's folder, parsed."""

    root: Path

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        """By dotted name; a package is its ``__init__``."""
        found = {}
        for path in sorted(self.root.rglob("*.py")):
            parts = [self.root.name, *path.relative_to(self.root).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = parsed(path.read_text())
        return found

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """By module: those that it imports, also inside its functions."""
        return {name: self._imports(name) for name in self.modules}

    def _imports(self, name: str) -> set[str]:
        found: set[str] = set()
        for node in statements(self.modules[name]):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found.add(inner if inner in self.modules else node.module)
        return (found & self.modules.keys()) - {name}

    def circles(self) -> list[list[str]]:
        """Groups of modules that import one another, directly or around."""
        reach = {name: self._reachable(name) for name in self.modules}
        groups = {
            tuple(sorted(other for other in reach[name] if name in reach[other]))
            for name in self.modules
            if name in reach[name]
        }
        return [list(group) for group in sorted(groups)]

    def _reachable(self, name: str) -> set[str]:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            new = self.imports[waiting.pop()] - seen
            seen |= new
            waiting.extend(new)
        return seen
