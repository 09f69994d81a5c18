"""What predicts published numbers, on small volumes (tier: no process)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lassen import kept_by_table_1, memory, speed, with_latency, with_nothing_hidden
from paper import kernels, least_gpus, reading, speed_up
from published import LEAST, STRONG, WEAK, Kernels, Run, SpeedUp

from hyperslab.planner.machine import Machine, load_machine

SMALL = Run("cosmoflow", 64, 4, 8, 2)


@pytest.fixture
def machine() -> Machine:
    return load_machine("lassen-v100")


def test_published_runs_use_all_their_gpus() -> None:
    for case in (*STRONG, *WEAK):
        for run in (case.before, case.after):
            assert run.extents["data"] * run.extents["depth"] == run.gpus
            assert run.samples % run.extents["data"] == 0


def test_weak_scaling_keeps_the_samples_of_a_gpu() -> None:
    for case in WEAK:
        assert case.after.samples * case.before.gpus == case.before.samples * case.after.gpus
        assert case.published < case.after.gpus / case.before.gpus


def test_more_messages_scale_worse(machine: Machine) -> None:
    after = replace(SMALL, samples=32, gpus=64)
    row = speed_up(SpeedUp("small", "", 4.0, SMALL, after), "weak", machine)
    assert 0.5 * 8 < row.predicted <= 8
    assert row.ratio == row.predicted / 4
    assert row.others["10 us latency"] < row.predicted
    assert row.others.keys() == {"nothing hidden", "one rate", "10 us latency", "batch norm"}


def test_assumptions_make_steps_longer(machine: Machine) -> None:
    assert speed(SMALL, with_nothing_hidden(machine)) < speed(SMALL, machine)
    assert speed(SMALL, with_latency(machine, 1e-3)) < speed(SMALL, machine)


def test_a_distributed_convolution_is_slower_than_its_local_kernels(machine: Machine) -> None:
    time, relative = kernels(Kernels(8, "conv1", 0.0739, 0.938), machine)
    assert 0 < relative.predicted < 1
    # Peak itself, 13.0 Tflop/s for 928 Gflop, is an input.
    assert time.predicted * relative.predicted == pytest.approx(928 / 13.0, rel=5e-3)


def test_table_1_counts_more_than_this_program_keeps(machine: Machine) -> None:
    run = Run("cosmoflow", 128, 1, 1, 1)
    assert kept_by_table_1(run) / 2**30 == pytest.approx(0.824, rel=2e-3)
    assert memory(run, machine) < kept_by_table_1(run)


def test_least_gpus_fit(machine: Machine) -> None:
    name, published, run = LEAST[0]
    row = least_gpus(name, published, run, machine)
    assert row.others[f"GiB {row.predicted:.0f}-way"] <= machine.memory / 2**30
    fewer = row.others.get(f"GiB {row.predicted / 2:.0f}-way")
    assert row.predicted == 1 if fewer is None else fewer > machine.memory / 2**30


def test_reading_follows_the_equation(machine: Machine) -> None:
    assert reading(machine).predicted == pytest.approx(1e3 * 64 * 2**30 / 240e9)
