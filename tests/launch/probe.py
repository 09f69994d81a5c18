"""A program in place of a rank, `python -m tests.launch.probe FILE [wait]`: says what it finds."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path


def environment_shown() -> dict[str, str]:
    """What the system says of this process."""
    words = Path("/proc/self/environ").read_text().rstrip("\0").split("\0")
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def descriptors() -> list[str]:
    """The files of this process but the null device, and where /proc itself is listed."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(f"{link.name} {os.readlink(link)}")
        except OSError:
            continue
    return sorted(name for name in found if not name.endswith(("/dev/null", "/fd")))


def main() -> None:
    handlers = {number: str(signal.getsignal(number)) for number in signal.valid_signals()}
    facts = {
        "pid": os.getpid(),
        "arguments": sys.argv[1:],
        "name": __name__,
        "environment": dict(os.environ),
        "shown": environment_shown(),
        "descriptors": descriptors(),
        "signals": {number: words.partition(" at ")[0] for number, words in handlers.items()},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "group": os.getpgid(0),
        "folder": os.getcwd(),
        "parent": os.getppid(),
    }
    libraries: dict[str, float] = {"left out": gc.get_freeze_count()}
    if "torch" in sys.modules:
        libraries["threads"] = sys.modules["torch"].get_num_threads()
        libraries["draw"] = float(sys.modules["numpy"].random.random())
    partial = Path(f"{sys.argv[1]}.partial")
    partial.write_text(json.dumps({**facts, "libraries": libraries}))
    partial.rename(sys.argv[1])
    print("said")
    print("complained", file=sys.stderr)
    if sys.argv[2:] == ["wait"]:
        time.sleep(1000)
    sys.exit(int(sys.argv[2]))


if __name__ == "__main__":
    main()
