"""Reads the text of a recipe, and says which of its keys and values are wrong: without torch.

`hyperslab.recipe.load` does the rest. Commands ask here first, so that a misspelt key or a word in
place of a number is an error at once.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import CoreConfig, ErrorDetails, SchemaError, SchemaValidator, ValidationError

from hyperslab.errors import RecipeError
from hyperslab.recipe.shipped import shipped_recipes
from hyperslab.util.documents import parse_yaml, read_text


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Read the keys and values of a file; ``what`` it is to be is what errors call it.

    Raises:
        RecipeError: it cannot be read, or holds something else.
    """
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


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Say that a recipe has no such key, with the nearest one and those beside it."""
    return f"unknown key {key!r}\n    nearest: {nearest_key(key, known)!r}{siblings(key, known)}"


def missing_key(key: str) -> str:
    """Say that a recipe lacks a key, or an element of a list."""
    return f"{key!r} is missing"


def unchosen_key(key: str) -> str:
    """Say that a key is one of another kind of its section."""
    return f"key {key!r} does not go with the chosen {key.rpartition('.')[0]}.name"


def no_section(key: str, value: Any, known: Sequence[str]) -> str:
    """Say that a key takes keys of its own."""
    return f"bad value {value!r} for {key!r}: it is a section of keys{siblings(f'{key}.', known)}"


def bad_value(key: str, value: Any, problem: str, choices: Sequence[str]) -> str:
    """Say what a key takes: one of ``choices``, or what pydantic's ``problem`` says."""
    if choices:
        valid = f"one of {', '.join(choices)}\n    nearest: {nearest_key(str(value), choices)!r}"
        return f"bad value {value!r} for {key!r}: it should be {valid}"
    message = problem.removeprefix("Value error, ").replace("Input should", "it should")
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
    return f"\n    valid in {section or 'a recipe'}: {', '.join(names)}" if names else ""


def origin_of(key: str, file: str, sources: Mapping[str, str]) -> str:
    """Name the override that a key came from, or else the file."""
    return next((s for k, s in sources.items() if _related_words(k, key)), file)


def _related_words(a: str, b: str) -> bool:
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


UNWRITTEN = ("handed_in", "python_class")
"""Keys that `hyperslab.fit` writes and nobody else."""

OLDER_WORDS = {"keep": "none"}
"""Words of earlier versions for ``memory``, and what they are now."""

UNNAMED = ("target", "python")
"""Names of sections for what has none: somebody's class, and what a program has handed in."""

_TORCH_SOURCES = {
    "optimizer": ("optim/__init__.py", r" import ((?!Optimizer\b)[A-Z]\w*) as \1$"),
    "optimizer.schedule": ("optim/lr_scheduler.py", r"^class ([A-Z]\w*)\(LRScheduler\)"),
}
"""Sections that may name a class of torch's, where torch lists them, and how."""


@functools.cache
def _torch_source(section: str) -> str:
    """Return the text of torch's file that has the classes for a section; empty without one."""
    spec = find_spec("torch")
    if section not in _TORCH_SOURCES or spec is None or not spec.submodule_search_locations:
        return ""
    try:
        return read_text(Path(spec.submodule_search_locations[0], _TORCH_SOURCES[section][0]))
    except (OSError, UnicodeDecodeError):
        return ""


def torch_names(section: str) -> list[str]:
    """List torch's own classes for a section, in small letters, without importing torch."""
    if section not in _TORCH_SOURCES:
        return []
    found = re.findall(_TORCH_SOURCES[section][1], _torch_source(section), re.MULTILINE)
    return [name.lower() for name in found]


def _may_be_of_torch(section: str, name: str) -> bool:
    """Say whether torch's file has such a class, however its release writes that."""
    text = _torch_source(section)
    found = re.search(rf"\b(?:class|import|as) {re.escape(name)}\b", text, re.IGNORECASE)
    return section in _TORCH_SOURCES and (not text or found is not None)


def wrong_keys(
    values: Any, declared: Mapping[str, Any], section: str = ""
) -> Iterator[tuple[str, str]]:
    """List keys that are wrong whatever the others say, in pydantic's order, and what is wrong.

    ``declared`` has the recipe's ``keys``. Its ``names`` are those of every section that may name
    a class, hyperslab's own, the default first: any key there may be an argument of another class.
    Its ``values`` have the keys of a section by its name, each with its schema or none, and those
    that are needed. A schema is pydantic's own, of numbers, words and lists of them; or one of
    ours: of a ``section``, and of what is ``named`` by a word, or else is a section.
    """
    known, own = declared["keys"], declared["names"].get(section)
    if own is not None and values.get("target"):
        return  # any key may be an argument of it
    name = values.get("name", own[0]) if own else ""
    if own and name not in own:
        if name not in UNNAMED and not _may_be_of_torch(section, str(name)):
            place = f"{section}.name"
            yield place, bad_value(place, name, "", [*dict.fromkeys((*own, *torch_names(section)))])
        return
    prefix = f"{section}." if section else ""
    mine = declared["values"][section][name]
    for word, schema in mine["keys"].items():
        if word in values:
            yield from _wrong_values(f"{prefix}{word}", values, schema, declared)
        elif word in mine["needed"]:
            yield f"{prefix}{word}", missing_key(f"{prefix}{word}")
    for word in values:
        key = f"{prefix}{word}"
        if word not in mine["keys"] and word not in UNWRITTEN:
            yield key, unchosen_key(key) if key in known else unknown_key(key, known)


def _wrong_values(
    key: str, values: Mapping[str, Any], schema: Any, declared: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """List what is wrong with the value of a key that is there, as `wrong_keys` does."""
    value = values[key.rpartition(".")[2]]
    kind = schema["type"] if schema else None
    if kind == "section" and isinstance(value, dict):
        yield from wrong_keys(value, declared, key)
    elif kind == "section":
        if value not in schema["instead"]:
            yield key, no_section(key, value, declared["keys"])
    elif kind == "named":
        for place, one in _pairs(key, value, schema["in"]):
            if isinstance(one, dict) and key in declared["values"]:
                yield from wrong_keys(one, declared, key)
            known = one in (*schema["expected"], *OLDER_WORDS) or values.get("plugins")
            if isinstance(one, str) and not known:
                yield place, bad_value(place, one, "", schema["expected"])
    elif schema:
        for problem in _problems_of(value, schema):
            place = ".".join(map(str, (key, *problem["loc"])))
            if problem["type"] == "missing":
                yield place, missing_key(place)
            else:
                yield place, bad_value(place, problem["input"], problem["msg"], _words_of(schema))


def _pairs(key: str, value: Any, kind: str) -> Iterable[tuple[str, Any]]:
    """Return what stands for a class, with its place: a value, or those in a list or a section."""
    if kind == "list" and isinstance(value, list):
        return [(f"{key}.{place}", one) for place, one in enumerate(value)]
    if kind == "dict" and isinstance(value, dict):
        return [(f"{key}.{word}", one) for word, one in value.items()]
    return [(key, value)] if kind == "value" else []


def _problems_of(value: Any, schema: Mapping[str, Any]) -> list[ErrorDetails]:
    """List what pydantic says of a value in a section."""
    try:
        SchemaValidator(schema, CoreConfig(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        return error.errors(include_url=False)
    except SchemaError:  # of another release than the schema: the recipe itself will check
        return []
    return []


def _words_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the words that a value has to be one of; none if it is no word."""
    return list(map(str, schema.get("schema", schema).get("expected", ())))
