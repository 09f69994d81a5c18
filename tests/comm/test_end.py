"""Nothing remains of a process group when a program ends (tier: real processes)."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.forked import forked_commands
from tests.ports import unused_port

PROGRAM = """
import os
import torch
import hyperslab as hs

grid = hs.Grid(depth=2)
model = hs.parallelize(torch.nn.Conv3d(1, 2, 3, padding=1), grid)
x = hs.shard(torch.ones(1, 1, 5, 4, 4), grid)
y = model(x)
y.mean().backward()
import torch.distributed.nn
from hyperslab.comm.bootstrap import stop_distributed
from hyperslab.comm.communicator import communicators_of_world
kept = communicators_of_world()
del model
before = len(os.listdir("/proc/self/task"))
stop_distributed()
print(before, len(os.listdir("/proc/self/task")))
try:
    kept.halos.group
except hs.CommError as error:
    print(error)
"""


def test_no_thread_of_gloo_outlives_the_process_group() -> None:
    """Though the program still has its grid and a cut tensor: such a thread may abort it."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(unused_port())}
    ranks = []
    for rank in "01":
        environment = {**os.environ, **world, "RANK": rank, "LOCAL_RANK": rank}
        environment["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, "-c", PROGRAM]
        with forked_commands():
            start = subprocess.Popen(command, env=environment, text=True, stdout=-1, stderr=-2)
        ranks.append(start)
    for process in ranks:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        counts, ended = said.splitlines()[-3:-1]
        assert "has ended" in ended
        assert counts.split()[1] == "1"
