"""A command whose standard streams are closed does its work (tier: child processes)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, resource, sys
from pathlib import Path

from hyperslab.util.startup import begin_command

begin_command()
assert min(os.pipe()) > 2
from hyperslab.launch.forked import can_fork
from hyperslab.launch.supervisor import launch

assert sys.stdin.read() == ""
print("to nobody")
print("nor this", file=sys.stderr)
os.dup2(2, 300)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
assert can_fork() or sys.platform != "linux"
launch(2, ["-m", "this"], Path(sys.argv[1]) / "logs", limit=60)
rank = "import os, sys; os.write(1, b'1'); sys.exit(os.environ['RANK'] not in '01')"
launch(2, ["-c", rank], Path(sys.argv[1]) / "logs", limit=60)
Path(sys.argv[1], "done").touch()
"""


def test_ranks_start_where_all_streams_are_closed(tmp_path: Path) -> None:
    """As forks and as interpreters, also with a descriptor beyond the limit of numbers."""

    def close() -> None:
        os.closerange(0, 3)

    line = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    assert subprocess.run(line, preexec_fn=close, timeout=100).returncode == 0
    assert (tmp_path / "done").exists()


IMPORTS = """
import os
before = dict(os.environ)
import hyperslab, hyperslab.cli
assert os.environ == before, "an import has changed the environment"
"""
ALLOCATOR = """
import os
from hyperslab.util.startup import begin_command
begin_command()
print({k: v for k, v in os.environ.items() if "ALLOC_CONF" in k})
"""


@pytest.mark.parametrize(
    "own", [{}, {"PYTORCH_ALLOC_CONF": "a"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}]
)
def test_commands_choose_segments_that_grow(own: dict[str, str]) -> None:
    """Unless the user has chosen, and never at an import: of torch, see `tests.test_import`."""
    environment = {k: v for k, v in os.environ.items() if "ALLOC_CONF" not in k}
    line = [sys.executable, "-c", ALLOCATOR if own else IMPORTS + ALLOCATOR]
    run = subprocess.run(line, env=environment | own, capture_output=True, text=True, check=False)
    expected = own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert run.stdout.strip() == str(expected), run.stderr
