"""A whole calibration, short (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

import errno
import itertools
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.errors import MachineError
from hyperslab.planner import calibrate as calibration
from hyperslab.planner import timing
from hyperslab.planner.calibrate import Calibration, calibrate
from hyperslab.planner.calls import only_pass
from hyperslab.planner.machine import Machine, load_machine, save_machine
from hyperslab.planner.records import Call, LocalOperator, TensorSpec
from hyperslab.planner.timing import Clock, OperatorToTime, distinct_operators, hidden_share
from hyperslab.planner.trace import Workload, trace_step
from hyperslab.train import flops
from tests.planner.machine.test_machine import gradients, machine
from tests.ranks import run_ranks

SHORT = 0.001  # [s]
# What is measured is looked at, not how well: few repetitions of little.
LITTLE = (
    mock.patch.object(flops, "PEAK_EXTENTS", (64, 128)),
    mock.patch.multiple(calibration, TRIAD_BYTES=1 << 20, FILE_SIZES=(1 << 20, 4 << 20)),
    mock.patch.multiple(timing, REPETITIONS=(2, 4), NETWORK_DEPTHS=(1, 2), ROTATED_BYTES=1 << 20),
    mock.patch.multiple(timing, LAYER_FEATURES=64, LARGEST_SUM=1 << 20, TURNS=1),
    mock.patch.object(timing, "HALO_BYTES", (64 << 10, 256 << 10)),
)


def traced(ranks: int) -> list[LocalOperator]:
    def build() -> torch.nn.Module:
        layers = [torch.nn.Conv3d(1, 2, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(128, 1)]
        return torch.nn.Sequential(*layers)

    workload = Workload(build, (1, 1, 4, 4, 4), target=(1, 1), loss=F.mse_loss)
    return trace_step(workload, {"depth": ranks}).operators


def measure(folder: Path, before: Machine | None, *unknown: LocalOperator) -> Calibration:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    operators = (*traced(ranks), *unknown)
    with LITTLE[0], LITTLE[1], LITTLE[2], LITTLE[3]:
        return calibrate(hs.Grid(data=ranks), "here", folder, operators, before, budget=SHORT)


def on_a_full_disk(folder: Path) -> str:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    grid = hs.Grid(data=2)
    with pytest.MonkeyPatch.context() as patch:
        if grid.rank == 1:
            patch.setattr(os, "fsync", full)
        with pytest.raises(MachineError) as caught:
            calibration.measure_reading(grid, folder)
    return str(caught.value)


def test_a_disk_that_is_full_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    for words in run_ranks(2, on_a_full_disk, tmp_path):
        assert f"cannot write a file in {tmp_path} to time how it is read: No space" in words
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    return measure(tmp_path_factory.mktemp("alone"), None)


@pytest.fixture(scope="module")
def pair(alone: Calibration, tmp_path_factory: pytest.TempPathFactory) -> list[Calibration]:
    """What two ranks add to the file of one."""
    return run_ranks(2, measure, tmp_path_factory.mktemp("pair"), alone.machine)


def test_what_was_asked_for_is_measured(alone: Calibration) -> None:
    setting = alone.machine.setting(1)
    assert alone.measured == len(setting.operators) > 5
    assert {setting.estimate(operator).how for operator in traced(1)} == {"measured"}
    assert setting.bandwidth > 0
    assert alone.machine.links == {}


def test_every_pass_is_measured_apart(alone: Calibration) -> None:
    backward = [op for op in traced(1) if "convolution_backward" in op.call.name]
    (operator,) = backward
    assert (
        alone.machine.setting(1).estimate(only_pass(operator, "backward-filter")).how == "measured"
    )


def test_a_file_comes_back(alone: Calibration, tmp_path: Path) -> None:
    save_machine(alone.machine, tmp_path / "here.yaml")
    assert load_machine(tmp_path / "here.yaml") == alone.machine


def test_ranks_measure_together(pair: list[Calibration]) -> None:
    first, second = (result.machine for result in pair)
    assert first.setting(2).operators == second.setting(2).operators
    assert first.links.keys() == {"device"}
    assert [sums.ranks for sums in first.sums] == [2]
    for line in first.links["device"]:
        assert line.residual is not None
        assert line.residual.worst >= line.residual.median >= 0
    assert first.message_seconds(1000, "device") > 0
    assert first.sum_seconds(10**6, range(2)) > 0
    assert 0 <= first.hidden.halos <= 1
    assert 0 <= first.hidden.gradients <= 1


def test_numbers_of_ranks_join_in_one_file(alone: Calibration, pair: list[Calibration]) -> None:
    joined = pair[0].machine
    assert [setting.ranks for setting in joined.settings] == [1, 2]
    assert joined.at(1) == alone.machine.at(1)
    assert joined.ranks_per_node == 2
    assert joined.links
    of_two = joined.model_copy(update={"settings": (joined.setting(2),)})
    backwards = of_two.joined(alone.machine)
    assert [setting.ranks for setting in backwards.settings] == [1, 2]
    assert backwards.links == joined.links


def test_calls_are_added_to_a_file(alone: Calibration, tmp_path: Path) -> None:
    other = gradients(4)
    again = measure(tmp_path, alone.machine, other)
    assert again.measured == 3  # both passes, and each alone
    before = alone.machine.setting(1)
    after = again.machine.setting(1)
    assert after.operators[: len(before.operators)] == before.operators
    assert after.bandwidth == before.bandwidth


def test_what_a_step_has_most_of_comes_first_where_time_is_short(
    alone: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call is measured; of the operators one takes nearly all of a step."""
    looks = iter([False, True])
    monkeypatch.setattr(timing, "any_rank", lambda late: next(looks))
    before = alone.machine.with_setting(
        alone.machine.setting(1).model_copy(update={"operators": ()})
    )
    large = gradients(64)
    found = measure(tmp_path, before, large)
    assert found.measured == 1
    assert found.left == alone.measured + 3 - 1
    (entry,) = found.machine.setting(1).operators
    assert entry.parsed == large.call


