"""Video autoencoders decode cut latents as whole ones (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

import itertools
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers.models.autoencoders  # noqa: F401 - else each rank imports it
import pytest
import torch
import torch.distributed as dist

import hyperslab as hs
from tests.ranks import run_ranks
from tests.selection import by_rotation, in_gate

SCRIPT = Path(__file__).parents[2] / "examples" / "video_decode.py"
STAYS_CUT = {"wan": True, "hunyuan": False, "cogvideox": True}
"""Hunyuan's attention over all frames leaves the video whole on every rank."""
GRIDS = {"2": {"height": 2}, "2x2": {"height": 2, "width": 2}}


def of_one_rank(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What the first rank computes, on all of them: a serial run takes most of the time."""
    found = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def decoded(name: str, axes: dict[str, int]) -> tuple[float, tuple[str, ...]]:
    """How far the video is from the serial one, and along which axes it is cut."""
    make: Any = runpy.run_path(str(SCRIPT))["NETWORKS"][name]
    torch.manual_seed(0)
    network = make(8).eval()
    latents = torch.randn(1, 4, 2, 4, 4)
    with torch.inference_mode():
        whole = of_one_rank(lambda: network.decode(latents).sample)
        video = network.decode(hs.shard(latents, hs.Grid(**axes))).sample
        apart = (video.full() - whole).norm() / whole.norm()
    return apart.item(), video.partition.axes


@pytest.mark.parametrize(
    ("name", "grid"),
    in_gate(itertools.product(STAYS_CUT, GRIDS), kept=[("cogvideox", "2x2")]),
)
def test_equal_to_serial(name: str, grid: str) -> None:
    axes = GRIDS[grid]
    for apart, cut in run_ranks(2 ** len(axes), decoded, name, axes):
        assert apart <= 1e-5
        assert cut == (tuple(axes) if STAYS_CUT[name] else ())


def encoded(name: str, axes: dict[str, int]) -> float:
    """How far the latents of a cut video are from the serial ones."""
    make: Any = runpy.run_path(str(SCRIPT))["NETWORKS"][name]
    torch.manual_seed(0)
    network = make(8).eval()
    video = torch.randn(1, 3, 5, 32, 32)
    with torch.inference_mode():
        whole = of_one_rank(lambda: network.encode(video).latent_dist.mode())
        found = network.encode(hs.shard(video, hs.Grid(**axes))).latent_dist.mode()
        return ((found.full() - whole).norm() / whole.norm()).item()


@pytest.mark.parametrize(("name", "grid"), by_rotation(STAYS_CUT, GRIDS))
def test_encoding_is_equal_to_serial(name: str, grid: str) -> None:
    axes = GRIDS[grid]
    assert max(run_ranks(2 ** len(axes), encoded, name, axes)) <= 1e-5


def tiled(name: str, axes: dict[str, int]) -> float:
    """How far a cut video is from the serial one, both decoded in the network's own tiles."""
    make: Any = runpy.run_path(str(SCRIPT))["NETWORKS"][name]
    torch.manual_seed(0)
    network = make(8).eval()
    network.enable_tiling(**TILES[name])
    latents = torch.randn(1, 4, 2, 8, 8)
    with torch.inference_mode():
        whole = of_one_rank(lambda: network.decode(latents).sample)
        found = network.decode(hs.shard(latents, hs.Grid(**axes))).sample
        return ((found.full() - whole).norm() / whole.norm()).item()


WAN_TILES = {
    "tile_sample_min_height": 32,
    "tile_sample_min_width": 32,
    "tile_sample_stride_height": 24,
    "tile_sample_stride_width": 24,
}
TILES = {
    "wan": WAN_TILES,
    "hunyuan": WAN_TILES,
    "cogvideox": {"tile_sample_min_height": 32, "tile_sample_min_width": 32},
}


TILED = [(name, grid) for name in STAYS_CUT for grid in GRIDS]


@pytest.mark.parametrize(("name", "grid"), in_gate(TILED, kept=[("hunyuan", "2x2")]))
def test_tiles_are_equal_to_serial(name: str, grid: str) -> None:
    axes = GRIDS[grid]
    assert max(run_ranks(2 ** len(axes), tiled, name, axes)) <= 1e-5


@pytest.mark.long
def test_the_script_runs() -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--size",
        "4",
        "--frames",
        "2",
        "--width",
        "8",
        "--check",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "wan, 1 ranks: 1 x 3 x 5 x 32 x 32" in done.stdout
    assert float(done.stdout.split()[-1]) <= 1e-5
