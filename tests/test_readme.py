"""The README's example runs as it is printed (tier: two gloo ranks)."""

from __future__ import annotations

import re
from contextlib import chdir
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

README = Path(__file__).parent.parent / "README.md"


def example() -> str:
    """The README's Python block that makes a grid."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "hs.Grid" in block]
    return str(code)


def write_universes(folder: Path, count: int, size: int) -> None:
    random = np.random.default_rng(0)
    folder.mkdir()
    for index in range(count):
        unit = random.uniform(-1, 1, 4)
        with h5py.File(folder / f"univ_{index}.hdf5", "w") as file:
            file["full"] = random.poisson(1.0, (size, size, size, 4)).astype(np.int16)
            file["unitPar"], file["physPar"] = unit, 0.3 + 0.1 * unit
            file["namePar"] = np.array([b"Omega_m", b"sigma_8", b"n_s", b"H_0"])
            file["redshifts"] = np.array([0.0, 0.5, 1.5, 3.0])


def run_example(code: str, folder: str) -> tuple[tuple[int, ...], float]:
    torch.manual_seed(dist.get_rank())  # as torch does it: every process differently
    names: dict[str, object] = {}
    with chdir(folder):  # later tests run in this process, and the folder goes
        exec(code, names)
    x, loss = names["x"], names["loss"]
    return tuple(x.shape), float(loss)  # type: ignore[attr-defined, arg-type]


def test_the_example_has_fourteen_lines_at_most() -> None:
    assert len([line for line in example().splitlines() if line.strip()]) <= 14


def test_it_is_short_and_its_tree_has_every_package() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 110
    (tree,) = re.findall(r"^src/hyperslab/\n(.*?)^```", text, re.M | re.DOTALL)
    assert len(tree.splitlines()) <= 20
    packages = {path.parent.name for path in README.parent.glob("src/hyperslab/*/__init__.py")}
    assert packages <= set(re.findall(r"\b(\w+)/ ", tree))


def test_the_example_runs(tmp_path: Path) -> None:
    write_universes(tmp_path / "universes", count=10, size=32)
    results = run_ranks(2, run_example, example(), str(tmp_path))
    assert results[0] == results[1]
    assert results[0][0] == (4, 4, 32, 32, 32)
    assert np.isfinite(results[0][1])
    assert (tmp_path / "runs" / "a" / "step-100" / "model.safetensors").exists()