def measure_own(folder: Path, before: Machine) -> int:
    return measure(folder, before, gradients(4 + dist.get_rank())).measured


def test_ranks_may_ask_for_different_operators(pair: list[Calibration], tmp_path: Path) -> None:
    assert run_ranks(2, measure_own, tmp_path, pair[0].machine) == [6, 6]


def test_an_operator_that_torch_lacks_is_named(alone: Calibration, tmp_path: Path) -> None:
    unknown = LocalOperator(Call("mine.secret.default", ()), "", "forward", (), 0, 0)
    result = measure(tmp_path, alone.machine, unknown)
    assert result.measured == 0
    assert result.failed == {
        "mine.secret.default": "this torch has no operator mine.secret.default"
    }


def test_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"here was measured elsewhere.*processor: none there"):
        measure(tmp_path, machine())


def test_other_versions_are_refused(alone: Calibration, tmp_path: Path) -> None:
    older = alone.machine.versions | {"torch": "1.13"}
    before = alone.machine.model_copy(update={"versions": older})
    with pytest.raises(MachineError, match=r"torch: 1\.13 there"):
        measure(tmp_path, before)


def test_other_threads_are_refused(alone: Calibration, tmp_path: Path) -> None:
    setting = alone.machine.setting(1).model_copy(update={"threads": 7})
    with pytest.raises(MachineError, match=r"1 ranks of 7 threads.*\n.*OMP_NUM_THREADS=7"):
        measure(tmp_path, alone.machine.with_setting(setting))


def test_a_call_is_measured_once() -> None:
    operator = gradients(8)
    both, data, weights = distinct_operators([operator, replace(operator, layer="other")])
    assert [both.count, data.count, weights.count] == [2, 0, 0]
    known = [data.operator.call, weights.operator.call]
    assert distinct_operators([operator], known) == [replace(both, count=1)]
    assert not both.library


def pretended(seconds: Iterator[float], asked: list[str]) -> mock._patch[object]:
    """Replaces the measurement of a call."""

    def measure_call(wanted: OperatorToTime, clock: Clock) -> tuple[float, str]:
        asked.append(wanted.operator.layer)
        return next(seconds), "no memory" if wanted.operator.layer == "large" else ""

    return mock.patch.object(timing, "_measure_call", measure_call)


