"""The repository is consistent with itself (tier: no process)."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from hyperslab.tensor import RULES
from tests.structure import parsed

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "docs", "benchmarks", "recipes", "examples")
CODE = sorted(
    path
    for files in (ROOT.glob("*.py"), *((ROOT / folder).rglob("*.py") for folder in FOLDERS))
    for path in files
)
TEXT = sorted(
    path
    for pattern in ("*.py", "*.md", "*.yaml", "*.toml", "*.cff", "Makefile")
    for folder in (ROOT, *(ROOT / name for name in FOLDERS))
    for path in (folder.glob(pattern) if folder == ROOT else folder.rglob(pattern))
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OPTIONAL = [
    need
    for extra in (
        "report",
        "tensorboard",
        "medical",
        "zarr",
        "mpi",
        "gpu",
        "wandb",
        "mlflow",
        "lightning",
    )
    for need in EXTRAS[extra]
]
RUNTIME = [*PROJECT["dependencies"], *OPTIONAL]
IMPORT_NAMES = {
    "PyYAML": "yaml",
    "google-crc32c": "google_crc32c",
    "mlflow-skinny": "mlflow",
}
# An absolute path of one machine, a home folder say; the pattern does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.}\]])/(?:work|tmp|root|home|mnt)/\w")
# What docs and docstrings call a module: `comm/grid.py`, or `grid.py` where the folder is clear.
MODULE = re.compile(r"(?<![\w/.-])\w[\w/-]*\.py\b")
NOT_OURS = {
    "script.py": "a user's program",
    "own.py": "a user's program",
    "toy_format.py": "a user's format",
    "prepare.py": "of MLPerf",
    "split_cosmoflow_sample.py": "of LBANN",
    "reduce_sum.py": "an alternative that lost",
    "reduce_norm.py": "an alternative that lost",
}

WRITTEN_BY_THE_SITE = {"docs/reference/recipe.md", "docs/reference/commands.md"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    """Top-level packages that a file imports, anywhere in it."""
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]
            if node.module == "torch.utils.tensorboard":
                yield "tensorboard"


def declared(requirements: list[str]) -> set[str]:
    names = (re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in requirements)
    return {IMPORT_NAMES.get(name, name) for name in names}


def test_no_path_of_one_machine() -> None:
    found = {name_of(path): MACHINE_PATH.findall(path.read_text()) for path in TEXT}
    assert {name: paths for name, paths in found.items() if paths} == {}


def test_the_pattern_finds_machine_paths() -> None:
    assert MACHINE_PATH.search("see /" + "home/me/data")
    assert not MACHINE_PATH.search("https://example.org/home/me, build/tmp/x")


def is_with_examples(path: Path) -> bool:
    return path.is_relative_to(ROOT / "src") and ">>>" in path.read_text()


def prose(path: Path) -> str:
    """A page, or the docstrings and comments of a module."""
    text = path.read_text()
    if path.suffix != ".py":
        return text
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = [ast.get_docstring(n) for n in ast.walk(ast.parse(text)) if isinstance(n, nodes)]
    return "\n".join([*filter(None, docs), *re.findall(r"#.*", text)])


ENDS = {"/".join(path.parts[-depth:]) for path in CODE for depth in range(1, len(path.parts))}
"""What a module's path may be called: its last parts."""


def exists(name: str) -> bool:
    """Is a module of that name here, or is it no module of ours?"""
    placeholder = any(part.isupper() for part in Path(name).with_suffix("").parts)
    return name in ENDS or placeholder or Path(name).name in NOT_OURS


def test_modules_that_are_named_exist() -> None:
    """Most files name nothing that is missing, not even in their code: they need no parser."""
    suspects = [path for path in TEXT if not all(map(exists, MODULE.findall(path.read_text())))]
    named = {(name_of(path), name) for path in suspects for name in MODULE.findall(prose(path))}
    assert sorted((path, name) for path, name in named if not exists(name)) == []


def test_links_lead_somewhere() -> None:
    broken = []
    for page in (page for page in TEXT if page.suffix == ".md"):
        for link in re.findall(r"\]\(([^)#:\s]+)[)#]", page.read_text()):
            target = page.parent / link
            written = target.resolve().relative_to(ROOT).as_posix() in WRITTEN_BY_THE_SITE
            if not target.exists() and not written:
                broken.append(f"{name_of(page)}: {link}")
    assert broken == []


def test_modules_are_found_in_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("See `a/b.py`, c.py and (x/y-z.py); not a.pyc, /d.py or e.python.")
    assert MODULE.findall(prose(page)) == ["a/b.py", "c.py", "x/y-z.py"]


def test_examples_in_docstrings_hold() -> None:
    failed = []
    for path in filter(is_with_examples, CODE):
        module = importlib.import_module(
            ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        )
        with patch.dict(RULES):  # the examples of `register` enter a rule
            if doctest.testmod(module).failed:  # what differs is printed
                failed.append(name_of(path))
    assert failed == []


def test_imports_and_dependencies_are_the_same() -> None:
    used = {package for path in (ROOT / "src").rglob("*.py") for package in imports(path)}
    assert used - sys.stdlib_module_names - {"hyperslab"} == declared(RUNTIME)


def test_every_requirement_has_both_ends() -> None:
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    for requirement in [*PROJECT["dependencies"], *extras]:
        assert re.fullmatch(r"[\w-]+>=[\d.]+,<[\d.]+(; .*)?", requirement), requirement


def test_one_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {PROJECT['version']}\n" in citation


def test_the_makefile_installs_an_allowed_torch() -> None:
    (default,) = re.findall(
        r"^TORCH \?= torch==(\d+)\.(\d+)", (ROOT / "Makefile").read_text(), re.M
    )
    assert (2, 9) <= tuple(map(int, default)) < (3, 0)
    assert "torch>=2.11,<3" in PROJECT["dependencies"]
