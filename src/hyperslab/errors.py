"""Defines the errors that the package raises; each names what is wrong, where, and the remedy.

`printable` and `reason` put the content of files and other libraries' errors into words;
`system_errors_as` raises those of the operating system as one of these.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_LINE = 2000
"""Characters of a line of an error."""


class HyperslabError(Exception):
    """Base of every error that hyperslab raises on purpose.

    Its lines have `LONGEST_LINE` characters at most, because a quotation may be a whole file.
    """

    def __init__(self, *words: object) -> None:
        super().__init__(*(_bounded(word) if isinstance(word, str) else word for word in words))


class UnsupportedOp(HyperslabError, TypeError):
    """An operator was called on a cut tensor and has no rule; nothing was computed."""


class LayoutError(HyperslabError, ValueError):
    """A tensor cannot be cut, or two tensors cannot be brought together, as asked."""


class DataError(HyperslabError, ValueError):
    """A file, or a value in it, is missing, damaged or of another kind than needed."""


class RecipeError(HyperslabError, ValueError):
    """A recipe holds an unknown key or a bad value."""


def no_run(folder: object) -> DataError:
    """Return the error of a folder that no training has filled."""
    return DataError(
        f"{folder} is not the folder of a run: it has no recipe.yaml\n"
        "    `hyperslab train RECIPE` makes one and says where"
    )


class MachineError(HyperslabError, ValueError):
    """A machine file cannot be read or holds a bad value; names the file and the key."""


class CommError(HyperslabError, RuntimeError):
    """Another rank died, timed out or disagrees."""


class CheckpointError(HyperslabError, OSError):
    """A checkpoint cannot be written or read; names it and says why."""

    def __str__(self) -> str:
        return str(self.args[0])


class DivergedError(HyperslabError, ArithmeticError):
    """The loss is not a finite number."""


class Stopped(HyperslabError):
    """A signal ended the run after a checkpoint; ``code`` is the process's exit code.

    ``said``: whether the user has been told.
    """

    def __init__(self, number: int, message: str, *, said: bool = True) -> None:
        super().__init__(message)
        self.code = 128 + number
        self.said = said


def _bounded(text: str) -> str:
    """Return the text without the middle of its longest lines."""
    return "\n".join(map(_bounded_line, text.split("\n"))) if len(text) > LONGEST_LINE else text


def _bounded_line(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2 - 50
    return f"{line[:half]} ... ({len(line) - 2 * half} characters) ... {line[-half:]}"


def printable(text: str) -> str:
    """Return a text for a terminal: control characters, as files may hold them, are written out.

    They could move the cursor, change what was printed before, or turn the order of letters round.

    >>> print(printable("univ\\x1b[2K\\u202e.hdf5"))
    univ\\x1b[2K\\u202e.hdf5
    >>> printable("two\\nlines")
    'two\\nlines'
    """
    if text.isprintable():
        return text
    return "".join(map(_written_out, text))


def _written_out(letter: str) -> str:
    if letter == "\n" or unicodedata.category(letter) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return letter
    return letter.encode("unicode_escape", "surrogatepass").decode()


def reason(problem: BaseException) -> str:
    """Says why, in a few words: the operating system's where it is its error."""
    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.strerror}: {problem.filename}" if problem.filename else problem.strerror
    return f"{type(problem).__name__}: {problem}"


@contextmanager
def system_errors_as(
    kind: type[HyperslabError], what: str, *, named: bool = True, then: str = ""
) -> Iterator[None]:
    """Raises the operating system's errors within as ``kind``: ``what``, the reason, and ``then``.

    ``named``: the reason has the file's name, which ``what`` lacks.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {reason(error) if named else error.strerror}{then}") from error
