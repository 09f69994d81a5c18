"""Checkpoints with pickles are refused, their code never runs (tiers: no process; gloo ranks)."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from hyperslab.checkpoint.retention import best_of, folder_of, latest
from hyperslab.checkpoint.save_load import load, read_extra, save
from hyperslab.errors import CheckpointError
from tests.checkpoint.old import attacking_pickle, save_pickled, write_sums
from tests.checkpoint.test_save_load import network, same, tensors
from tests.ranks import run_ranks


def test_an_old_checkpoint_is_refused_with_nothing_changed(tmp_path: Path) -> None:
    save_pickled(tmp_path / "a", *network(3), step=3)
    model, optimizer = network(1)
    before = tensors(model, optimizer)
    with pytest.raises(CheckpointError, match=r"was written as a pickle(.|\n)*run any code"):
        load(tmp_path / "a", model, optimizer)
    with pytest.raises(CheckpointError, match="written as a pickle"):
        read_extra(tmp_path / "a")
    assert same(tensors(model, optimizer), before)


def test_a_new_one_takes_its_place(tmp_path: Path) -> None:
    model, optimizer = network(2)
    save_pickled(tmp_path / "a", model, optimizer)
    save(tmp_path / "a", model, optimizer)
    assert {file.name for file in (tmp_path / "a").iterdir()} == {
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    }
    other, restored = network(1)
    load(tmp_path / "a", other, restored)
    assert same(tensors(other, restored), tensors(model, optimizer))


def save_old_on_ranks(path: Path) -> None:
    save_pickled(path, *network(2), seed=2)


def test_one_that_ranks_wrote_is_refused(tmp_path: Path) -> None:
    run_ranks(2, save_old_on_ranks, tmp_path / "a")
    with pytest.raises(CheckpointError, match="written as a pickle"):
        load(tmp_path / "a", *network(1))


ATTACKED = (".metadata", "__0_0.distcp", "extra.pt", "model.safetensors", "optimizer.safetensors")
ATTACKED += ("extra.safetensors", "state.json", "model.pt", "manifest.json")


@pytest.mark.parametrize("form", ["old", "new", "both"])
@pytest.mark.parametrize("victim", [*ATTACKED, "every one"])
def test_no_file_of_a_foreign_checkpoint_runs_code(tmp_path: Path, form: str, victim: str) -> None:
    mark = tmp_path / "attacked"
    path = folder_of(tmp_path) / "step-00000001"
    path.mkdir(parents=True)
    model, optimizer = network(1)
    if form != "old":
        save(path, model, optimizer, random=torch.get_rng_state())
        written = {file.name for file in path.iterdir()}
    if form != "new":
        save_pickled(path, model, optimizer)
    names = ATTACKED if victim == "every one" else (victim,)
    for name in names:
        (path / name).write_bytes(attacking_pickle(mark))
    if "manifest.json" not in names or victim == "every one":
        write_sums(path, **({} if form == "old" else {"format": 2}))
    (path.parent / "best").symlink_to(path.name)
    for read in (
        lambda: load(path, model, optimizer),
        lambda: load(path, model),
        lambda: read_extra(path),
        lambda: latest(tmp_path),
        lambda: best_of(tmp_path),
    ):
        with contextlib.suppress(CheckpointError):
            read()
        assert not mark.exists()
    if form == "new" and victim in written - {"manifest.json"}:
        with pytest.raises(CheckpointError):
            load(path, model, optimizer)
