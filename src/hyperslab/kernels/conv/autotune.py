"""Times the variants of a pass at its first use on the real operands, and keeps the fastest.

Choices lie in the user's cache folder, so that ranks and later runs make the same ones: one
file a choice, in a folder for everything that times depend on beside the problem. A file is
linked to its name when it is complete, and only if there is none yet: the first writer's choice
is everybody's, and a run that is resumed repeats what it did before.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hyperslab.errors import reason
from hyperslab.kernels import registry
from hyperslab.kernels.conv.problem import Problem
from hyperslab.kernels.conv.variants import CONV_VARIANTS, variant_by_rule
from hyperslab.util.torch_internals import dispatch_modes_active

logger = logging.getLogger(__name__)


class AutotuneCache:
    """The names of variants by problem, on disk; ``folder`` None: in the user's cache folder."""

    def __init__(self, folder: Path | None = None, *, threads: int | None = None) -> None:
        self._environment = autotune_environment(threads or torch.get_num_threads())
        self._told = False
        try:
            root = folder or _cache_home() / "hyperslab" / "choices"
            self._folder: Path | None = root / _digest(self._environment)
        except RuntimeError as error:  # there is no home folder
            self._folder = None
            self._tell(str(error))

    def read(self, problem: Problem) -> str | None:
        """What was chosen; None: nothing yet, or nothing that can be read."""
        if self._folder is None:
            return None
        path = self._path(problem)
        try:
            entry = json.loads(path.read_bytes())
            if entry["problem"] != problem.text or entry["environment"] != self._environment:
                raise ValueError("it is about something else")
            return str(entry["variant"])
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell(reason(error))
        except (ValueError, KeyError, TypeError) as error:
            self._tell(f"{path} is damaged ({error}); it is written again")
            self._remove(path)
        return None

    def keep(self, problem: Problem, variant: str) -> str:
        """Write a choice unless somebody was faster; the one that holds from now on."""
        if self._folder is None:
            return variant
        entry = {
            "environment": self._environment,
            "problem": problem.text,
            "variant": variant,
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".partial") as file:
                json.dump(entry, file, indent=1)
                file.flush()
                os.link(file.name, self._path(problem))
        except FileExistsError:
            return self.read(problem) or variant
        except OSError as error:
            self._tell(reason(error))
        return variant

    def _path(self, problem: Problem) -> Path:
        assert self._folder is not None
        return self._folder / f"{_digest(problem.text)}.json"

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._tell(reason(error))

    def _tell(self, why: str) -> None:
        if not self._told:
            logger.warning("kernels are measured anew in every run: %s", why)
        self._told = True


def _cache_home() -> Path:
    """As the XDG base directory specification has it."""
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return asked if asked.is_absolute() else Path.home() / ".cache"


@functools.cache
def autotune_environment(threads: int) -> str:
    """What times depend on beside the problem."""
    found = re.search(r"(oneDNN|MKL-DNN) v([\w.]+)", torch.__config__.show())
    limits = [os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")]
    parts = [
        f"torch {torch.__version__}",
        f"oneDNN {found.group(2) if found else ''}",
        _processor(),
        f"{torch.backends.cpu.get_cpu_capability()} {' '.join(limits)}".strip(),
        f"{threads} threads",
        " ".join(sorted({name for variants in CONV_VARIANTS.values() for name in variants})),
    ]
    return "; ".join(parts)


def _processor() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        names = []
    return names[0] if names else f"{platform.machine()} {platform.processor()}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


WORTHWHILE = 20_000_000
"""Products from which on a pass is measured: some tenths of a millisecond of one core."""

COPIED = 1 << 22
"""Elements of both volumes up to which a variant may copy them."""

SLOW = 2.0  # times the fastest so far: not run once more
CLEARLY = 0.95  # of the rule's time: what another variant must be below


class Autotuner:
    """Choices of this process, read from disk or measured and written there."""

    def __init__(self, stored: AutotuneCache) -> None:
        self._stored = stored
        self._names: dict[Problem, str] = {}

    def name(self, problem: Problem, run: Callable[[str], Any]) -> str:
        """The variant for a problem; ``run`` computes it by a variant's name."""
        name = self._names.get(problem)
        if name is None:
            name = self._stored.read(problem)
            if name not in legal_variants(problem):
                name = self._stored.keep(problem, fastest_variant(problem, run))
            if name not in legal_variants(problem):  # of another version of hyperslab
                name = variant_by_rule(problem)
            self._names[problem] = name
        return name


@functools.cache
def autotuner(threads: int) -> Autotuner:
    """Those for this number of threads."""
    return Autotuner(AutotuneCache(threads=threads))


def is_autotuned(problem: Problem) -> bool:
    """Whether it is worth it, and nobody watches operators or traces them."""
    return (
        problem.products >= WORTHWHILE and not registry.is_traced() and dispatch_modes_active() == 0
    )


def legal_variants(problem: Problem) -> list[str]:
    """The names of its variants, the rule's first.

    Of large volumes without those that copy them: a step may fit by less than that.
    """
    first = variant_by_rule(problem)
    large = math.prod(problem.x) + math.prod(problem.y) > COPIED
    rest = [
        name
        for name, variant in CONV_VARIANTS[problem.task].items()
        if name != first and variant.legal(problem) and not (large and variant.copies)
    ]
    return [first, *rest]


def fastest_variant(problem: Problem, run: Callable[[str], Any]) -> str:
    """Best of two after a first run, which also plans; the rule's unless another is clearly faster.

    A variant that oneDNN refuses here is none.
    """
    first, *rest = legal_variants(problem)
    limit = min(_seconds(run, first) for _ in range(3)) * CLEARLY
    best = first
    for name in rest:
        try:
            seconds = _seconds(run, name)
            if seconds > SLOW * limit:
                continue
            seconds = min(seconds, _seconds(run, name), _seconds(run, name))
        except RuntimeError:
            continue
        if seconds < limit:
            best = name
            limit = seconds
    return best


def _seconds(run: Callable[[str], Any], name: str) -> float:
    begin = time.perf_counter()
    run(name)
    return time.perf_counter() - begin
