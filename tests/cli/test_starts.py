"""Starts wait for nothing that they do not use (tier: a few child processes)."""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.cli import COMMANDS, load_command
from hyperslab.cli.early import DECLARED, check_recipe, early_command, read_declared
from hyperslab.errors import RecipeError
from hyperslab.formats.files import check_folder
from hyperslab.recipe.load import TORCH_CLASSES, load_recipe
from hyperslab.recipe.text import torch_names
from hyperslab.studies.run_folder import read_run
from hyperslab.studies.sweep.schema import load_sweep
from hyperslab.train.evaluate import recipe_for
from hyperslab.util.optional_libraries import current_versions
from tests.docs.blocks import DOCS
from tests.forked import forked_commands

ROOT = DOCS.parent
SLOW = ("torch", "numpy", "pydantic", "rich", "matplotlib", "h5py", "yaml", "tensorboard")


def modules_after(*statements: str) -> list[set[str]]:
    """The modules that a fresh process has imported after each of these statements in turn."""
    say = "print(*sys.modules, file=sys.__stderr__)\n"
    program = "import sys\n" + "".join(f"{statement}\n{say}" for statement in statements)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stderr.splitlines()]


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
    ("overviews", "needed"),
    [
        (["--version"], set()),
        (["--help"], {"rich"}),
        (["train --help", "convert lits --help", "recipes copy --help"], {"pydantic"}),
    ],
    ids=str,
)
def test_overviews_import_neither_torch_nor_numpy(overviews: list[str], needed: set[str]) -> None:
    for words, found in zip(overviews, modules_after(*map(command, overviews)), strict=True):
        assert found.intersection(SLOW) - needed - {"yaml"} == set(), words


NOT_THERE = {
    "train nowhere.yaml": "cannot read the recipe nowhere.yaml: No such file or directory",
    "plan nowhere.yaml": "cannot read the recipe nowhere.yaml: No such file or directory",
    "inspect nowhere": "nowhere: does not exist; give the folder that holds the data",
    "evaluate nowhere": "nowhere is not the folder of a run: it has no recipe.yaml",
    "predict nowhere a.nii --out x": "nowhere is not the folder of a run",
    "scale strong nowhere.yaml": "cannot read the recipe nowhere.yaml: No such file",
    "sweep nowhere.yaml": "cannot read the sweep nowhere.yaml: No such file or directory",
    "report nowhere": "nowhere is not the folder of a run: it has no recipe.yaml",
    "convert nowhere x": "nowhere: does not exist; give the folder that holds the data",
    "train data.yaml": "nowhere: does not exist; give the folder that holds the data",
    "sweep bad.yaml": "bad.yaml is not valid YAML: ",
    "train .": "cannot read the recipe .: Is a directory",
}


@pytest.fixture
def _odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with a sweep that is no YAML and a recipe whose data are not there."""
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("a: [1\n")
    Path("data.yaml").write_text("data: {path: nowhere, batch_size: 2}\ndevice: cpu\n")


@pytest.mark.usefixtures("_odd_files")
def test_what_is_not_there_is_said_before_torch_is_imported() -> None:
    """All commands one after the other in one process, each with its own standard error."""
    program = f"""
