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
from hyperslab.util import documents
from hyperslab.util.atomic_files import open_to_append
from hyperslab.util.documents import (
    TooMuch,
    open_plain,
    parse_long_yaml,
    parse_yaml,
    read_bytes,
    read_json_lines,
    read_text,
    value_of_json,
)

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
    "too long": "a: " + "x" * (1 << 20),
    "an object": "a: !!python/object/apply:os.system [true]",
    "a zero in a text": 'data: {path: "a\\0b"}',
    "half a letter": 'data: {path: "a\\ud800b"}',
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
    with pytest.raises(RecipeError, match="not valid YAML"):
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
    text = "times:\n" + "".join(f"  op{i}: [1, 2.5]\n" for i in range(5_000))
    assert parse_long_yaml(text) == {"times": {f"op{i}": [1, 2.5] for i in range(5_000)}}
    for kind in ("a billion laughs", "a billion merges", "itself"):
        with pytest.raises(TooMuch):
            parse_long_yaml(EVIL[kind])


def test_a_key_of_a_recipe_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("epochs: 1\ngrid: {depth: 2, width: 3, depth: 4}\n")
    with pytest.raises(RecipeError, match=r"twice\.yaml.*has the key 'depth' twice"):
        load_recipe(path)
    assert parse_yaml("{1: a, '1': b}") == {1: "a", "1": "b"}


@pytest.mark.parametrize("value", ["[]", "{}", "0", '""'])
def test_json_that_stands_for_much(value: str) -> None:
    text = f"[{','.join([value] * 5_000_000)}]"
    for one in (text, text.encode()):
        with pytest.raises(ValueError, match="more than 192 MiB"):
            value_of_json(one)


def test_journals_of_any_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b'{"a": 1}\n[2]\n{"b"')
    assert read_json_lines(path) == ([{"a": 1}, [2]], 13)
    os.truncate(path, 1 << 40)  # holes
    with pytest.raises(ValueError, match="a line has more than"):
        read_json_lines(path)
    monkeypatch.setattr(documents, "MOST_JSON_MEMORY", documents.MOST_JSON_MEMORY >> 10)
    path.write_bytes(b"[" + b"[]," * 999 + b"0]\n")
    assert len(read_json_lines(path)[0][0]) == 1_000
    with path.open("ab") as file:
        file.write(path.read_bytes() * 2)
    with pytest.raises(ValueError, match="would take more than"):
        read_json_lines(path)
    with pytest.raises(ValueError, match="are read at most"):
        read_bytes(path, 1 << 10)


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


def reading_json_lines(path: Path) -> object:
    return read_json_lines(path)


@pytest.mark.parametrize(
    "read",
    [read_text, read_bytes, reading_json_lines, open_plain, open_to_append],
    ids=lambda read: read.__name__,
)
def test_pipes_and_devices_are_not_waited_for(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "device", "folder"):
        with pytest.raises(OSError, match=name):
            read(tmp_path / name)


def test_a_pipe_on_the_command_line_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"a: 1")
    os.close(writer)
    assert read_text(Path(f"/dev/fd/{reader}")) == "a: 1"
    os.close(reader)
