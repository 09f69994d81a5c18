"""`data.train`, `data.validation` and `data.test`: paths and lists, as folders and as words."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperslab.errors import DataError, RecipeError, printable, reason
from hyperslab.formats.joined import common_parent
from hyperslab.formats.registry import formats

LIST_SUFFIX = ".txt"
"""Of a file that lists samples, one a line; lines that begin with # and empty ones say nothing."""

MOST_LIST = 64 << 20
"""Of such a file [B]."""

_POSITIONS = re.compile(r"\d*:\d*")


@dataclass(frozen=True, slots=True)
class Lists:
    """The words of each split, by its name, and the folder to which they are relative.

    ``path`` is ``data.path``. Without it every word is a path of its own, of a folder or of a
    file, and the data set is what the folders hold.
    """

    path: Path | None
    words: dict[str, tuple[str, ...]]

    def folders(self) -> list[Path]:
        """Those that hold the data, none within another.

        Raises:
            DataError: a path does not exist, or a list cannot be read.
        """
        if self.path is not None:
            return [self.path]
        found = [
            path if _is_folder(path) else path.parent
            for split in self.words
            for path in self._paths(split)
        ]
        kept: list[Path] = []
        for folder in sorted(dict.fromkeys(map(_plain, found)), key=lambda path: len(path.parts)):
            if not any(folder.is_relative_to(other) for other in kept):
                kept.append(folder)
        return [folder for folder in dict.fromkeys(map(_plain, found)) if folder in kept]

    def relative(self, split: str) -> tuple[str, ...]:
        """The words of a split, relative to the data set's folder; raises as `folders`."""
        root = self.path if self.path is not None else common_parent(self.folders())
        if self.path is None:
            return tuple(_below(root, path) for path in self._paths(split))
        return tuple(self._written(split, root))

    def _written(self, split: str, root: Path) -> Iterator[str]:
        """Words beside ``data.path``; those of list files in their place."""
        for word in self.words.get(split, ()):
            if word.endswith(LIST_SUFFIX):
                file = next((p for p in (root / word, Path(word)) if p.is_file()), root / word)
                yield from (_inside(root, line) for line in read_list(file, split))
            else:
                yield _inside(root, word)

    def _paths(self, split: str) -> Iterator[Path]:
        """Words that are paths, where there is no ``data.path``."""
        for word in self.words.get(split, ()):
            path = Path(word)
            if word.endswith(LIST_SUFFIX) and not path.is_dir():
                found = [path.parent / line for line in read_list(path, split)]
            elif set("*?[") & set(word) and not path.exists():
                found = [Path(name) for name in sorted(glob.glob(word, recursive=True))] or [path]
            else:
                found = [path]
            for one in found:
                if not one.exists():
                    raise DataError(
                        f"data.{split}: {printable(str(one))} does not exist\n    without "
                        "data.path give folders, files of samples, or a list of them (*.txt)"
                    )
                yield one


def read_list(path: Path, split: str) -> list[str]:
    """The lines of a file that lists samples.

    Raises:
        DataError: it cannot be read, is no text, or lists nothing.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_LIST + 1)
        if len(data) > MOST_LIST:
            raise DataError(f"data.{split}: {path} has more than {MOST_LIST >> 20} MiB for a list")
        lines = [line.strip() for line in data.decode("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.{split}: the list {path} cannot be read: {reason(error)}\n    give a text file "
            "with one sample a line, relative to data.path, or without that to the file's folder"
        ) from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise DataError(f"data.{split}: the list {path} has no line that names a sample")
    return found


def check_words(words: Sequence[str]) -> None:
    """Refuse words that cannot be any.

    Raises:
        ValueError: there are none, or one is empty.
    """
    if not words:
        raise ValueError("give a path or a list of samples, or null")
    for word in words:
        if not word.strip() or "\0" in word:
            raise ValueError(f"{printable(word)!r} is no path")


def absolute(words: Sequence[str], path: Path | None) -> list[str]:
    """The same words for another working folder; those that are relative to ``path`` stay."""
    if path is None:
        return [os.path.abspath(word) for word in words]
    return [
        os.path.abspath(word)
        if word.endswith(LIST_SUFFIX) and not (path / word).is_file() and Path(word).is_file()
        else word
        for word in words
    ]


def _inside(root: Path, word: str) -> str:
    """A word beside ``data.path``, relative to it."""
    if _POSITIONS.fullmatch(word):
        return word
    return _below(root, root / word) if word.startswith("/") else os.path.normpath(word)


def _below(root: Path, path: Path) -> str:
    relative = Path(os.path.relpath(os.path.abspath(path), os.path.abspath(root))).as_posix()
    if relative == ".." or relative.startswith("../"):
        raise RecipeError(
            f"{path} is not in data.path {root}: leave data.path out, or mend the path"
        )
    return relative


def _is_folder(path: Path) -> bool:
    """Whether samples lie in it; those of Zarr are folders themselves."""
    suffixes = tuple(suffix for one in formats() for suffix in one.suffixes)
    return path.is_dir() and not path.name.endswith(suffixes)


def _plain(path: Path) -> Path:
    return Path(os.path.abspath(path))
