"""`mpirun ... hyperslab train` trains as one rank does: `make test-mpi` (tier: MPI)."""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

RECIPE = """
model: {variant: paper2020, batch_norm: true, width: 16}
data: {path: universes, batch_size: 4}
epochs: 2
device: cpu
timeout: 60
"""
MPIRUN = ("mpirun", "-n", "2", "--oversubscribe")


def write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    (folder / "universes").mkdir()
    for i in range(12):
        with h5py.File(folder / f"universes/u{i:02d}.hdf5", "w") as file:
            file["full"] = rng.poisson(1.0, (16, 16, 16, 4)).astype("int16")
            file["unitPar"] = rng.uniform(-1, 1, 4)
    (folder / "recipe.yaml").write_text(RECIPE)


def train(folder: Path, output: str, *more: str, under: tuple[str, ...] = ()) -> list[float]:
    """The losses of the epochs."""
    command = (sys.executable, "-m", "hyperslab", "train", "recipe.yaml", f"output={output}", *more)
    done = subprocess.run(
        [*under, *command], cwd=folder, text=True, capture_output=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (folder / output / "epochs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [float(row[name]) for row in rows for name in ("train_loss", "validation_loss")]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        serial = train(folder, "serial")
        together = train(folder, "together", "data.driver=mpio", "grid.depth=2", under=MPIRUN)
    np.testing.assert_allclose(together, serial, rtol=1e-4)
    print(f"mpirun hyperslab train: losses {together}, of one rank {serial}")


if __name__ == "__main__":
    main()
