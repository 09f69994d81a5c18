"""A damaged or hostile checkpoint is one error, and the one before is taken (tier: no process)."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperslab.checkpoint import best_in, files, folder_of, tensors
from hyperslab.checkpoint.retention import latest, mend_best, save_step
from hyperslab.checkpoint.save_load import load
from hyperslab.errors import CheckpointError
from hyperslab.util import documents
from tests.checkpoint.forged import write_sums
from tests.checkpoint.test_save_load import network

HASH = "0" * 64


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of the steps 1 and 2; the first is the best."""
    run = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        model, optimizer = network(step)
        position = {"best_step": 1}
        save_step(run, step, model, optimizer, best=step == 1, keep=2, position=position)
    return run


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(written, tmp_path / "run", symlinks=True))


def sums(**changed: object) -> bytes:
    return json.dumps({"format": 2, "sha256": {"state.json": HASH}, **changed}).encode()


DAMAGES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe\x00\x80" * 99,
    "UTF-16": sums().decode().encode("utf-16"),
    "a list": b"[]",
    "null": b"null",
    "a number": b"1e999",
    "a long number": b'{"format": ' + b"9" * 10_000 + b"}",
    "nested lists": b"[" * 200_000,
    "nested objects": b'{"a":' * 200_000,
    "no checksums": sums(sha256={}),
    "checksums are a list": sums(sha256=["state.json"]),
    "checksums are text": sums(sha256="state.json"),
    "a checksum is a number": sums(sha256={"state.json": 3}),
    "a checksum is short": sums(sha256={"state.json": "ab"}),
    "a checksum is another": sums(),
    "format is text": sums(format="2"),
    "format is true": sums(format=True),
    "format is later": sums(format=3),
    "format is null": sums(format=None),
    "format is misspelt": sums().replace(b"format", b"formAt"),
    "format is gone": json.dumps({"sha256": {"state.json": HASH}}).encode(),
    "something else": sums(sha_256={}),
    "without the state": sums(sha256={"model.safetensors": HASH}),
    **{
        f"a file named {name[:12]!r}": sums(sha256={"state.json": HASH, name: HASH})
        for name in ("../other", "/etc/passwd", "..", ".", "", "a/b", "a\0b", "é", "x" * 999)
    },
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_falls_back(
    run: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    newest = folder_of(run) / "step-00000002"
    (newest / "manifest.json").write_bytes(DAMAGES[damage])
    with caplog.at_level("WARNING", "hyperslab"):
        assert latest(run) == newest.with_name("step-00000001")
    assert str(newest) in caplog.text
    with pytest.raises(CheckpointError, match=newest.name):
        load(newest, *network(1))


def test_a_huge_manifest_is_not_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MANIFEST_LIMIT", 100)
    with pytest.raises(CheckpointError, match="more than"):
        load(folder_of(run) / "step-00000002", *network(1))


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def to_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def to_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


CHANGES = (to_pipe, to_device, to_link, to_loop, to_folder, Path.unlink)
CHANGED = [
    *itertools.product(("manifest.json", "state.json", "model.safetensors"), CHANGES),
    ("state.json", to_longer),  # of a manifest a space more says the same
    ("model.safetensors", to_longer),
]


@pytest.mark.parametrize(("name", "change"), CHANGED)
def test_what_is_no_plain_file_falls_back(
    run: Path, name: str, change: Callable[[Path], None]
) -> None:
    newest = folder_of(run) / "step-00000002"
    change(newest / name)
    assert latest(run) == newest.with_name("step-00000001")


STATES = {
    "a list": [],
    "nothing": {},
    "no extra": {"model": {}, "optimizer": None},
    "a list of weights": {"model": [], "optimizer": None, "extra": {}},
    "a word": {"model": {}, "optimizer": "adam", "extra": {}},
    "an empty optimizer": {"model": {}, "optimizer": {}, "extra": {}},
    "groups without weights": {
        "model": {},
        "optimizer": {"state": {}, "param_groups": [{}], "rest": {}, "other_state": {}},
        "extra": {},
    },
    "tensors that are not there": {
        "model": {},
        "optimizer": {
            "state": {"0.weight": {"exp_avg": {"$tensor": "x"}}},
            "param_groups": [{"params": ["0.weight"]}],
            "rest": {},
            "other_state": {},
        },
        "extra": {"a": {"$tensor": "b"}},
    },
    "an unknown mark": {"model": {}, "optimizer": None, "extra": {"a": {"$call": ["os"]}}},
}


@pytest.mark.parametrize("state", STATES)
def test_a_state_of_nobodys_making_is_refused(run: Path, state: str) -> None:
    """Its checksums are right: somebody means it."""
    path = folder_of(run) / "step-00000002"
    (path / "state.json").write_text(json.dumps(STATES[state]))
    write_sums(path, format=2)
    with pytest.raises(CheckpointError, match="step-00000002"):
        load(path, *network(1))


@pytest.mark.parametrize(
    "target",
    ["step-00000009", "nothing", "/etc", "../..", "best", "step-00000002/model.safetensors", None],
    ids=str,
)
def test_a_damaged_link_to_the_best_is_passed_over(
    run: Path, caplog: pytest.LogCaptureFixture, target: str | None
) -> None:
    link = folder_of(run) / "best"
    link.unlink()
    link.write_text("x") if target is None else link.symlink_to(target)
    with caplog.at_level("WARNING", "hyperslab"):
        assert best_in(folder_of(run)) == folder_of(run) / "step-00000001"  # as the newest one says
    assert f"{link} points to no checkpoint" in caplog.text
    mend_best(folder_of(run) / "step-00000002", 1)
    assert os.readlink(link) == "step-00000001"


def test_a_damaged_link_is_mended_by_the_next_checkpoint(run: Path) -> None:
    link = folder_of(run) / "best"
    link.unlink()
    link.symlink_to(link.name)
    save_step(run, 3, *network(1), best=False, keep=2)
    assert os.readlink(link) == "step-00000003"


def test_a_link_that_a_kill_has_left_unfinished_goes(run: Path) -> None:
    partial = folder_of(run) / ".best.partial"
    partial.symlink_to("step-00000002")
    mend_best(folder_of(run) / "step-00000002", 1)
    assert not os.path.lexists(partial)
    partial.write_text("")
    save_step(run, 3, *network(1), best=False, keep=2)
    assert not os.path.lexists(partial)


@pytest.mark.parametrize("best", [False, True])
def test_a_copy_in_place_of_the_link(run: Path, best: bool) -> None:
    """As programs leave it that know no links."""
    copy = shutil.copytree(run, run.with_name("copy"), symlinks=False)
    link = folder_of(copy) / "best"
    assert best_in(folder_of(copy)) == link
    load(link, *network(1))
    save_step(copy, 3, *network(1), best=best, keep=1)
    found = best_in(folder_of(copy))
    assert found is not None
    load(found, *network(1))
    if best:
        assert os.readlink(link) == "step-00000003"
    assert not [name for name in os.listdir(folder_of(copy)) if name.startswith(".")]


def test_things_beside_checkpoints_are_no_checkpoints(run: Path) -> None:
    folder = folder_of(run)
    for name in ("step-zzz", "step-9", "step-00000007.bak", "step-"):
        (folder / name).mkdir()
    (folder / "step-99999999").write_text("")
    assert latest(run) == folder / "step-00000002"
    save_step(run, 3, *network(1), best=False, keep=1)
    assert (folder / "step-zzz").is_dir()


@functools.cache
def long_header() -> bytes:
    words = b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(2_000_000)) + b"}}"
    return len(words).to_bytes(8, "little") + words


@pytest.mark.parametrize("name", ["model", "optimizer", "extra"])
def test_tensors_of_a_long_header_are_not_read(run: Path, name: str) -> None:
    """Three million names of nothing would take 600 MiB."""
    path = latest(run)
    assert path is not None
    (path / f"{name}.safetensors").write_bytes(long_header())
    write_sums(path, format=2)
    with pytest.raises(
        CheckpointError, match=rf"{name}\.safetensors is not a file of .* header of \d+ by"
    ):
        load(path, *network(2))


def test_what_could_not_be_loaded_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = network(1)
    monkeypatch.setattr(documents, "MOST_JSON_MEMORY", 1 << 20)
    with pytest.raises(CheckpointError, match=r"more than 1 MiB\n    give large tables as tensors"):
        save_step(tmp_path, 1, model, optimizer, best=False, keep=2, table=[0] * 20_000)
    monkeypatch.setattr(tensors, "HEADER_LIMIT", 64)
    with pytest.raises(CheckpointError, match="tensors are too many for one file"):
        save_step(tmp_path, 1, model, optimizer, best=False, keep=2)
    assert latest(tmp_path) is None
