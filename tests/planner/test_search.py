"""Plans of small networks (tier: no process)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from hyperslab.comm.placement import axes_in_nodes, places
from hyperslab.errors import DataError, LayoutError
from hyperslab.planner import search, summary
from hyperslab.planner.job import GridJob, job_of
from hyperslab.planner.machine import ReadSpeed, load_machine
from hyperslab.planner.search import (
    GridPlan,
    LeastRanks,
    RooflineEstimate,
    least_ranks,
    make_plan,
    roofline_estimate,
    suggested_changes,
    trace_fitting,
    trace_one,
)
from hyperslab.planner.summary import plan_document, plan_remarks
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import GridSection
from tests.planner.small import bounds, recipe_file, small_job, v100
from tests.selection import by_rotation

pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> GridJob:
    return small_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def all_grids(job: GridJob) -> GridPlan:
    """Of 8 ranks, however much they take."""
    return make_plan(job, v100(), 8, bounds(everything=True))


def test_the_grids_that_fit_come_first_by_time(all_grids: GridPlan) -> None:
    plan = all_grids
    assert plan.untraced == ()
    assert len(plan.traced) + len(plan.refused) == 20
    times = [one.seconds.total for one in plan.traced]
    assert times == sorted(times)
    assert plan.best is plan.traced[0]
    assert {one.grid.data for one in plan.refused} == {8}  # for 4 samples
    for one in plan.traced:
        assert 0 < plan.efficiency(one) < 1.2
        assert one.throughput == pytest.approx(4 / one.seconds.total)


def test_a_limit_divides_the_grids(job: GridJob, all_grids: GridPlan) -> None:
    needs = sorted(one.memory.total for one in all_grids.traced)
    tight = make_plan(job, v100(), 8, bounds(needs[2], everything=True))
    assert tight.best is not None
    assert tight.best.memory.total <= needs[2]
    fits = [one.fits(needs[2]) for one in tight.traced]
    assert fits == sorted(fits, reverse=True)
    assert {tight.binds(one) for one in tight.traced if not one.fits(needs[2])} == {"memory"}
    nothing = make_plan(job, v100(), 8, bounds(needs[0] - 1))
    assert nothing.best is None
    assert nothing.smallest is not None


def test_the_rough_estimate_chooses_what_is_traced(
    job: GridJob, monkeypatch: pytest.MonkeyPatch, traced_once: dict[str, object]
) -> None:
    monkeypatch.setattr(search, "TRACED", 3)
    plan = make_plan(job, v100(), 8, bounds())
    assert len(plan.traced) == 3
    assert len(plan.traced) + len(plan.untraced) + len(plan.refused) == 20
    slowest = max(plan.first.seconds(one.grid) for one in plan.traced)
    assert all(plan.first.seconds(grid) >= slowest for grid in plan.untraced)
    with mock.patch.dict(traced_once, clear=True):  # the result depends on the arguments alone
        again = make_plan(job, v100(), 8, bounds())
    assert [one.grid for one in again.traced] == [one.grid for one in plan.traced]


def test_where_the_fastest_do_not_fit_those_that_need_least_are_traced(
    job: GridJob, all_grids: GridPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rough estimate is no bound: what it takes for small may be too large."""
    least = all_grids.smallest
    assert least is not None
    largest = max(all_grids.traced, key=lambda one: one.memory.total)
    monkeypatch.setattr(search, "TRACED", 1)
    monkeypatch.setattr(RooflineEstimate, "seconds", lambda _, grid: float(grid != largest.grid))
    monkeypatch.setattr(RooflineEstimate, "memory", lambda _, grid: int(grid != least.grid))
    fastest = make_plan(job, v100(), 8, bounds()).traced[0]
    assert fastest.memory.total > least.memory.total
    tight = make_plan(job, v100(), 8, bounds(least.memory.total))
    assert tight.best is not None
    assert tight.best.grid == least.grid


def test_the_rough_estimate_is_near_the_trace(tmp_path: Path) -> None:
    """At the paper's size, where it chooses; it need not be near for toys."""
    path = Path(__file__).parents[2] / "recipes" / "cosmoflow-512.yaml"
    job = job_of(load_recipe(path, ["data.path=nowhere"]))
    plan = make_plan(job, v100(), 128, bounds())
    first = roofline_estimate(job, v100(), 128)
    for one in plan.traced:
        assert first.memory(one.grid) == pytest.approx(one.memory.total, rel=0.05)
        assert first.seconds(one.grid) == pytest.approx(one.seconds.total, rel=0.2)


