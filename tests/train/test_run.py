"""Whole runs: stopped and gone on with, on other grids (tiers: one process; a few gloo ranks)."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyperslab.checkpoint.retention import folder_of, latest
from hyperslab.errors import CheckpointError, RecipeError, Stopped
from hyperslab.recipe.load import load_recipe
from hyperslab.train.evaluate import evaluate
from hyperslab.train.run import awaiting_run, check_held, lock_run
from hyperslab.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.selection import in_gate
from tests.train.universes import losses, run, write_recipe

TOLERANCE = 1e-4
STEPS = 9  # three epochs of two full mini-batches and one of three samples


def stopped(recipe: Path, step: int, rank: int, *overrides: str, resume: bool = False) -> str:
    """Run until one rank gets SIGTERM while it computes a step; the message of the stop."""
    original = Trainer.train_step

    def interrupted(self: Trainer, *args: Any) -> Any:
        if self.at.step == step - 1 and self.grid.rank == rank:
            signal.raise_signal(signal.SIGTERM)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", interrupted)
        with pytest.raises(Stopped) as caught:
            run(recipe, *overrides, resume=resume)
    assert caught.value.code == 128 + signal.SIGTERM
    return str(caught.value)


@pytest.fixture(scope="module")
def reference(universes: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an uninterrupted serial run."""
    recipe = write_recipe(tmp_path_factory.mktemp("reference") / "run.yaml", universes)
    run(recipe)
    return losses(recipe.with_suffix(""))


def test_the_reference_trains(reference: list[float]) -> None:
    assert len(reference) == STEPS
    assert len(set(reference)) == STEPS


