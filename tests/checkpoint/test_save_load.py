"""Checkpoints: whole or not at all, on any grid (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyperslab.checkpoint import save_load
from hyperslab.checkpoint.files import verify_checksums
from hyperslab.checkpoint.retention import folder_of, latest, save_step
from hyperslab.checkpoint.save_load import load, save
from hyperslab.errors import CheckpointError
from tests.ranks import run_ranks


class Killed(BaseException):
    """Stands for a kill: nothing of ours catches it."""


def network(seed: int) -> tuple[nn.Module, torch.optim.Adam]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(seed):
        model(torch.rand(11, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [torch.as_tensor(v) for s in optimizer.state.values() for v in s.values()]
    rates = [torch.tensor(group["lr"]) for group in optimizer.param_groups]
    return [*(t.clone() for t in model.state_dict().values()), *moments, *rates]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def written(path: Path, seed: int) -> list[torch.Tensor]:
    model, optimizer = network(seed)
    save(path, model, optimizer, seed=seed)
    return tensors(model, optimizer)


def read(path: Path) -> tuple[list[torch.Tensor], dict[str, Any]]:
    model, optimizer = network(1)
    extra = load(path, model, optimizer)
    return tensors(model, optimizer), extra


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Let the operating system refuse every file beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    model, optimizer = network(3)
    save(tmp_path / "a", model, optimizer, random=state, position={"step": 3, "best": None})
    values, extra = read(tmp_path / "a")
    assert same(values, tensors(model, optimizer))
    assert extra["position"] == {"step": 3, "best": None}
    assert torch.equal(extra["random"], state)


def test_a_fresh_optimizer_takes_the_state(tmp_path: Path) -> None:
    expected = written(tmp_path / "a", 2)
    model, optimizer = network(0)
    load(tmp_path / "a", model, optimizer)
    assert same(tensors(model, optimizer), expected)


def test_a_model_alone(tmp_path: Path) -> None:
    model, _ = network(2)
    save(tmp_path / "a", model)
    other, optimizer = network(1)
    assert load(tmp_path / "a", other) == {}
    assert same(list(model.state_dict().values()), list(other.state_dict().values()))
    with pytest.raises(CheckpointError, match=r"does not fit.*optimizer"):
        load(tmp_path / "a", other, optimizer)


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        save(tmp_path / "a", nn.Linear(2, 3), what=object)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "a", 1)
    with pytest.raises(CheckpointError, match=r"does not fit this model.*weight"):
        load(tmp_path / "a", nn.Linear(5, 7))


@pytest.mark.parametrize("at", ["rename", "replace"])
def test_killed_between_write_and_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    model, optimizer = network(1)
    first = save_step(tmp_path, 1, model, optimizer, best=True, keep=2)
    second = first.with_name("step-00000002")
    original = getattr(Path, at)

    def die(path: Path, target: Path) -> Path:
        if target in (second, first.with_name("best")):
            raise Killed
        return original(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, at, die)
        with pytest.raises(Killed):
            save_step(tmp_path, 2, model, optimizer, best=True, keep=2)
    assert latest(tmp_path) == (first if at == "rename" else second)
    assert os.readlink(first.with_name("best")) == first.name
    last = save_step(tmp_path, 3, model, optimizer, best=False, keep=2)
    assert latest(tmp_path) == last
    assert not list(folder_of(tmp_path).glob(".*"))


def test_a_run_whose_folder_was_removed_does_not_go_on_in_another(tmp_path: Path) -> None:
    run, made = tmp_path / "run", network(1)
    run.mkdir()
    save_step(run, 1, *made, best=True, keep=2)
    shutil.rmtree(run)
    with pytest.raises(CheckpointError, match=r"cannot write .*/step-00000002: No such file or"):
        save_step(run, 2, *made, best=True, keep=2)
    assert not run.exists()


def test_an_existing_checkpoint_stays_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = written(tmp_path / "a", 2)
    with full_disk(512), pytest.raises(CheckpointError, match=r"cannot write .*/a: File too"):
        written(tmp_path / "a", 3)
    assert same(read(tmp_path / "a")[0], old)
    assert os.listdir(tmp_path) == ["a"]
    new = written(tmp_path / "a", 3)
    assert same(read(tmp_path / "a")[0], new)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("free", "words"), [(3 << 20, "no space left on the disk (3 MiB free)"), (1 << 40, None)]
)
def test_a_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, words: str | None
) -> None:
    usage = type(shutil.disk_usage(tmp_path))(1 << 41, (1 << 41) - free, free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with full_disk(512), pytest.raises(CheckpointError) as caught:
        written(tmp_path / "a", 3)
    first, *more = str(caught.value).splitlines()
    assert first.startswith(f"cannot write the checkpoint {tmp_path / 'a'}: ")
    assert [line.strip() for line in more] == ([words] if words else [])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("when", ["writing", "syncing"])
def test_what_the_disk_says_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, when: str
) -> None:
    old = written(tmp_path / "a", 2)

    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if when == "syncing" else (save_load, "write_tensors")), fail)
        with pytest.raises(CheckpointError) as caught:
            written(tmp_path / "a", 3)
    words = f"cannot write the checkpoint {tmp_path / 'a'}: {os.strerror(number)} (rank 0)"
    assert str(caught.value) == words
    assert same(read(tmp_path / "a")[0], old)
    assert os.listdir(tmp_path) == ["a"]
    written(tmp_path / "a", 3)


@pytest.mark.parametrize("what", ["a file in its place", "no such device"])
def test_an_unwritable_folder_is_named(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "a" if what == "a file in its place" else Path("/proc/a")
    with pytest.raises(CheckpointError, match=f"cannot write the checkpoint {path}: "):
        written(path, 1)


def damage(path: Path, how: str) -> None:
    victim = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    data = victim.read_bytes()
    if how == "truncated":
        victim.write_bytes(data[: len(data) // 2])
    elif how == "one bit":
        middle = len(data) // 2
        victim.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif how == "missing":
        victim.unlink()
    else:
        (path / "manifest.json").unlink()


@pytest.mark.parametrize("how", ["truncated", "one bit", "missing", "no manifest"])
def test_a_corrupt_newest_checkpoint_is_passed_over_and_named(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = network(1)
    good, bad = (
        save_step(tmp_path, step, model, optimizer, best=False, keep=3) for step in (10, 20)
    )
    damage(bad, how)
    with pytest.raises(CheckpointError, match=bad.name):
        load(bad, model, optimizer)
    with caplog.at_level("WARNING", "hyperslab"):
        assert latest(tmp_path) == good
    assert str(bad) in caplog.text
    assert "the one before" in caplog.text


def test_a_corrupt_checkpoint_does_not_outlive_a_good_one(tmp_path: Path) -> None:
    model, optimizer = network(1)
    for step, best in ((10, False), (20, True)):
        bad = save_step(tmp_path, step, model, optimizer, best=best, keep=1)
    damage(bad, "truncated")
    good = save_step(tmp_path, 15, model, optimizer, best=False, keep=1)
    assert latest(tmp_path) == good
    assert os.readlink(folder_of(tmp_path) / "best") == good.name


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert latest(tmp_path / "nothing") is None


def test_the_last_n_and_the_best_stay(tmp_path: Path) -> None:
    model, optimizer = network(1)
    for step in range(1, 7):
        save_step(tmp_path, step, model, optimizer, best=step in (1, 2), keep=2)
    names = sorted(os.listdir(folder_of(tmp_path)))
    assert names == ["best", "step-00000002", "step-00000005", "step-00000006"]
    verify_checksums(folder_of(tmp_path) / "best")
    assert (folder_of(tmp_path) / "best").resolve().name == "step-00000002"


def save_on_ranks(path: Path) -> list[torch.Tensor]:
    return written(path, 2)


def load_on_ranks(path: Path) -> tuple[list[torch.Tensor], dict[str, Any]]:
    return read(path)


@pytest.mark.parametrize(("write_ranks", "read_ranks"), [(3, 2), (2, 1), (1, 4)])
def test_any_number_of_ranks_reads_it(tmp_path: Path, write_ranks: int, read_ranks: int) -> None:
    expected = run_ranks(write_ranks, save_on_ranks, tmp_path / "a")[0]
    for values, extra in run_ranks(read_ranks, load_on_ranks, tmp_path / "a"):
        assert same(values, expected)
        assert extra == {"seed": 2}
    assert same(read(tmp_path / "a")[0], expected)


def save_with_trouble_on(rank: int, path: Path) -> str:
    trouble = full_disk(128) if dist.get_rank() == rank else contextlib.nullcontext()
    with trouble, pytest.raises(CheckpointError) as caught:
        written(path, 3)
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_says_what_failed_on_one(tmp_path: Path, rank: int) -> None:
    old = run_ranks(2, save_on_ranks, tmp_path / "a")[0]
    messages = run_ranks(2, save_with_trouble_on, rank, tmp_path / "a")
    assert messages[0] == messages[1]
    assert f"cannot write the checkpoint {tmp_path / 'a'}: File too large" in messages[0]
    assert same(read(tmp_path / "a")[0], old)


def counting_reads(path: Path) -> tuple[int, list[torch.Tensor]]:
    with patch.object(save_load, "read_tensors", wraps=save_load.read_tensors) as reads:
        values, _ = read(path)
    return reads.call_count, values


def test_the_files_are_read_by_one_rank(tmp_path: Path) -> None:
    expected = run_ranks(2, save_on_ranks, tmp_path / "a")[0]
    files = list((tmp_path / "a").glob("*.safetensors"))
    counts = []
    for count, values in run_ranks(4, counting_reads, tmp_path / "a"):
        assert same(values, expected)
        counts.append(count)
    assert counts == [len(files), 0, 0, 0]
