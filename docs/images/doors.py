"""Draws the pictures of the home page's doors, each from a short run on ranks of torchrun.

torchrun --nproc-per-node 2 docs/images/doors.py [scans] [images] [fourier]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.models import UNet3D
from hyperslab.simulate.phantoms import draw_phantom

SIDE = 48
Panels = dict[str, np.ndarray]


def train(net: nn.Module, grid: hs.Grid, steps: int, draw: Callable, loss: Callable) -> None:
    """Trains on what ``draw(step)`` gives to every rank alike."""
    optim = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step in range(steps):
        x, y = draw(step)
        value = loss(net(hs.shard(x, grid)), hs.shard(y, grid, channels=y.dim() == x.dim()))
        value.backward()
        optim.step()
        optim.zero_grad()
        if grid.is_main and step % 20 == 0:
            print(f"step {step}: {value.item():.4f}", flush=True)


def predict(net: nn.Module, grid: hs.Grid, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net.eval()(hs.shard(x, grid)).full()


def scans() -> Panels:
    """A 3-D U-Net on phantoms of scans, cut along the depth."""
    grid = hs.Grid(depth=torch.distributed.get_world_size())

    def scan(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        hu, classes, _ = draw_phantom(np.random.default_rng(seed), 24, SIDE)
        x = torch.from_numpy(hu.astype(np.float32).T.copy()).clamp(-200, 300)
        x = F.interpolate((x[None, None] + 200) / 500, (16, SIDE, SIDE))
        y = torch.from_numpy(classes.T.copy()).float()[None, None]
        return x, F.interpolate(y, (16, SIDE, SIDE))[0].long()

    torch.manual_seed(0)
    net = hs.parallelize(UNet3D(1, 3, channels=4, levels=2), grid)
    weights = torch.tensor([0.2, 1.0, 3.0])
    train(net, grid, 160, scan, lambda a, b: F.cross_entropy(a, b, weights))
    x, y = scan(1000)
    found = predict(net, grid, x).argmax(1)
    plane = int((y[0] == 2).sum((1, 2)).argmax())
    return {"scan": x[0, 0, plane], "labels": y[0, plane], "predicted": found[0, plane]}


def images() -> Panels:
    """A 2-D network that finds discs among noise and bars, cut along the height."""
    grid = hs.Grid(height=torch.distributed.get_world_size())

    def image(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = np.random.default_rng(seed)
        rows, columns = np.indices((96, 96))
        picture = numbers.normal(0, 0.3, (96, 96))
        labels = np.zeros((96, 96), int)
        for kind in (0, 1) * 5:
            i, j, r = *numbers.uniform(8, 88, 2), numbers.uniform(4, 10)
            disc = (rows - i) ** 2 + (columns - j) ** 2 < r**2
            bar = (abs(rows - i) < 2 * r) & (abs(columns - j) < 2)
            picture += disc if kind else bar
            labels[disc] = 1 if kind else labels[disc]
        return torch.from_numpy(picture).float()[None, None], torch.from_numpy(labels)[None]

    def block(before: int, after: int) -> list[nn.Module]:
        return [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]

    torch.manual_seed(0)
    net = nn.Sequential(
        *block(1, 16), *block(16, 16), nn.MaxPool2d(2), *block(16, 32), *block(32, 32),
        nn.Upsample(scale_factor=2, mode="bilinear"), *block(32, 16), nn.Conv2d(16, 2, 1),
    )  # fmt: skip
    net = hs.parallelize(net, grid)
    train(net, grid, 160, image, F.cross_entropy)
    x, y = image(1000)
    return {"image": x[0, 0], "labels": y[0], "predicted": predict(net, grid, x).argmax(1)[0]}


class Spectral(nn.Module):
    """A Fourier layer: the lowest modes times weights, and a linear map beside it."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        scale = 1 / channels
        size = (channels, channels, 2 * modes, modes)
        self.weight = nn.Parameter(scale * torch.randn(*size, dtype=torch.cfloat))
        self.beside = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = self.modes
        spectrum = torch.fft.rfft2(x)
        low = torch.cat([spectrum[:, :, :m, :m], spectrum[:, :, -m:, :m]], 2)
        low = torch.einsum("bihw,oihw->bohw", low, self.weight)
        pad = (0, spectrum.shape[3] - m)
        top, bottom = F.pad(low[:, :, :m], pad), F.pad(low[:, :, m:], pad)
        rest = spectrum.shape[2] - 2 * m
        middle = F.pad(top * 0, (0, 0, 0, rest - m)) if rest > m else top[:, :, :rest] * 0
        whole = torch.cat([top, middle, bottom], 2)
        return F.gelu(torch.fft.irfft2(whole, s=(x.shape[2], x.shape[3])) + self.beside(x))


