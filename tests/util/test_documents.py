"""YAML and JSON end soon, whatever they say (tier: no process)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hyperslab.errors import MachineError, RecipeError
from hyperslab.planner.machine import load_machine
from hyperslab.recipe.load import load_recipe
from hyperslab.studies.sweep.schema import load_sweep
from hyperslab.util.documents import TooMuch, parse_long_yaml, parse_yaml, value_of_json

LETTERS = "abcdefghijklm"
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise(LETTERS)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b}\n  <<: [{','.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise(LETTERS)
)
EVIL = {
    "a billion laughs": LAUGHS,
    "a billion merges": MERGES,
    "brackets": "[" * 400_000,
    "mappings in brackets": "{a: " * 100_000,
    "lists": "- " * 100_000,
    "keys": "? " * 100_000,
    "indents": "".join(" " * i + "a:\n" for i in range(900)),
    "itself": "a: &a [*a]",
    "a long number": "a: " + "1" * 10_000,
    "a number of sixties": "a: " + "1:" * 5_000 + "1",
    "a day that is none": "a: 2001-99-99",
    "too long": "a: " + "x" * (1 << 20),
    "an object": "a: !!python/object/apply:os.system [true]",
}


@pytest.mark.parametrize("kind", EVIL)
def test_evil_yaml_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(yaml.YAMLError):
        parse_yaml(EVIL[kind])
    path = tmp_path / "evil.yaml"
    path.write_text(EVIL[kind])
    for load in (load_recipe, load_sweep):
        with pytest.raises(RecipeError, match=r"evil\.yaml"):
            load(path)
    with pytest.raises(RecipeError, match="no YAML"):
        load_recipe(path, [f"data.path={EVIL['brackets']}"])
    with pytest.raises(MachineError, match=r"evil\.yaml"):
        load_machine(str(path))


def test_aliases_and_merges_of_a_recipe_stay() -> None:
    text = "base: &base {depth: 2}\ngrid:\n  <<: *base\n  width: 3\nlist: [*base, *base]"
    found = parse_yaml(text)
    assert found["grid"] == {"depth": 2, "width": 3}
    assert found["list"] == [{"depth": 2}] * 2
    assert found == yaml.safe_load(text)


def test_colons_are_no_sixties() -> None:
    text = "a: 10:20\nb: [8:10, 190:20:30.15]\nc: 620\nd: 1.5\ne: '7'"
    assert parse_yaml(text) == {
        "a": "10:20",
        "b": ["8:10", "190:20:30.15"],
        "c": 620,
        "d": 1.5,
        "e": "7",
    }


def test_long_yaml() -> None:
    text = "times:\n" + "".join(f"  op{i}: [1, 2.5]\n" for i in range(20_000))
    assert parse_long_yaml(text) == {"times": {f"op{i}": [1, 2.5] for i in range(20_000)}}
    for kind in ("a billion laughs", "a billion merges", "itself"):
        with pytest.raises(TooMuch):
            parse_long_yaml(EVIL[kind])


def test_deep_json() -> None:
    with pytest.raises(ValueError, match="deep"):
        value_of_json("[" * 100_000)
    assert value_of_json(b'{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize("load", [load_recipe, load_sweep, lambda path: load_machine(str(path))])
def test_of_a_file_without_an_end_only_the_beginning_is_read(
    tmp_path: Path, load: Callable[[Path], object]
) -> None:
    path = tmp_path / "endless.yaml"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises((RecipeError, MachineError), match=r"it has more than [0-9]+ characters"):
        load(path)
