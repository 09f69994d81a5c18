"""Choices of kernels in the user's cache folder, so that ranks and later runs make the same ones.

One file a choice, in a folder for everything that times depend on beside the problem. A file is
linked to its name when it is complete, and only if there is none yet: the first writer's choice is
everybody's, and a run that is resumed repeats what it did before.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import re
import tempfile
from pathlib import Path

import torch

from hyperslab.errors import reason
from hyperslab.ops.kernels.convolution.options import Problem
from hyperslab.ops.kernels.convolution.variants import CONV_VARIANTS

logger = logging.getLogger(__name__)


class StoredChoices:
    """The names of variants by problem, on disk; ``folder`` None: in the user's cache folder."""

    def __init__(self, folder: Path | None = None, *, threads: int | None = None) -> None:
        self._environment = environment(threads or torch.get_num_threads())
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
def environment(threads: int) -> str:
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
