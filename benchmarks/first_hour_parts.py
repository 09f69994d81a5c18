"""The parts of `benchmarks/first_hour.py`, each a generator of rows.

A row is a dictionary of plain values; ``ok`` says whether something that must hold does, and rows
without it are measurements. What is left out, since a library is not there, says so in a row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import gpu
import torch
import torch.distributed as dist
import torch.nn.functional as F
from clock import machine, now
from launch import run_ranks
from networks import OURS, Case, make_case
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hyperslab as hs
from hyperslab.comm.bootstrap import GLOO_ON_CUDA
from hyperslab.comm.exchange import Boxes
from hyperslab.errors import HyperslabError
from hyperslab.geometry import Box

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
GOAL = {"cosmoflow-512-batch-norm": (0.050, 24.0)}
"""The most seconds of a step and GiB, by case."""

NCCL_SHARES = (2, 30)
"""The first version of NCCL that takes several ranks on one device."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """How the parts run; ``tiny`` is for a CPU and shows nothing but that they do."""

    tiny: bool = False
    device: str = "cuda"
    distconv: Path | None = None

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


def versions(options: Options) -> Row:
    """What a result belongs to."""
    found = {**machine(), "tiny": options.tiny, "device": options.device}
    for name in ("numpy", "triton"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = None
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        found["commit"] = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:  # there is no git
        found["commit"] = ""
    if options.cuda:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def about_machine(options: Options) -> Iterator[Row]:
    """What the device and its driver say of themselves."""
    yield {"torch": torch.__version__, "processor": machine()["processor"]}
    if not options.cuda:
        return
    about = torch.cuda.get_device_properties(0)
    yield {
        "devices": torch.cuda.device_count(),
        "memory [GiB]": about.total_memory / GIB,
        "multiprocessors": about.multi_processor_count,
        "capability": f"{about.major}.{about.minor}",
    }
    for words in (["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit"],):
        try:
            done = subprocess.run([*words, "--format=csv,noheader"], capture_output=True, text=True)
            yield {"driver, highest clock, power": done.stdout.strip()}
        except OSError:
            yield {"driver": "nvidia-smi is not there"}


def in_module(module: str, options: Options) -> Iterator[Row]:
    """A module of the tests that compares kernels with references, in a process of its own."""
    variables = {"HYPERSLAB_TEST_DEVICE": options.device}
    variables["TRITON_INTERPRET"] = "0" if options.cuda else "1"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    last = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1:]
    yield {"module": module, "words": " ".join(last), "ok": done.returncode == 0}


def waiting(options: Options) -> Iterator[Row]:
    """Two steps that may wait, and one in which torch fails where the host does."""
    sys.path.insert(0, str(ROOT))
    from tests.parallel.waiting import NETWORKS, waiting_is

    for name, dtype in itertools.product(NETWORKS, (torch.float32, torch.bfloat16)):
        step = NETWORKS[name](hs.Grid(), dtype)
        words = ""
        step()
        if options.cuda:
            step()
            try:
                with waiting_is("error"):
                    step()
            except RuntimeError as error:
                words = str(error).splitlines()[0]
        yield {"network": name, "dtype": str(dtype), "words": words, "ok": not words}


def best(action: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    """The shortest of some runs [s], after one that does not count."""
    action()
    found = []
    for _ in range(times):
        began = now(device)
        action()
        found.append(now(device) - began)
    return min(found)


def formats(options: Options) -> Iterator[Row]:
    """The passes of a convolution of 4 and of 1 channels, by type, format and autotuning."""
    side = 16 if options.tiny else 512
    device = torch.device(options.device)
    for channels, kind, benchmark in itertools.product(
        (4, 1), ("bfloat16", "tf32", "float32"), (False, True)
    ):
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cudnn.allow_tf32 = kind == "tf32"
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        for form in (torch.contiguous_format, torch.channels_last_3d):
            made = partial(torch.randn, device=device, dtype=dtype)
            x, w, g = (
                made(*shape).contiguous(memory_format=form)
                for shape in (
                    (1, channels, *[side] * 3),
                    (16, channels, 3, 3, 3),
                    (1, 16, *[side] * 3),
                )
            )
            row: Row = {"channels": channels, "type": kind, "autotuning": benchmark}
            row["format"] = str(form).removeprefix("torch.")
            pads = ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
            passes: dict[str, tuple[Callable[[], Any], int]] = {
                "forward": (partial(F.conv3d, x, w, padding=1), x.nbytes + g.nbytes),
                "weight gradient": (
                    partial(
                        torch.ops.aten.convolution_backward,
                        *(g, x, w, None, *pads, [False, True, False]),
                    ),
                    x.nbytes + g.nbytes,
                ),
            }
            for name, (action, size) in passes.items():
                try:
                    seconds = best(action, device, 1 if options.tiny else 5)
                except torch.cuda.OutOfMemoryError as error:
                    row[name] = str(error).splitlines()[0]
                    continue
                row[f"{name} [ms]"] = 1e3 * seconds
                row[f"{name} [GB/s]"] = size / seconds / 1e9
            yield row


EQUAL = 1e-5
"""The most of a float32 result's relative difference, where plain torch itself is not further."""


