"""Pickles among the files of a checkpoint never run (tier: no process)."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from hyperslab.checkpoint import best_in, folder_of
from hyperslab.checkpoint.files import read_values
from hyperslab.checkpoint.retention import latest
from hyperslab.checkpoint.save_load import load, save
from hyperslab.errors import CheckpointError
from tests.checkpoint.forged import attacking_pickle, write_sums
from tests.checkpoint.test_save_load import network

WRITTEN = ("model.safetensors", "optimizer.safetensors", "extra.safetensors", "state.json")
OF_TORCH = (".metadata", "__0_0.distcp", "extra.pt", "model.pt")
ATTACKED = (*WRITTEN, *OF_TORCH, "manifest.json")


@pytest.mark.parametrize("format", [{}, {"format": 2}], ids=["no format", "format 2"])
@pytest.mark.parametrize("victim", [*ATTACKED, "every one"])
def test_no_file_of_a_foreign_checkpoint_runs_code(
    tmp_path: Path, format: dict[str, int], victim: str
) -> None:
    mark = tmp_path / "attacked"
    path = folder_of(tmp_path) / "step-00000001"
    path.mkdir(parents=True)
    model, optimizer = network(1)
    save(path, model, optimizer, random=torch.get_rng_state())
    names = ATTACKED if victim == "every one" else (victim,)
    for name in names:
        (path / name).write_bytes(attacking_pickle(mark))
    if victim != "manifest.json":
        write_sums(path, **format)
    (path.parent / "best").symlink_to(path.name)
    for read in (
        lambda: load(path, model, optimizer),
        lambda: load(path, model),
        lambda: read_values(path),
        lambda: latest(tmp_path),
        lambda: best_in(path.parent),
    ):
        with contextlib.suppress(CheckpointError):
            read()
        assert not mark.exists()
    if not format or victim in WRITTEN:
        with pytest.raises(CheckpointError):
            load(path, model, optimizer)