def test_the_least_of_two_looks_at_different_moments_counts() -> None:
    names = ["first", "large", "second", "third"]
    wanted = [
        OperatorToTime(replace(gradients(width), layer=name)) for width, name in enumerate(names, 4)
    ]
    asked: list[str] = []
    times = iter([1.0, 9.0, 8.0, 2.0, 3.0, 5.0, 4.0])
    clock = Clock(hs.Grid(), 0.1)
    with pretended(times, asked), mock.patch.object(timing, "NEXT_LOOK", 3):
        entries, failed = timing.measure_operators(wanted, clock, lambda *_: None)
    assert asked == ["first", "large", "second", "first", "second", "third", "third"]
    assert [entry.seconds for entry in entries] == [1.0, 3.0, 4.0]
    assert failed == {wanted[1].operator.call: "no memory"}


def test_none_is_begun_that_would_end_too_late_if_it_took_as_long_as_the_last() -> None:
    wanted = [OperatorToTime(gradients(width)) for width in (4, 5, 6)]
    moments = iter([0.0, 0.0, 4.0, 8.0])  # at the start and before each
    asked: list[str] = []
    with (
        pretended(itertools.repeat(1.0), asked),
        mock.patch.object(timing, "time", SimpleNamespace(monotonic=lambda: next(moments))),
    ):
        entries, _ = timing.measure_operators(wanted, Clock(hs.Grid()), lambda *_: None, end=11)
    assert len(asked) == len(entries) == 2


def test_what_a_step_calls_often_comes_before_what_takes_longer_once(
    alone: Calibration, tmp_path: Path
) -> None:
    asked: list[str] = []
    often = [replace(gradients(16), layer="often")] * 100
    with pretended(itertools.repeat(1.0), asked):
        measure(tmp_path, alone.machine, replace(gradients(32), layer="once"), *often)
    # Passes alone are in no step: the longest of them first.
    assert asked == 2 * ["often", "once", "once", "once", "often", "often"]


@pytest.mark.parametrize("half", [1e7, 2e11])
def test_bfloat16_has_at_least_the_peak_of_float32(half: float) -> None:
    """A processor without instructions for bfloat16 computes it in float32, far faster."""
    rates = {"float32": 1e11, "bf16": half}
    with mock.patch.object(calibration, "measure_peak", lambda _, precision: rates[precision]):
        peaks = calibration.peak_flops(torch.device("cpu"))
    assert peaks == pytest.approx({"float32": 1e11, "bfloat16": max(half, 1e11)})


def test_an_operand_that_was_handed_over_is_noticed() -> None:
    operator = gradients(8)
    over = replace(operator, call=Call("aten.to_mkldnn.default", operator.call.arguments[1:2]))
    found = distinct_operators([over, operator, gradients(9)])
    assert [wanted.library for wanted in found] == [False, True, True, True, False, False, False]


def test_hidden_shares() -> None:
    assert hidden_share(apart=3, together=2, work=2) == 1
    assert hidden_share(apart=3, together=2.5, work=2) == 0.5
    assert hidden_share(apart=3, together=3.5, work=2) == 0
    assert hidden_share(apart=2, together=2, work=2) == 0


def measure_with_little_memory() -> tuple[int, dict[Call, str], bool]:
    def product(name: str, extent: int) -> LocalOperator:
        spec = TensorSpec((extent,), (1,), torch.float32)
        return LocalOperator(Call(name, (spec, spec)), "", "forward", (), 0, 0)

    limits = resource.getrlimit(resource.RLIMIT_AS)
    wanted = [product("aten.mul.Tensor", 100_000_000), product("aten.add.Tensor", 1000)]
    clock = timing.Clock(hs.Grid(data=2), SHORT)
    with mock.patch.object(timing, "free_memory", return_value=1 << 29):
        entries, failed = timing.measure_operators(
            distinct_operators(wanted), clock, lambda done, total: None
        )
    return len(entries), failed, resource.getrlimit(resource.RLIMIT_AS) == limits


def test_a_call_that_is_too_large_for_a_rank_is_left_out() -> None:
    """In place of a rank that the system ends without a word."""
    for measured, failed, restored in run_ranks(2, measure_with_little_memory):
        assert measured == 1
        ((call, why),) = failed.items()
        assert call.name == "aten.mul.Tensor"
        assert "memory" in why
        assert restored
