"""Draws the pictures of the home page's six doors: of short trainings, or of results kept here.

torchrun --nproc-per-node 2 docs/images/doors.py [universes scans video images fourier clusters]
"""

from __future__ import annotations

import csv
import io
import json
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Affine2D
from torch import nn

import hyperslab as hs
from hyperslab.models import UNet3D
from hyperslab.simulate.phantoms import draw_phantom
from hyperslab.simulate.universes import make_universes

SIDE = 48
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
Panels = dict[str, torch.Tensor]


def train(net: nn.Module, grid: hs.Grid, steps: int, draw: Callable, loss: Callable) -> None:
    """Trains on what ``draw(step)`` gives to every rank alike."""
    optim = torch.optim.Adam(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optim, 1, 0.05, steps)
    for step in range(steps):
        x, y = draw(step)
        value = loss(net(hs.shard(x, grid)), hs.shard(y, grid, channels=y.dim() == x.dim()))
        value.backward()
        optim.step()
        optim.zero_grad()
        schedule.step()
        if grid.is_main and step % 20 == 0:
            print(f"step {step}: {value.item():.4f}", flush=True)


def predict(net: nn.Module, grid: hs.Grid, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net.eval()(hs.shard(x, grid)).full()


def scans() -> Panels:
    """Trains a 3-D U-Net on phantoms of scans, cut along the height."""
    grid = hs.Grid(height=torch.distributed.get_world_size())

    def scan(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        hu, classes, _ = draw_phantom(np.random.default_rng(seed), 24, SIDE)
        x = torch.from_numpy(hu.astype(np.float32).T.copy()).clamp(-200, 300)
        x = F.interpolate((x[None, None] + 200) / 500, (16, SIDE, SIDE))
        y = torch.from_numpy(classes.T.copy()).float()[None, None]
        return x, F.interpolate(y, (16, SIDE, SIDE))[0].long()

    torch.manual_seed(0)
    net = hs.parallelize(UNet3D(1, 3, channels=4, levels=2), grid)
    weights = torch.tensor([0.2, 1.0, 3.0])
    train(net, grid, 400, scan, lambda a, b: F.cross_entropy(a, b, weights))
    x, y = scan(1000)
    found = predict(net, grid, x).argmax(1)
    plane = int((y[0] == 2).sum((1, 2)).argmax())
    return {"scan": x[0, 0, plane], "labels": y[0, plane], "predicted": found[0, plane]}


def video() -> Panels:
    """Trains an autoencoder on clips of moving blobs, cut along the height of the frames."""
    grid = hs.Grid(height=torch.distributed.get_world_size())
    sides = (torch.arange(float(side)) for side in (8, 32, 64))
    t, i, j = torch.meshgrid(*sides, indexing="ij")

    def clip(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = np.random.default_rng(seed)
        x = torch.zeros(3, *t.shape)
        for _ in range(4):
            row, column, radius = numbers.uniform((4, 4, 3), (28, 60, 7))
            down, right = numbers.uniform(-2, 2, 2)
            apart = torch.hypot(i - row - down * t, j - column - right * t)
            colour = torch.from_numpy(numbers.uniform(0.1, 1, (3, 1, 1, 1))).float()
            x += colour * (radius - apart).sigmoid()
        return (x.clamp(max=1)[None],) * 2

    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv3d(3, 16, 3, stride=(1, 2, 2), padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
        nn.Conv3d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.SiLU(),
        nn.Conv3d(32, 12, 3, padding=1),
    )  # fmt: skip
    decoder = nn.Sequential(
        nn.Conv3d(12, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU(),
        nn.Upsample(scale_factor=2, mode="trilinear"),
        nn.Conv3d(32, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
        nn.Upsample(scale_factor=(1, 2, 2), mode="trilinear"),
        nn.Conv3d(16, 16, 3, padding=1), nn.SiLU(), nn.Conv3d(16, 3, 3, padding=1), nn.Sigmoid(),
    )  # fmt: skip
    net = hs.parallelize(nn.Sequential(encoder, decoder), grid)
    train(net, grid, 1000, clip, F.mse_loss)
    x, _ = clip(1000)
    return {"input": x[0], "decoded": predict(net, grid, x)[0]}


def images() -> Panels:
    """Trains a 2-D network to find discs among noise and bars, cut along the height."""
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
    """Trains Fourier layers on what viscous flow (Burgers' equation in 2-D) makes of a field."""
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


def draw_video(figure: Figure, panels: Panels) -> None:
    """Draws three frames of the input above those of the decoder."""
    axes = figure.subplots(2, 3)
    for row, (name, frames) in zip(axes, panels.items(), strict=True):
        for axis, number in zip(row, (0, 3, 6), strict=True):
            axis.imshow(frames[:, number].permute(1, 2, 0))
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name)
    for axis, number in zip(axes[0], (0, 3, 6), strict=True):
        axis.set_title(f"frame {number + 1}")
    for axis in axes[1]:
        draw_cut(axis, panels["decoded"].shape[2])


def draw_row(name: str) -> Callable[[Figure, Panels], None]:
    """Draws what enters a network, what should leave it and what does."""
    entering, leaving = ("RdBu_r", "RdBu_r") if name == "fourier" else ("gray", "viridis")

    def draw(figure: Figure, panels: Panels) -> None:
        axes = figure.subplots(1, 3)
        (title, x), (_, y), (_, found) = panels.items()
        axes[0].imshow(x, cmap=entering, interpolation="nearest")
        for axis, values in zip(axes[1:], (y, found), strict=True):
            low, high = float(y.min()), float(y.max())
            axis.imshow(values, cmap=leaving, vmin=low, vmax=high, interpolation="nearest")
        for axis, title in zip(axes, panels, strict=True):
            axis.set_title(title)
            axis.axis("off")
        draw_cut(axes[2], len(found))

    return draw


CUT = {"color": "red", "linewidth": 1.2, "linestyle": (0, (5, 4))}


def draw_cut(axis: Axes, rows: int) -> None:
    """Draws where the height is cut over two ranks."""
    axis.axhline(rows / 2 - 0.5, color="white", linewidth=2.5)
    axis.axhline(rows / 2 - 0.5, **CUT)


def universe(index: int) -> np.ndarray:
    """Simulates one of the universes of docs/science.md."""
    with tempfile.TemporaryDirectory() as folder:
        (path,) = make_universes(
            folder, count=index + 1, size=64, box_size=256, part=(index, index + 1)
        )
        with h5py.File(path) as file:
            return np.log1p(file["full"][..., 0].astype(np.float32))


def draw_universes(figure: Figure, _: Panels) -> None:
    """Draws a universe of the test split, and what was found in all of them (docs/science.md)."""
    run = "figure9/64 + batch norm/rate-0.0003-seed-0/evaluation/predictions.csv"
    with zipfile.ZipFile(RESULTS / "science-figure9-runs.zip") as runs:
        rows = list(csv.DictReader(io.StringIO(runs.read(run).decode())))
    axes = figure.subplots(1, 3)
    cube = universe(int(rows[0]["sample"].rpartition("_")[2]))
    axes[0].imshow(cube[:8].mean(0), cmap="magma", interpolation="bilinear")
    axes[0].set(title="universe", xticks=[], yticks=[])
    for axis, (name, title) in zip(
        axes[1:], {"Omega_m": r"$\Omega_m$", "sigma_8": r"$\sigma_8$"}.items(), strict=True
    ):
        true, found = (
            [float(row[f"{kind}_phys_{name}"]) for row in rows] for kind in ("true", "predicted")
        )
        axis.plot(true, true, color="0.6", linewidth=1)
        axis.scatter(true, found, s=12, color="#7a2a8a", linewidths=0)
        axis.set(title=title, xlabel="true", xticks=[], yticks=[], box_aspect=1)
    axes[1].set_ylabel("predicted")


def draw_clusters(figure: Figure, _: Panels) -> None:
    """Draws the box of one rank, and the bytes that it reads, on 2, 4 and 8 ranks."""
    read = json.loads((RESULTS / "memory-epyc-2cores-2026-11-21.json").read_text())["read"]
    cube = universe(0)
    for axis, ranks in zip(figure.subplots(1, 3), ("2", "4", "8"), strict=True):
        draw_cube(axis, cube, read[ranks]["grid"])
        axis.set_title(f"{ranks} ranks: {read[ranks]['system'] / 2**20:.2f} MiB")


def draw_cube(axis: Axes, cube: np.ndarray, grid: dict[str, int]) -> None:
    """Draws three faces of a cube, the first rank's box of it in colour, and the cuts."""
    cuts = [grid.get(dim, 1) for dim in ("depth", "height", "width")]
    mine = np.ones(cube.shape, bool)
    for dim, cut in enumerate(cuts):
        np.moveaxis(mine, dim, 0)[len(cube) // cut :] = False
    back = 0.45  # how far the depth goes to the right and upwards
    faces = (  # its values, which are the rank's, (rows, columns), where it lies
        (cube[:8].mean(0)[::-1], mine[0][::-1], (1, 2), (1, 0, 0, 1, 0, 0)),
        (cube[:, :8].mean(1), mine[:, 0], (0, 2), (1, 0, back, back, 0, 1)),
        (cube[..., -8:].mean(2).T[::-1], mine[..., -1].T[::-1], (1, 0), (back, back, 0, 1, 1, 0)),
    )
    high = np.quantile(faces[0][0], 0.998)
    for values, inside, dims, place in faces:
        colours = plt.get_cmap("magma")(values / high)
        greys = 0.75 + 0.25 * plt.get_cmap("gray")(values / high)
        where = Affine2D.from_values(*place) + axis.transData
        axis.imshow(
            np.where(inside[..., None], colours, greys),
            origin="lower", extent=(0, 1, 0, 1), transform=where, interpolation="nearest",
        )  # fmt: skip
        lines = [cuts[dim] > 1 for dim in dims]
        for cut, line in zip(lines, (((0, 1), (0.5, 0.5)), ((0.5, 0.5), (0, 1))), strict=True):
            if cut:
                axis.plot(*line, color="white", linewidth=2.5, transform=where)
                axis.plot(*line, **CUT, transform=where)
    axis.set(xlim=(-0.02, 1.02 + back), ylim=(-0.02, 1.02 + back), aspect="equal")
    axis.axis("off")


DOORS: dict[str, tuple[Callable[[], Panels] | None, Callable[[Figure, Panels], None]]] = {
    "universes": (None, draw_universes),
    "scans": (scans, draw_row("scans")),
    "video": (video, draw_video),
    "images": (images, draw_row("images")),
    "fourier": (fourier, draw_row("fourier")),
    "clusters": (None, draw_clusters),
}


def main() -> None:
    plt.rcParams["font.size"] = plt.rcParams["axes.titlesize"] = 13
    for name in sys.argv[1:] or DOORS:
        learn, draw = DOORS[name]
        panels = learn() if learn else {}
        if torch.distributed.get_rank() == 0:
            figure = plt.figure(figsize=(6, 2.4), layout="constrained")
            draw(figure, panels)
            figure.savefig(Path(__file__).with_name(f"door-{name}.png"), dpi=110)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    main()
    torch.distributed.destroy_process_group()
