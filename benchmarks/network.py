"""The plan's times on a slow network against measured steps: 1 Gbit/s, 1 ms there and back.

    python benchmarks/network.py [--ranks 2 4] [--networks gradients halos cosmoflow-32]
                                 [--rate 125e6] [--delay 5e-4] [--turns 10] [--budget 0.1]
                                 [--gradients exact] [--machine OUT.yaml] [--json OUT]

Every rank has a network, a host name and processes of its own (Linux namespaces, as root); a relay
of one process (`relay.py`) joins them. For each number of ranks:

1. `calibrate` measures messages, sums, hidden shares and overhead over this network, and the
   operators of all steps, on all ranks at once,
2. the steps of all grids are measured in turn, in one process group: medians of the slowest rank,
3. each is predicted from what was calibrated.

Four ranks on two cores take turns, which the measurements of operators and of steps share.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import torch
import torch.nn.functional as F
from clock import machine as this_machine
from clock import slowest, stopwatch, write_results
from torch import nn

import hyperslab as hs
from hyperslab.comm import shared_channels
from hyperslab.comm.agreement import all_gather
from hyperslab.comm.bootstrap import start_ranks, stop_distributed
from hyperslab.parallel.averaging import Gradients
from hyperslab.planner.calibrate import calibrate
from hyperslab.planner.cost import step_cost
from hyperslab.planner.machine import save_machine
from hyperslab.planner.trace import Extents, Workload, busiest, trace_step

HERE = Path(__file__).parent
SET_INTERFACE = 0x400454CA  # TUNSETIFF of Linux
PLAIN_TUN = 0x1001  # IFF_TUN | IFF_NO_PI: whole IP packets
MTU = 65000  # [B]: few packets, for a relay in Python
LARGEST_BUFFER = 1 << 20  # [B] that a sender may have on its way
PORT = 29401
WARM_UP = 2


class SlowNetwork:
    """Joins nodes of one rank each by a relay, until it is left; what still runs there is killed.

    Raises:
        OSError, subprocess.CalledProcessError: not root, or the system has no namespaces or TUN.
    """

    def __init__(self, nodes: int, rate: float, delay: float) -> None:
        self.names = [f"hsnet{os.getpid()}-{node}" for node in range(nodes)]
        self._devices: list[int] = []
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for node, name in enumerate(self.names):
                self._make(node, name)
            line = [sys.executable, HERE / "relay.py", rate, delay, *self._devices]
            relay = subprocess.Popen(
                [*map(str, line)], pass_fds=self._devices, text=True, preexec_fn=_first
            )
            self._processes.append(relay)
        except BaseException:
            self.close()
            raise

    def _make(self, node: int, name: str) -> None:
        _ip("netns", "add", name)
        device = f"hs{os.getpid() % 10**7}-{node}"
        self._devices.append(os.open("/dev/net/tun", os.O_RDWR))
        request = struct.pack("16sH22x", device.encode(), PLAIN_TUN)
        fcntl.ioctl(self._devices[-1], SET_INTERFACE, request)
        _ip("link", "set", device, "netns", name)
        _ip("-n", name, "link", "set", device, "name", "slow0", "mtu", str(MTU))
        _ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "slow0")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "slow0", "up")
        for way in ("rmem", "wmem"):
            limits = f"net.ipv4.tcp_{way}=4096 131072 {LARGEST_BUFFER}"
            _run("ip", "netns", "exec", name, "sysctl", "-qw", limits)

    @staticmethod
    def address(node: int) -> str:
        """Return a node's address."""
        return f"10.78.0.{node + 1}"

    def start(
        self, node: int, command: Sequence[str], told: Path | None = None, **environ: str
    ) -> subprocess.Popen[str]:
        """Run a command on a node; ``told`` gets what it prints."""
        inside = f'hostname slow{node}; exec "$@"'
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        line = ["ip", "netns", "exec", self.names[node], *apart, "sh", "-c", inside, "sh"]
        with ExitStack() as stack:
            output = None if told is None else stack.enter_context(told.open("w"))
            process = subprocess.Popen(
                [*line, *command], env={**os.environ, **environ}, stdout=output, text=True
            )
        self._processes.append(process)
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for device in self._devices:
            os.close(device)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _first() -> None:
    """Lets the relay run before the ranks, as a switch waits for no processor."""
    os.setpriority(os.PRIO_PROCESS, 0, -20)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, capture_output=True, text=True, check=True)


