"""What is wrong with a recipe, in the user's words."""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from hyperslab.recipe.choices import OneOf
from hyperslab.recipe.schema import BY_NAME, BY_TARGET, Recipe
from hyperslab.recipe.short_forms import A_TARGET, DEFAULT_NAMES, TORCH


def explain(error: ValidationError, values: Any, file: str, sources: Mapping[str, str]) -> str:
    """One line or two for each mistake: where it is, what it is, and the nearest valid word.

    ``values`` are those of the recipe; ``sources`` gives the override that a key came from, where
    it did not come from ``file``.
    """
    lines = []
    for problem in error.errors(include_url=False):
        key = _dotted(problem["loc"], values)
        where = next((s for k, s in sources.items() if _related(k, key)), file)
        lines.append(f"{where}: {_sentence(key, dict(problem))}")
    return "\n".join(lines)


def _related(a: str, b: str) -> bool:
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _sentence(key: str, problem: dict[str, Any]) -> str:
    kind = problem["type"]
    value = problem["input"]
    if kind == "extra_forbidden" and key in _fields():
        return f"key {key!r} does not go with the chosen {key.rpartition('.')[0]}.name"
    if kind == "extra_forbidden":
        closest = nearest_key(key, list(_fields()))
        return f"unknown key {key!r}\n    nearest: {closest!r}{_siblings(key)}"
    if kind == "missing":
        return f"{key!r} is missing"
    if kind == "value_error" and isinstance(value, dict):  # of keys that do not go together
        return str(problem["msg"].removeprefix("Value error, "))
    if kind in ("model_type", "model_attributes_type"):
        return f"bad value {value!r} for {key!r}: it is a section of keys{_siblings(f'{key}.')}"
    if kind == "union_tag_invalid":
        value = value["name"]
    choices = _choices(key)
    if choices:
        valid = f"it should be one of {', '.join(choices)}\n    nearest: "
        return f"bad value {value!r} for {key!r}: {valid}{nearest_key(str(value), choices)!r}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return f"bad value {value!r} for {key!r}: {message}"


def nearest_key(word: str, valid: Sequence[str]) -> str:
    """The valid word that looks most like this one; of a dotted key the last part counts too."""
    last = word.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        end = candidate.rpartition(".")[2]
        initials = "".join(part[:1] for part in end.split("_"))
        return _ratio(word, candidate) + max(_ratio(last, end), _ratio(last, initials))

    return max(valid, key=likeness)


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _dotted(loc: Sequence[int | str], values: Any) -> str:
    """The key as the user writes it: pydantic also puts in which alternative it tried."""
    keys: list[str] = []
    for part in loc:
        if part in (BY_NAME, BY_TARGET):
            continue
        if isinstance(values, dict) and part not in values and values.get("name") == part:
            continue
        keys.append(str(part))
        values = values.get(part) if isinstance(values, dict) else None
    if ".".join(keys) in DEFAULT_NAMES and isinstance(values, dict):
        keys.append("name")  # an alternative that does not exist
    return ".".join(keys)


def _siblings(key: str) -> str:
    section = key.rpartition(".")[0]
    names = [k.rpartition(".")[2] for k in _fields() if k.rpartition(".")[0] == section]
    return f"\n    valid in {section or 'a recipe'}: {', '.join(names)}" if names else ""


@functools.cache
def _fields() -> dict[str, Any]:
    """Every key of a recipe, dotted, with its type; sections too."""
    fields: dict[str, Any] = {}
    for key, annotation in _walk(Recipe, ""):
        fields[key] = fields[key] | annotation if key in fields else annotation
    return fields


def _walk(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        if name in ("trusted", "handed_in", "python_class"):  # nobody writes them
            continue
        yield prefix + name, field.annotation
        for kind in _alternatives(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _walk(kind, f"{prefix}{name}.")


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The types that a key takes, those in unions and behind marks too."""
    if typing.get_origin(annotation) is typing.Annotated:
        yield from _alternatives(annotation.__origin__)
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for kind in typing.get_args(annotation):
            yield from _alternatives(kind)
    else:
        yield annotation


def _choices(key: str) -> list[str] | None:
    """The words that a key takes, if it takes words."""
    kinds: list[Any] = [_fields().get(key.rstrip(".0123456789"))]
    choices: list[str] = []
    while kinds:
        kind = kinds.pop()
        if typing.get_origin(kind) is typing.Literal:
            choices += [str(value) for value in typing.get_args(kind)]
        elif typing.get_origin(kind) in (typing.Union, types.UnionType):
            kinds += typing.get_args(kind)
        elif typing.get_origin(kind) is typing.Annotated:
            kinds.append(kind.__origin__)
            marks = [mark for mark in kind.__metadata__ if isinstance(mark, OneOf)]
            choices += [word for mark in marks for word in mark.words()]
    if key.endswith(".name"):
        choices = [name for name in choices if name not in (A_TARGET, "python")]
        choices += [name for name in TORCH.get(key.rpartition(".")[0], ()) if name not in choices]
    return list(dict.fromkeys(choices)) or None
