"""Writing while the run goes on (tiers: no process; a few gloo ranks; an interpreter)."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyperslab.checkpoint import save_load
from hyperslab.checkpoint.background import BackgroundWriter
from hyperslab.checkpoint.retention import folder_of, latest, save_step
from hyperslab.checkpoint.save_load import load
from hyperslab.errors import CheckpointError, CommError, DivergedError
from tests.checkpoint.test_save_load import full_disk, network, read, same, tensors
from tests.ranks import run_ranks


@contextmanager
def writing_held() -> Iterator[threading.Event]:
    """Files are written after the event is set."""
    event = threading.Event()
    original = save_load.write_tensors

    def held(path: Path, part: dict[str, torch.Tensor]) -> str:
        assert event.wait(60)
        return original(path, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_load, "write_tensors", held)
        yield event


Made = tuple[nn.Module, torch.optim.Adam]


def state_of(made: Made) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors(*made)]


def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As a step does, in place."""
    model(torch.rand(11, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def begin(
    run: Path, step: int, of: BackgroundWriter, made: tuple[nn.Module, torch.optim.Adam]
) -> None:
    save_step(run, step, *made, best=step == 1, keep=2, behind=of, seed=torch.tensor(step))


def test_what_is_written_is_the_state_of_the_call(tmp_path: Path) -> None:
    made = network(2)
    expected = state_of(made)
    writer = BackgroundWriter()
    with writing_held() as go:
        begin(tmp_path, 1, writer, made)
        assert latest(tmp_path) is None
        change(*made)
        assert not same(tensors(*made), expected)
        go.set()
        writer.wait()
    newest = latest(tmp_path)
    assert newest is not None
    found, extra = read(newest)
    assert same(found, expected)
    assert extra == {"seed": torch.tensor(1)}


def test_one_at_a_time_and_the_newest_complete_one_loads(tmp_path: Path) -> None:
    made = network(2)
    writer = BackgroundWriter()
    begin(tmp_path, 1, writer, made)
    first = state_of(made)
    writer.wait()
    change(*made)
    with writing_held() as go:
        begin(tmp_path, 2, writer, made)
        newest = latest(tmp_path)
        assert newest is not None
        assert newest.name == "step-00000001"
        assert same(read(newest)[0], first)
        second = state_of(made)
        change(*made)
        threading.Timer(0.2, go.set).start()
        begin(tmp_path, 3, writer, made)  # waits for the second
    assert same(read(folder_of(tmp_path) / "step-00000002")[0], second)
    writer.wait()
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-00000003"


def large() -> Made:
    """Weights that the thread copies; the last has a buffer that is copied at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 300), nn.Linear(300, 300), nn.BatchNorm1d(300))
    optimizer = torch.optim.Adam(model.parameters())
    change(model, optimizer)
    return model, optimizer


@contextmanager
def copying_held(writer: BackgroundWriter) -> Iterator[threading.Event]:
    """What is copied late is copied after the event is set."""
    event = threading.Event()
    original = writer.memory.finish

    def held() -> None:
        assert event.wait(60)
        original()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.memory, "finish", held)
        yield event


def test_copies_that_fail_are_an_error_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RuntimeError("the device is lost")

    writer = BackgroundWriter()
    monkeypatch.setattr(writer.memory, "finish", lost)
    begin(tmp_path, 1, writer, network(2))
    with pytest.raises(CheckpointError, match="the device is lost"):
        writer.wait()
    assert latest(tmp_path) is None


def test_a_step_waits_for_the_copies_of_large_weights(tmp_path: Path) -> None:
    made = large()
    expected = state_of(made)
    writer = BackgroundWriter()
    with copying_held(writer) as go:
        begin(tmp_path, 1, writer, made)
        made[0](torch.rand(11, 5)).sum().backward()  # changes the running statistics
        assert not writer.memory.copied.is_set()
        threading.Timer(0.2, go.set).start()
        made[1].step()
        assert writer.memory.copied.is_set()
    writer.wait()
    other = large()
    newest = latest(tmp_path)
    assert newest is not None
    load(newest, *other)
    assert same(state_of(other), expected)
    assert not made[1]._optimizer_step_pre_hooks


def test_weights_that_something_else_changes_are_not_stored(tmp_path: Path) -> None:
    made = large()
    writer = BackgroundWriter()
    with copying_held(writer) as go:
        begin(tmp_path, 1, writer, made)
        with torch.no_grad():
            made[0][1].weight.add_(1)
        go.set()
        with pytest.raises(CheckpointError, match=r"changed while(.|\n)*background=false"):
            writer.wait()
    assert latest(tmp_path) is None
    begin(tmp_path, 2, writer, made)
    writer.wait()
    assert latest(tmp_path) is not None


def test_the_memory_is_used_again(tmp_path: Path) -> None:
    made = network(2)
    writer = BackgroundWriter()
    begin(tmp_path, 1, writer, made)
    writer.wait()
    before = writer.memory.nbytes
    state = sum(t.nbytes for t in tensors(*made))
    assert state / 2 < before < 20 * state  # each tensor is aligned, and these are tiny
    begin(tmp_path, 2, writer, made)
    writer.wait()
    assert writer.memory.nbytes == before


def test_errors_come_out_at_the_next_one_and_at_the_end(tmp_path: Path) -> None:
    made = network(3)
    writer = BackgroundWriter()
    with full_disk(128):
        begin(tmp_path, 1, writer, made)
        assert writer._thread is not None
        writer._thread.join()
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000001: File too large"):
        begin(tmp_path, 2, writer, made)
    begin(tmp_path, 3, writer, made)
    writer.wait()
    with (
        full_disk(128),
        pytest.raises(CheckpointError, match="step-00000004"),
        writer.finishing(),
    ):
        begin(tmp_path, 4, writer, made)
    assert [path.name for path in sorted(folder_of(tmp_path).iterdir())] == [
        "best",
        "step-00000003",
    ]


def test_what_cannot_be_stored_is_an_error_like_others(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    save_step(tmp_path, 1, *network(1), best=True, keep=1, behind=writer, what=object)
    with pytest.raises(CheckpointError, match=r"cannot write .*: what has the type type"):
        writer.wait()


def leave(*_: object) -> None:
    raise SystemExit(3)


def test_whatever_ends_the_thread_is_heard() -> None:
    _, optimizer = network(1)
    writer = BackgroundWriter()
    writer.start(leave, optimizer)
    with pytest.raises(SystemExit):
        writer.wait()


def fail(run: Path, writer: BackgroundWriter, error: Exception, timer: threading.Timer) -> None:
    with writer.finishing():
        begin(run, 1, writer, network(1))
        timer.start()
        raise error


@pytest.mark.parametrize("error", [DivergedError("x"), KeyError("x")])
def test_an_error_of_the_run_waits_for_the_writing(tmp_path: Path, error: Exception) -> None:
    writer = BackgroundWriter()
    with writing_held() as go, pytest.raises(type(error)):
        fail(tmp_path, writer, error, threading.Timer(0.2, go.set))
    assert latest(tmp_path) is not None


def test_a_lost_rank_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyperslab.checkpoint.background.PATIENCE_IF_LOST", 0.1)
    writer = BackgroundWriter()
    with writing_held() as go:
        with pytest.raises(CommError):
            fail(tmp_path, writer, CommError("lost contact"), threading.Timer(0, len, [()]))
        assert latest(tmp_path) is None
        go.set()
        writer.wait()


def train_on_ranks(run: Path) -> list[list[torch.Tensor]]:
    """Messages of steps go on meanwhile, and ranks are not at the same step."""
    made = network(2)
    writer = BackgroundWriter()
    states = []
    for step in range(1, 6):
        begin(run, step, writer, made)
        states.append(state_of(made))
        for _ in range(20 * (dist.get_rank() + 1)):
            torch.rand(100, 100).mm(torch.rand(100, 100))
        for _ in range(20):
            value = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(value)
            assert value == 3
        torch.manual_seed(step)
        change(*made)
    writer.wait()
    return states


def test_ranks_agree_beside_the_steps(tmp_path: Path) -> None:
    states = run_ranks(3, train_on_ranks, tmp_path)
    for step in (4, 5):
        found = read(folder_of(tmp_path) / f"step-{step:08d}")[0]
        assert all(same(found, of_rank[step - 1]) for of_rank in states)
    assert len(list(folder_of(tmp_path).glob("step-*"))) == 3  # the first is the best


def fail_on_ranks(run: Path) -> str:
    made = network(3)
    writer = BackgroundWriter()
    if dist.get_rank() == 1:
        with full_disk(128):
            begin(run, 1, writer, made)
            assert writer._thread is not None
            writer._thread.join()
    else:
        begin(run, 1, writer, made)
    with pytest.raises(CheckpointError) as caught:
        writer.wait()
    begin(run, 2, writer, made)
    writer.wait()
    return str(caught.value)


def test_every_rank_hears_of_an_error(tmp_path: Path) -> None:
    messages = run_ranks(2, fail_on_ranks, tmp_path)
    assert messages[0] == messages[1]
    assert "step-00000001: File too large (rank 1)" in messages[0]
    model, optimizer = network(1)
    newest = latest(tmp_path)
    assert newest is not None
    load(newest, model, optimizer)


RECIPE = """
model: {{name: cosmoflow, width: 32, batch_norm: true}}
data: {{synthetic: {{width: 32, samples: 2}}, batch_size: 1, counts: [1, 1, 0]}}
optimizer: {{name: adam, learning_rate: 1e-4}}
loss: mse
epochs: 1
checkpoint: {{background: true}}
output: {output}
device: cpu
"""


def test_a_program_ends_with_its_last_checkpoint(tmp_path: Path) -> None:
    """The thread that has written it frees tensors, for which it needs the interpreter."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(output=tmp_path / "run"))
    words = [sys.executable, "-m", "hyperslab", "train", str(recipe)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
