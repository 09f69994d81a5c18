"""The source tree keeps to its rooms and its words (tier: no process)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.structure import SOURCE, Tree

DEEPEST = 3  # folders, the package's own among them
# Folders and modules at the top, without __init__ and __main__.
DOORS = 20

OWN_ROOMS = {
    "benchmarks": "the scripts there",
    "docs": "the pages",
    "examples": "the scripts there",
    "losses": "losses.py",
    "mpi": "MPI",
    "mri": "a real MRI",
    "networks": "published networks on every grid",
    "slurm": "Slurm",
    "soak": "random faults",
}
"""Folders of tests that belong to no package, each with its subject."""


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(SOURCE)


def test_no_module_imports_itself_around_a_corner(tree: Tree) -> None:
    assert tree.circles() == []


def test_the_tree_is_flat(tree: Tree) -> None:
    folders = {path.parent.relative_to(SOURCE.parent) for path in SOURCE.rglob("*.py")}
    assert [folder for folder in folders if len(folder.parts) > DEEPEST] == []


def test_there_are_few_doors(tree: Tree) -> None:
    doors = {name.split(".")[1] for name in tree.modules if "." in name} - {"__main__"}
    assert len(doors) <= DOORS, sorted(doors)


def test_tests_stand_in_rooms_of_the_same_names() -> None:
    tests = Path(__file__).parent
    rooms = [folder for folder in tests.rglob("*/") if any(folder.glob("test_*.py"))]
    names = [room.relative_to(tests) for room in rooms]
    mirrored = [
        name for name in names if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()
    ]
    assert {str(name) for name in names if name.parts[0] not in OWN_ROOMS} == {
        str(name) for name in mirrored if name.parts[0] not in OWN_ROOMS
    }


def test_every_test_says_its_tier() -> None:
    silent = [
        str(path)
        for path in Path(__file__).parent.rglob("test_*.py")
        if not re.match(r'"""[^"]*\btiers?:', path.read_text(), re.I)
    ]
    assert silent == []


def write(root: Path, **modules: str) -> Tree:
    package = root / "package"
    for name, text in {"__init__": "", **modules}.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(package)


def test_circles_are_found_in_functions_too(tmp_path: Path) -> None:
    lazy = "def f():\n    from package import a\n"
    tree = write(tmp_path, a="import package.b", b="from package.c import x", c=lazy)
    assert tree.circles() == [["package.a", "package.b", "package.c"]]
    assert write(tmp_path, c="").circles() == []
