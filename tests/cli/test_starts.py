"""Starts wait for nothing that they do not use (tier: a few child processes)."""

from __future__ import annotations

import ast
import inspect
import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import hyperslab as hs
from hyperslab.cli import COMMANDS, load_command
from hyperslab.cli.early import PAGES, WIDTH, help_page, read_pages
from hyperslab.formats.files import check_folder
from hyperslab.recipe.load import load_recipe
from hyperslab.train.evaluate import recipe_for
from hyperslab.util.optional_libraries import current_versions
from tests.docs.blocks import DOCS
from tests.forked import forked_commands

SLOW = ("torch", "numpy", "pydantic", "rich", "matplotlib", "h5py", "yaml", "tensorboard")


def modules_after(statements: str) -> set[str]:
    """The modules that a fresh process has imported after these statements."""
    program = f"import sys\n{statements}\nprint(*sys.modules, file=sys.__stderr__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def command(words: str) -> str:
    return f"""
import hyperslab.cli
sys.argv[1:] = {words.split()!r}
try:
    hyperslab.cli.main()
except SystemExit as end:
    assert not end.code
"""


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("--version", set()),
        ("--help", {"rich"}),
        *((f"{name} --help", {"pydantic"}) for name in ("train", "convert lits", "recipes copy")),
    ],
)
def test_overviews_import_neither_torch_nor_numpy(words: str, needed: set[str]) -> None:
    found = modules_after(command(words))
    assert found.intersection(SLOW) - needed - {"yaml"} == set()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train nowhere.yaml", "cannot read the recipe nowhere.yaml: No such file or directory"),
        ("plan nowhere.yaml", "cannot read the recipe nowhere.yaml: No such file or directory"),
        ("inspect nowhere", "nowhere: does not exist; give the folder that holds the data"),
        ("evaluate nowhere", "nowhere is not the folder of a run: it has no recipe.yaml"),
        ("predict nowhere a.nii --out x", "nowhere is not the folder of a run"),
    ],
)
def test_what_is_not_there_is_said_before_torch_is_imported(words: str, said: str) -> None:
    program = f"""
import sys
import hyperslab.cli
sys.argv[1:] = {words.split()!r}
try:
    hyperslab.cli.main()
except SystemExit as end:
    print(end.code, *({{"torch", "numpy", "h5py"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n"
    assert said in done.stderr
    name, first, *_ = words.split()
    with pytest.raises(hs.HyperslabError, match=said):  # the command's own words
        {"train": load_recipe, "plan": load_recipe, "inspect": check_folder}.get(
            name, partial(recipe_for, overrides=())
        )(Path(first))


def test_versions_are_those_of_the_libraries() -> None:
    assert current_versions()["torch"] == torch.__version__


def test_the_package_imports_nothing_until_it_is_used() -> None:
    found = modules_after("import hyperslab")
    assert found.intersection((*SLOW, "typer", "jinja2")) == set()


def test_the_public_names_import_nothing_of_commands_and_pages() -> None:
    statements = "import hyperslab as hs\nhs.shard, hs.parallelize, hs.open, hs.load, hs.models"
    found = modules_after(statements)
    late = ("pydantic", "rich", "typer", "matplotlib", "jinja2", "tensorboard", "triton")
    assert found.intersection(late) == set()


def test_training_imports_neither_figures_nor_the_planner() -> None:
    found = modules_after("from hyperslab.cli import load_command\nload_command('train')")
    late = ("matplotlib", "jinja2", "tensorboard", "triton", "rich.progress", "hyperslab.planner")
    assert found.intersection(late) == set()


@pytest.mark.parametrize(
    "words", ["report run", "scale strong r.yaml", "plan r.yaml --figure f.png"]
)
def test_what_draws_says_what_it_lacks(words: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "data: {synthetic: {width: 16}, batch_size: 2}\nmodel: {variant: lbann}\n"
        "device: cpu\noutput: run\n"
    )
    program = f"""
import sys
sys.modules["matplotlib"] = None
sys.argv[1:] = {words.split()!r}
import hyperslab.cli
hyperslab.cli.main()
"""
    with forked_commands():
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
        )
    assert done.returncode == 1
    assert re.search(r"error: drawing needs another library .*matplotlib", done.stderr)
    assert "Traceback" not in done.stderr


def test_whoever_cuts_a_tensor_has_the_rules() -> None:
    assert "hyperslab.ops.convolution" in modules_after("import hyperslab.tensor.sharded")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_the_first_sentence_of_its_help(name: str) -> None:
    help_text = inspect.cleandoc(load_command(name).help).replace("\n", " ")
    assert re.split(r"(?<=\.) |  ", help_text)[0].strip() == COMMANDS[name]


def test_every_module_of_a_command_is_in_the_table() -> None:
    shared = {"__init__", "early", "options", "rank", "terminal"}
    folder = Path(inspect.getfile(load_command)).parent
    assert {file.stem for file in folder.glob("*.py")} - shared == set(COMMANDS)


def test_help_without_imports_is_what_commands_print() -> None:
    made = runpy.run_path(str(DOCS / "help.py"))
    assert PAGES.read_text() == made["text"](), "run python docs/help.py"
    assert read_pages() == made["printed_pages"]()


@pytest.mark.parametrize(
    "words",
    [
        ["train"],
        ["train", "--help", "--help"],
        ["--debug", "train", "--help"],
        ["train", "r.yaml", "--help"],
        ["nothing", "--help"],
    ],
)
def test_other_words_are_left_to_the_command(words: list[str]) -> None:
    assert help_page(words) is None


def test_a_narrow_terminal_gets_the_commands_own_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert help_page(["train", "--help"]) is not None
    monkeypatch.setenv("COLUMNS", str(WIDTH - 1))
    assert help_page(["train", "--help"]) is None


def test_names_are_found_where_type_checkers_see_them() -> None:
    """The table of `hyperslab.__init__` says what its imports for type checkers say."""
    tree = ast.parse(Path(inspect.getfile(hs)).read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hyperslab")
        for alias in node.names
    }
    assert set(seen) == set(hs.__all__) <= set(dir(hs))
    assert {name: home for name, home in seen.items() if home != "hyperslab"} == hs._HOMES
    assert [name for name in hs.__all__ if getattr(hs, name, None) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hs.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_starts_take_a_fraction_of_a_second() -> None:
    """Ten times what is measured, on a machine that does other things, too."""
    before = os.times()
    modules_after(command("--help"))
    after = os.times()
    assert after.children_user - before.children_user < 2.0
