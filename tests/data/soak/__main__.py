"""Rounds of random epochs with injected faults, for as long as wanted.

    python -m tests.data.soak --minutes 30 --ranks 4 [--seed 0] [--json FILE]

Each round draws data sets, a grid, modes, budgets and a fault from the seed and its number. Every
box is compared with what the seed says; every fault has to end as docs/formats.md says. The first
violation ends it: `--seed S --first N --rounds 1` repeats that round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.data.soak.rounds import Soak, Violation


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.data.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--rounds", type=int, default=10**9)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--json", type=Path, help="a file for the summary")
    chosen = parser.parse_args(arguments)
    soak = Soak(chosen.seed, chosen.ranks)
    begin, number = time.monotonic(), chosen.first
    failed = None
    try:
        while (
            time.monotonic() - begin < 60 * chosen.minutes and number < chosen.first + chosen.rounds
        ):
            print(f"{time.monotonic() - begin:7.1f} s  {soak.round(number)}", flush=True)
            number += 1
    except Violation as error:
        failed = f"seed {chosen.seed}, round {number}: {error}"
        print(f"VIOLATION {failed}", flush=True)
    finally:
        soak.close()
    summary = {"minutes": (time.monotonic() - begin) / 60, "violation": failed} | soak.summary()
    print(json.dumps(summary, indent=1))
    if chosen.json:
        chosen.json.write_text(json.dumps(summary, indent=1))
    return 0 if failed is None else 1


if __name__ == "__main__":
    sys.exit(main())
