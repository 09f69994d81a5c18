"""A command whose standard streams are closed does its work (tier: child processes)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from pathlib import Path
from hyperslab.util.startup import fill_standard_descriptors
from hyperslab.launch.supervisor import launch

fill_standard_descriptors()
assert min(os.pipe()) > 2
rank = "import os, sys; os.write(1, b'1'); sys.exit(os.environ['RANK'] not in '01')"
launch(2, ["-c", rank], Path(sys.argv[1]) / "logs", limit=60)
Path(sys.argv[1], "done").touch()
"""


def test_ranks_start_where_all_streams_are_closed(tmp_path: Path) -> None:
    def close() -> None:
        os.closerange(0, 3)

    line = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    assert subprocess.run(line, preexec_fn=close, timeout=100).returncode == 0
    assert (tmp_path / "done").exists()
