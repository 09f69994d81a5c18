"""What a process without a GPU runs: Triton tried on machines that lack what it needs.

The place of Triton's driver is taken by one that compiles a launcher, as the real one does, and
then starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.build import compile_module_from_src

from hyperslab.kernels.registry import why_triton_fails
from tests.kernels.cuda.compiled import NoGpu

LAUNCHER = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", 0, -1, 0};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
"""


class CompilingDriver(NoGpu):
    """Compiles a launcher in C before anything else."""

    def get_current_device(self) -> int:
        compile_module_from_src(LAUNCHER, "launcher", [], [], [])
        return super().get_current_device()


def tried(change: Callable[[Path], None], folder: Path) -> str:
    """What is said of a machine, in a process of its own."""
    there, here = os.pipe()
    if os.fork() == 0:
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        change(folder)
        os.write(here, str(why_triton_fails(torch.device("cpu"))).encode())
        os._exit(0)
    os.wait()
    os.close(here)
    return os.read(there, 10_000).decode()


def no_compiler(_: Path) -> None:
    os.environ["PATH"] = ""
    os.environ.pop("CC", None)


def broken_compiler(_: Path) -> None:
    """As where Python.h is missing: it ends with an error."""
    os.environ["CC"] = "false"


def no_cache(folder: Path) -> None:
    (folder / "file").touch()
    os.environ["XDG_CACHE_HOME"] = str(folder / "file")


def own_cache(folder: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(folder / "own")


def nothing(_: Path) -> None:
    """Everything is there but a device: the launcher starts nothing."""


if __name__ == "__main__":
    active: Any = CompilingDriver()
    driver.set_active(active)
    for case in (no_compiler, broken_compiler, no_cache, own_cache, nothing):
        folder = Path(os.environ["HYPERSLAB_TRIED"]) / case.__name__
        folder.mkdir()
        print(f"{case.__name__}: {tried(case, folder)}")