def fourier() -> Panels:
    """Fourier layers that learn what viscous flow (Burgers' equation in 2-D) makes of a field."""
    grid = hs.Grid(height=torch.distributed.get_world_size())
    width = 48
    k = np.fft.fftfreq(width, 1 / width)
    size = np.hypot(k[:, None], k[None])

    def field(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = np.random.default_rng(seed)
        u = np.fft.ifft2(np.fft.fft2(numbers.normal(size=(width, width))) * np.exp(-size / 3)).real
        u = begin = u / u.std()
        for _ in range(60):  # u_t = -u (u_x + u_y) + nu lap u
            hat = np.fft.fft2(u * u / 2)
            push = np.fft.ifft2(1j * (k[:, None] + k[None]) * hat).real
            hat = np.fft.fft2(u - 0.004 * push) * np.exp(-0.002 * size**2)
            u = np.fft.ifft2(hat).real
        return tuple(torch.from_numpy(v).float()[None, None] for v in (begin, u))

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 1), *(Spectral(16, 12) for _ in range(3)), nn.Conv2d(16, 1, 1)
    )
    net = hs.parallelize(net, grid)
    train(net, grid, 200, field, F.mse_loss)
    x, y = field(1000)
    return {"field": x[0, 0], "later": y[0, 0], "predicted": predict(net, grid, x)[0, 0]}


KINDS = {"scans": scans, "images": images, "fourier": fourier}


def save(name: str, panels: Panels) -> None:
    figure, axes = plt.subplots(1, len(panels), figsize=(6, 2.3), layout="constrained")
    colours = "RdBu_r" if name == "fourier" else "gray"
    last = list(panels.values())[-2:]
    low, high = float(last[0].min()), float(last[0].max())
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        shared = {"vmin": low, "vmax": high} if title != next(iter(panels)) else {}
        other = "viridis" if name != "fourier" else colours
        axis.imshow(values, cmap=other if shared else colours, interpolation="nearest", **shared)
        axis.set_title(title, fontsize=9)
        axis.axis("off")
    figure.savefig(Path(__file__).with_name(f"door-{name}.png"), dpi=110)


MEMORY = {"Wan, 9 x 192 x 192": (1, 0.48, 0.48), "CogVideoX, 9 x 192 x 192": (1, 0.58, 0.29)}
"""The largest memory of a rank while it decodes, over that of one rank: measured, docs/video.md."""


def draw_video() -> None:
    figure, axis = plt.subplots(figsize=(6, 2.3), layout="constrained")
    for i, (name, shares) in enumerate(MEMORY.items()):
        axis.bar(np.arange(3) + 0.38 * i, shares, 0.36, label=name)
    axis.set_xticks(np.arange(3) + 0.19, ["1 rank", "2 ranks", "4 ranks"])
    axis.set_ylabel("memory of a rank", fontsize=8)
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name("door-video.png"), dpi=110)


def main() -> None:
    if torch.distributed.get_rank() == 0:
        draw_video()
    for name in sys.argv[1:] or KINDS:
        panels = KINDS[name]()
        if torch.distributed.get_rank() == 0:
            save(name, panels)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    main()
    torch.distributed.destroy_process_group()
