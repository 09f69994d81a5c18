"""Mutate files of every kind and read them: no hang, no traceback, no crash, bounded memory.

    python -m tests.soak.fuzz --count 10000 [--seed 0] [--kind hdf5 ...] [--first 0] [--limit 90]

Nothing may silently change where a checksum exists. It ends with a table, and with exit code 1 if
something was violated; each violation says how to repeat that case.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import IO

from tests.soak.fuzz.subjects import SUBJECTS

OUTCOMES = ("refused", "same", "changed", "violation")

WORKER = "from tests.soak.fuzz.worker import main; main()"
"""A program, which tests fork."""

FIRST = 120.0
"""More time for the first case of a process [s]: it makes the good files."""


class Process:
    """A worker process and what it is at."""

    def __init__(self, seed: int, limit: float) -> None:
        self.limit = limit
        self.kinds: set[str] = set()
        self.child = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def play(self, kind: str, number: int) -> tuple[str, str]:
        """The outcome; a process that hangs or dies is one, and of no use afterwards."""
        pipe: IO[str] | None = self.child.stdin
        answers: IO[str] | None = self.child.stdout
        assert pipe is not None
        assert answers is not None
        pipe.write(f"{kind} {number}\n")
        pipe.flush()
        limit = self.limit if kind in self.kinds else self.limit + FIRST
        self.kinds.add(kind)
        with selectors.DefaultSelector() as selector:
            selector.register(answers, selectors.EVENT_READ)
            if not selector.select(limit):
                self.end()
                return "violation", f"hangs for {limit:g} s"
        line = answers.readline()
        if not line:
            code = self.child.wait()
            return "violation", f"crashes with code {code}"
        outcome, words = json.loads(line)
        return outcome, words

    @property
    def usable(self) -> bool:
        return self.child.poll() is None

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()


def cases(kinds: list[str], first: int, count: int) -> Iterator[tuple[str, int]]:
    for number in range(first, first + -(-count // len(kinds))):
        for kind in kinds:
            yield kind, number


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=10_000, help="cases of all kinds together")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=sorted(SUBJECTS), help="default: all")
    parser.add_argument("--limit", type=float, default=90.0, help="of a case [s]")
    chosen = parser.parse_args(arguments)
    kinds = chosen.kind or list(SUBJECTS)
    table: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    begin = time.monotonic()
    process = Process(chosen.seed, chosen.limit)
    try:
        for done, (kind, number) in enumerate(cases(kinds, chosen.first, chosen.count)):
            if done == chosen.count:
                break
            if not process.usable:
                process.end()
                process = Process(chosen.seed, chosen.limit)
            outcome, words = process.play(kind, number)
            table[kind][outcome] += 1
            if outcome == "violation":
                print(f"VIOLATION {kind} {number}: {words}")
                print(
                    f"to repeat: python -m tests.soak.fuzz --kind {kind} --seed {chosen.seed} "
                    f"--first {number} --count 1",
                    flush=True,
                )
    finally:
        process.end()
        show(table, time.monotonic() - begin)
    return 1 if sum(row["violation"] for row in table.values()) else 0


def show(table: dict[str, Counter[str]], seconds: float) -> None:
    """Print how the cases of each kind ended."""
    print(f"\n{'':16}" + "".join(f"{word:>10}" for word in ("cases", *OUTCOMES)))
    total: Counter[str] = Counter()
    for kind, row in table.items():
        total += row
        print(f"{kind:16}{row.total():10}" + "".join(f"{row[word]:10}" for word in OUTCOMES))
    print(f"{'all':16}{total.total():10}" + "".join(f"{total[word]:10}" for word in OUTCOMES))
    print(f"{seconds:.0f} s", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
