"""Reads the text of a recipe and its overrides, and finds words for what is wrong with them."""

from __future__ import annotations

import difflib
import functools
import importlib
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from hyperslab.errors import RecipeError
from hyperslab.recipe.shipped import shipped_recipes
from hyperslab.util.documents import parse_yaml, read_text


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Read the keys and values of a file, which errors call ``what`` (`RecipeError`)."""
    try:
        values = parse_yaml(read_text(path))
    except OSError as error:
        hint = f"\n    hyperslab ships one: hyperslab recipes copy {path.stem}"
        known = hint if path.stem in shipped_recipes() else ""
        raise RecipeError(f"cannot read the {what} {path}: {error.strerror}{known}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds no `key: value` lines, so it is not a {what}")
    return values


def parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RecipeError(f"{text!r} is not an override: write key=value, such as grid.depth=2")
    try:
        return key, parse_yaml(value)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {text!r}: the value is not valid YAML: {error}") from None


def put_override(values: dict[str, Any], key: str, value: Any) -> None:
    inner: Any = values
    words = key.split(".")
    for word, following in itertools.pairwise(words):
        place = _place_in(inner, word)
        found = inner.get(place) if isinstance(inner, dict) else inner[place]
        if not isinstance(found, dict) and isinstance(_place_in(found, following), str):
            found = inner[place] = {}
        inner = found
    inner[_place_in(inner, words[-1])] = value


def _place_in(values: Any, word: str) -> int | str:
    """Return the place that a word of a dotted key means: in a list a number, if it has as many."""
    is_index = isinstance(values, list) and word.isdecimal() and int(word) < len(values)
    return int(word) if is_index else word


def bad_value(key: str, value: Any, problem: str, choices: Sequence[str]) -> str:
    """Say what a key takes: one of ``choices``, or what pydantic's ``problem`` says."""
    if choices:
        valid = f"one of {', '.join(choices)}\n    nearest: {nearest_key(str(value), choices)!r}"
        return f"bad value {value!r} for {key!r}: it should be {valid}"
    message = problem.removeprefix("Value error, ").replace("Input should", "it should")
    message = re.sub("Input is not a valid path.*", "it should be a path", message)
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


def siblings(key: str, known: Sequence[str]) -> str:
    """List the keys of the section that a key is in, where it has some."""
    section = key.rpartition(".")[0]
    names = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    where = f"in {section}" if section else "there"
    return f"\n    valid {where}: {', '.join(names)}" if names else ""


def origin_of(key: str, file: str, sources: Mapping[str, str]) -> str:
    """Name the override that a key came from, or else the file."""
    for said, source in sources.items():
        if f"{key}.".startswith(f"{said}.") or f"{said}.".startswith(f"{key}."):
            return source
    return file


UNWRITTEN = ("handed_in", "python_class")  # keys that `hyperslab.fit` writes and nobody else

UNNAMED = ("target", "python")
"""Names of sections for what has none: somebody's class, and what a program has handed in."""

_TORCH_SOURCES = {
    "optimizer": ("torch.optim", "optim/__init__.py", r" import ((?!Optimizer\b)[A-Z]\w*) as \1$"),
    "optimizer.schedule": (
        "torch.optim.lr_scheduler",
        "optim/lr_scheduler.py",
        r"^class ([A-Z]\w*)\(LRScheduler\)",
    ),
}
"""Sections that may name a class of torch's, the module that has them, and how its file does."""


@functools.cache
def torch_knows_cuda() -> bool:
    """Say whether torch was built for CUDA or ROCm, as its text has it."""
    spec = find_spec("torch")
    text = ""
    if spec is not None and spec.submodule_search_locations:
        with suppress(OSError):
            text = read_text(Path(spec.submodule_search_locations[0], "version.py"))
    return len(re.findall(r"^(?:cuda|hip)\b.*= None$", text, re.MULTILINE)) < 2


_GPU_FILES = ("nvidia*", "nvmap", "nvhost*", "dxg", "kfd")
"""Matches the files in /dev of the drivers for CUDA, also on Jetson and WSL, and for ROCm."""


def machine_has_gpu(devices: Path = Path("/dev")) -> bool:
    """Say whether there may be a device for torch here: False where no driver has a file."""
    return sys.platform != "linux" or any(any(devices.glob(name)) for name in _GPU_FILES)


def torch_classes(section: str) -> dict[str, str]:
    """Return torch's classes for a section: dotted names by their own names in small letters.

    They are read from torch's text, as importing it takes two seconds.
    """
    spec = find_spec("torch")
    if section not in _TORCH_SOURCES or spec is None or not spec.submodule_search_locations:
        return {}
    home, file, pattern = _TORCH_SOURCES[section]
    text = ""
    with suppress(OSError):
        text = read_text(Path(spec.submodule_search_locations[0], file))
    found = re.findall(pattern, text, re.MULTILINE)
    if not found:  # a release that writes them otherwise
        found = [name for name in dir(importlib.import_module(home)) if name[0].isupper()]
    return {name.lower(): f"{home}.{name}" for name in found}
