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
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic import BaseModel, PydanticUserError, TypeAdapter
from typer.models import OptionInfo, ParameterInfo

from hyperslab.cli import COMMANDS
from hyperslab.cli.early import DECLARED
from hyperslab.recipe import load
from hyperslab.recipe.network import NetworkSection
from hyperslab.recipe.optimizer import OptimizerSection
from hyperslab.recipe.schedule import ScheduleSection
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.section import NamedSection, Section, declared_names

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
        "type": [str(each.value) for each in kind]
        if issubclass(kind, enum.Enum)
        else kind.__name__,
        "list": several,
        "optional": optional,
        "words": words,
        "more": {key: getattr(info, key) for key in SAID if getattr(info, key) is not None},
    }
    if one.default is not inspect.Parameter.empty:
        found["default"] = str(one.default) if isinstance(one.default, Path) else one.default
    return found


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
        known = [name for name in declared_names(base) if name not in (load.A_TARGET, "python")]
        found[section] = sorted(known, key=lambda name: name != first)
    return found


def values(section: type[BaseModel], key: str = "") -> dict[str, Any]:
    """The schemas of a section's numbers, words and lists by its name, and of sections below."""
    field = section.model_fields.get("name")
    (name,) = get_args(field.annotation) if issubclass(section, NamedSection) and field else ("",)
    mine: dict[str, Any] = {}
    found = {key: {name: mine}}
    validators = section.__pydantic_decorators__.field_validators.values()
    rewritten = {word for one in validators if one.info.mode != "after" for word in one.info.fields}
    for word, one in section.model_fields.items():
        for kind in load._alternatives(one.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                for below, schemas in values(kind, f"{key}.{word}".lstrip(".")).items():
                    found.setdefault(below, {}).update(schemas)
        with suppress(PydanticUserError):  # a section
            type_of = Annotated[one.annotation, None, *one.metadata]
            schema = plain(TypeAdapter(type_of, config=Section.model_config).core_schema)
            mine |= {word: schema} if schema and word not in rewritten else {}
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
