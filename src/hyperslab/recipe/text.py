"""Reads the text of a recipe, and says which of its keys and values are wrong: without torch.

`hyperslab.recipe.load` does the rest. Commands ask here first, so that a misspelt key or a word in
place of a number is an error at once.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
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


def wrong_keys(
    values: Any, declared: Mapping[str, Any], section: str = ""
) -> Iterator[tuple[str, str]]:
    """List keys that are wrong whatever the others say, in pydantic's order, and what is wrong.

    ``declared`` has the recipe's ``keys``. Its ``names`` are those of every section that may name
    a class, hyperslab's own, the default first: any key there may be an argument of another class.
    Its ``values`` are pydantic's own schemas of numbers, words and lists of them, by section, name
    and key.
    """
    known, own = declared["keys"], declared["names"].get(section)
    if not isinstance(values, dict) or _names_a_class(values, own):
        return
    prefix = f"{section}." if section else ""
    name = values.get("name", own[0]) if own else ""
    schemas = declared["values"].get(section, {}).get(name, {})
    mine = [key for key in known if key.rpartition(".")[0] == section]
    for key in mine:
        word = key.removeprefix(prefix)
        if any(other.startswith(f"{key}.") for other in known):
            yield from wrong_keys(values.get(word), declared, key)
        elif word in values and word in schemas:
            for problem in _problems_of(values[word], schemas[word]):
                place = ".".join(map(str, (key, *problem["loc"])))
                choices = _words_of(schemas[word])
                if problem["type"] == "missing":
                    yield place, missing_key(place)
                else:
                    yield place, bad_value(place, problem["input"], problem["msg"], choices)
    for word in values:
        if f"{prefix}{word}" not in mine and word not in UNWRITTEN:
            yield f"{prefix}{word}", unknown_key(f"{prefix}{word}", known)


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


def _names_a_class(section: Mapping[str, Any], own: Sequence[str] | None) -> bool:
    if own is None:
        return False
    of_torch = bool(own) and section.get("name", own[0]) not in own
    return of_torch or bool(section.get("target"))
