"""A process that plays cases, one after the other, in bounded memory.

It is told numbers on standard input and answers with a line of JSON each on standard output.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from hyperslab.errors import HyperslabError
from tests.soak.fuzz.subject import Subject
from tests.soak.fuzz.subjects import SUBJECTS

ROOM = 1 << 30
"""Beside the box, which is small here [B]."""

LONGEST = 20_000
"""Characters of an error."""


class Player:
    """Plays the cases of one kind: good files are made once and copied for each."""

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        self.kind = kind
        self.room: Callable[[], AbstractContextManager[None]] = nullcontext
        self.seed = seed
        self.subject: Subject = SUBJECTS[kind]
        self.good = folder / kind / "good"
        self.good.parent.mkdir(parents=True)
        self.subject.make(self.good)
        self.case = self.good.with_name("case")
        self._copy()
        self.digest = self.subject.read(self.case)

    def _copy(self) -> None:
        shutil.rmtree(self.case, ignore_errors=True)
        shutil.copytree(self.good, self.case, symlinks=True)

    def play(self, number: int) -> tuple[str, str]:
        """The outcome of a case, and words on it."""
        self._copy()
        rng = random.Random(f"{self.seed}/{self.kind}/{number}")
        path, how, tells = self.subject.spoil(self.case, rng)
        what = f"{path.relative_to(self.case)} {how}"
        try:
            with self.room():
                found = self.subject.read(self.case)
        except HyperslabError as error:
            words = str(error)
            if len(words) > LONGEST:
                return "violation", f"{what}: an error of {len(words)} characters"
            if not any(name in words for name in (str(self.case), *self.subject.keys)):
                return "violation", f"{what}: the error names no file: {words}"
            return "refused", what
        except BaseException:
            return "violation", f"{what}: {traceback.format_exc()}"
        if found == self.digest:
            return "same", what
        if tells:
            return "violation", f"{what}: silently changed"
        return "changed", what


@contextmanager
def bounded() -> Iterator[None]:
    """In `ROOM` more memory than this process has now."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)


def main() -> None:
    warnings.simplefilter("ignore")
    seed = int(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    players: dict[str, Player] = {}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for line in sys.stdin:
            kind, number = line.split()
            if kind not in players:
                players[kind] = Player(kind, seed, Path(folder))
                players[kind].room = bounded
            answers.write(json.dumps(players[kind].play(int(number))) + "\n")


if __name__ == "__main__":
    main()