import io, sys
from contextlib import redirect_stderr
import hyperslab.cli
for words in {[words.split() for words in NOT_THERE]!r}:
    sys.argv[1:] = words
    with redirect_stderr(io.StringIO()) as said:
        try:
            hyperslab.cli.main()
        except SystemExit as end:
            code = end.code
    print([code, said.getvalue(), *({{"torch", "numpy", "h5py"}} & set(sys.modules))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for said, line in zip(NOT_THERE.values(), done.stdout.splitlines(), strict=True):
        code, text, *imported = ast.literal_eval(line)
        assert (code, imported) == (1, [])
        assert said in text


@pytest.mark.parametrize("words", NOT_THERE)
@pytest.mark.usefixtures("_odd_files")
def test_what_is_not_there_is_said_in_the_words_of_the_command(words: str) -> None:
    name, first, *_ = (
        words.replace("strong ", "").replace("train data.yaml", "inspect nowhere").split()
    )
    own = {
        **dict.fromkeys(("train", "plan", "scale"), load_recipe),
        **dict.fromkeys(("inspect", "convert"), check_folder),
        **dict.fromkeys(("evaluate", "predict"), partial(recipe_for, overrides=())),
        "report": read_run,
        "sweep": load_sweep,
    }
    with pytest.raises(hs.HyperslabError, match=NOT_THERE[words]):
        own[name](Path(first))


@pytest.mark.parametrize(
    "words",
    [
        "train r.yaml --ranks 3 grid.depth=2 grid.data=2",
        "train r.yaml grid=auto",
        "plan r.yaml grid.auto=true",
        "plan r.yaml --shape x",
        "plan r.yaml --memory lots",
        "scale strong r.yaml --ranks 0",
        "scale strong r.yaml",
        "convert . out --cut 1,2",
        "convert . out --channels middle",
        "convert lits . out --size x",
        "convert scans . out --spacing x",
        "simulate out --count 1 --size 8 --part 3/2",
        "simulate out --count 0 --size 8",
        "evaluate run --split mine",
        "evaluate run --window x",
        "predict run a --out b --format png",
        "predict run a --out b --window 8 --blend linear",
    ],
)
def test_what_cannot_start_is_refused_early_in_the_words_of_the_command(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "data: {synthetic: {width: 16}, batch_size: 4}\nmodel: {variant: lbann}\ndevice: cpu\n"
    Path("r.yaml").write_text(text)
    Path("run").mkdir()
    Path("run/recipe.yaml").write_text(text)
    name, *rest = re.split(r" (?![^{]*})", words)
    said = []
    for one in (early_command(name), load_command(name)):
        with redirect_stderr(io.StringIO()) as err:
            try:
                one.main(rest, prog_name=f"hyperslab {name}")
            except SystemExit as end:
                said.append((end.code, err.getvalue()))
            except hs.HyperslabError as error:
                said.append((1, str(error)))
    assert said[0] == said[1]
    assert said[0][0] in (1, 2)


def test_versions_are_those_of_the_libraries() -> None:
    assert current_versions()["torch"] == torch.__version__


def test_the_package_imports_nothing_until_it_is_used() -> None:
    (found,) = modules_after("import hyperslab")
    assert found.intersection((*SLOW, "typer", "jinja2")) == set()


def test_what_imports_torch_imports_what_it_uses() -> None:
    """One after the other in one process: cut tensors, the public names, training."""
    rules, names, training = modules_after(
        "import hyperslab.tensor.sharded",
        "import hyperslab as hs\nhs.shard, hs.parallelize, hs.open, hs.load, hs.models",
        "from hyperslab.cli import load_command\nload_command('train')",
    )
    assert "hyperslab.ops.convolution" in rules, "a program that cuts a tensor has the rules"
    pages = {"matplotlib", "jinja2", "tensorboard", "triton"}
    assert names & {*pages, "pydantic", "rich", "typer"} == set()
    assert training & {*pages, "rich.progress", "hyperslab.planner"} == set()


@pytest.mark.parametrize(
    "words", ["report run", "scale strong r.yaml --ranks 1", "plan r.yaml --figure f.png"]
)
def test_what_draws_says_what_it_lacks(words: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "data: {synthetic: {width: 16}, batch_size: 2}\nmodel: {variant: lbann}\n"
        "device: cpu\noutput: run\n"
    )
    (tmp_path / "run").mkdir()
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


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_the_first_sentence_of_its_help(name: str) -> None:
    help_text = inspect.cleandoc(load_command(name).help).replace("\n", " ")
    assert re.split(r"(?<=\.) |  ", help_text)[0].strip() == COMMANDS[name]


def test_every_module_of_a_command_is_in_the_table() -> None:
    shared = {"__init__", "early", "options", "rank", "terminal"}
    folder = Path(inspect.getfile(load_command)).parent
    assert {file.stem for file in folder.glob("*.py")} - shared == set(COMMANDS)


def test_what_is_declared_is_what_commands_and_recipes_have() -> None:
    made = runpy.run_path(str(DOCS / "help.py"))
    assert DECLARED.read_text() == made["text"](), "run python docs/help.py"


def said_by(command: Any, name: str, words: Sequence[str]) -> tuple[object, str, str]:
    """How a command ends on such words, and what it prints; it must not get so far as to run."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        command.main([*words], prog_name=f"hyperslab {name}")
    return end.value.code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    "words",
    [
        *(f"{name} --help" for name in read_declared()["commands"]),
        *(f"convert {below} --help" for below in ("folder", "lits", "scans")),
        *("train", "train --foo", "train r.yaml --rank 3", "train r.yaml --ranks 0"),
        *("train r.yaml --ranks x", "train r.yaml --output", "scale strang r.yaml"),
        *("convert a", "convert scans a", "convert scans a b --spacin 1", "predict run"),
        *("calibrate", "simulate a --count x", "plan r.yaml --al", "compile now"),
    ],
)
@pytest.mark.parametrize("columns", ["60", "120"])
def test_help_and_wrong_words_are_those_of_the_command(
    words: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    name, *rest = words.split()
    early = said_by(early_command(name), name, rest)
    assert early == said_by(load_command(name), name, rest)
    assert early[0] == (0 if "--help" in words else 2)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), letter=st.sampled_from("aeqxz_"))
def test_a_misspelt_key_is_refused_in_the_words_of_the_recipe(
    data: st.DataObject, letter: str
) -> None:
    section, _, last = data.draw(st.sampled_from(read_declared()["keys"])).rpartition(".")
    at = data.draw(st.integers(0, len(last)))
    key = f"{section}.{last[:at]}{letter}{last[at:]}".lstrip(".")
    recipe = ROOT / "recipes" / "demo.yaml"
    with pytest.raises(RecipeError) as late:
        load_recipe(recipe, [f"{key}=1"])
    with pytest.raises(RecipeError) as early:
        check_recipe(recipe, [f"{key}=1"])
    assert str(early.value) in str(late.value)
    assert f"override {key}=: unknown key '{key}'\n" in str(early.value)


def refusal(look: Callable[[Path, Sequence[str]], object], path: Path, override: str) -> str:
    """What is said of a recipe with an override; nothing if it is accepted."""
    try:
        look(path, [override])
    except RecipeError as error:
        return str(error)
    return ""


@settings(deadline=None, max_examples=150)
@given(
    recipe=st.sampled_from(["demo", "demo-unet"]),
    key=st.sampled_from(read_declared()["keys"]),
    word=st.sampled_from(
        "x auto 1 -1 0.5 1e999 .nan true null [] [x,1] [1,-2,.nan] {a:1} keep Adam".split()
    ),
)
def test_values_are_refused_in_the_words_of_the_recipe(recipe: str, key: str, word: str) -> None:
    path = ROOT / "recipes" / f"{recipe}.yaml"
    early = refusal(check_recipe, path, f"{key}={word}")
    assert not early or early in refusal(load_recipe, path, f"{key}={word}")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("grid.depth=x", "'x' for 'grid.depth': it should be a valid integer, unable to parse"),
        ("ema=1", "1 for 'ema': it should be less than 1"),
        ("data.fold=-1", "-1 for 'data.fold': it should be greater than or equal to 0"),
        ("optimizer.eps=.nan", "nan for 'optimizer.eps': it should be a finite number"),
        ("optimizer.schedule.power=[]", "[] for 'optimizer.schedule.power': it should be a valid"),
        (
            "data.shape=[4,32,x,0]",
            "'x' for 'data.shape.2': it should be a valid integer, unable to",
        ),
        ("data.window=[0,.nan]", "nan for 'data.window.1': it should be a finite number"),
        ("model.variant=lban", "'lban' for 'model.variant': it should be one of paper2020, sc18,"),
        ("model.name=cosmo", "'cosmo' for 'model.name': it should be one of cosmoflow, unet3d\n"),
        (
            "optimizer.name=adamm",
            "'adamm' for 'optimizer.name': it should be one of adam, sgd, a",
        ),
        ("optimizer=adam", "'adam' for 'optimizer': it is a section of keys\n    valid in optimi"),
        ("optimizer.schedule.name=x", "'x' for 'optimizer.schedule.name': it should be one of lin"),
        ("loss=mae", "'mae' for 'loss': it should be one of mse, l1, cross_entropy, dice,"),
        ("metrics={a: mae}", "'mae' for 'metrics.a': it should be one of mse, l1, cross_entropy,"),
        ("loggers=[csv, x]", "'x' for 'loggers.1': it should be one of csv, tensorboard, wandb"),
        ("data.format=hdf", "'hdf' for 'data.format': it should be one of hdf5, lbann, npy,"),
        ("memory=recompue", "'recompue' for 'memory': it should be one of auto, none, tile, rec"),
    ],
)
def test_bad_values_are_refused_early(override: str, said: str) -> None:
    with pytest.raises(
        RecipeError, match=re.escape(f"override {override.split('=')[0]}=: bad value {said}")
    ) as early:
        check_recipe(ROOT / "recipes" / "demo.yaml", [override])
    with pytest.raises(RecipeError) as late:
        load_recipe(ROOT / "recipes" / "demo.yaml", [override])
    assert str(early.value) == str(late.value)


def test_names_of_torch_are_read_without_importing_it() -> None:
    for section, classes in TORCH_CLASSES.items():
        assert torch_names(section) == [*classes]


def test_missing_keys_and_keys_of_another_kind_are_refused_early(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    for text, said in {
        "model: {}": "'data' is missing",
        "data: {synthetic: {width: 16}}": "'data.batch_size' is missing",
        "data: {synthetic: {width: 16}, batch_size: 1}\nmlperf: {org: a}": "'mlperf.platform' is",
        "data: {synthetic: {width: 16}, batch_size: 1}\nmodel: {name: unet3d, width: 3}\n"
        "loss: dice": "key 'model.width' does not go with the chosen model.name",
    }.items():
        recipe.write_text(text)
        with pytest.raises(RecipeError, match=re.escape(said)) as early:
            check_recipe(recipe, [])
        with pytest.raises(RecipeError) as late:
            load_recipe(recipe)
        assert str(early.value) == str(late.value)


@pytest.mark.parametrize(
    "said",
    [
        ["optimizer.name=rmsprop", "optimizer.centered=true"],  # torch's
        ["optimizer.target=torch.optim.AdamW", "optimizer.lr=0.1", "optimizer.amsgrad=true"],
        ["model.target=my.Net", "model.depth=3", "model.inner.width=2"],
        ["loss.target=my.Loss", "loss.alpha=1"],
        ["data.target=my.Source", "data.size=1"],
        ["metrics.mine=mse", "grid=auto", "parallelize.until=head", "memory=keep"],
        ["data.format=mine", "data.plugins=[my.formats]", "optimizer.name=AdamW"],
        ["optimizer.schedule.name=steplr", "optimizer.schedule.gamma=0.5"],
    ],
)
def test_keys_that_a_recipe_may_have_are_left_to_it(said: list[str]) -> None:
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        check_recipe(recipe, [])
        check_recipe(recipe, said)


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    early = early_command("train")
    assert early.main([str(tmp_path / "pipe")], standalone_mode=False) is None


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
