"""Numbers about the source tree: rooms, circles, names, signatures, packings.

`python -m tests.structure [FOLDER]` prints them, for `src/hyperslab` or for the same package in
another checkout. `tests.test_structure` holds this one to its limits.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "hyperslab"
RULES = ("ops", "nn")  # where rules of operators are, or were
Function = ast.FunctionDef | ast.AsyncFunctionDef


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
            found[name] = ast.parse(path.read_text())
        return found

    @property
    def lines(self) -> int:
        return sum(len(path.read_text().splitlines()) for path in self.root.rglob("*.py"))

    def folders(self) -> Counter[str]:
        """Modules in each folder, ``__init__`` among them."""
        paths = self.root.rglob("*.py")
        return Counter(str(path.parent.relative_to(self.root.parent)) for path in paths)

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """By module: those that it imports, also inside its functions."""
        return {name: self._imports(name) for name in self.modules}

    def _imports(self, name: str) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(self.modules[name]):
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

    def definitions(self) -> dict[str, list[str]]:
        """Public names at the top of modules, with the modules that define them."""
        found = defaultdict(list)
        for module, tree in self.modules.items():
            for name in dict.fromkeys(_defined(tree)):
                if not name.startswith("_"):
                    found[name].append(module)
        return dict(found)

    def repeated(self) -> dict[str, list[str]]:
        """Public names that more than one module defines."""
        return {name: where for name, where in self.definitions().items() if len(where) > 1}

    def functions(self) -> Iterator[tuple[str, Function]]:
        for module, tree in self.modules.items():
            for node in ast.walk(tree):
                if isinstance(node, Function):
                    yield f"{module}.{node.name}", node

    def signatures(self) -> list[tuple[int, str]]:
        """Parameters of every function but ``self`` and ``cls``, most first."""
        return sorted(((_parameters(node), name) for name, node in self.functions()), reverse=True)

    def packings(self) -> list[str]:
        """Statements that assign several values at once; exchanging two names is none."""
        return [
            f"{module}:{node.lineno}"
            for module, tree in self.modules.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and _packs(node)
        ]

    def untyped(self, *rooms: str) -> int:
        """How often ``Any`` stands in the modules of these rooms, imports left out."""
        return sum(
            isinstance(node, ast.Name) and node.id == "Any"
            for module, tree in self.modules.items()
            if module.split(".")[1:2] and module.split(".")[1] in rooms
            for node in ast.walk(tree)
        )


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign) and not _is_type_variable(node.value):
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from (name.id for name in names if isinstance(name, ast.Name))


def _is_type_variable(value: ast.expr) -> bool:
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in ("TypeVar", "ParamSpec")


def _parameters(node: Function) -> int:
    arguments = node.args
    named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    rest = (arguments.vararg is not None) + (arguments.kwarg is not None)
    return len([name for name in named if name not in ("self", "cls")]) + rest


def _packs(node: ast.Assign) -> bool:
    (target, *_), value = node.targets, node.value
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    return {ast.unparse(e) for e in target.elts}.isdisjoint({ast.unparse(e) for e in value.elts})


def main(root: Path = SOURCE) -> None:
    tree = Tree(root)
    packings = tree.packings()
    repeated = tree.repeated()
    print(f"{len(tree.modules)} modules, {tree.lines} lines")
    print("fullest folders:", *(f"{name} {n}," for name, n in tree.folders().most_common(8)))
    print(f"import circles: {len(tree.circles())}", *tree.circles()[:5])
    print(f"public names in more than one module: {len(repeated)}")
    for name, where in sorted(repeated.items()):
        print("   ", name, ", ".join(where))
    print(
        "longest signatures:", *(f"\n    {count} {name}" for count, name in tree.signatures()[:10])
    )
    print(
        f"tuple packings: {len(packings)}, {1000 * len(packings) / tree.lines:.1f} per 1000 lines"
    )
    print(f"Any in rules: {tree.untyped(*RULES)}; in all: {tree.untyped(*_rooms(tree))}")


def _rooms(tree: Tree) -> set[str]:
    return {name.split(".")[1] for name in tree.modules if "." in name}


if __name__ == "__main__":
    main(*(Path(folder) for folder in sys.argv[1:2]))
