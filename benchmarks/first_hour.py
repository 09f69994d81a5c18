"""The first hour on a GPU: an ordered list of parts, each of which answers one question.

    python benchmarks/first_hour.py [PART ...] [--out build/first-hour.jsonl] [--minutes 5]
                                    [--distconv PATH]
    python benchmarks/first_hour.py --tiny --device cpu    every part on small shapes, without a GPU
    python benchmarks/first_hour.py --read                 what OUT has, as a table

Each part is a process of its own, which is ended after ``--minutes``; what it found until then is
kept. Each adds a line of JSON to OUT as soon as it has ended: what it found, how it ended, and the
versions. What has ended well on this device with these versions is not run again unless it is
named, so the same command goes on where the last one was stopped. What a part printed is in a
folder beside OUT. Torch, numpy and Triton are enough; a part that needs more says so. The page
docs/first-hour.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# Nothing slow is imported here: this process only starts others.

HERE = Path(__file__).resolve().parent

PARTS = {
    "machine": "Which device, driver and libraries are there?",
    "kernels": "Do our kernels compute what their references do?",
    "packing": "Are boxes packed and added by one kernel as by torch?",
    "waiting": "Does the host wait for a value in a step?",
    "formats": "In which memory format and type is the first convolution fastest?",
    "equality": "Do networks on one rank give plain torch's numbers?",
    "equality-ranks": "Do they on 2 and 8 ranks that share the device?",
    "step-cosmoflow-512-batch-norm": "Are 50 ms and 24 GiB met, beside eager and compiled?",
    "step-cosmoflow-512": "The same without batch norm.",
    "step-cosmoflow-256-batch-norm": "The same at 256.",
    "step-cosmoflow-128-batch-norm": "The same at 128.",
    "step-cosmoflow-128": "The same at 128 without batch norm.",
    "step-unet3d-256": "The same of the U-Net.",
    "profile": "Which operators take the time, and at how many GB/s?",
    "host": "From which size on does the device wait for the host?",
    "graphs": "Is a step that a CUDA graph replays the eager one, and how long is the host busy?",
    "nccl": "Do ranks over NCCL give the same numbers, in any order?",
    "failures": "What happens where a rank raises, is killed, or stops?",
    "thresholds": "From where on do our kernels and slabs pay?",
    "command": "Does a recipe train with checkpoints behind the steps?",
    "operators": "Do all operators' samples agree, as CUDA tensors?",
}
"""What is run, in this order: what decides whether the rest means anything comes first."""

MACHINE = "machine"
SAME = ("processor", "torch", "tiny")
"""Which of a line's versions say that a result is of this machine; the commit is noted beside."""


def run_part(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part in a process of its own and return its line."""
    folder = options.out.with_suffix(".parts")
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / f"{name}.json"
    found.unlink(missing_ok=True)
    words = [sys.executable, str(HERE / "first_hour_parts.py"), name, str(found)]
    words += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    words += ["--distconv", str(options.distconv)] if options.distconv else []
    began = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        # Ranks and compilers that it starts are of its session, and end with it.
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(60 * options.minutes)
            ended = "ended" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {options.minutes:g} min"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    kept = json.loads(found.read_text()) if found.exists() else {"rows": [], "versions": {}}
    wrong = [row for row in kept["rows"] if row.get("ok") is False]
    line = {
        "part": name,
        "how": "wrong" if ended == "ended" and wrong else ended,
        "seconds": round(time.monotonic() - began, 1),
        **kept,
    }
    if ended != "ended":
        line["words"] = (folder / f"{name}.log").read_text().splitlines()[-12:]
    return line


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return what is in a file of results, without a last line that was cut off."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def done(lines: Sequence[dict[str, Any]], versions: dict[str, Any]) -> set[str]:
    """Return the parts that have ended well on this device with these versions."""
    return {
        line["part"]
        for line in lines
        if line["how"] == "ended"
        and all(line["versions"].get(key) == versions.get(key) for key in SAME)
    }


def show(line: dict[str, Any]) -> None:
    """Print a part's result, a row of it a line."""
    print(f"\n{line['part']}: {line['how']}, {line['seconds']:g} s. {PARTS.get(line['part'], '')}")
    for row in line["rows"]:
        mark = {True: "ok   ", False: "WRONG", None: "     "}[row.get("ok")]
        print(f"  {mark} " + ", ".join(f"{k} {_short(v)}" for k, v in row.items() if k != "ok"))
    for text in line.get("words", []):
        print(f"  | {text}")
    sys.stdout.flush()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run(options: argparse.Namespace) -> int:
    """Run what is left to run; the exit code is 1 where a part did not end well."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    machine = run_part(MACHINE, options)
    lines = [machine]
    show(machine)
    _add(options.out, machine)
    if machine["how"] == "ended":
        there = done(lines_of(options.out), machine["versions"])
        for name in options.part or [p for p in PARTS if p not in there]:
            if name != MACHINE:
                line = run_part(name, options)
                lines.append(line)
                show(line)
                _add(options.out, line)
    return int(any(line["how"] != "ended" for line in lines))


def _add(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="\n".join(f"{name}: {question}" for name, question in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="*", metavar="PART", help="by default all others")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=5, help="the limit of one part")
    parser.add_argument("--distconv", type=Path, metavar="PATH", help="LLNL's source tree")
    parser.add_argument("--out", type=Path, default=Path("build/first-hour.jsonl"))
    parser.add_argument("--read", action="store_true", help="print what OUT has, and run nothing")
    options = parser.parse_args()
    unknown = set(options.part) - {*PARTS}
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.read:
        for line in {line["part"]: line for line in lines_of(options.out)}.values():
            show(line)
        return 0
    return run(options)


if __name__ == "__main__":
    raise SystemExit(main())
