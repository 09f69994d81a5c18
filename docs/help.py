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
from typing import Any, get_args, get_origin

import typer
from typer.models import OptionInfo, ParameterInfo

from hyperslab.cli import COMMANDS
from hyperslab.cli.early import DECLARED
from hyperslab.recipe import load
from hyperslab.recipe.network import NetworkSection
from hyperslab.recipe.optimizer import OptimizerSection
from hyperslab.recipe.schedule import ScheduleSection
from hyperslab.recipe.section import NamedSection, declared_names

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


def text() -> str:
    """All of it, as the file has it."""
    found = {"commands": commands(), "keys": list(load._fields()), "names": own_names()}
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    DECLARED.write_text(text())
    print(f"wrote {DECLARED}")