def test_the_least_number_of_ranks(job: GridJob) -> None:
    plan = make_plan(job, v100(), 4, bounds(everything=True))
    smallest = plan.smallest
    assert smallest is not None
    limit = bounds(smallest.memory.total)
    least = least_ranks(plan.first, limit).found
    assert least is not None
    assert least.grid.size <= 4
    assert least.fits(smallest.memory.total)
    nothing = least_ranks(plan.first, bounds(1000))
    assert nothing.found is None
    assert nothing.proven  # the parameters alone are too large


@pytest.mark.parametrize(
    ("grid", "name"),
    by_rotation(
        [{"depth": 3}, {"depth": 3, "width": 2}, {"data": 2}], ["lassen-v100", "laptop-2core"]
    ),
)
def test_what_does_not_fit_is_not_traced_to_its_end(
    name: str, grid: dict[str, int], job: GridJob
) -> None:
    """To the byte: the limit at which a grid begins to fit is that of its whole trace."""
    machine, cut = load_machine(name), GridSection(**grid)
    whole = trace_one(job, cut, machine, bounds())
    needed = whole.memory.total
    found = trace_fitting(job, cut, machine, bounds(needed))
    assert found is not None
    assert (found.memory, found.seconds.total) == (whole.memory, whole.seconds.total)
    for less in (needed - 1, needed // 2, 1000):
        assert trace_fitting(job, cut, machine, bounds(less)) is None


def test_few_ranks_that_the_rough_estimate_left_out_are_traced(job: GridJob) -> None:
    """However little the rough estimate promises, no more ranks are said than fit already."""
    best = make_plan(job, v100(), 2, bounds()).best
    assert best is not None
    alone = trace_one(job, GridSection(), v100(), bounds())
    careful = roofline_estimate(job, v100(), 2)
    careful = replace(careful, kept=10 * careful.kept)
    tight = bounds(max(alone.memory.total, best.memory.total))
    found = least_ranks(careful, tight, best)
    assert found.proven
    assert found.found is not None
    assert found.found.grid.size == 1
    tighter = bounds(alone.memory.total - 1)
    found = least_ranks(careful, tighter, best)
    assert found.found is best
    assert found.proven


def test_recomputation_and_half_precision_are_traced(tmp_path: Path) -> None:
    job = small_job(tmp_path, "model.batch_norm=true")
    plan = make_plan(job, v100(), 2, bounds())
    tile, recompute, offload, half = suggested_changes(plan)
    assert tile.override == "memory=tile"
    assert recompute.override == "memory=recompute"
    assert recompute.after.cost.flops > recompute.before.cost.flops
    assert offload.override == "memory=offload"
    assert offload.after.memory.activations < offload.before.memory.activations
    assert half.override == "precision=bf16"
    both = small_job(tmp_path, "memory=recompute", "precision=bf16")
    assert suggested_changes(make_plan(both, v100(), 2, bounds())) == []


def test_the_document_holds_all_grids(job: GridJob) -> None:
    plan = make_plan(job, v100(), 8, bounds())
    said = plan_document(plan, suggested_changes(plan), LeastRanks(None, proven=False))
    assert len(said["grids"]) + len(said["not_traced"]) + len(said["illegal"]) == 20
    first = said["grids"][0]
    assert said["best"] == first["grid"]
    assert sum(first["seconds"].values()) == pytest.approx(first["step_seconds"])
    assert sum(first["memory"].values()) == first["bytes"]


def test_no_grid_is_possible(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="no grid of 17 ranks is possible"):
        make_plan(small_job(tmp_path), v100(), 17, bounds())


def test_data_that_are_not_here(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, data={"path": "nowhere", "batch_size": 4})
    job = job_of(load_recipe(path))
    assert job.about.shape == (4, 16, 16, 16)
    assert "nowhere is not here" in job.assumed
    with pytest.raises(DataError, match="--shape"):
        job_of(load_recipe(path, ["model.width=null"]))
    assert job_of(load_recipe(path), (4, 32, 32, 32)).inputs == (4, 4, 32, 32, 32)


def test_accumulated_mini_batches_make_one_step(tmp_path: Path) -> None:
    once = make_plan(small_job(tmp_path), v100(), 2, bounds()).traced[0]
    twice = make_plan(small_job(tmp_path, "optimizer.accumulate=2"), v100(), 2, bounds()).traced[0]
    assert twice.samples == 2 * once.samples
    assert twice.seconds.forward == pytest.approx(2 * once.seconds.forward)
    assert twice.seconds.gradients == pytest.approx(once.seconds.gradients)


def test_a_step_waits_for_what_reading_takes_longer(tmp_path: Path) -> None:
    """Reading goes on beside the step; only what it takes longer than that is waited for."""
    path = recipe_file(tmp_path, data={"path": "nowhere", "batch_size": 4, "mode": "direct"})
    job = job_of(load_recipe(path), (4, 16, 16, 16))
    for seconds in (1e-6, 10.0):
        reading = ReadSpeed(bandwidth=job.step_bytes(GridSection()) / seconds)
        machine = v100().model_copy(update={"reading": reading})
        found = trace_one(job, GridSection(), machine, bounds())
        work = found.seconds.total - found.seconds.input
        assert found.reading == pytest.approx(seconds)
        assert found.seconds.input == pytest.approx(max(0.0, seconds - work))


def test_a_machine_file_of_another_processor_is_named(
    job: GridJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "processor_name", lambda: "another one")
    measured = make_plan(job, load_machine("laptop-2core"), 1, bounds())
    published = make_plan(job, v100(), 1, bounds())
    said, not_said = (
        "\n".join(plan_remarks(plan, [], LeastRanks(None, proven=False)))
        for plan in (measured, published)
    )
    assert "laptop-2core was measured on AMD EPYC, and this is another one" in said
    assert "another one" not in not_said


def test_a_machine_file_of_other_instructions_is_named(
    job: GridJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = load_machine("laptop-2core").model_copy(update={"instructions": "AVX512"})
    monkeypatch.setattr(summary, "processor_name", lambda: machine.processor)
    said = []
    for here in ("AVX2", "AVX512"):
        monkeypatch.setattr(summary, "instruction_set", lambda here=here: here)
        plan = make_plan(job, machine, 1, bounds())
        said.append("\n".join(plan_remarks(plan, [], LeastRanks(None, proven=False))))
    assert "was measured on AMD EPYC (AVX512), and this is AMD EPYC (AVX2)" in said[0]
    assert "was measured on" not in said[1]


def test_which_axes_lie_inside_a_node_is_said(job: GridJob) -> None:
    plan = make_plan(job, v100(), 8, bounds())
    said = "\n".join(plan_remarks(plan, [], LeastRanks(None, proven=False)))
    best = plan.best
    assert best is not None
    mates = np.flatnonzero(places(best.grid.model_dump(), 4, job.about.shape[1:]) < 4)
    inside = axes_in_nodes(best.grid.model_dump(), mates.tolist())
    near, far = map(summary.bytes_text, best.cost.halo_bytes.values())
    assert (
        f"nodes      4 ranks each: {inside}; halos of the slowest rank {near} a mini-batch inside, "
        f"{far} across"
    ) in said
    within = make_plan(job, v100(), 4, bounds())
    assert "nodes " not in "\n".join(plan_remarks(within, [], LeastRanks(None, proven=False)))


def test_batch_norm_of_dense_features_is_estimated_by_two_samples(tmp_path: Path) -> None:
    """One sample has no variance. What is kept for a sample is that of a trace of four, by four."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {name: multiscale, channels: [4, 8]}\n"
        "data: {synthetic: {width: 32}, batch_size: 4}\n"
    )
    job = job_of(load_recipe(path))
    first = roofline_estimate(job, v100(), 2)
    four = trace_one(job, GridSection(), v100(), bounds())
    assert 4 * first.kept + first.held == pytest.approx(four.memory.total, rel=0.05)
    assert first.seconds(GridSection()) == pytest.approx(four.seconds.total, rel=0.3)
    assert make_plan(job, v100(), 2, bounds()).best is not None