@pytest.mark.parametrize("step", [2, 4])
def test_stopped_and_gone_on_with(
    tmp_path: Path, universes: Path, reference: list[float], step: int
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    message = stopped(recipe, step, 0)
    newest = latest(recipe.with_suffix(""))
    assert newest is not None
    assert newest.name in message
    assert newest.name == f"step-{step + 1:08}"  # the ranks agree while the next step runs
    assert len(losses(recipe.with_suffix(""))) == step + 1
    run(recipe, resume=True)
    assert losses(recipe.with_suffix("")) == reference


def test_history_of_a_killed_run_has_no_step_twice(
    tmp_path: Path, universes: Path, reference: list[float]
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes), tmp_path / "run"
    original = Trainer.train_step

    def killed(self: Trainer, *args: Any) -> Any:
        if self.at.step == 7:
            raise KeyboardInterrupt
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", killed)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, "checkpoint.every_steps=4")
    assert len(losses(out)) > 4
    run(recipe, resume=True)
    assert losses(out) == reference
    epochs = (out / "epochs.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in epochs] == ["epoch", "0", "1", "2"]
    means = [float(line.split(",")[1]) for line in epochs[1:]]
    by_epoch = [reference[i : i + 3] for i in (0, 3, 6)]
    weighted = [(4 * a + 4 * b + 3 * c) / 11 for a, b, c in by_epoch]
    assert means == pytest.approx(weighted, rel=1e-6)


def test_a_corrupt_newest_checkpoint_costs_only_its_steps(
    tmp_path: Path, universes: Path, reference: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes), tmp_path / "run"
    stopped(recipe, 7, 0, "checkpoint.every=1")
    newest = latest(out)
    assert newest is not None
    victim = newest / "optimizer.safetensors"
    victim.write_bytes(victim.read_bytes()[:1000])
    run(recipe, resume=True)
    assert f"{newest} is corrupt" in caplog.text
    assert losses(out) == reference


GRIDS = [
    (2, ["grid.depth=2"], 2, ["grid.data=2"]),
    (1, [], 4, ["grid.depth=2", "grid.width=2"]),
    (4, ["grid.data=2", "grid.height=2"], 1, []),
]


@pytest.mark.parametrize(
    ("first", "grid", "second", "other"),
    in_gate(GRIDS, kept=GRIDS[1:]),
    ids=lambda v: "-".join(v) if v and isinstance(v, list) else None,
)
def test_gone_on_with_on_another_grid(
    tmp_path: Path,
    universes: Path,
    reference: list[float],
    first: int,
    grid: list[str],
    second: int,
    other: list[str],
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes), tmp_path / "run"
    messages = run_ranks(first, stopped, recipe, 4, first - 1, *grid)
    assert len(set(messages)) == 1
    assert 4 <= len(losses(out)) < STEPS
    run_ranks(second, _resume, recipe, *other)
    assert losses(out) == pytest.approx(reference, rel=TOLERANCE)


def _resume(recipe: Path, *overrides: str) -> None:
    run(recipe, *overrides, resume=True)


def test_a_finished_run_is_left_alone(
    tmp_path: Path, universes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=1), tmp_path / "run"
    with caplog.at_level("INFO", "hyperslab"):
        run(recipe, resume=True)
    assert f"nothing to resume in {out}: from the start" in caplog.text
    before = losses(out)
    with pytest.raises(RecipeError, match=r"holds a run already\n.*--resume .*resume=True"):
        run(recipe)
    run(recipe, resume=True)
    assert losses(out) == before
    further = ["epochs=2", "stop_at.validation_loss=1e-9"]
    with caplog.at_level("INFO", "hyperslab"):
        run(recipe, *further, resume=True)
    assert caplog.messages[-1] == "stop_at.validation_loss=1e-09: not reached after epoch 2"
    assert losses(out)[:3] == before
    assert len(losses(out)) == 6
    with pytest.raises(RecipeError, match=r"batch_size is 2 but .* was written with 4"):
        run(recipe, "data.batch_size=2", resume=True)
    assert load_recipe(out / "recipe.yaml") == load_recipe(recipe, further)


def test_a_resume_without_an_intact_checkpoint_overwrites_nothing(
    tmp_path: Path, universes: Path
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=1), tmp_path / "run"
    run(recipe)
    for manifest in folder_of(out).glob("step-*/manifest.json"):
        manifest.unlink()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=f"none of the 1 checkpoints in {folder_of(out)} is"):
        run(recipe, "epochs=2", resume=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_samples_that_may_have_been_trained_on_are_warned_of(
    tmp_path: Path, universes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=1), tmp_path / "run"
    run(recipe)
    evaluate(out)
    assert "may hold samples that it has seen" not in caplog.text
    evaluate(out, overrides=["data.seed=1"])
    assert "the test split of" in caplog.text
    assert "may hold samples that it has seen" in caplog.text


def test_a_resume_on_another_training_split_is_refused(tmp_path: Path, universes: Path) -> None:
    folder = tmp_path / "universes"
    folder.mkdir()
    for file in universes.iterdir():
        (folder / file.name).symlink_to(file)
    recipe = write_recipe(tmp_path / "run.yaml", folder, epochs=1)
    run(recipe)
    for override in ("data.seed=1", "data.fractions=[0.6,0.2,0.2]"):
        with pytest.raises(RecipeError, match=r"training split is not the one that .*step-0"):
            run(recipe, override, "epochs=2", resume=True)
    (folder / "univ_more.hdf5").symlink_to(next(universes.iterdir()))
    with pytest.raises(RecipeError, match=r"files in data\.path have changed"):
        run(recipe, "epochs=2", resume=True)
    (folder / "univ_more.hdf5").unlink()
    moved = folder.rename(tmp_path / "moved")
    run(recipe, f"data.path={moved}", "epochs=2", resume=True)
    assert len(losses(tmp_path / "run")) == 6


@pytest.mark.parametrize("resume", [False, True])
def test_one_run_at_a_time_in_a_folder(tmp_path: Path, universes: Path, resume: bool) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=1), tmp_path / "run"
    out.mkdir()
    with (
        lock_run(out),
        pytest.raises(RecipeError, match=f"another run is under way in output {out}"),
    ):
        run(recipe, resume=resume)
    assert [path.name for path in out.iterdir()] == [".lock"]
    run(recipe, resume=resume)
    with lock_run(out):
        pass  # a run that has ended lets go


def test_no_checkpoint_goes_into_the_folder_of_another_run(tmp_path: Path, universes: Path) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes), tmp_path / "run"
    moved = tmp_path / "moved"
    with ExitStack() as other:

        def begin_another(*_: Any) -> None:
            if not moved.exists():
                out.rename(moved)
                out.mkdir()
                other.enter_context(lock_run(out))

        other.callback(register_optimizer_step_pre_hook(begin_another).remove)
        with pytest.raises(CheckpointError, match=f"into {out}: it is another run's folder by now"):
            run(recipe)
    assert [path.name for path in out.iterdir()] == [".lock"]


