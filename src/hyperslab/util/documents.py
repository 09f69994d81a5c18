"""Reads YAML and JSON that anybody may have written, in bounded time and memory.

Both are small where people or hyperslab itself wrote them, so far more than that is refused:
size, depth, and in YAML what its aliases stand for. A few lines of aliases of aliases make a
value with billions of entries ("billion laughs"), which is cheap as long as nobody walks through
it; and a million brackets keep PyYAML busy for an hour.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import yaml

MOST_YAML_CHARACTERS = 512 << 10  # of a document of somebody's, by PyYAML's slow reader
MOST_LONG_YAML_CHARACTERS = 32 << 20  # of one that a program has written: a machine file
MOST_NODES = 200_000  # of a document of somebody's, aliases counted as what they stand for
MOST_JSON_BYTES = 64 << 20  # [B] of a JSON file, and of a line of a journal

MOST_JSON_MEMORY = 192 << 20
"""Limits what the values of a JSON document take as objects of Python [B], roughly counted."""

LINES_RATIO = 8  # times its bytes for the values of a long journal; honest ones take 3 or 4
MOST_DEPTH = 64  # of brackets, lists and mappings in each other
MOST_DIGITS = 100  # the most digits of an integer in YAML

_TEXT = "tag:yaml.org,2002:str"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_DATE = "tag:yaml.org,2002:timestamp"
_OCTAL = re.compile(r"[-+]?0[0-9_]+")


class TooMuch(yaml.YAMLError):
    """Reports a document that is larger or deeper than it may be, and in what."""


class _BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which stops where there is too much."""

    most_nodes = MOST_NODES

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[int, int] = {}

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= MOST_DEPTH:
            raise TooMuch(f"brackets are more than {MOST_DEPTH} deep")
        super().fetch_flow_collection_start(token)

    def add_indent(self, column: int) -> bool:
        if len(self.indents) >= MOST_DEPTH:
            raise TooMuch(f"lists and mappings are more than {MOST_DEPTH} deep")
        return bool(super().add_indent(column))

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if node is None:
            return node
        if alias and id(node) not in self._sizes:
            raise TooMuch("an alias (*name) stands for something that contains it")
        if not alias:
            self._sizes[id(node)] = 1 + sum(self._sizes.get(id(n), 1) for n in _children(node))
        if self._sizes[id(node)] > self.most_nodes:
            raise TooMuch(f"it has more than {self.most_nodes} values, aliases counted in full")
        return node

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """``10:20`` is a text, as in YAML 1.2; in YAML 1.1 it is 620, by sixties.

        So are ``010``, which is 8 there and not what people mean, and ``2026-11-29``: both may be
        names, and where a number is asked for a text of digits is that. Escapes may make what no
        name of a file has.
        """
        if kind is yaml.ScalarNode and not _can_name_a_file(value):
            raise TooMuch(f"the text {value[:MOST_DIGITS]!r} has a character that no text has")
        tag = super().resolve(kind, value, implicit)
        if tag == _DATE or (tag in _NUMBERS and _OCTAL.fullmatch(value)):
            return _TEXT
        if kind is not yaml.ScalarNode or tag not in _NUMBERS or ":" not in value:
            return tag
        if len(value) > MOST_DIGITS:
            raise TooMuch(f"a number has {len(value)} characters")
        return _TEXT

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuses a key that is there twice: PyYAML takes the last one, without a word."""
        if isinstance(node, yaml.MappingNode):
            keys = [(k.tag, k.value) for k, _ in node.value if isinstance(k, yaml.ScalarNode)]
            if twice := [key for (_, key), count in Counter(keys).items() if count > 1]:
                raise TooMuch(f"it has the key {twice[0][:MOST_DIGITS]!r} twice in one mapping")
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> Any:
        if len(node.value) > MOST_DIGITS:
            raise TooMuch(f"a number has {len(node.value)} characters")
        return super().construct_yaml_int(node)

    def construct_yaml_binary(self, node: Any) -> Any:
        """Checks of texts would pass over bytes, of which pydantic makes a text afterwards."""
        return self.construct_undefined(node)


_BoundedLoader.add_constructor("tag:yaml.org,2002:int", _BoundedLoader.construct_yaml_int)
_BoundedLoader.add_constructor("tag:yaml.org,2002:binary", _BoundedLoader.construct_yaml_binary)


def _can_name_a_file(text: str) -> bool:
    try:
        text.encode(errors="surrogateescape")  # as Python has the bytes of names that are no UTF-8
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


GIVEN = ("/dev/stdin", "/dev/fd", "/proc/self/fd")
"""Pipes that only the user himself names, as in ``hyperslab train <(...)``, or where they lie."""


def open_plain(path: Path, *, links: bool = True) -> io.BufferedReader:
    """Open a file that is one: no pipe, no device, of which there might be no end.

    Raises:
        OSError: it cannot be read, is something else, or is a link where ``links`` is False.
    """
    if str(path) in GIVEN or str(path.parent) in GIVEN:
        return path.open("rb")
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        folder = stat.S_ISDIR(mode)
        words = os.strerror(errno.EISDIR) if folder else "it is not a plain file"
        raise OSError(errno.EISDIR if folder else errno.EINVAL, words, str(path))
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, most: int = MOST_YAML_CHARACTERS) -> str:
    """Return a file's text, of a longer one little more than ``most`` characters."""
    with io.TextIOWrapper(open_plain(path), encoding="utf-8") as file:
        return file.read(most + 1)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document.

    Raises:
        yaml.YAMLError: it is none, or larger or deeper than it may be.
    """
    if len(text) > MOST_YAML_CHARACTERS:
        raise TooMuch(f"it has more than {MOST_YAML_CHARACTERS} characters")
    return _load(text, _BoundedLoader)


def parse_long_yaml(text: str) -> Any:
    """Parse the YAML that programs write as `parse_yaml` does, ten times faster where it is built.

    Such files have no aliases. libyaml crashes where brackets are thousands deep, so its events,
    which it makes without going down, are looked at first.
    """
    if len(text) > MOST_LONG_YAML_CHARACTERS:
        raise TooMuch(f"it has more than {MOST_LONG_YAML_CHARACTERS} characters")
    loader = getattr(yaml, "CSafeLoader", _BoundedLoader)
    depth = 0
    for event in yaml.parse(text, loader):
        if isinstance(event, yaml.AliasEvent):
            raise TooMuch("it has aliases (*name): write out what they stand for")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise TooMuch(f"lists and mappings are more than {MOST_DEPTH} deep")
    return _load(text, loader)


def _load(text: str, loader: Any) -> Any:
    try:
        return yaml.load(text, loader)
    except yaml.YAMLError:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError) as error:  # of odd scalars
        raise TooMuch(f"{type(error).__name__}: {error}") from None


def check_json_memory(text: str | bytes, most: int | None = None) -> int:
    """Refuse JSON whose values take far more memory than it has bytes: ``[[],[],...`` twenty times.

    Returns what they take [B], roughly.

    Raises:
        ValueError: it is more than ``most``, by default `MOST_JSON_MEMORY`.
    """
    most = MOST_JSON_MEMORY if most is None else most
    signs = (b"{", b"[", b",") if isinstance(text, bytes) else ("{", "[", ",")
    mappings, lists, commas = map(text.count, signs)  # type: ignore[arg-type]
    size = 240 * mappings + 64 * (lists + commas)
    if size > most:
        raise ValueError(f"its values would take more than {most >> 20} MiB")
    return size


def value_of_json(text: str | bytes, *, strict: bool = False) -> Any:
    """Return the value of a JSON document.

    A ``strict`` one has no key twice in one object, of which Python takes the last without a word,
    and none of the numbers that JSON has not, such as NaN.

    Raises:
        ValueError: it is none, deeper than Python goes, or stands for too much.
    """
    check_json_memory(text)
    checks: dict[str, Any] = {"object_pairs_hook": _keys_once, "parse_constant": _no_constant}
    try:
        return json.loads(text, **(checks if strict else {}))
    except RecursionError:
        raise ValueError("its brackets are too deep") from None


def _keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"it has the key {twice[:MOST_DIGITS]!r} twice in one object")
    return found


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def read_bytes(path: Path, most: int = MOST_JSON_BYTES) -> bytes:
    """Return what a file holds; raises ValueError for more than ``most`` bytes."""
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"it has {size} bytes; {most} are read at most")
    with open_plain(path) as file:
        return file.read(size)


def read_json(path: Path) -> Any:
    """Return the value of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none, or larger or deeper than it may be.
    """
    return value_of_json(read_bytes(path))


def lines_of(file: IO[bytes], most: int = MOST_JSON_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file, each with its end; a ValueError for longer ones than ``most``."""
    while line := file.readline(most + 1):
        if len(line) > most:
            raise ValueError(f"a line has more than {most} bytes")
        yield line


def finished_lines(file: IO[bytes], most: int = MOST_JSON_BYTES) -> Iterator[bytes]:
    """Yield what `lines_of` does, but for a last line that does not end: it is being written."""
    return (line for line in lines_of(file, most) if line.endswith(b"\n"))


def read_json_lines(path: Path) -> tuple[list[Any], int]:
    """Return the rows of a journal and the bytes [B] of its whole lines.

    A last line that was not finished is no line.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is not JSON, or the rows take far more memory than the file has bytes.
    """
    rows: list[Any] = []
    size = taken = 0
    with open_plain(path) as file:
        for line in finished_lines(file):
            size += len(line)
            most = max(MOST_JSON_MEMORY, LINES_RATIO * size)
            taken += check_json_memory(line, most - taken)
            rows.append(value_of_json(line))
    return rows, size