def _gradients() -> nn.Module:
    """Few flops, 4 million parameters."""
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1),
        nn.LeakyReLU(),
        nn.AvgPool3d(4),
        nn.Flatten(),
        nn.Linear(8 * 8 * 4 * 4, 2048),
        nn.LeakyReLU(),
        nn.Linear(2048, 1024),
        nn.LeakyReLU(),
        nn.Linear(1024, 4),
    )


def _halos() -> nn.Module:
    """Ten thin layers on large maps, and hardly a parameter."""
    layers: list[nn.Module] = []
    for i in range(10):
        layers += [nn.Conv3d(4 if i else 2, 4, 3, padding=1), nn.LeakyReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 4))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gradients": (_gradients, (4, 2, 32, 16, 16)),
    "halos": (_halos, (4, 2, 64, 32, 16)),
    "cosmoflow-32": (lambda: hs.models.CosmoFlow(32, dropout=0.0), (4, 4, 32, 32, 32)),
}
"""What makes each, and the shape of a mini-batch; all predict four numbers a sample."""


def workload(name: str, gradients: Gradients) -> Workload:
    """The step that is measured, to be traced."""
    build, shape = NETWORKS[name]
    return Workload(
        build,
        shape,
        target=(shape[0], 4),
        loss=F.mse_loss,
        optimizer=torch.optim.Adam,
        gradients=gradients,
    )


GRIDS: dict[int, list[dict[str, int]]] = {
    2: [{"data": 2}, {"depth": 2}, {"height": 2}, {"width": 2}],
    4: [
        {"data": 4},
        {"depth": 4},
        {"data": 2, "depth": 2},
        {"depth": 2, "height": 2},
        {"height": 2, "width": 2},
    ],
}
"""What is compared, by the number of ranks."""


def named(extents: Extents) -> str:
    """A grid's name."""
    return " ".join(f"{axis}={extent}" for axis, extent in extents.items())


def steps_of(name: str, ranks: int, turns: int, gradients: Gradients) -> dict[str, list[float]]:
    """Seconds of the steps of all grids, in turn; on every rank."""
    build, shape = NETWORKS[name]
    made = {}
    for extents in GRIDS[ranks]:
        torch.manual_seed(0)
        grid = hs.Grid(**extents)
        model = hs.parallelize(build(), grid, gradients=gradients)
        optimizer = torch.optim.Adam(model.parameters())
        x = hs.shard(torch.rand(shape), grid)
        y = hs.shard(torch.rand(shape[0], 4), grid)

        def step(model=model, optimizer=optimizer, x=x, y=y) -> None:  # type: ignore[no-untyped-def]
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        made[named(extents)] = grid, step
    seconds: dict[str, list[float]] = {grid: [] for grid in made}
    for _ in range(WARM_UP + turns):
        for key, (grid, step) in made.items():
            grid.barrier()
            seconds[key] += slowest(stopwatch(grid.device, [step]), grid.device)
    return {grid: times[WARM_UP:] for grid, times in seconds.items()}