def results(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """The loss of one sample and the gradients of all parameters, without dropout."""
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    enabled = dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(case.y.device.type, torch.bfloat16, enabled=enabled):
        loss = case.loss(case.model(case.x).to(dtype if not enabled else torch.float32), case.y)
    loss.backward()
    gradients = [p.grad.double() for p in case.model.parameters() if p.grad is not None]
    return [loss.detach().double(), *gradients]


def apart(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The relative difference of all of them together, in the L2 norm; the loss first."""
    both = [torch.cat([t.flatten().cpu() for t in side]) for side in (found, expected)]
    return float((both[0] - both[1]).norm() / both[1].norm())


def a_case(network: str, width: int, device: torch.device, dtype: torch.dtype) -> Case:
    """A network that has no zeros for weights, in a type."""
    case = (
        torchvision_case(width, device)
        if network == "r3d_18"
        else make_case(network, width, network == "cosmoflow", device)
    )
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in case.model.parameters():
            if not parameter.any():
                parameter.copy_(0.1 * torch.randn(parameter.shape))
    if dtype == torch.float64:
        case.model.double()
        case.x = case.x.double()
        case.y = case.y.double() if case.y.is_floating_point() else case.y
    return case


def torchvision_case(width: int, device: torch.device) -> Case:
    """torchvision's r3d_18, which knows nothing of us."""
    from torchvision.models.video import r3d_18

    torch.manual_seed(0)
    model = r3d_18(num_classes=4).to(device)
    x = torch.randn(2, 3, width // 2, width, width, device=device)
    return Case(model, x, torch.tensor([1, 3], device=device), F.cross_entropy)


def compared(network: str, width: int, axes: dict[str, int]) -> list[Row]:
    """On every rank: our numbers and plain torch's against plain torch's in float64."""
    grid = hs.Grid(**axes)
    torch.backends.cudnn.allow_tf32 = False
    exact = results(a_case(network, width, grid.device, torch.float64), torch.float64)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        theirs = apart(results(a_case(network, width, grid.device, dtype), dtype), exact)
        case = a_case(network, width, grid.device, dtype)
        case.cut(grid)
        ours = apart(results(case, dtype), exact)
        row = {"network": f"{network}-{width}", "grid": str(axes or 1), "dtype": str(dtype)}
        row |= {"torch is off by": theirs, "we are off by": ours}
        # Where plain torch has no number (seen on a CPU, in bfloat16), ours is to have one.
        bar = max(2 * theirs, EQUAL) if math.isfinite(theirs) else math.inf
        rows.append({**row, "ok": ours <= bar})
    return rows


def networks_of(options: Options) -> list[tuple[str, int]]:
    width = 16 if options.tiny else 64
    return [*((name, width) for name in OURS), ("r3d_18", width)]


GRIDS: dict[int, dict[str, int]] = {2: {"depth": 2}, 8: {"depth": 2, "height": 2, "width": 2}}


def equality(options: Options) -> Iterator[Row]:
    """On one rank, in this process."""
    with torch.device(options.device):
        for network, width in networks_of(options):
            yield from unless_missing(network, lambda n=network, w=width: compared(n, w, {}))


def equality_ranks(options: Options) -> Iterator[Row]:
    """Over ranks that share the device; messages go by gloo."""
    for size, (network, width) in itertools.product(GRIDS, networks_of(options)):
        if options.tiny and size > 2:
            continue
        start = partial(run_ranks, size, share_devices=options.cuda)
        yield from unless_missing(
            network, lambda n=network, w=width, s=start, k=size: s(compared, n, w, GRIDS[k])[0]
        )


def unless_missing(what: str, action: Callable[[], list[Row]]) -> Iterator[Row]:
    """Rows, or one that says which library is not there."""
    try:
        yield from action()
    except ModuleNotFoundError as error:
        yield {"network": what, "left out": f"{error.name} is not installed"}


def step(case: gpu.Network, options: Options) -> Iterator[Row]:
    """A training step in bfloat16 beside eager and compiled torch, in turn."""
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    if options.tiny:
        case = gpu.Network(case.network, 32 if case.network == "cosmoflow" else 16, case.batch_norm)
    peak, source = gpu.peak_of(device)
    flops = gpu.flops_of(case)
    variants = ["hyperslab", "eager", *([] if options.tiny else ["compiled"])]
    variants += ["distconv"] if options.distconv else []
    turns = (1, 1) if options.tiny else (5, 3)
    asked = gpu.Options(options.device, *turns, options.distconv)
    bars = GOAL.get(case.name)
    for variant, found in gpu.compare(case, variants, asked):
        row: Row = {"case": case.name, "variant": variant}
        if "failed" in found:
            yield {**row, "failed": found["failed"]}
            continue
        row |= {"best [ms]": 1e3 * found["best"], "median [ms]": 1e3 * found["median"]}
        row |= {"share of peak": flops / found["best"] / peak, "peak": f"{peak:.3g}, {source}"}
        if found["memory"] is not None:
            row["memory [GiB]"] = found["memory"] / GIB
        if bars and variant == "hyperslab" and found["memory"] is not None:
            row["ok"] = found["best"] <= bars[0] and found["memory"] <= bars[1] * GIB
        yield row


class Operators(TorchDispatchMode):
    """Times each operator on the device, and counts the bytes of its tensors."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.calls: dict[str, list[tuple[Any, Any, int]]] = defaultdict(list)

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = self._mark()
        result = func(*args, **(kwargs or {}))
        end = self._mark()
        tensors = [t for t in _leaves([args, kwargs, result]) if isinstance(t, torch.Tensor)]
        self.calls[str(func)].append((begin, end, sum(t.nbytes for t in tensors)))
        return result

    def rows(self, most: int) -> list[Row]:
        """The operators that took longest."""
        now(self.device)
        table = []
        for name, calls in self.calls.items():
            if self.device.type == "cuda":
                seconds = sum(begin.elapsed_time(end) for begin, end, _ in calls) / 1e3
            else:
                seconds = sum(end - begin for begin, end, _ in calls)
            size = sum(nbytes for *_, nbytes in calls)
            row = {"operator": name, "calls": len(calls), "ms": 1e3 * seconds}
            table.append({**row, "GB/s": size / max(seconds, 1e-9) / 1e9})
        return sorted(table, key=lambda row: -row["ms"])[:most]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def profile(options: Options) -> Iterator[Row]:
    """One step of the goal's network by operator, with GB/s, and by kernel."""
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    network = gpu.Network("cosmoflow", 32 if options.tiny else 512, True)
    runner = gpu.build(network, "hyperslab", gpu.Options(options.device))
    for _ in range(1 if options.tiny else gpu.WARM_UP):
        runner.step()
    with Operators(device) as operators:
        seconds = runner.step()
    yield {"step, with a mark around each operator [ms]": 1e3 * seconds}
    yield from operators.rows(25)
    if options.cuda:
        from torch.profiler import ProfilerActivity

        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
            runner.step()
        kernels = sorted(profiler.key_averages(), key=lambda k: -k.self_device_time_total)
        for kernel in kernels[:25]:
            ms = kernel.self_device_time_total / 1e3
            yield {"kernel": kernel.key[:100], "calls": kernel.count, "ms": ms}


def host(options: Options) -> Iterator[Row]:
    """How long the host takes to queue a step, and how long the device takes for it."""
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    for width, variant in itertools.product(
        (32,) if options.tiny else (32, 64, 96, 128), ("hyperslab", "eager")
    ):
        network = gpu.Network("cosmoflow", width, True)
        runner = gpu.build(network, variant, gpu.Options(options.device))
        queued, ended = [], []
        for _ in range(2 if options.tiny else 15):
            began = now(device)
            with torch.autocast(device.type, gpu.DTYPE):
                loss = runner.case.loss(runner.forward().float(), runner.case.y)
            loss.backward()
            queued.append(time.perf_counter() - began)
            ended.append(now(device) - began)
            runner.case.model.zero_grad()
        row: Row = {"width": width, "variant": variant}
        row |= {"host [ms]": 1e3 * statistics.median(queued[1:])}
        yield {**row, "step [ms]": 1e3 * statistics.median(ended[1:])}


def replayed(width: int, axes: dict[str, int], calls: int) -> tuple[bool, dict[str, float]]:
    """Steps of CosmoFlow with dropout, eager and by `hs.graphed`; if equal, and times [ms]."""
    grid = hs.Grid(**axes)
    results: list[list[torch.Tensor]] = []
    times: dict[str, float] = {}
    for name in ("eager", "graphed"):
        torch.manual_seed(0)
        model = hs.parallelize(hs.models.CosmoFlow(width, batch_norm=True, dropout=0.3), grid)
        x = hs.shard(torch.randn(1, 4, width, width, width, device=grid.device), grid)
        y = torch.rand(1, 4, device=grid.device)

        def step(x: Any, y: Any, model: nn.Module = model) -> torch.Tensor:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        run = hs.graphed(step) if name == "graphed" else step
        found: list[torch.Tensor] = []
        queued = []
        for number in range(calls):
            model.zero_grad()
            now(grid.device)
            began = time.perf_counter()
            loss = run(x * (1 + number), y)
            queued.append(time.perf_counter() - began)
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        results.append(found)
        times[f"{name}, host [ms]"] = 1e3 * statistics.median(queued[-3:])
    return all(map(torch.equal, *results)), times


def graphs(options: Options) -> Iterator[Row]:
    """Whether replays equal eager steps, on one rank and on two that NCCL connects."""
    torch.backends.cudnn.deterministic = True  # and no choice by times: the bits are compared
    width, calls = (32, 2) if options.tiny else (64, 16)
    same, times = replayed(width, {}, calls)
    yield {"ranks": 1, "calls": calls, **times, "ok": same}
    backend = nccl_backend(options, 2)
    if backend == GLOO_ON_CUDA:
        yield {"ranks": 2, "left out": "several ranks on one device need NCCL 2.30"}
        return
    same, times = run_ranks(2, replayed, width, {"depth": 2}, calls, backend=backend)[0]
    yield {"ranks": 2, "backend": backend, "calls": calls, **times, "ok": same}


def one_after_the_other(axes: dict[str, int], width: int, steps: int) -> tuple[bool, str]:
    """The same step again and again, with sums of gradients and halos under way together.

    It gives the same bits each time, or a message has met another one.
    """
    grid = hs.Grid(**axes)
    case = a_case("cosmoflow", width, grid.device, torch.float32)
    case.cut(grid)
    first: list[torch.Tensor] = []
    for _ in range(steps):
        case.model.zero_grad()
        found = [p.detach().clone() for p in results(case, torch.float32)]
        first = first or found
        if not all(map(torch.equal, found, first)):
            return False, str(grid)
        for module in case.model.modules():  # running statistics change nothing in training
            if isinstance(module, nn.BatchNorm3d):
                module.reset_running_stats()
    return True, str(grid)


def nccl_backend(options: Options, ranks: int) -> str:
    """NCCL where it takes so many ranks; otherwise gloo, which is said in the rows."""
    if not options.cuda:
        return "gloo"
    shares = torch.cuda.nccl.version()[:2] >= NCCL_SHARES
    return "nccl" if shares or torch.cuda.device_count() >= ranks else GLOO_ON_CUDA


def nccl(options: Options) -> Iterator[Row]:
    """Equality over NCCL, where several ranks may have one device; the same bits in 20 steps."""
    for size in (2,) if options.tiny else (2, 4):
        axes = {"depth": 2, "height": size // 2}
        backend = nccl_backend(options, size)
        row: Row = {"ranks": size, "backend": backend, "devices": torch.cuda.device_count()}
        try:
            for network, width in networks_of(options)[: 1 if options.tiny else 2]:
                for found in run_ranks(size, compared, network, width, axes, backend=backend)[0]:
                    yield {**row, **found}
            steps = (3, 32) if options.tiny else (20, 64)
            same = run_ranks(size, one_after_the_other, axes, steps[1], steps[0], backend=backend)
            yield {**row, "the same bits in steps": steps[0], "ok": all(same for same, _ in same)}
        except RuntimeError as error:
            yield {**row, "words": str(error).splitlines()[0], "ok": False}


FAILS_AFTER = 3  # steps
LIMIT = 20.0
"""How long [s] ranks wait for each other in the part on failures."""


def failing_rank(rank: int, kind: str, backend: str, store: str, width: int, says: Any) -> None:
    """Step until rank 1 fails, and say when and with which words this one ended."""
    if backend != "gloo":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2, timeout=limit)
    grid = hs.Grid(depth=2)
    case = make_case("cosmoflow", width, True, grid.device)
    case.cut(grid)
    words = ""
    try:
        for number in itertools.count():
            if rank == 1 and number == FAILS_AFTER:
                says.send(("fails", time.time(), ""))
                if kind == "raises":
                    raise ValueError("this rank gives up")
                os.kill(os.getpid(), signal.SIGKILL if kind == "is killed" else signal.SIGSTOP)
            results(case, torch.float32)
            now(grid.device)
    except (RuntimeError, ValueError, HyperslabError) as error:
        words = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    says.send(("ends", time.time(), words))
    if rank == 1:  # as a program that does not catch it
        os._exit(1)


def failures(options: Options) -> Iterator[Row]:
    """A rank raises, is killed, or is stopped: when the other one ends, and what it says."""
    context = multiprocessing.get_context("spawn")
    backend = nccl_backend(options, 2)
    for kind in ("raises", "is killed", "stops"):
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder, "store").as_uri()
            ranks = [
                context.Process(
                    target=failing_rank, args=(rank, kind, backend, store, 32, pipes[rank][1])
                )
                for rank in range(2)
            ]
            for process in ranks:
                process.start()
            fails = pipes[1][0].recv() if pipes[1][0].poll(120) else ("fails", time.time(), "")
            ranks[0].join(3 * LIMIT)
            ended = time.time()
            row: Row = {"rank 1": kind, "backend": backend, "limit [s]": LIMIT}
            if ranks[0].is_alive():
                row |= {"words": f"rank 0 goes on after {3 * LIMIT:g} s", "ok": False}
            else:
                word = pipes[0][0].recv() if pipes[0][0].poll(0) else ("ends", ended, "")
                row |= {"rank 0 ended after [s]": ended - fails[1], "words": word[2]}
                row |= {"exit code": ranks[0].exitcode}
                row["ok"] = bool(word[2]) or ranks[0].exitcode != 0
            for process in ranks:
                process.kill()
                process.join()
        yield row


def thresholds(options: Options) -> Iterator[Row]:
    """Packing by one kernel against slices; slabs against a buffer, by the size of a block."""
    device = torch.device(options.device)
    times = 1 if options.tiny else 20
    sides = (8,) if options.tiny else (8, 16, 32, 64, 128)
    for side, channels in itertools.product(sides, (16,) if options.tiny else (16, 64)):
        x = torch.randn(1, channels, side, side, side, device=device)
        x = x.to(gpu.DTYPE).contiguous(memory_format=torch.channels_last_3d)
        faces = [x.narrow(d, at, 1) for d in (2, 3, 4) for at in (0, side - 1)]
        row: Row = {"side": side, "channels": channels}
        copy = partial(lambda all: [f.contiguous() for f in all], faces)
        row["six faces by torch [us]"] = 1e6 * best(copy, device, times)
        if options.cuda:
            whole = Box.whole(tuple(x.shape))
            intervals = [[(0, e) for e in x.shape] for _ in faces]
            for each, (dim, at) in zip(
                intervals, itertools.product((2, 3, 4), (0, side - 1)), strict=True
            ):
                each[dim] = (at, at + 1)
            boxes = Boxes(whole, tuple(map(Box.of, intervals)))
            packed = partial(boxes.pack, x)
            row["six faces by one kernel [us]"] = 1e6 * best(packed, device, times)
        w = torch.randn(channels, channels, 3, 3, 3, device=device, dtype=gpu.DTYPE)
        halos = [torch.randn_like(x.narrow(2, 0, 1)) for _ in range(2)]

        def by_buffer(x: torch.Tensor = x, w: torch.Tensor = w, halos: Any = halos) -> None:
            F.conv3d(torch.cat([halos[0], x, halos[1]], 2), w, padding=(0, 1, 1))

        def by_slabs(x: torch.Tensor = x, w: torch.Tensor = w, halos: Any = halos) -> None:
            y = F.conv3d(x, w, padding=1)
            for halo, tap, at in ((halos[0], 0, 0), (halos[1], 2, y.shape[2] - 1)):
                part = F.conv3d(halo, w.narrow(2, tap, 1), padding=(0, 1, 1))
                y.narrow(2, at, 1).add_(part)

        row["buffer [us]"] = 1e6 * best(by_buffer, device, times)
        row["slabs [us]"] = 1e6 * best(by_slabs, device, times)
        yield row


RECIPE: dict[str, Any] = {
    "model": {"name": "cosmoflow", "variant": "paper2020", "width": 32, "batch_norm": True},
    "data": {
        "synthetic": {"width": 32, "samples": 5},
        "mode": "direct",
        "batch_size": 1,
        "counts": [4, 1, 0],
    },
    "optimizer": {"name": "adam", "learning_rate": 1e-4},
    "loss": "mse",
    "epochs": 2,
    "checkpoint": {"background": True, "every_steps": 2},
}


def command(options: Options) -> Iterator[Row]:
    """Two epochs of synthetic volumes by the command line, with checkpoints behind the steps."""
    missing = [name for name in ("pydantic", "typer") if not _is_there(name)]
    if missing:
        yield {"left out": f"{', '.join(missing)} not installed"}
        return
    with tempfile.TemporaryDirectory() as folder:
        width = 32 if options.tiny else 128
        recipe = {**RECIPE, "output": str(Path(folder, "run")), "device": options.device}
        recipe["model"] = {**RECIPE["model"], "width": width}
        recipe["data"] = {**RECIPE["data"], "synthetic": {"width": width, "samples": 5}}
        path = Path(folder, "recipe.yaml")
        path.write_text(json.dumps(recipe))
        words = [sys.executable, "-m", "hyperslab", "train", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        written = sorted(p.name for p in Path(folder, "run", "checkpoints").glob("*"))
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        row: Row = {"exit code": done.returncode, "checkpoints": len(written)}
        yield {**row, "words": " ".join(last), "ok": done.returncode == 0 and bool(written)}


def operators(options: Options) -> Iterator[Row]:
    """The tests that need a device, and all samples of operators on it; pytest runs them."""
    if not (_is_there("pytest") and _is_there("hypothesis")):
        yield {"left out": "pytest and hypothesis are not installed"}
        return
    asked: list[tuple[str, list[str], dict[str, str]]] = [
        ("tests of the device", ["-m", "gpu", "tests"], {}),
        ("samples on it", ["tests/ops"], {"HYPERSLAB_TEST_DEVICE": options.device}),
    ]
    if options.tiny:
        asked = [("some samples", ["tests/ops/scans"], {})]
    for what, words, variables in asked:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-n", "0", "-q", "--maxfail=20", *words],
            env={**os.environ, **variables},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        said = done.stdout.strip().splitlines()
        failed = [line for line in said if line.startswith("FAILED")]
        row: Row = {"what": what, "words": said[-1] if said else done.stderr[-300:]}
        yield {**row, "failed": failed, "ok": done.returncode in (0, 5)}  # 5: nothing to run


def _is_there(library: str) -> bool:
    try:
        __import__(library)
    except ImportError:
        return False
    return True


PARTS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "machine": about_machine,
    "kernels": partial(in_module, "tests.kernels.cuda.interpreted"),
    "packing": partial(in_module, "tests.comm.packed"),
    "waiting": waiting,
    "formats": formats,
    "equality": equality,
    "equality-ranks": equality_ranks,
    **{f"step-{case.name}": partial(step, case) for case in gpu.CASES},
    "profile": profile,
    "host": host,
    "graphs": graphs,
    "nccl": nccl,
    "failures": failures,
    "thresholds": thresholds,
    "command": command,
    "operators": operators,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("out", type=Path, help="rewritten after each row")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--distconv", type=Path)
    given = parser.parse_args()
    options = Options(given.tiny, given.device, given.distconv)
    if options.cuda and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; --tiny --device cpu runs every part without")
    found: dict[str, Any] = {"versions": versions(options), "rows": []}
    for row in PARTS[given.part](options):
        found["rows"].append(row)
        aside = given.out.with_suffix(".new")
        aside.write_text(json.dumps(found))
        aside.replace(given.out)  # whole, whenever this process is ended


if __name__ == "__main__":
    main()
