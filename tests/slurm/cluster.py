"""A cluster of two nodes on one machine: a real Slurm with its daemons, in a temporary folder.

The nodes are those of `tests.nodes`: network, host names, processes and shared memory apart. Each
has a `slurmd`; node0 has `slurmctld` and munge besides. Jobs are put in and asked for from node0.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from tests.nodes import ADDRESSES, Nodes

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")

CPUS = 8  # of a node, as far as Slurm knows
GPUS = 4  # as the files in slurm/ ask for: null devices, of which Slurm says which task has which

START = 30.0  # [s] that the daemons have to come
LIMIT = 100.0  # [s] for a command or a job
PAUSE = 0.2  # [s] between two looks

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

CONFIG = """
ClusterName=test
SlurmctldHost=node0({first})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
KillWait=20
GresTypes=gpu
NodeName=node0 NodeAddr={first} CPUs={cpus} Gres=gpu:{gpus}
NodeName=node1 NodeAddr={second} CPUs={cpus} Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""

INSIDE = """
unset GLOO_SOCKET_IFNAME # a task may be on the other node; names tell the addresses
mount --bind "$HOSTS" /etc/hosts
mount -t tmpfs shm /dev/shm
exec "$@"
"""
"""Before a command of a node."""


def missing_tools() -> list[str]:
    """What of Slurm and munge is not installed here."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


class SlurmError(RuntimeError):
    """Slurm did something else than it was asked; with the last lines of its daemons."""


class SlurmCluster:
    """Two nodes with Slurm, until it is left; what still runs there is killed.

    Raises:
        NodesError: not root, or the system has no namespaces.
        SlurmError: the daemons did not start.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._commands = 0
        self._nodes = Nodes()
        try:
            self._configure()
            self._start_daemons()
        except BaseException:
            self._nodes.close()
            raise

    def __enter__(self) -> SlurmCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._nodes.close()

    def run(self, *command: str, code: int | None = 0, **environ: str) -> str:
        """What a command on node0 writes; ``code`` is the exit code it must have, if it must."""
        process, output = self._start(0, command, **environ)
        found = process.wait(LIMIT)
        if code is not None and found != code:
            raise self._error(f"{command}: exit code {found}\n{output.read_text()}")
        return output.read_text()

    def submit(self, *words: str, **environ: str) -> int:
        """``sbatch words...``: the job's number."""
        return int(self.run("sbatch", "--parsable", *words, **environ))

    def state(self, job: int) -> dict[str, str]:
        """What Slurm says of a job."""
        words = self.run("scontrol", "show", "job", "-o", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: int, done: Callable[[], bool]) -> None:
        """Wait until something is so; the job must not end before."""
        end = time.monotonic() + LIMIT
        while not done():
            state = self.state(job)
            if state["JobState"] in ENDED or time.monotonic() > end:
                raise self._error(f"waited in vain for {state}\n{_read(state['StdOut'])}")
            time.sleep(PAUSE)

    def end_of(self, job: int) -> str:
        """Wait for the end of a job: its state and exit code, such as "COMPLETED 0"."""
        end = time.monotonic() + LIMIT
        while (state := self.state(job))["JobState"] not in ENDED:
            if time.monotonic() > end:
                raise self._error(f"job {job} does not end: {state}\n{_read(state['StdOut'])}")
            time.sleep(PAUSE)
        return f"{state['JobState']} {state['ExitCode'].partition(':')[0]}"

    def start_again(self, job: int) -> None:
        """Wait until a job is in the queue again, and spare it the two minutes that it has to wait.

        What was allowed to it before is void for the second in which that ended.
        """
        self.wait_for(job, lambda: self.state(job)["Reason"] == "BeginTime")
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now+2")

    def rank_process(self, job: int, rank: int) -> int:
        """The process of a rank of a job, as this machine numbers it."""
        wanted = {f"SLURM_JOB_ID={job}", f"SLURM_PROCID={rank}", f"SLURM_CONF={self._config}"}
        for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
            program = Path(_read(process / "cmdline").partition("\0")[0]).name
            if program.startswith("python") and wanted <= {*_read(process / "environ").split("\0")}:
                return int(process.name)
        raise self._error(f"job {job} has no rank {rank}")

    @property
    def _config(self) -> Path:
        return self.folder / "slurm.conf"

    def _configure(self) -> None:
        first, second = ADDRESSES
        places = {"folder": self.folder, "first": first, "second": second}
        self._config.write_text(CONFIG.format(**places, cpus=CPUS, gpus=GPUS))
        gpus = [self.folder / f"gpu{number}" for number in range(GPUS)]
        self.folder.joinpath("gres.conf").write_text(
            "".join(f"Name=gpu File={gpu} Flags=nvidia_gpu_env\n" for gpu in gpus)
        )
        # `slurmd` looks for what mounts control groups; the first version's plugin does without.
        self.folder.joinpath("cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        nodes = "".join(f"{address} node{node}\n" for node, address in enumerate(ADDRESSES))
        self.folder.joinpath("hosts").write_text(f"127.0.0.1 localhost\n{nodes}")
        for gpu in gpus:
            os.mknod(gpu, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as the null device
        for name in ("state", "spool.node0", "spool.node1"):
            self.folder.joinpath(name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def _start_daemons(self) -> None:
        files = ("key-file", "socket", "pid-file", "seed-file", "log-file")
        munge = [f"--{name}={self.folder}/munge.{name.partition('-')[0]}" for name in files]
        self._start(0, ["munged", "--foreground", "--force", *munge])
        end = time.monotonic() + START
        while not (self.folder / "munge.socket").exists():
            self._check(end)
        self._start(0, ["slurmctld", "-D"])
        for node in range(2):
            self._start(node, ["slurmd", "-D", "-N", f"node{node}"])
        while self.run("sinfo", "--noheader", "--format=%T", code=None).split() != ["idle"]:
            self._check(end)

    def _check(self, end: float) -> None:
        if time.monotonic() > end:
            raise self._error("Slurm does not start")
        time.sleep(PAUSE)

    def _start(
        self, node: int, command: Sequence[str], **environ: str
    ) -> tuple[subprocess.Popen[str], Path]:
        self._commands += 1
        output = self.folder / f"output.{self._commands}"
        where = {"HOSTS": str(self.folder / "hosts"), "SLURM_CONF": str(self._config)}
        inside = ["sh", "-c", INSIDE, "sh", *command]
        return self._nodes.start(node, inside, {**where, **environ}, output), output

    def _error(self, words: str) -> SlurmError:
        """With the last lines of the daemons."""
        logs = [(log.name, _read(log).splitlines()[-20:]) for log in self.folder.glob("*.log")]
        return SlurmError("\n".join([words, *("\n".join([name, *lines]) for name, lines in logs)]))


def _read(path: str | Path) -> str:
    """Empty where there is nothing, or nothing any more."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
