"""The source tree keeps to its rooms and its words (tier: no process)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.structure import SOURCE, Tree

FULLEST = 15  # modules in a folder

# Names that mean the same thing in every module that defines them.
SAME_MEANING = {
    "boxes": "those that ranks hold of a sample (hs.boxes), of all ranks in formats.io_cost",
    "log": "the logger of the module",
    "reference": "the plain version of a kernel, one in each of its modules",
    "register": "an operator's rule (hs.register), a format (hs.formats.register)",
}


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(SOURCE)


def test_rooms_are_not_corridors(tree: Tree) -> None:
    assert {name: n for name, n in tree.folders().items() if n > FULLEST} == {}


def test_no_module_imports_itself_around_a_corner(tree: Tree) -> None:
    assert tree.circles() == []


def test_a_public_name_means_one_thing(tree: Tree) -> None:
    repeated = tree.repeated()
    assert {n: where for n, where in repeated.items() if n not in SAME_MEANING} == {}
    assert SAME_MEANING.keys() <= repeated.keys()


def test_tests_stand_in_rooms_of_the_same_names() -> None:
    tests = Path(__file__).parent
    own = {
        "benchmarks",
        "docs",
        "examples",
        "mpi",
        "mri",
        "networks",
        "structure",
        "losses",
        "soak",
        "slurm",
    }
    for folder in tests.rglob("*/"):
        name = str(folder.relative_to(tests))
        if any(folder.glob("test_*.py")) and name.split("/")[0] not in own:
            found = (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()
            assert found, f"tests/{name} mirrors nothing of the sources"


def test_every_test_says_its_tier() -> None:
    for path in Path(__file__).parent.rglob("test_*.py"):
        words = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert re.search(r"\btiers?:", words, re.IGNORECASE), path


def write(root: Path, **modules: str) -> Tree:
    package = root / "package"
    for name, text in {"__init__": "", **modules}.items():
        path = package / (name.replace("__of__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(package)


def test_circles_are_found_in_functions_too(tmp_path: Path) -> None:
    lazy = "def f():\n    from package import a\n"
    tree = write(tmp_path, a="import package.b", b="from package.c import x", c=lazy)
    assert tree.circles() == [["package.a", "package.b", "package.c"]]
    assert write(tmp_path, c="").circles() == []


def test_names_are_counted_where_they_are_defined(tmp_path: Path) -> None:
    tree = write(
        tmp_path,
        a="from package.b import Box\nX = 1\n_y = 2\nclass Grid: ...\n",
        b="T = TypeVar('T')\nclass Box: ...\nX: int = 2\n",
        c="T = TypeVar('T')\ndef Grid(): ...\n_y = 1\n",
    )
    assert tree.repeated() == {
        "Grid": ["package.a", "package.c"],
        "X": ["package.a", "package.b"],
    }


def test_packings_are_told_from_exchanges(tmp_path: Path) -> None:
    tree = write(tmp_path, a="a, b = 1, 2\na, b = b, a\na, b = f()\nself.a, b = x, y\n")
    assert tree.packings() == ["package.a:1", "package.a:4"]


def test_parameters_are_counted_without_self(tmp_path: Path) -> None:
    tree = write(tmp_path, a="class A:\n    def f(self, a, /, b, *c, d=1, **e): ...\n")
    assert tree.signatures() == [(5, "package.a.f")]