def on_rank(options: argparse.Namespace) -> None:
    """Calibrate, measure and predict; the first rank writes what was found."""
    torch.set_num_threads(1)
    start_ranks("cpu", timeout=300)
    ranks = int(os.environ["WORLD_SIZE"])
    everybody = hs.Grid(data=ranks)
    assert shared_channels() is None
    steps = [*itertools.product(options.networks, GRIDS[ranks])]
    traces = {  # the ranks share the work
        (name, named(extents)): [
            trace_step(workload(name, options.gradients), extents, rank)
            for rank in {0, busiest(extents)}
        ]
        for name, extents in steps[everybody.rank :: ranks]
    }
    operators = [
        operator for some in traces.values() for trace in some for operator in trace.operators
    ]
    with tempfile.TemporaryDirectory() as folder:
        done = calibrate(everybody, "slow-network", Path(folder), operators, budget=options.budget)
    costs = {
        key: max(
            (step_cost(trace, done.machine, ranks).seconds for trace in some),
            key=lambda seconds: seconds.total,
        )
        for key, some in traces.items()
    }
    predicted = dict(itertools.chain(*(one.items() for one in all_gather(costs))))
    rows = []
    for name in options.networks:
        measured = steps_of(name, ranks, options.turns, options.gradients)
        for grid, seconds in measured.items():
            rows.append(
                {
                    "network": name,
                    "ranks": ranks,
                    "grid": grid,
                    "measured": statistics.median(seconds),
                    "range": [min(seconds), max(seconds)],
                    "predicted": predicted[name, grid].total,
                    "parts": predicted[name, grid].as_dict(),
                }
            )
    if everybody.is_main:
        if options.machine:
            save_machine(done.machine, options.machine)
        machine = done.machine.model_dump(mode="json", exclude_none=True)
        for setting in machine["settings"]:
            del setting["operators"]
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}))
    stop_distributed()


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The table, and the pairs of grids whose order is the other way round."""
    for row in rows:
        parts = ", ".join(
            f"{cause} {1e3 * seconds:.0f}"
            for cause, seconds in row["parts"].items()
            if seconds > 0.02 * row["predicted"]
        )
        low, high = (1e3 * seconds for seconds in row["range"])
        print(
            f"{row['network']:14}{row['ranks']:3} {row['grid']:20}{1e3 * row['measured']:8.0f} ms "
            f"({low:.0f} to {high:.0f}) {1e3 * row['predicted']:8.0f} ms "
            f"{row['predicted'] / row['measured'] - 1:+7.1%}  {parts}"
        )
    apart, wrong = 0, []
    for a, b in itertools.combinations(rows, 2):
        if (a["network"], a["ranks"]) != (b["network"], b["ranks"]):
            continue
        if abs(a["measured"] / b["measured"] - 1) > 0.1:
            apart += 1
            if (a["measured"] < b["measured"]) != (a["predicted"] < b["predicted"]):
                wrong.append(f"{a['network']}, {a['ranks']} ranks: {a['grid']} and {b['grid']}")
    print(f"order: {apart - len(wrong)} of {apart} pairs that differ by more than 10 %", *wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[*GRIDS], choices=GRIDS)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--rate", type=float, default=125e6, help="[B/s] of each node's link")
    parser.add_argument("--delay", type=float, default=5e-4, help="[s] of each packet")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--budget", type=float, default=0.1, help="[s] for each measurement")
    parser.add_argument(
        "--gradients",
        default="exact",
        choices=get_args(Gradients),
        help="as hs.parallelize takes it",
    )
    parser.add_argument("--machine", type=Path, help="keep the machine file of the most ranks")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    if "RANK" in os.environ:
        on_rank(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or the network would stay
    where = this_machine()
    print(", ".join(f"{key} {value}" for key, value in where.items()), flush=True)
    results = []
    for ranks in options.ranks:
        with (
            tempfile.TemporaryDirectory() as folder,
            SlowNetwork(ranks, options.rate, options.delay) as network,
        ):
            told = Path(folder, "rows.json")
            command = [sys.executable, __file__, *sys.argv[1:], "--json", str(told)]
            running = [
                network.start(
                    rank,
                    command,
                    RANK=str(rank),
                    WORLD_SIZE=str(ranks),
                    LOCAL_RANK="0",
                    MASTER_ADDR=network.address(0),
                    MASTER_PORT=str(PORT),
                    GLOO_SOCKET_IFNAME="slow0",
                )
                for rank in range(ranks)
            ]
            codes = [one.wait() for one in running]
            if any(codes):
                raise SystemExit(f"ranks ended with {codes}")
            results.append(json.loads(told.read_text()))
            print_rows(results[-1]["rows"])
    write_results(options, where, {"runs": results})


if __name__ == "__main__":
    main()
