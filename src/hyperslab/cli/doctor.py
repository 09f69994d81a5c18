"""Runs `hyperslab doctor`: looks at ranks, devices, links, files, clocks and versions."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperslab.cli.rank import adopt_rank, as_rank, become_rank, exit_when_stopped, is_started
from hyperslab.errors import HyperslabError
from hyperslab.launch.supervisor import cores_here, launch
from hyperslab.util.optional_libraries import current_versions

if TYPE_CHECKING:
    from hyperslab.comm import Grid

TIMEOUT = 60.0  # [s] that a rank waits for the others
MESSAGE = 4 << 20  # [B]
SUM = 32 << 20  # [B], about what CosmoFlow's gradients are
FILE = 32 << 20  # [B] that one rank of a node writes and reads
SLOW = 4.0  # times the median: ranks whose messages take longer are named
CLOCKS = 1.0  # [s] that clocks of nodes may differ: logs and time stamps of files are compared


@dataclass(frozen=True, slots=True)
class Findings:
    """Holds what one rank says of itself and its node; times in s, None where it has none."""

    host: str
    device: str
    cores: int
    clock: float
    versions: dict[str, str]
    message: float | None
    written: float | None
    read: float | None
    sees_folder: bool


def doctor_command(
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks to start here.")] = 1,
    folder: Annotated[
        Path,
        typer.Option(help="Folder of data or runs, in which each node writes and removes a file."),
    ] = Path(),
) -> None:
    """Look at ranks, links, files and clocks before a job.

    Looks at devices and versions, too. Under torchrun and srun every rank runs this command. It
    takes seconds, changes nothing, and ends with exit code 1 if a job would fail or be slow.
    """
    adopt_rank()
    with exit_when_stopped():
        if not is_started():
            with _naming(folder.absolute()):
                tempfile.TemporaryFile(dir=folder).close()
        if is_started() or ranks == 1:
            doctor_as_rank(folder)
            return
        with tempfile.TemporaryDirectory(prefix="hyperslab-doctor-") as logs:
            import_module("hyperslab.planner.timing")  # for the ranks, which are forks
            command = ["-m", "hyperslab", "doctor", "--folder", str(folder)]
            launch(ranks, command, Path(logs), limit=TIMEOUT)


@as_rank
def doctor_as_rank(folder: Path) -> None:
    """Look as one rank; the main one prints what all have found."""
    from hyperslab.comm import Grid
    from hyperslab.comm.agreement import all_gather
    from hyperslab.comm.bootstrap import start_ranks
    from hyperslab.planner.timing import Clock

    begin = time.monotonic()
    is_main = become_rank()
    start_ranks("auto", timeout=TIMEOUT)
    grid = Grid(data=int(os.environ.get("WORLD_SIZE", "1")))
    met = time.monotonic() - begin
    found = all_gather(_look(grid, folder.absolute()))
    total = None
    if grid.size > 1:
        total = Clock(grid, budget=0.0).sum_seconds(grid.gradients, SUM)
    if not is_main:
        return
    print(f"ranks      {grid.size} on {len({one.host for one in found})} nodes, met in {met:.1f} s")
    for line in _facts(found, total):
        print(line)
    problems = _problems(found, folder)
    for line in problems:
        print(f"problem    {line}")
    print(f"done       in {time.monotonic() - begin:.1f} s", flush=True)
    if problems:
        raise HyperslabError(f"{len(problems)} of these would stop a job or make it slow")


def _look(grid: Grid, folder: Path) -> Findings:
    import torch

    from hyperslab.comm.agreement import all_gather, collective_try

    host = socket.gethostname()
    first = all_gather(host).index(host) == grid.rank  # of this node
    device = "cpu"
    if grid.device.type == "cuda":
        properties = torch.cuda.get_device_properties(grid.device)
        device = f"{properties.name} {getattr(properties, 'uuid', grid.device)}"
    message = _seconds_of_message(grid)
    written, read = collective_try(lambda: _try_folder(folder) if first else (None, None))
    with_token = _all_see(grid, folder)
    grid.barrier()
    return Findings(
        host=host,
        device=device,
        cores=cores_here(),
        clock=time.time(),
        versions=current_versions(),
        message=message,
        written=written,
        read=read,
        sees_folder=with_token,
    )


def _seconds_of_message(grid: Grid) -> float | None:
    """Times `MESSAGE` bytes to the next rank and from the one before, all at once."""
    if grid.size == 1:
        return None
    from hyperslab.planner.timing import Clock

    clock = Clock(grid, budget=0.0)  # as few repetitions as there can be
    after, before = (grid.rank + 1) % grid.size, (grid.rank - 1) % grid.size
    return clock.by_rank(clock.exchange([(after, MESSAGE)], [(before, MESSAGE)]))[grid.rank]


def _try_folder(folder: Path) -> tuple[float, float]:
    """Times writing `FILE` bytes to the disk and reading them back [s]."""
    with _naming(folder), tempfile.TemporaryFile(dir=folder) as file:
        begin = time.perf_counter()
        file.write(os.urandom(1 << 20) * (FILE >> 20))
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - begin
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = time.perf_counter()
        while file.read(1 << 20):
            pass
        return written, time.perf_counter() - begin


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Name the folder and the node in an error of the system."""
    try:
        yield
    except OSError as error:
        raise HyperslabError(
            f"{folder} cannot be written on {socket.gethostname()}: {error.strerror}\n"
            "    give the folder of your data or runs: --folder"
        ) from None


