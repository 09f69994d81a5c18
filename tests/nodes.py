"""Two machines made of one: network, host names and processes apart, with a cable between them.

Linux namespaces, for which one has to be root. Files are common, as on a cluster's file system;
memory is not: no process of one node sees those of the other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29400
TOOLS = ("ip", "unshare")


class NodesError(RuntimeError):
    """Nodes cannot be made here; says why."""


class Nodes:
    """Two nodes, "node0" and "node1", until it is left; what still runs on them is killed.

    Raises:
        NodesError: not root, or the system has no namespaces.
    """

    def __init__(self) -> None:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if sys.platform != "linux" or missing or os.geteuid() != 0:
            raise NodesError(f"namespaces need Linux, root and {', '.join(TOOLS)}")
        self._names = [f"hyperslab-{os.getpid()}-{node}" for node in range(2)]
        self._links = [f"hs{os.getpid() % 10**7}-{node}" for node in range(2)]
        self._processes: list[subprocess.Popen[str]] = []
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.close()
            raise NodesError(f"no network namespaces here: {error.stderr.strip()}") from None

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _make(self) -> None:
        for name in self._names:
            _ip("netns", "add", name)
        first, second = self._links
        _ip("link", "add", first, "type", "veth", "peer", "name", second)
        for name, link, address in zip(self._names, self._links, ADDRESSES, strict=True):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", link, "up")

    def cut(self, node: int = 0) -> None:
        """Pull the cable out of a node: nothing arrives any more, and nobody is told."""
        _ip("-n", self._names[node], "link", "set", self._links[node], "down")

    def mend(self, node: int = 0) -> None:
        """Put it in again."""
        _ip("-n", self._names[node], "link", "set", self._links[node], "up")

    def start(
        self, node: int, command: Sequence[str], environ: Mapping[str, str], output: Path
    ) -> subprocess.Popen[str]:
        """Run a command on a node; ``output`` gets what it writes."""
        inside = f'hostname node{node}; exec "$@"'
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        line = ["ip", "netns", "exec", self._names[node], *apart, "sh", "-c", inside, "sh"]
        network = {"GLOO_SOCKET_IFNAME": self._links[node]}
        with output.open("w") as file:
            process = subprocess.Popen(
                [*line, *command],
                env={**os.environ, **network, **environ},
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._processes.append(process)
        return process

    def torchrun(
        self, node: int, ranks: int, arguments: Sequence[str], output: Path, **environ: str
    ) -> subprocess.Popen[str]:
        """Start ``python arguments...`` on so many ranks of a node, as its part of two."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += [f"--nproc-per-node={ranks}", f"--node-rank={node}"]
        command += [f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}", *arguments]
        return self.start(node, command, environ, output)

    def rank(
        self, node: int, arguments: Sequence[str], output: Path, **environ: str
    ) -> subprocess.Popen[str]:
        """Start ``python arguments...`` as the only rank of a node, without torchrun."""
        place = {"RANK": str(node), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        where = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
        return self.start(node, [sys.executable, *arguments], {**place, **where, **environ}, output)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
