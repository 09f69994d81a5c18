"""What saves memory needs hardly more where it cannot help, and auto no more (tier: no process)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from torch import nn

import hyperslab as hs
from hyperslab.errors import LayoutError, RecipeError
from hyperslab.parallel.parallelize import Memory
from hyperslab.planner.auto import choose_grid
from hyperslab.planner.cost import step_cost
from hyperslab.planner.job import job_of
from hyperslab.planner.records import Offload, Trace
from hyperslab.planner.search import PlanBounds, trace_one
from hyperslab.planner.trace import Workload, trace_step
from hyperslab.recipe.load import load_recipe
from hyperslab.train.run import train
from tests.networks import zoo
from tests.planner.test_auto import recipe_file, v100
from tests.selection import in_gate

Builder = Callable[[], tuple[nn.Module, int]]
"""Makes a network, and says how many channels it takes."""


def plain(channels: int, *layers: Callable[[], nn.Module]) -> Builder:
    return lambda: (nn.Sequential(*(layer() for layer in layers)), channels)


def conv(before: int, after: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv3d(before, after, 3, **{"padding": 1, **options})


NETWORKS: Mapping[str, Builder] = {
    "cosmoflow with batch norm": lambda: (hs.models.CosmoFlow(64, batch_norm=True), 4),
    "unet3d": lambda: (hs.models.UNet3D(1, 3, channels=8, levels=2), 1),
    "plain": plain(2, conv(2, 16), nn.ReLU, lambda: nn.MaxPool3d(2), conv(16, 8), nn.ReLU),
}
MOST = {"tile": 1.03, "recompute": 1.1, "offload": 1.03}
"""Times the memory without: in small networks a slab, or a stage that runs again, is not small."""
TILED_FROM = 1 << 14
"""Bytes of a slab that make these small networks run over many of them."""


def traced(build: Builder, memory: Any, axes: Mapping[str, int], width: int = 64) -> Trace:
    _, channels = build()
    shape = (1, channels, width, width, width)
    work = Workload(lambda: build()[0], shape, memory=memory)
    return trace_step(work, axes)


@pytest.mark.parametrize(
    ("name", "ranks"),
    in_gate(
        [(name, ranks) for name in NETWORKS for ranks in (1, 2)],
        kept=[("cosmoflow with batch norm", 2), ("plain", 1), ("plain", 2)],
    ),
)
def test_small_networks_need_hardly_more(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyperslab.ops.slabs.SLAB_BYTES", TILED_FROM)
    axes = {"depth": ranks}
    usual = traced(NETWORKS[name], "none", axes)
    for memory, most in MOST.items():
        found = traced(NETWORKS[name], memory, axes)
        assert found.peak <= most * usual.peak, memory


OTHERS = """
    UNet BasicUNet DynUNet SegResNet AttentionUnet RegUNet DiNTS HighResNet AutoEncoder VNet
    DenseNet ResNet EfficientNet
""".split()
"""MONAI's networks with one output of one input, which a traced step can train."""


def test_an_offloaded_map_is_in_memory_only_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that is joined, which nothing but the file holds between its uses."""
    monkeypatch.setattr("hyperslab.ops.slabs.SLAB_BYTES", TILED_FROM)
    monkeypatch.setattr("hyperslab.parallel.offload.OFFLOADED_FROM", TILED_FROM)
    tile, offload = (
        traced(NETWORKS["unet3d"], memory, {"depth": 2}) for memory in ("tile", "offload")
    )
    others = tile.parameters + tile.gradients
    assert offload.saved < tile.saved / 20
    assert offload.peak - others < 0.85 * (tile.peak - others)
    moved = [event for event in offload.events if isinstance(event, Offload)]
    there, back = (
        sum(event.nbytes for event in moved if event.stage == stage)
        for stage in ("forward", "backward")
    )
    assert there >= back > tile.saved / 2
    machine = v100().model_copy(update={"copying": 1e9})
    found = step_cost(offload, machine, 2).seconds.offload
    assert found == pytest.approx((there + back) / 1e9)


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_networks_of_others_need_hardly_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperslab.ops.slabs.SLAB_BYTES", TILED_FROM)
    network = zoo.NETWORKS[name]

    def build() -> tuple[nn.Module, int]:
        return network.make(), network.shape[1]

    ways = ("none", "tile", "offload")
    peaks = [traced(build, memory, {"depth": 2}, 48).peak for memory in ways]
    assert max(peaks) == peaks[0]
    assert traced(build, "recompute", {"depth": 2}, 48).peak <= 1.02 * peaks[0]


def test_the_fastest_way_that_fits_is_chosen(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path), ["memory=auto"])
    job = job_of(recipe)
    machine = v100()
    plenty = PlanBounds(1 << 40, "a test")
    fastest = trace_one(job, recipe.grid, machine, plenty)
    ways = {
        way: trace_one(job.with_recipe(memory=way), recipe.grid, machine, plenty)
        for way in get_args(Memory)
    }
    most = ways["none"].memory.total
    allowed = [way.seconds.total for way in ways.values() if way.memory.total <= most]
    assert fastest.seconds.total == min(allowed)
    assert fastest.memory.total <= most
    assert choose_grid(recipe, 1, machine, plenty).memory == fastest.saving
    with pytest.raises(LayoutError, match=r"memory=auto: .* does not fit into"):
        choose_grid(recipe, 1, machine, PlanBounds(1000, "a test"))


def test_an_older_word_means_the_same_and_nobody_chooses_in_a_program(tmp_path: Path) -> None:
    assert load_recipe(recipe_file(tmp_path), ["memory=keep"]).memory == "none"
    with pytest.raises(RecipeError, match="memory=auto: nothing here can choose the memory"):
        train(load_recipe(recipe_file(tmp_path), ["memory=auto"]))
