"""What predicts published numbers, on small volumes (tier: no process)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lassen import input_seconds, kept_by_table_1, memory, speed, with_latency, with_nothing_hidden
from paper import kernels, least_gpus, on_cori, reading, speed_up
from published import EFFICIENCY, EPOCH, FITTED, LEAST, STRONG, WEAK, Kernels, Run, SpeedUp

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


def test_half_of_the_scalings_are_predicted() -> None:
    assert 2 * len(FITTED) == len(STRONG) + len(WEAK)


def test_the_store_sends_what_other_replicas_keep(machine: Machine) -> None:
    """Half of two samples of 4 channels of 64³ int16, of which a GPU has half each."""
    assert machine.exchange is not None
    seconds = 0.5 * 4 * 64**3 * 2 / machine.exchange
    two = replace(SMALL, samples=2, gpus=4)
    assert input_seconds(two, machine, 1.0) == pytest.approx(seconds / 2)
    assert input_seconds(replace(two, input="direct"), machine, 1.0) == 0
    whole = input_seconds(replace(two, input="sample"), machine, 1.0)
    assert whole == pytest.approx(4 * 64**3 * 2 / 12.5e9)


def test_cori_loses_what_its_sums_take() -> None:
    efficiency, epoch = on_cori()
    assert efficiency.predicted == pytest.approx(EFFICIENCY, rel=0.15)
    assert epoch.predicted == pytest.approx(EPOCH, rel=0.15)


def test_weak_scaling_keeps_the_samples_of_a_gpu() -> None:
    for case in WEAK:
        assert case.after.samples * case.before.gpus == case.before.samples * case.after.gpus
        assert case.published < case.after.gpus / case.before.gpus


def test_more_messages_scale_worse(machine: Machine) -> None:
    after = replace(SMALL, samples=32, gpus=64)
    row = speed_up(SpeedUp("small", "", 4.0, SMALL, after), "weak", machine)
    assert 0.5 * 8 < row.predicted <= 8
    assert row.ratio == row.predicted / 4
    # Sums over nodes are fitted with their latencies: those of messages alone slow both runs down.
    assert row.others["10 us latency"] != row.predicted
    peak = load_machine("lassen-v100-peak")
    assert speed(after, with_latency(peak, 1e-5)) / speed(SMALL, with_latency(peak, 1e-5)) < (
        speed(after, peak) / speed(SMALL, peak)
    )
    assert row.others.keys() == {"column Peak", "one rate", "10 us latency", "batch norm"}


def test_assumptions_make_steps_longer(machine: Machine) -> None:
    peak = load_machine("lassen-v100-peak")
    assert speed(SMALL, with_nothing_hidden(peak)) < speed(SMALL, peak)
    assert speed(SMALL, with_latency(machine, 1e-3)) < speed(SMALL, machine)


def test_a_distributed_convolution_is_slower_than_its_local_kernels(machine: Machine) -> None:
    time, relative = kernels(Kernels(8, "conv1", 0.0739, 0.938), machine)
    assert 0 < relative.predicted < 1
    # Time x Rel itself is an input.
    assert time.predicted * relative.predicted == pytest.approx(0.938 * 73.9, rel=5e-3)


def test_table_1_counts_more_than_this_program_keeps(machine: Machine) -> None:
    run = Run("cosmoflow", 128, 1, 1, 1)
    assert kept_by_table_1(run) / 2**30 == pytest.approx(0.824, rel=2e-3)
    assert memory(run, machine) - machine.reserved < kept_by_table_1(run)


def test_least_gpus_fit(machine: Machine) -> None:
    name, published, run = LEAST[0]
    row = least_gpus(name, published, run, machine)
    assert row.others[f"GiB {row.predicted:.0f}-way"] <= machine.memory / 2**30
    fewer = row.others.get(f"GiB {row.predicted / 2:.0f}-way")
    assert row.predicted == 1 if fewer is None else fewer > machine.memory / 2**30


def test_reading_follows_the_equation(machine: Machine) -> None:
    assert reading(machine).predicted == pytest.approx(1e3 * 64 * 2**30 / 240e9)
