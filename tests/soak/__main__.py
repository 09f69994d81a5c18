"""Campaigns of random faults side by side, for as long as wanted.

    python -m tests.soak --minutes 60 [--kind NAME]... [--seed 0] [--ranks 4] [--json FILE]

Each case draws all that happens in it from the seed, the kind of fault and the case's number, and
prints a line. The first violation ends the soak with exit code 1; it says how to repeat that case.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.soak.kinds import KINDS
from tests.soak.run import Soak


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="default: all")
    parser.add_argument("--cases", type=int, default=10**9, help="of each kind, at most")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="a file for the summary")
    chosen = parser.parse_args(arguments)
    kinds = {name: KINDS[name] for name in chosen.kind or KINDS}
    soak = Soak(kinds, chosen.seed, chosen.ranks, chosen.first)
    fine = False
    try:
        fine = soak.run(chosen.minutes, chosen.cases)
    finally:
        summary = json.dumps(soak.summary(), indent=1)
        print(summary, flush=True)
        if chosen.json:
            chosen.json.write_text(summary)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
