"""Writes what commands and recipes declare into the package, where it is read without imports.

    python docs/help.py

A test compares the file with the commands and with the recipe's classes.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel, TypeAdapter
from typer.models import OptionInfo, ParameterInfo

from hyperslab.cli import COMMANDS
from hyperslab.cli.early import DECLARED
from hyperslab.formats.registry import formats
from hyperslab.recipe import load
from hyperslab.recipe.network import NetworkSection
from hyperslab.recipe.optimizer import OptimizerSection
from hyperslab.recipe.schedule import ScheduleSection
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.section import NamedSection, Section, declared_names
from hyperslab.recipe.text import UNNAMED, UNWRITTEN

SAID = ("help", "metavar", "min", "max")
"""What an option or argument says besides its words; the file has no others."""


def declaration(function: Callable[..., Any], help: str | None = None) -> dict[str, Any]:
    """The help of a command, and its options and arguments by name."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    declared = {p.name: parameter(p) for p in parameters if p.annotation is not typer.Context}
    return {"help": help or inspect.cleandoc(function.__doc__ or ""), "parameters": declared}


def parameter(one: inspect.Parameter) -> dict[str, Any]:
    """What `hyperslab.cli.early` makes it from."""
    kind, info = get_args(one.annotation)
    plain: ParameterInfo = type(info)(default=...)
    others = {k for k, v in vars(info).items() if v != vars(plain)[k]}
    assert others <= {"default", "param_decls", *SAID}, f"{one.name}: {others}"
    optional = NoneType in get_args(kind)
    if optional:
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    several = get_origin(kind) is list
    if several:
        (kind,) = get_args(kind)
    words = [*([] if info.default is ... else [info.default]), *(info.param_decls or ())]
    found = {
        "option": isinstance(info, OptionInfo),
        "type": type_of(kind),
        "list": several,
        "optional": optional,
        "words": words,
        "more": {key: getattr(info, key) for key in SAID if getattr(info, key) is not None},
    }
    if one.default is not inspect.Parameter.empty:
        found["default"] = str(one.default) if isinstance(one.default, Path) else one.default
    return found


def type_of(kind: Any) -> str | list[str]:
    """The name of a type, or the words that it takes."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    is_enum = issubclass(kind, enum.Enum)
    return [str(each.value) for each in kind] if is_enum else str(kind.__name__)


def commands() -> dict[str, Any]:
    """Every command that is slow to import, and those of a group with their settings."""
    found: dict[str, Any] = {}
    for name in COMMANDS:
        command = getattr(importlib.import_module(f"hyperslab.cli.{name}"), f"{name}_command")
        if not isinstance(command, typer.Typer):
            found[name] = declaration(command)
        elif command.registered_callback is None:  # that of `recipes` is quick
            below = {}
            for one in command.registered_commands:
                callback = one.callback
                assert callback is not None
                key = one.name or callback.__name__
                below[key] = declaration(callback, one.help)
                below[key]["settings"] = {"no_args_is_help": one.no_args_is_help}
            found[name] = {"help": command.info.help, "commands": below}
    return found


def own_names() -> dict[str, list[str]]:
    """The sections that may name a class, and hyperslab's own names there, the default first."""
    bases: dict[str, type[NamedSection]] = {
        "model": NetworkSection,
        "optimizer": OptimizerSection,
        "optimizer.schedule": ScheduleSection,
    }
    found: dict[str, list[str]] = {"data": [], "loss": []}
    for section, base in bases.items():
        first = load.DEFAULT_NAMES[section]
        known = [name for name in declared_names(base) if name not in UNNAMED]
        found[section] = sorted(known, key=lambda name: name != first)
    return found


NAMED = {"loss": "value", "metrics": "dict", "loggers": "list", "memory": "value"}
"""Keys whose words stand for classes or for others, and where they are: in a list, ..."""

INSTEAD: dict[str, list[Any]] = {"grid": ["auto"]}
"""Words that a section may be in place of its keys."""


def values(section: type[BaseModel], key: str = "") -> dict[str, Any]:
    """The keys of a section by its name, with their schemas, and sections below; those needed."""
    field = section.model_fields.get("name")
    (name,) = get_args(field.annotation) if issubclass(section, NamedSection) and field else ("",)
    mine: dict[str, Any] = {}
    required = [word for word, one in section.model_fields.items() if one.is_required()]
    needed = [word for word in required if word not in ("name", "output")]
    found: dict[str, Any] = {key: {name: {"keys": mine, "needed": needed}}}
    validators = section.__pydantic_decorators__.field_validators.values()
    rewritten = {word for one in validators if one.info.mode != "after" for word in one.info.fields}
    for word, one in section.model_fields.items():
        if word in UNWRITTEN:
            continue
        place = f"{key}.{word}".lstrip(".")
        kinds = list(load._alternatives(one.annotation))
        below = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        for kind in below:
            for inner, schemas in values(kind, place).items():
                found.setdefault(inner, {}).update(schemas)
        mine[word] = None
        if place in NAMED:
            element = {"value": place, "dict": f"{place}.x", "list": f"{place}.0"}[NAMED[place]]
            expected = load._choices(element)
            mine[word] = {"type": "named", "in": NAMED[place], "expected": expected}
        elif place == "data.format":
            known = [f.name for f in formats() if f.source.__module__.startswith("hyperslab.")]
            mine[word] = {"type": "named", "in": "value", "expected": known}
        elif below:
            instead = [*INSTEAD.get(place, ()), *([None] if NoneType in kinds else ())]
            mine[word] = {"type": "section", "instead": instead}
        elif word not in rewritten:
            type_of = Annotated[one.annotation, None, *one.metadata]
            mine[word] = plain(TypeAdapter(type_of, config=Section.model_config).core_schema)
    return found


def plain(schema: Any) -> dict[str, Any] | None:
    """Pydantic's own schema, if it takes numbers and words alone and runs no Python."""
    parts = {
        "nullable": ("schema",),
        "tuple": ("items_schema",),
        "dict": ("keys_schema", "values_schema"),
        **dict.fromkeys(("any", "bool", "float", "int", "literal", "str"), ()),
    }.get(schema["type"])
    if parts is None:
        return None
    found = {word: value for word, value in schema.items() if word not in ("metadata", *parts)}
    for part in parts:
        inner = schema[part]
        several = inner if isinstance(inner, list) else [inner]
        plains = [one for one in map(plain, several) if one is not None]
        if len(plains) < len(several):
            return None
        found[part] = plains if isinstance(inner, list) else plains[0]
    return found


def text() -> str:
    """All of it, as the file has it."""
    found = {
        "commands": commands(),
        "keys": list(load._fields()),
        "names": own_names(),
        "values": values(Recipe),
    }
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    DECLARED.write_text(text())
    print(f"wrote {DECLARED}")
