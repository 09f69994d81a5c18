"""Start the ranks of one machine and end them all."""

from __future__ import annotations

import ctypes
import datetime
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hyperslab.errors import (
    CommError,
    DataError,
    HyperslabError,
    LayoutError,
    RecipeError,
    Stopped,
    UnsupportedOp,
    reason,
)
from hyperslab.train.stop_request import SIGNALS

TAIL = 12
"""Lines of a rank's error output that an error quotes."""

CODES = {128 + number: number for number in SIGNALS}
"""Exit codes of a rank that wrote a checkpoint and ended because of a signal."""

RAISED: dict[str, type[HyperslabError]] = {
    kind.__name__: kind
    for kind in (HyperslabError, UnsupportedOp, LayoutError, DataError, RecipeError, CommError)
} | dict.fromkeys(("CheckpointError", "DivergedError"), HyperslabError)
"""What an error that a rank raised becomes in the process that started it, by its name."""

PR_SET_PDEATHSIG = 1

LAUNCHER = "HYPERSLAB_LAUNCHER"
"""In a rank's environment: the process that started it."""


def launch(ranks: int, arguments: Sequence[str], logs: Path, *, silent: bool = False) -> None:
    """Run ``python arguments...`` on so many ranks of this machine until all have ended.

    The ranks write to this terminal; their error output goes into ``logs``, one file a rank, and
    if it is to be ``silent`` all that they write.
    SIGINT, SIGTERM and SIGHUP are passed on to them. When one fails, the others are ended, and
    killed if they do not.

    Raises:
        Stopped: a signal ended the ranks.
        CommError: a rank was killed; names it and quotes the last lines that it wrote.
        HyperslabError: what the first rank that failed raised.
        RecipeError: ``logs`` cannot be written.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    name = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    try:
        specs = DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL if silent else Std.ERR)
    except OSError as error:
        raise RecipeError(f"cannot write into output {logs.parent}: {reason(error)}") from None
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        elastic_launch(_config(ranks, name, specs), sys.executable)(*arguments)
    except SignalException as error:
        raise Stopped(error.sigval, f"stopped by {error.sigval.name}") from None
    except ChildFailedError as error:
        output = {int(p.parent.name): p for p in logs.glob(f"{name}_*/attempt_0/*/stderr.log")}
        raise explain_failures(error.failures, output) from None
    finally:
        del os.environ[LAUNCHER]


def _config(ranks: int, name: str, specs: DefaultLogsSpecs) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=specs,
    )


def explain_failures(
    failures: dict[int, ProcessFailure], output: dict[int, Path]
) -> HyperslabError:
    """One error for all: that of the rank that failed first, and not because another one did.

    What a rank said goes before a death by signal, its own or another's: it may have come after.
    """
    if all(failure.exitcode in CODES for failure in failures.values()):
        number = CODES[next(iter(failures.values())).exitcode]
        return Stopped(number, f"stopped by {number.name}")
    rank = min(failures, key=lambda rank: _order(failures[rank]))
    failure = failures[rank]
    quote = _quote(output.get(rank))
    if failure.exitcode < 0 and not _said(failure):
        return CommError(
            f"rank {rank} (process {failure.pid}) was killed by {failure.signal_name()} and the "
            f"others were ended{KILLED.get(failure.exitcode, '')}\n"
            f"    go on from the last checkpoint with --resume{quote}"
        )
    name, _, words = _message(failure).partition(": ")
    if name in RAISED:
        alone = sum(_message(other).endswith(words) for other in failures.values()) == 1
        return RAISED[name](f"{words}\n    (rank {rank})" if alone else words)
    return HyperslabError(f"rank {rank} failed with exit code {failure.exitcode}{quote}")


KILLED = {
    -signal.SIGKILL: "\n    SIGKILL comes from the system where memory runs out, and from here "
    "for a rank that does not answer"
}


def _order(failure: ProcessFailure) -> tuple[bool, bool, int]:
    """The cause is lowest."""
    return _follows(failure), not _said(failure), failure.timestamp


def _follows(failure: ProcessFailure) -> bool:
    """Whether a rank failed because another one did, or because it was told to end."""
    name = _message(failure).partition(":")[0]
    if name == "CommError":
        return True
    ended = failure.exitcode in CODES or failure.exitcode == -signal.SIGTERM
    return ended and not _said(failure)


def _said(failure: ProcessFailure) -> bool:
    """Whether a rank raised an error of this package."""
    name = _message(failure).partition(":")[0]
    return name in RAISED


def _message(failure: ProcessFailure) -> str:
    """What the rank raised, as "DataError: words"; empty if it could not say."""
    message = failure.error_file_data.get("message", "")
    return str(message.get("message", "")) if isinstance(message, dict) else ""


def _quote(output: Path | None) -> str:
    lines = output.read_text(errors="replace").splitlines()[-TAIL:] if output else []
    shown = "".join(f"\n    | {line}" for line in lines)
    return f"\n    its last lines, from {output}:{shown}" if lines else ""


def settle_environment(environ: MutableMapping[str, str], ranks: int, timeout: float = 60) -> None:
    """Share this machine's cores among its ranks and let them talk over its loopback.

    After a signal they have ``timeout`` [s] to write their checkpoint.
    """
    environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(timeout)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // ranks)))
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


@contextmanager
def settled_environment(ranks: int, timeout: float) -> Iterator[None]:
    """`settle_environment` for these ranks alone: those that are started next are others."""
    before = dict(os.environ)
    settle_environment(os.environ, ranks, timeout)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def end_with_parent() -> None:
    """Ask Linux for SIGTERM if the process that started this rank dies without a word.

    It may have died before it could be asked.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
        signal.raise_signal(signal.SIGTERM)