def _all_see(grid: Grid, folder: Path) -> bool:
    """Tells if this rank sees what the main one writes into the folder."""
    from hyperslab.comm.agreement import broadcast_from_main

    made: list[tempfile.TemporaryDirectory[str]] = []

    def make() -> str:
        made.append(tempfile.TemporaryDirectory(prefix=".hyperslab-doctor-", dir=folder))
        return made[0].name

    there = Path(broadcast_from_main(make)).is_dir()
    grid.barrier()
    for one in made:
        one.cleanup()
    return there


def _facts(found: list[Findings], total: float | None) -> list[str]:
    kinds = Counter(one.device.split(" GPU-")[0].rsplit(" ", 1)[0] for one in found)
    lines = [
        f"devices    {', '.join(f'{count} x {kind}' for kind, count in sorted(kinds.items()))}, "
        f"{min(one.cores for one in found)} to {max(one.cores for one in found)} cores a rank"
    ]
    times = [one.message for one in found if one.message is not None]
    if times and total is not None:
        slowest = max(times)
        lines.append(
            f"links      {MESSAGE / statistics.median(times) / 1e9:.2f} GB/s to the next rank, "
            f"{MESSAGE / slowest / 1e9:.2f} at least (from rank {times.index(slowest)}); a sum of "
            f"{SUM >> 20} MiB takes {1e3 * total:.1f} ms"
        )
    written = [one.written for one in found if one.written is not None]
    read = [one.read for one in found if one.read is not None]
    lines.append(
        f"files      {FILE / max(written) / 1e6:.0f} MB/s written and {FILE / max(read) / 1e6:.0f} "
        "MB/s read by the slowest node (a read may come from its cache)"
    )
    clocks = [one.clock for one in found]
    lines.append(f"clocks     within {1e3 * (max(clocks) - min(clocks)):.0f} ms of each other")
    words = ", ".join(f"{name} {version}" for name, version in found[0].versions.items())
    lines.append(f"versions   {words}")
    return lines


def _problems(found: list[Findings], folder: Path) -> list[str]:
    """Says what would go wrong or be slow, and what to do."""
    from hyperslab.comm.rendezvous import interleaved_nodes, name_ranks

    problems = []
    hosts = [one.host for one in found]
    if why := interleaved_nodes(hosts):
        problems.append(why)
    counts = Counter(hosts)
    if len(set(counts.values())) > 1:
        some = ", ".join(f"{host} {count}" for host, count in sorted(counts.items())[:4])
        problems.append(f"nodes have different numbers of ranks ({some}): the slowest decides")
    shared = [
        device
        for device, count in Counter(
            (one.host, one.device) for one in found if one.device != "cpu"
        ).items()
        if count > 1
    ]
    if shared:
        remedy = "--gpus-per-node as --ntasks-per-node, or fewer ranks"
        problems.append(f"ranks share a GPU on {shared[0][0]}: {remedy}")
    times = [one.message for one in found if one.message is not None]
    slow = [at for at, spent in enumerate(times) if spent > SLOW * statistics.median(times)]
    if slow:
        problems.append(f"messages of {name_ranks(slow)} take {SLOW:g} times as long as others'")
    if blind := [at for at, one in enumerate(found) if not one.sees_folder]:
        problems.append(
            f"{folder} is not the same folder on {name_ranks(blind)}: runs and data "
            "need one that all nodes share"
        )
    clocks = [one.clock for one in found]
    if max(clocks) - min(clocks) > CLOCKS:
        problems.append(
            f"clocks differ by {max(clocks) - min(clocks):.1f} s between nodes: use NTP"
        )
    if odd := [at for at, one in enumerate(found) if one.versions != found[0].versions]:
        problems.append(f"{name_ranks(odd)} have other versions than rank 0")
    return problems
