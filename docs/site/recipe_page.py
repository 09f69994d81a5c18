"""The recipes' reference, from the schema that checks them and the comments beside its fields."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from value_types import in_words, referred, shown_value

from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.section import Section

NOBODY_WRITES = {"trusted", "handed_in", "python_class"}
"""Keys of a run's own recipe, for data and networks that a program has passed."""
BEGIN = """# Recipes

This page lists every key of a recipe with its type, its default and its meaning. It is written
from the schema that checks recipes, so it cannot differ from it. In a YAML file sections are
nested; the command line has dots instead, as in `data.batch_size=8`. `hyperslab recipes`
lists the shipped recipes. An unknown key or a bad value is an error that names the nearest
valid one.

A value in *italics* is a type; `null` means that the key is not used. If a section has
alternatives, `name` chooses one of them; the one marked *(default)* needs no `name`.
"""


@dataclass(frozen=True)
class Part:
    """A section of a recipe, at its dotted key; ``chosen`` by this name where there are several."""

    key: str
    definition: str
    chosen: str | None = None


def recipe_page() -> str:
    """Markdown with a heading for each section, and for each of its alternatives."""
    schema = Recipe.model_json_schema()
    parts = list(parts_of(schema))
    anchors = {part.definition: _anchor(part) for part in parts}
    return "\n".join([BEGIN, *(_chapter(part, schema, anchors) for part in parts)])


def parts_of(schema: dict[str, Any]) -> Iterator[Part]:
    """Every section once, those inside another after it."""
    waiting = [Part("", "Recipe")]
    seen = set()
    while waiting:
        part = waiting.pop(0)
        if part.definition in seen:
            continue
        seen.add(part.definition)
        yield part
        inside = []
        for name, node in definition(schema, part.definition)["properties"].items():
            key = f"{part.key}.{name}".lstrip(".")
            names = referred(node)
            several = len(names) > 1
            inside += [Part(key, n, _name(schema, n) if several else None) for n in names]
        waiting[:0] = inside


def definition(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """The schema of one section."""
    found: dict[str, Any] = schema if name == "Recipe" else schema["$defs"][name]
    return found


def _name(schema: dict[str, Any], name: str) -> str | None:
    node = definition(schema, name).get("properties", {}).get("name", {})
    return node.get("const")


def _anchor(part: Part) -> str:
    words = [part.key.replace(".", "-") or "top", part.chosen]
    return "-".join(filter(None, words))


def _chapter(part: Part, schema: dict[str, Any], anchors: dict[str, str]) -> str:
    node = definition(schema, part.definition)
    title = f"`{part.key}`" if part.key else "Top level"
    if part.chosen:
        default = " *(default)*" if "default" in node["properties"]["name"] else ""
        title += f" with `name: {part.chosen}`{default}"
    comments = comments_of(part.definition)
    required = node.get("required", [])
    rows = [
        _row(name, value, name in required, comments.get(name, ""), anchors)
        for name, value in node["properties"].items()
        if name not in NOBODY_WRITES and not (part.chosen and name == "name")
    ]
    level = "###" if part.key.count(".") or part.chosen else "##"
    lines = [f"{level} {title} {{#{_anchor(part)}}}", "", node.get("description", ""), ""]
    if rows:
        lines += ["| key | | value | default |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(
    name: str, node: dict[str, Any], required: bool, comment: str, anchors: dict[str, str]
) -> str:
    default = "**required**" if required else shown_value(node.get("default"))
    default = default or "its own"  # a section's
    words = [name, comment, in_words(node, anchors), default]
    key, *cells = (word.replace("|", "\\|") for word in words)
    return f"| `{key}` | {' | '.join(cells)} |"


def comments_of(name: str) -> dict[str, str]:
    """What stands beside the fields of a section, or above them, by field."""
    found: dict[str, str] = {}
    for kind in reversed(_sections()[name].__mro__):
        if issubclass(kind, Section) and kind is not Section:
            found.update(_comments_in(inspect.getsource(kind)))
    return found


def _sections() -> dict[str, type[Section]]:
    waiting = [Section]
    found: dict[str, type[Section]] = {}
    while waiting:
        kind = waiting.pop()
        found[kind.__name__] = kind
        waiting += kind.__subclasses__()
    return found


def _comments_in(source: str) -> Iterator[tuple[str, str]]:
    lines = textwrap.dedent(source).splitlines()
    (tree,) = ast.parse("\n".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above = node.lineno - 2
        words: list[str] = []
        while lines[above].lstrip().startswith("#"):
            words.insert(0, lines[above].lstrip()[1:].strip())
            above -= 1
        beside = re.search(r"  # (.*)$", lines[(node.end_lineno or node.lineno) - 1])
        words += [beside[1]] if beside else []
        yield node.target.id, " ".join(words)
