"""Decode a video by diffusers' autoencoders, unchanged, on frames that are cut over ranks.

    python examples/video_decode.py --network wan
    torchrun --nproc-per-node 2 examples/video_decode.py --network wan --cut-height 2 --check

The networks are those of Wan, HunyuanVideo and CogVideoX, narrow, with random weights: what is
shown is memory and time, see docs/video.md. Needs `pip install diffusers`.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import hyperslab as hs
import torch
from torch import nn


def wan(width: int) -> nn.Module:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(base_dim=width, z_dim=4, num_res_blocks=1)


def hunyuan(width: int) -> nn.Module:
    from diffusers import AutoencoderKLHunyuanVideo

    widths = (width, 2 * width, 4 * width, 4 * width)
    return AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=widths, layers_per_block=1, norm_num_groups=4
    )


def cogvideox(width: int) -> nn.Module:
    from diffusers import AutoencoderKLCogVideoX

    widths = (width, 2 * width, 2 * width, 4 * width)
    return AutoencoderKLCogVideoX(
        latent_channels=4, block_out_channels=widths, layers_per_block=1, norm_num_groups=4
    )


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "wan": wan,
    "hunyuan": hunyuan,
    "cogvideox": cogvideox,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--network", choices=NETWORKS, default="wan")
    parser.add_argument("--width", type=int, default=16, help="channels of its first stage")
    parser.add_argument("--frames", type=int, default=3, help="latent frames")
    parser.add_argument("--size", type=int, default=16, help="latent pixels in height and width")
    for axis in ("depth", "height", "width"):
        what = "ranks that share the " + ("frames" if axis == "depth" else axis)
        parser.add_argument(f"--cut-{axis}", type=int, default=1, help=what)
    parser.add_argument("--check", action="store_true", help="compare with all of it on one rank")
    return parser.parse_args()


def peak_memory(device: torch.device) -> float:
    """Of this process so far [MiB]."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    asked = arguments()
    grid = hs.Grid(depth=asked.cut_depth, height=asked.cut_height, width=asked.cut_width)
    torch.manual_seed(0)
    network = NETWORKS[asked.network](asked.width).eval().to(grid.device)
    latents = torch.randn(1, 4, asked.frames, asked.size, asked.size, device=grid.device)
    with torch.inference_mode():
        cut = hs.shard(latents, grid)
        before = peak_memory(grid.device)
        start = time.perf_counter()
        video = network.decode(cut).sample
        local = video.local
        seconds = time.perf_counter() - start
        memory = peak_memory(grid.device) - before
        if grid.is_main:
            shape = " x ".join(map(str, video.shape))
            print(f"{asked.network}, {grid.size} ranks: {shape}, of it {tuple(local.shape)}")
            print(f"{seconds:.2f} s, {memory:.0f} MiB more than before on rank 0")
        if asked.check:
            whole = network.decode(latents).sample
            apart = (video.full() - whole).norm() / whole.norm()
            if grid.is_main:
                print(f"relative distance from the serial video: {apart:.1e}")


if __name__ == "__main__":
    main()
