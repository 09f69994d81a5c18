"""Times of code that runs on several ranks, and what they mean."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def now(device: torch.device) -> float:
    """The time [s] at which everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def stopwatch(device: torch.device, parts: Sequence[Callable[[], Any]]) -> list[float]:
    """The seconds that each of ``parts`` takes, run one after the other."""
    marks = [now(device)]
    for part in parts:
        part()
        marks.append(now(device))
    return [b - a for a, b in itertools.pairwise(marks)]


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Part by part the time of the slowest rank: the others wait for it."""
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def machine() -> dict[str, Any]:
    """Where and when a result was taken."""
    cuda = torch.cuda.is_available()
    return {
        "date": date.today().isoformat(),
        "processor": torch.cuda.get_device_name() if cuda else processor(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write_results(
    options: argparse.Namespace, where: dict[str, Any], results: dict[str, Any]
) -> None:
    """Writes what was found, where and with which options, if ``options.json`` names a file."""
    if options.json:
        what = {key: str(value) for key, value in vars(options).items() if key != "json"}
        options.json.write_text(json.dumps({**where, "options": what, **results}, indent=1))


def processor() -> str:
    """The name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
