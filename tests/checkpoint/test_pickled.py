"""Checkpoints with pickles are read on request only (tiers: no process; a few gloo ranks)."""

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


def test_an_old_checkpoint_is_read_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = network(3)
    state = torch.get_rng_state()
    save_pickled(tmp_path / "a", model, optimizer, random=state, step=3)
    other, restored = network(1)
    with pytest.raises(CheckpointError, match=r"run any code(.|\n)*checkpoint.trust_pickle=true"):
        load(tmp_path / "a", other, restored)
    with caplog.at_level("WARNING", "hyperslab"):
        extra = load(tmp_path / "a", other, restored, trust_pickle=True)
    assert "code that is in it is run" in caplog.text
    assert same(tensors(other, restored), tensors(model, optimizer))
    assert extra["step"] == 3
    assert torch.equal(extra["random"], state)


def test_saved_again_it_has_none(tmp_path: Path) -> None:
    model, optimizer = network(2)
    save_pickled(tmp_path / "a", model, optimizer)
    other, restored = network(1)
    load(tmp_path / "a", other, restored, trust_pickle=True)
    save(tmp_path / "a", other, restored)
    assert {file.name for file in (tmp_path / "a").iterdir()} == {
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    }
    load(tmp_path / "a", other, restored)
    assert same(tensors(other, restored), tensors(model, optimizer))


def save_old_on_ranks(path: Path) -> None:
    save_pickled(path, *network(2), seed=2)


def test_one_that_ranks_wrote(tmp_path: Path) -> None:
    run_ranks(2, save_old_on_ranks, tmp_path / "a")
    model, optimizer = network(1)
    assert load(tmp_path / "a", model, optimizer, trust_pickle=True) == {"seed": 2}
    assert same(tensors(model, optimizer), tensors(*network(2)))


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
