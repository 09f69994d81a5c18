"""The generated pages say what the code says (tier: no process)."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from pydantic_core import PydanticUndefined
from typer.core import TyperGroup

from hyperslab.cli import app
from hyperslab.recipe.load import _fields
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.section import Section

SITE = Path(__file__).parents[2] / "docs" / "site"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The writer of a page, by its module's name."""
    monkeypatch.syspath_prepend(str(SITE))

    def module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return module


NOBODY_WRITES = {"handed_in", "python_class"}


def rows(text: str) -> dict[str, list[list[str]]]:
    """The rows of the tables, by key: of a key of alternatives several, one after the other."""
    found: dict[str, list[list[str]]] = {}
    section = ""
    for line in text.splitlines():
        if heading := re.match(r"##+ (?:`([\w.]+)`|Top level)", line):
            section = f"{heading[1]}." if heading[1] else ""
        elif row := re.match(r"\| `(\w+)` \| (.*) \|$", line):
            found.setdefault(section + row[1], []).append(re.split(r" \| ", row[2]))
    return found


def sections(kind: type[Section] = Section) -> Iterator[type[Section]]:
    for inside in kind.__subclasses__():
        yield inside
        yield from sections(inside)


def test_the_page_has_every_key_that_a_recipe_may_have(page: Any) -> None:
    names = {key.partition(".schedule.name")[0] for key in rows(page("recipe_page").recipe_page())}
    expected = {key for key in _fields() if not key.endswith(".name")}
    assert names == expected


def test_every_key_says_what_it_is(page: Any) -> None:
    found = rows(page("recipe_page").recipe_page())
    silent = [key for key, cells in found.items() if not all(row[0].strip() for row in cells)]
    assert silent == []


def test_defaults_are_those_of_the_schema(page: Any) -> None:
    text = page("recipe_page").recipe_page()
    for name, field in Recipe.model_fields.items():
        if name in NOBODY_WRITES:
            continue
        ((*_, default),) = rows(text)[name]
        if field.default is PydanticUndefined:
            assert default == "**required**"
        elif field.default is None:
            assert default == "`null`"
        elif isinstance(field.default, str | int | float):
            assert default.strip("`").lower() == str(field.default).removesuffix(".0").lower()
        elif isinstance(field.default, tuple | list):
            assert json.loads(default.strip("`")) == list(field.default)
        else:
            assert default in ("its own", "`{}`")


def test_choices_and_comments_are_there(page: Any) -> None:
    found = rows(page("recipe_page").recipe_page())
    assert found["precision"][0][1] == "`float32`, `tf32`, `bf16` or `float16`"
    about, value, default = found["data.batch_size"][0]
    assert (value, default) == ("*integer* > 0", "**required**")
    assert about == "samples over all ranks"
    assert found["optimizer.clip"][0][0] == "the largest L2 norm of the gradient"
    assert "by a rule from types and shapes" in found["kernels"][0][0]  # a comment above the field


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    if isinstance(command, TyperGroup):
        context = typer.Context(command)
        for inside in command.list_commands(context):
            yield from commands(command.get_command(context, inside), f"{name} {inside}")


def test_every_command_and_option_is_there(page: Any) -> None:
    text = page("commands_page").commands_page()
    for name, command in commands(typer.main.get_command(app), "hyperslab"):
        chapter = re.search(rf"^##+ `{re.escape(name)}`\n(.*?)(?=^##|\Z)", text, re.M | re.S)
        assert chapter, name
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                if parameter.param_type_name == "option":
                    assert f"`{parameter.opts[0]}" in chapter[1], (name, parameter.name)
                assert (parameter.help or "").split(". ")[0][:30] in chapter[1].replace("\n", " ")
