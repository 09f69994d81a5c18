"""Whatever saves memory never needs more than nothing (tier: no process)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hyperslab as hs
from hyperslab.errors import LayoutError, RecipeError
from hyperslab.planner.auto import choose_grid
from hyperslab.planner.job import job_of
from hyperslab.planner.search import MemoryLimit, PlanBounds, trace_one
from hyperslab.planner.trace import Trace, Workload, trace_step
from hyperslab.recipe.load import load_recipe
from hyperslab.train.run import train
from tests.planner.test_auto import recipe_file, v100

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # MONAI's own

Builder = Callable[[], tuple[nn.Module, int]]
"""Makes a network, and says how many channels it takes."""


def monai(name: str, *args: Any, **options: Any) -> Builder:
    def build() -> tuple[nn.Module, int]:
        import monai.networks.nets as nets

        return getattr(nets, name)(*args, **options), 1

    return build


def plain(channels: int, *layers: Callable[[], nn.Module]) -> Builder:
    return lambda: (nn.Sequential(*(layer() for layer in layers)), channels)


def conv(before: int, after: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv3d(before, after, 3, **{"padding": 1, **options})


NETWORKS: Mapping[str, Builder] = {
    "cosmoflow": lambda: (hs.models.CosmoFlow(64), 4),
    "cosmoflow with batch norm": lambda: (hs.models.CosmoFlow(64, batch_norm=True), 4),
    "cosmoflow sc18": lambda: (hs.models.CosmoFlow(64, variant="sc18"), 1),
    "cosmoflow lbann": lambda: (hs.models.CosmoFlow(64, variant="lbann"), 4),
    "cosmoflow mlperf": lambda: (hs.models.CosmoFlow(64, variant="mlperf"), 4),
    "unet3d": lambda: (hs.models.UNet3D(1, 3, channels=8, levels=2), 1),
    "unet3d deep": lambda: (hs.models.UNet3D(1, 3, channels=4, levels=4), 1),
    "unet": monai("UNet", 3, 1, 3, (8, 16, 32), (2, 2), num_res_units=2),
    "unet with batch norm": monai("UNet", 3, 1, 3, (8, 16, 32), (2, 2), norm="batch"),
    "basic unet": monai("BasicUNet", 3, 1, 3, (8, 8, 16, 16, 32, 8)),
    "basic unet++": monai("BasicUNetPlusPlus", 3, 1, 3, (4, 4, 8, 8, 16, 4)),
    "dynunet": monai("DynUNet", 3, 1, 3, [3] * 4, [1, 2, 2, 2], [2] * 3, filters=(8, 16, 32, 32)),
    "segresnet": monai("SegResNet", 3, 8, 1, 3, blocks_down=(1, 2), blocks_up=(1,)),
    "attention unet": monai("AttentionUnet", 3, 1, 3, (8, 16, 32), (2, 2)),
    "regunet": monai("RegUNet", 3, 1, 8, 2, out_channels=3),
    "autoencoder": monai("AutoEncoder", 3, 1, 3, (8, 16), (2, 1)),
    "vnet": monai("VNet", 3, 1, 3),
    "densenet": monai("DenseNet121", 3, 1, 3),
    "resnet": monai("resnet18", n_input_channels=1, num_classes=3),
    "senet": monai("SEResNet50", 3, 1, 3),
    "plain": plain(2, conv(2, 16), nn.ReLU, lambda: nn.MaxPool3d(2), conv(16, 8), nn.ReLU),
    "no pooling": plain(2, conv(2, 8), nn.LeakyReLU, conv(8, 16, bias=False), nn.ReLU),
    "instance norm": plain(
        2, conv(2, 8), lambda: nn.InstanceNorm3d(8), nn.LeakyReLU, conv(8, 8), nn.ReLU
    ),
}
IN_GATE = ("cosmoflow with batch norm", "unet3d", "plain")
TILED_FROM = 1 << 14
"""Bytes of a slab that make these small networks run over many of them."""


def traced(build: Builder, memory: Any, axes: Mapping[str, int], dtype: Any) -> Trace:
    _, channels = build()
    shape = (1, channels, 64, 64, 64)
    work = Workload(lambda: build()[0], shape, memory=memory, precision=dtype)
    return trace_step(work, axes)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize(
    "name",
    [n if n in IN_GATE else pytest.param(n, marks=pytest.mark.long) for n in NETWORKS],
)
def test_no_network_needs_more(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperslab.ops.slabs.SLAB_BYTES", TILED_FROM)
    for axes in ({}, {"depth": 2}):
        plain = traced(NETWORKS[name], "none", axes, dtype)
        for memory in ("tile", "recompute"):
            found = traced(NETWORKS[name], memory, axes, dtype)
            assert found.peak <= plain.peak, (memory, axes, found.peak / plain.peak)


def test_the_fastest_way_that_fits_is_chosen(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path), ["memory=auto"])
    job = job_of(recipe)
    machine = v100()
    plenty = PlanBounds(MemoryLimit(1 << 40, "a test"))
    fastest = trace_one(job, recipe.grid, machine, plenty)
    ways = {
        way: trace_one(job.with_recipe(memory=way), recipe.grid, machine, plenty)
        for way in ("none", "tile", "recompute")
    }
    assert fastest.seconds.total == min(way.seconds.total for way in ways.values())
    assert choose_grid(recipe, 1, machine, plenty).memory == fastest.saving
    with pytest.raises(LayoutError, match=r"memory=auto: .* does not fit into"):
        choose_grid(recipe, 1, machine, PlanBounds(MemoryLimit(1000, "a test")))


def test_an_older_word_means_the_same_and_nobody_chooses_in_a_program(tmp_path: Path) -> None:
    assert load_recipe(recipe_file(tmp_path), ["memory=keep"]).memory == "none"
    with pytest.raises(RecipeError, match="memory=auto: there is nobody to choose the memory"):
        train(load_recipe(recipe_file(tmp_path), ["memory=auto"]))
