"""The compiled functions, loaded once a process."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hyperslab.errors import reason
from hyperslab.ops.kernels.fused.compiled.cache import cached_library
from hyperslab.ops.kernels.fused.compiled.compiler import CannotCompile

log = logging.getLogger(__name__)

SWITCH = "HYPERSLAB_COMPILE"
"""Set to 0 in the environment, it asks for the plain references in place of compiled kernels."""

WORTH_A_THREAD = 1 << 17
"""Elements for which a thread is started."""

PART = struct.Struct("@2q")
"""At the end of each structure: which part of the work, of how many."""

WHOLE = PART.pack(0, 1)

Function = Callable[[bytes], int]


@dataclass(frozen=True, slots=True)
class Library:
    """Each function takes a packed structure and returns 0, or 1 where memory ran out.

    All but those of a normalisation's numbers do a part of the work: see `call`.
    Those that end in ``is_known`` take none, and return 1 where the processor has what is needed.
    """

    forward: Function
    backward: Function
    sums: Function
    reorder: Function
    window_maximum: Function
    window_spread: Function
    resample: Function
    direct_is_known: Function
    direct_forward: Function
    direct_gradient: Function
    winograd_is_known: Function
    winograd_gradient: Function
    normalisation: Function
    parameter_gradients: Function
    through_statistics: Function


@functools.cache
def library() -> Library | None:
    """The functions, compiled where need be; None, with a line in the log, where they cannot be."""
    if os.environ.get(SWITCH) == "0":
        log.info("%s=0: fused kernels run as torch's single operators", SWITCH)
        return None
    try:
        return load_library(cached_library())
    except CannotCompile as error:
        log.warning("fused kernels run as torch's single operators, slower: %s", error)
        return None


def load_library(path: Path) -> Library:
    """The functions of a compiled library.

    Raises:
        CannotCompile: it cannot be loaded.
    """
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotCompile(f"{path}: {reason(error)}") from error
    functions = [
        loaded.hyperslab_chain_forward,
        loaded.hyperslab_chain_backward,
        loaded.hyperslab_chain_sums,
        loaded.hyperslab_reorder,
        loaded.hyperslab_window_maximum,
        loaded.hyperslab_window_spread,
        loaded.hyperslab_resample,
        loaded.hyperslab_direct_is_known,
        loaded.hyperslab_direct_forward,
        loaded.hyperslab_direct_gradient,
        loaded.hyperslab_winograd_is_known,
        loaded.hyperslab_winograd_gradient,
        loaded.hyperslab_normalisation,
        loaded.hyperslab_parameter_gradients,
        loaded.hyperslab_through_statistics,
    ]
    for function in functions:
        function.argtypes = [ctypes.c_char_p]
        function.restype = ctypes.c_int
    return Library(*functions)


def parts_for(size: int) -> int:
    """In how many parts to work on so many elements: torch's threads, where it is worth it."""
    if size < 2 * WORTH_A_THREAD:
        return 1
    return max(1, min(torch.get_num_threads(), size // WORTH_A_THREAD))


def call(function: Function, arguments: bytes, size: int) -> None:
    """Run a function on ``size`` elements, in parts at once where it is worth it.

    Args:
        arguments: the structure but for its last two: the number of the part and that of all.

    Raises:
        MemoryError: it found none.
    """
    parts = parts_for(size)
    if parts == 1:
        failed = function(arguments + WHOLE)
    else:
        failed = _in_parts(function, [arguments + PART.pack(i, parts) for i in range(parts)])
    if failed:
        raise MemoryError("no memory for rows of a fused kernel")


def _in_parts(function: Function, arguments: list[bytes]) -> int:
    """One part here, the others in threads of their own: ctypes lets them run at once."""
    results = [0] * len(arguments)

    def run(i: int) -> None:
        results[i] = function(arguments[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(1, len(arguments))]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    return max(results)
