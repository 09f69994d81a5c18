"""The notebooks run, cell by cell (tier: processes with kernels, two gloo ranks)."""

from __future__ import annotations

import runpy
from pathlib import Path

import nbformat
import pytest

from tests.docs.blocks import DOCS

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
RUN = runpy.run_path(str(DOCS / "notebooks" / "run.py"))["run_notebook"]


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = RUN(path, tmp_path)
    assert sum(cell.cell_type == "code" and bool(cell.outputs) for cell in done.cells) > 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_printed(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in cells)
    assert "\\u001b[" not in path.read_text()  # no progress bars, no colours
    assert path.stat().st_size < 200_000
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.filterwarnings("default")
def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("!python -c 'exit(3)'")])
    nbformat.write(notebook, tmp_path / "bad.ipynb")
    with pytest.raises(Exception, match="exit code 3"):
        RUN(tmp_path / "bad.ipynb", tmp_path)
