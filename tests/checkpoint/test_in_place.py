"""At no moment there is not a complete checkpoint under a name that is found (tier: no process)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from hyperslab.checkpoint import best_in, check_unused, files, folder_of, steps_in
from hyperslab.checkpoint.files import exchange, put_in_place
from hyperslab.checkpoint.retention import latest, save_step
from hyperslab.checkpoint.save_load import load, save
from hyperslab.errors import CheckpointError, RecipeError
from tests.checkpoint.killed import DONE, KILLED, ends_before
from tests.checkpoint.test_save_load import network, read, same, tensors
from tests.selection import in_gate

WAYS = ("exchange", "two renames")
EVERY = in_gate([1, 2], kept=[2])
"""Before which changes a process is killed."""


def first_of(way: str, every: int) -> int:
    """Where one way is killed before every other change, so that the other way has the others."""
    return WAYS.index(way) % every


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a file system lets a folder take the place of another; it need not wait for disks."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    if request.param == "two renames":
        monkeypatch.setattr(files, "exchange", lambda a, b: False)
    return str(request.param)


@pytest.mark.parametrize("every", EVERY)
def test_saving_over_a_name_always_leaves_one(tmp_path: Path, way: str, every: int) -> None:
    old = network(2)
    new = network(3)
    change = first_of(way, every)
    while True:
        shutil.rmtree(tmp_path, ignore_errors=True)
        tmp_path.mkdir()
        save(tmp_path / "a", *old)
        ended = ends_before(change, lambda: save(tmp_path / "a", *new))
        found = read(tmp_path / "a")[0]
        assert same(found, tensors(*(new if ended == DONE else old))) or same(found, tensors(*new))
        if ended == DONE:
            break
        assert ended == KILLED
        if change % (3 * every) < every:  # killed twice
            assert ends_before(change, lambda: save(tmp_path / "a", *new)) in (DONE, KILLED)
            read(tmp_path / "a")
        save(tmp_path / "a", *new)
        assert same(read(tmp_path / "a")[0], tensors(*new))
        assert os.listdir(tmp_path) == ["a"]
        change += every
    assert change > 10  # folder, four files, names, the old one's files


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(
    ("way", "step", "best"),
    in_gate(
        [(way, *saved) for way in WAYS for saved in ((2, False), (3, True))],
        kept=[("exchange", 2, False), ("two renames", 3, True)],
    ),
    indirect=["way"],
)
def test_a_run_always_has_its_newest_and_its_best(
    tmp_path: Path, way: str, step: int, best: bool, every: int
) -> None:
    old = network(2)
    new = network(3)
    change = first_of(way, every)
    while True:
        shutil.rmtree(tmp_path, ignore_errors=True)
        tmp_path.mkdir()
        for earlier, is_best in ((1, True), (2, False)):
            save_step(tmp_path, earlier, *old, best=is_best, keep=1)

        def act() -> None:
            save_step(tmp_path, step, *new, best=best, keep=1)

        ended = ends_before(change, act)
        check(tmp_path, at_least=2)
        if ended == DONE:
            break
        assert ended == KILLED
        if change % (3 * every) < every:
            ends_before(change // 2, act)
            check(tmp_path, at_least=2)
        save_step(tmp_path, step, *new, best=best, keep=1)
        names = sorted(os.listdir(folder_of(tmp_path)))
        kept = [step] if best else [1, step]
        assert names == ["best", *(f"step-{number:08d}" for number in kept)]
        change += every
    assert change > 10


def check(run: Path, *, at_least: int) -> None:
    newest = latest(run)
    assert newest is not None
    model, optimizer = network(1)
    load(newest, model, optimizer)
    assert steps_in(folder_of(run))[0].name >= f"step-{at_least:08d}"
    best = best_in(folder_of(run))
    assert best is not None
    load(best, model, optimizer)


def test_exchange(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of {name}").write_text(name)
    assert exchange(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "a") == ["of b"]
    with pytest.raises(OSError, match="No such file"):
        exchange(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("kind", ["file", "link to a checkpoint", "dangling link"])
def test_other_things_under_the_name(tmp_path: Path, way: str, kind: str) -> None:
    model, optimizer = network(1)
    path = tmp_path / "a"
    save(tmp_path / "other", *network(2))
    if kind == "file":
        path.write_text("")
    else:
        path.symlink_to("other" if kind == "link to a checkpoint" else "nothing")
    save(path, model, optimizer)
    assert same(read(path)[0], tensors(model, optimizer))
    assert not path.is_symlink()
    assert same(read(tmp_path / "other")[0], tensors(*network(2)))
    assert sorted(os.listdir(tmp_path)) == ["a", "other"]


def test_a_folder_with_other_things_is_kept(tmp_path: Path, way: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("years")
    with pytest.raises(CheckpointError, match=r"with other things, such as thesis\.tex"):
        save(tmp_path / "a", *network(1))
    assert (tmp_path / "a" / "thesis.tex").read_text() == "years"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    "name", ["a.pt", "model.py", "model/weights.bin", ".git/HEAD", "extra.txt"]
)
def test_what_only_looks_like_a_checkpoint_is_kept(tmp_path: Path, way: str, name: str) -> None:
    theirs = tmp_path / "a" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text("years")
    with pytest.raises(CheckpointError, match="with other things, such as"):
        save(tmp_path / "a", *network(1))
    assert theirs.read_text() == "years"


def test_a_file_is_kept(tmp_path: Path, way: str) -> None:
    (tmp_path / "model.pt").write_text("years")
    with pytest.raises(CheckpointError, match=r"model\.pt is a file, and stays as it is"):
        save(tmp_path / "model.pt", *network(1))
    assert (tmp_path / "model.pt").read_text() == "years"
    assert os.listdir(tmp_path) == ["model.pt"]


def test_links_under_hidden_names_are_not_followed(tmp_path: Path, way: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "precious").write_text("x")
    for name in (".a.partial", ".a.replaced"):
        (tmp_path / name).symlink_to(theirs)
    save(tmp_path / "a", *network(1))
    save(tmp_path / "a", *network(2))
    assert same(read(tmp_path / "a")[0], tensors(*network(2)))
    assert os.listdir(theirs) == ["precious"]


def test_what_cannot_be_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", *network(1))
    monkeypatch.setattr(files, "remove", _refuse)
    new = tmp_path / "new"
    shutil.copytree(tmp_path / "a", new)
    put_in_place(new, tmp_path / "a")
    read(tmp_path / "a")


def _refuse(path: Path) -> None:
    raise OSError(16, "Device or resource busy", str(path))


def test_the_generator_is_not_touched(tmp_path: Path) -> None:
    model, optimizer = network(1)
    before = torch.get_rng_state()
    save(tmp_path / "a", model, optimizer)
    load(tmp_path / "a", model, optimizer)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_training_that_begins_leaves_a_checkpoint_that_is_aside(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/.step-00000002.partial").mkdir(parents=True)
    check_unused(tmp_path)  # there was none yet
    (tmp_path / "checkpoints/.step-00000001.replaced").mkdir()
    with pytest.raises(RecipeError, match="holds a run already"):
        check_unused(tmp_path)
