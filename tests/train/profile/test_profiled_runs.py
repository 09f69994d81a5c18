"""Profiles of whole runs, also of those that stop (tiers: one process; a few gloo ranks)."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperslab.comm.communicator import PendingMessages
from hyperslab.errors import DivergedError, Stopped
from hyperslab.recipe.load import load_recipe
from hyperslab.train.profile import Profile, predicted_path, profile_path, read_profiles
from hyperslab.train.profiler import ProfilePolicy, StepRecorder
from hyperslab.train.run import train
from hyperslab.train.step import StepClock
from hyperslab.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.selection import in_gate
from tests.train.universes import losses, narrow_network, run, write_recipe

POLICY = ProfilePolicy(warm_up=1, steps=2)


def profiled(recipe: Path, *overrides: str, policy: ProfilePolicy = POLICY) -> None:
    with narrow_network():
        train(load_recipe(recipe, overrides), profile=policy)


@contextmanager
def at_step(step: int, do: Callable[[Trainer], object]) -> Iterator[None]:
    """Do something in the middle of a step."""
    original = Trainer.train_step

    def changed(self: Trainer, *args: Any) -> Any:
        if self.at.step == step - 1:
            do(self)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", changed)
        yield


@pytest.fixture(scope="module")
def of_two(universes: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Profile]:
    """The profiles of both ranks of a run."""
    recipe = write_recipe(tmp_path_factory.mktemp("two") / "run.yaml", universes)
    run_ranks(2, profiled, recipe, "grid.depth=2")
    return read_profiles(recipe.with_suffix(""))


def test_every_rank_writes_its_own(of_two: list[Profile]) -> None:
    assert [(p.rank, p.ranks, p.ended) for p in of_two] == [(0, 2, None), (1, 2, None)]
    for profile in of_two:
        # One warms up, one warms the profiler up; the fourth step would begin another epoch.
        assert [step.step for step in profile.steps] == [3, 4]
        assert profile.usual_seconds is not None


def test_the_rows_cover_the_step(of_two: list[Profile]) -> None:
    for profile in of_two:
        for step in profile.steps:
            assert step.covered <= 1 + 1e-9
            for row in ("convolutions", "operators", "halos", "statistics", "gradients", "data"):
                assert step.rows[row] > 0, row
            assert step.spans["halos under way"]
    # A step of milliseconds may be interrupted between its rows, but not all four.
    assert max(step.covered for profile in of_two for step in profile.steps) > 0.8


def test_rows_do_not_overlap(of_two: list[Profile]) -> None:
    for step in of_two[0].steps:
        spans = sorted(s for row, found in step.spans.items() if "under" not in row for s in found)
        for (_, end, _), (begin, _, _) in itertools.pairwise(spans):
            assert begin >= end - 1e-6
        for row, seconds in step.rows.items():
            spent = sum(end - begin for begin, end, _ in step.spans.get(row, []))
            assert spent == pytest.approx(seconds, abs=1e-6 * (1 + len(step.spans.get(row, []))))


def test_every_layer_has_both_passes(of_two: list[Profile]) -> None:
    found = {(time.layer, time.stage): time for time in of_two[0].layers}
    for layer in ("features.conv1", "features.norm1", "features.conv2", "head.fc1"):
        for stage in ("forward", "backward"):
            assert found[layer, stage].compute > 0
    for stage in ("forward", "backward"):
        assert found["features.conv2", stage].communication > 0
        assert found["features.norm1", stage].communication > 0
    assert found["", "optimizer"].compute > 0


def test_a_profile_changes_no_number(tmp_path: Path, universes: Path) -> None:
    plain = write_recipe(tmp_path / "plain.yaml", universes, epochs=2)
    run(plain)
    other = write_recipe(tmp_path / "other.yaml", universes, epochs=2)
    profiled(other)
    assert losses(other.with_suffix("")) == losses(plain.with_suffix(""))


def test_nothing_is_left_of_it_after_its_steps(tmp_path: Path, universes: Path) -> None:
    original = PendingMessages.__init__
    seen: list[tuple[bool, bool]] = []

    def look(trainer: Trainer) -> None:
        hooks = any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())
        seen.append((PendingMessages.__init__ is original, hooks))

    with at_step(2, look), at_step(6, look):
        profiled(write_recipe(tmp_path / "run.yaml", universes, epochs=2))
    assert seen == [(False, True), (True, False)]


def test_without_it_nothing_is_recorded(
    tmp_path: Path, universes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a run without --profile")

    monkeypatch.setattr(StepRecorder, "__init__", never)
    original = PendingMessages.__init__

    def look(trainer: Trainer) -> None:
        assert PendingMessages.__init__ is original
        assert not torch.autograd.profiler._is_profiler_enabled
        assert not any(m._forward_hooks for m in trainer.model.modules())

    recipe = write_recipe(tmp_path / "run.yaml", universes)
    with at_step(3, look):
        run(recipe, "epochs=1")
    assert not (recipe.with_suffix("") / "profile").exists()


def stopping(recipe: Path, *overrides: str) -> None:
    with at_step(4, lambda _: signal.raise_signal(signal.SIGTERM)), pytest.raises(Stopped):
        profiled(recipe, *overrides, policy=ProfilePolicy(warm_up=1, steps=50))


@pytest.mark.parametrize("ranks", in_gate([1, 2], kept=[2]))
def test_a_signal_leaves_what_was_recorded(tmp_path: Path, universes: Path, ranks: int) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    if ranks == 1:
        stopping(recipe)
    else:
        run_ranks(2, stopping, recipe, "grid.depth=2")
    found = read_profiles(recipe.with_suffix(""))
    assert len(found) == ranks
    for profile in found:
        assert profile.ended is not None
        assert profile.ended.startswith("stopped by SIGTERM")
        assert [step.step for step in profile.steps] == [3, 4]
        assert profile.layers


def test_a_run_that_diverges_leaves_what_was_recorded(
    tmp_path: Path, universes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)

    def break_weights(trainer: Trainer) -> None:
        for parameter in trainer.model.parameters():
            parameter.data.fill_(torch.nan)

    caplog.set_level("INFO", "hyperslab")
    with at_step(4, break_weights), pytest.raises(DivergedError):
        profiled(recipe, policy=ProfilePolicy(warm_up=1, steps=50))
    (profile,) = read_profiles(recipe.with_suffix(""))
    assert profile.ended is not None
    assert "not a finite number in step 4" in profile.ended
    assert profile.steps
    assert f"profiled {len(profile.steps)} steps, not 50: the loss is not" in caplog.text


def test_a_run_that_ends_before_says_so(
    tmp_path: Path, universes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    caplog.set_level("INFO", "hyperslab")
    profiled(recipe, "epochs=1", policy=ProfilePolicy(warm_up=20))
    (profile,) = read_profiles(recipe.with_suffix(""))
    assert (profile.ended, profile.steps, profile.median) == ("the run ended", [], None)
    assert "no step was profiled: the run ended before there was one" in caplog.text


def test_a_profile_that_cannot_be_written_ends_no_training(
    tmp_path: Path, universes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=2)
    out = recipe.with_suffix("")
    out.mkdir()
    (out / "profile").write_text("a file in the way")
    profiled(recipe)
    assert len(losses(out)) == 6
    assert f"the profile {profile_path(out, 0)} cannot be written" in caplog.text


def test_profiles_of_an_earlier_start_are_removed(tmp_path: Path, universes: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=1)
    stale = profile_path(recipe.with_suffix(""), 5)
    stale.parent.mkdir(parents=True)
    stale.write_text("{")
    expected_then = predicted_path(recipe.with_suffix(""))  # perhaps for another grid
    expected_then.write_text("{")
    profiled(recipe)
    assert not expected_then.exists()
    assert [p.rank for p in read_profiles(recipe.with_suffix(""))] == [0]


def test_no_step_has_the_time_in_which_the_profile_is_written(
    tmp_path: Path, universes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes)
    calls: list[str] = []
    for owner, name in ((StepRecorder, "finish"), (StepClock, "restart"), (StepClock, "lap")):
        original = getattr(owner, name)

        def noted(*args: Any, name: str = name, original: Callable[..., Any] = original) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, noted)
    profiled(recipe, "epochs=1", policy=ProfilePolicy(warm_up=0, steps=1))
    written = calls.index("finish")
    assert calls[written : written + 3] == ["finish", "restart", "lap"]