def test_another_start_leaves_a_run_its_folder(
    tmp_path: Path, universes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be locked, one by mistake, and one that waits for the ranks before it."""
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=1), tmp_path / "run"
    run(recipe)
    monkeypatch.setattr("hyperslab.train.run.try_lock", lambda _: True)
    with lock_run(out) as lock:
        with pytest.raises(RecipeError, match="holds a run already"):
            run(recipe)
        assert list(awaiting_run(out)) == []
        check_held(out, lock)


def test_the_folder_of_a_run(tmp_path: Path, universes: Path) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes), tmp_path / "run"
    run(recipe, "checkpoint.every=1", "checkpoint.keep=1", "optimizer.clip=0.5")
    names = {path.name for path in out.iterdir()}
    assert names == {
        ".lock",
        "recipe.yaml",
        "steps.csv",
        "epochs.csv",
        "checkpoints",
    }
    saved = yaml.safe_load((out / "recipe.yaml").read_text())
    assert saved["optimizer"]["clip"] == 0.5
    assert saved["optimizer"]["schedule"]["factor"] == 0.01
    kept = {path.name for path in folder_of(out).iterdir()}
    rows = [line.split(",") for line in (out / "epochs.csv").read_text().splitlines()[1:]]
    best = min(range(3), key=lambda epoch: float(rows[epoch][2]))
    assert kept == {"best", "step-00000009", f"step-{3 * (best + 1):08}"}
    assert os.readlink(folder_of(out) / "best") == f"step-{3 * (best + 1):08}"


def first_gradient(recipe: Path, *overrides: str) -> tuple[float, torch.Tensor]:
    """Loss of the first step, and the gradient that the optimizer got."""
    found: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        found.append(torch.cat([grad.flatten() for grad in grads]).clone())

    hook = register_optimizer_step_pre_hook(keep)
    try:
        run(recipe, *overrides)
    finally:
        hook.remove()
    return losses(load_recipe(recipe, overrides).output)[0], found[0]


def test_accumulated_mini_batches_are_one_large_one(tmp_path: Path, universes: Path) -> None:
    keys: dict[str, Any] = {"model": {"variant": "lbann", "dropout": 0.0}, "epochs": 1}
    recipe = write_recipe(tmp_path / "run.yaml", universes, **keys)
    out = tmp_path / "run"
    size = "data.batch_size="
    loss, gradient = first_gradient(recipe, f"output={out}-1", size + "11")
    # Eleven samples as 4 + 4 + 3: the last one counts less.
    again, accumulated = first_gradient(
        recipe, f"output={out}-2", size + "4", "optimizer.accumulate=3"
    )
    assert len(losses(Path(f"{out}-2"))) == 1
    assert again == pytest.approx(loss, rel=1e-5)
    assert torch.linalg.norm(accumulated - gradient) <= 1e-5 * torch.linalg.norm(gradient)


def test_clipping_bounds_the_step(tmp_path: Path, universes: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=1)
    _, gradient = first_gradient(recipe, "optimizer.clip=0.001")
    assert torch.linalg.norm(gradient) == pytest.approx(0.001, rel=1e-3)


def test_bf16_is_close_but_not_equal(
    tmp_path: Path, universes: Path, reference: list[float]
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=1)
    run(recipe, "precision=bf16")
    second = losses(tmp_path / "run")[1]  # the first prediction is zero in any precision
    assert second == pytest.approx(reference[1], rel=0.05)
    assert second != reference[1]
