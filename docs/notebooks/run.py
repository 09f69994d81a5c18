"""Run the notebooks and keep what their cells print and draw: `make notebooks`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def run_notebook(path: Path, folder: Path) -> nbformat.NotebookNode:
    """A notebook after all of its cells were run, in order, in this folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed, or a command in it.
    """
    notebook = nbformat.read(path, as_version=4)
    setup = nbformat.v4.new_code_cell(SETUP)
    notebook.cells.insert(0, setup)
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute(cwd=str(folder))
    del notebook.cells[0]
    return notebook


# Not of the notebook: `python` is the kernel's own, commands write to no terminal (no progress bars
# in the page), and one that fails is an error.
SETUP = """
import os
import subprocess
import sys
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
os.environ["COLUMNS"] = "100"
for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):  # of kernels; they make a terminal of a pipe
    os.environ.pop(name, None)

def _system(command):
    done = subprocess.run(command, shell=True, stdout=-1, stderr=-2, text=True)
    print(done.stdout, end="")
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {command}")

get_ipython().system = _system
%matplotlib inline
"""


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what differs from run to run."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    return notebook


if __name__ == "__main__":
    here = Path(__file__).parent
    names = sys.argv[1:] or sorted(path.name for path in here.glob("*.ipynb"))
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(cleaned(run_notebook(here / name, Path(folder))), here / name)
        print(name)
