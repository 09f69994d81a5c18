"""Neural operators, and a quantised autoencoder, train as they do serially (tier: gloo ranks).

neuraloperator's FNO and UNO go through Fourier space and write cut modes into fresh tensors;
MONAI's VQVAE updates its codebook, ordinary buffers, in place by what was gathered.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.networks.nets import VQVAE
from neuralop.models import FNO, UNO
from torch import nn

import hyperslab as hs
from tests.ops.serial import distance
from tests.ranks import run_ranks
from tests.selection import by_rotation, in_gate

SHAPE = (2, 1, 12, 16, 8)
LEARNING_RATE = 0.05


def fno() -> nn.Module:
    return FNO((6, 4, 4), 1, 2, hidden_channels=6, n_layers=2)


def padded_fno() -> nn.Module:
    """Pads the domain; group norm, no positions."""
    return FNO(
        (6, 4, 4), 1, 2, hidden_channels=6, n_layers=2, domain_padding=0.25, norm="group_norm",
        positional_embedding=None,
    )  # fmt: skip


def tucker_fno() -> nn.Module:
    """Weights that are factorised, and contracted factor by factor."""
    return FNO(
        (6, 4, 4), 1, 2, hidden_channels=6, n_layers=2, factorization="tucker", rank=0.3,
        implementation="factorized",
    )  # fmt: skip


def uno() -> nn.Module:
    """Halves and doubles the resolution in Fourier space."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its arguments
        return UNO(
            1, 2, hidden_channels=4, n_layers=3, uno_out_channels=[4, 6, 4],
            uno_n_modes=[[4, 4, 4]] * 3, uno_scalings=[[1, 1, 1], [0.5, 0.5, 0.5], [2, 2, 2]],
            fno_skip="linear", channel_mlp_skip="linear",
        )  # fmt: skip


def vqvae() -> nn.Module:
    down = ((2, 4, 1, 1),) * 2
    up = ((2, 4, 1, 1, 0),) * 2
    return VQVAE(
        3, 1, 1, channels=(4, 8), num_res_layers=1, num_res_channels=(4, 8),
        downsample_parameters=down, upsample_parameters=up, num_embeddings=8, embedding_dim=4,
        ddp_sync=False,
    )  # fmt: skip


class Corners(nn.Module):
    """A Fourier layer as Li et al. 2021 published it: low modes of both signs, one by one."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        shape = (4, channels, channels, modes, modes, modes)
        self.weights = nn.Parameter(0.3 * torch.randn(shape, dtype=torch.cfloat))
        self.skip = nn.Conv3d(channels, channels, 1)

    def forward(self, x: Any) -> Any:
        m = self.modes
        modes = torch.fft.rfftn(x, dim=[-3, -2, -1])
        shape = (x.size(0), x.size(1), x.size(-3), x.size(-2), x.size(-1) // 2 + 1)
        out = torch.zeros(*shape, dtype=modes.dtype, device=x.device)
        low, high = slice(0, m), slice(-m, None)
        for weight, first, second in zip(
            self.weights, (low, high, low, high), (low, low, high, high), strict=True
        ):
            part = modes[:, :, first, second, :m]
            out[:, :, first, second, :m] = torch.einsum("bixyz,ioxyz->boxyz", part, weight)
        y = torch.fft.irfftn(out, s=(x.size(-3), x.size(-2), x.size(-1)))
        return nn.functional.gelu(y + self.skip(x))


class Adaptive(nn.Module):
    """The mixing of AFNO (Guibas et al. 2022): blocks of channels, soft shrinkage."""

    def __init__(self, channels: int, kept: int) -> None:
        super().__init__()
        self.kept = kept
        self.weights = nn.Parameter(0.3 * torch.randn(2, 2, channels // 2, channels // 2))

    def forward(self, x: Any) -> Any:
        modes = torch.fft.rfft2(x, dim=(2, 3), norm="ortho")
        batch, depth, height, width, channels = modes.shape
        modes = modes.reshape(batch, depth, height, width, 2, channels // 2)
        middle, kept = height // 2, self.kept
        chosen = (slice(None), slice(None), slice(middle - kept, middle + kept), slice(0, kept))
        real = torch.zeros(modes.shape, dtype=x.dtype, device=x.device)
        imaginary = torch.zeros(modes.shape, dtype=x.dtype, device=x.device)
        part = modes[chosen]
        a, b = (
            torch.einsum("...bi,bio->...bo", p, w)
            for p, w in zip((part.real, part.imag), self.weights, strict=True)
        )
        real[chosen] = torch.relu(a - b)
        imaginary[chosen] = torch.relu(a + b)
        mixed = nn.functional.softshrink(torch.stack([real, imaginary], dim=-1), lambd=0.01)
        mixed = torch.view_as_complex(mixed).reshape(batch, depth, height, width, channels)
        return x + torch.fft.irfft2(mixed, s=x.shape[2:4], dim=(2, 3), norm="ortho")


class ChannelsLast(nn.Module):
    """A layer that has channels last, as transformers do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x.permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)


def corners() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 4, 1), Corners(4, 3), Corners(4, 3), nn.Conv3d(4, 2, 1))


def adaptive() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), ChannelsLast(nn.LayerNorm(4)), ChannelsLast(Adaptive(4, 3)),
        ChannelsLast(nn.Linear(4, 2)),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    network.__name__: network
    for network in (fno, padded_fno, tucker_fno, uno, corners, adaptive, vqvae)
}
GRIDS = {
    "2": {"depth": 2},
    "4": {"width": 4},
    "2x2": {"depth": 2, "height": 2},
    "data": {"data": 2, "depth": 2},
}
Steps = list[dict[str, torch.Tensor | None]]


def train(name: str, axes: dict[str, int] | None, dtype: torch.dtype) -> Steps:
    """Two steps of descent: outputs, gradients and buffers."""
    torch.manual_seed(0)
    network = NETWORKS[name]()
    wide = {torch.float64: torch.complex128, torch.float32: torch.complex64}[dtype]
    for key, p in network.named_parameters():  # Module.double() leaves complex ones alone
        if not key.startswith("quantizer"):  # whose distances are of float32
            p.data = p.data.to(wide if p.is_complex() else dtype)
    full = torch.randn(SHAPE, dtype=dtype)
    x: Any = full
    if axes is not None:
        grid = hs.Grid(**axes)
        hs.parallelize(network, grid)
        x = hs.shard(full, grid)
    descent = torch.optim.SGD(network.parameters(), LEARNING_RATE)
    found = []
    for _ in range(2):
        y = network(x)
        extra = 0.0
        if isinstance(y, tuple):
            y, extra = y
        loss = (y - 0.3).square().mean() + extra
        descent.zero_grad()
        loss.backward()
        descent.step()
        whole = y.full() if isinstance(y, hs.Sharded) else y
        step = {"output": whole.detach(), "loss": loss.detach()}
        step |= {
            n: None if p.grad is None else p.grad.clone() for n, p in network.named_parameters()
        }
        found.append(step | {n: b.clone() for n, b in network.named_buffers()})
    return found


@functools.cache
def serial(name: str, dtype: torch.dtype) -> Steps:
    return run_ranks(1, train, name, None, dtype)[0]


def apart(name: str, axes: dict[str, int], dtype: torch.dtype, expected: Steps) -> dict[str, float]:
    """The largest relative distance from the serial run, by what differs."""
    found: dict[str, float] = {}
    for got, want in zip(train(name, axes, dtype), expected, strict=True):
        for key, value in want.items():
            found[key] = max(found.get(key, 0.0), distance(got[key], value))
    return found


@pytest.mark.parametrize(
    "dtype", in_gate([torch.float64, torch.float32], kept=[torch.float64]), ids=str
)
@pytest.mark.parametrize(("name", "grid"), by_rotation(NETWORKS, GRIDS))
def test_equal_to_serial(name: str, grid: str, dtype: torch.dtype) -> None:
    axes = GRIDS[grid]
    if name == "vqvae" and dtype == torch.float64 and torch.__version__ < "2.12":
        pytest.skip("its codebook's loss mixes types, which torch's own backward refuses")
    # neuraloperator keeps modes, and MONAI's codebook distances, in float32.
    tolerance = 1e-5 if dtype == torch.float64 else 1e-4
    for found in run_ranks(math.prod(axes.values()), apart, name, axes, dtype, serial(name, dtype)):
        assert max(found.values()) <= tolerance, found


class MeanOfField(nn.Module):
    """A number of a field: a network in which neuraloperator's is a part."""

    def __init__(self) -> None:
        super().__init__()
        self.operator = fno()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operator(x).mean((2, 3, 4))[:, :1]


@pytest.mark.parametrize("network", [fno, tucker_fno, uno, MeanOfField])
def test_a_checkpoint_holds_no_arguments(tmp_path: Path, network: Callable[[], nn.Module]) -> None:
    first, second = network(), network()
    optimizer = torch.optim.Adam(first.parameters())
    first(torch.ones(SHAPE)).square().mean().backward()
    optimizer.step()
    hs.save(tmp_path / "a", first, optimizer)
    hs.load(tmp_path / "a", second, torch.optim.Adam(second.parameters()))
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_run_of_a_neural_operator(tmp_path: Path) -> None:
    def trained(epochs: int, *, resume: bool) -> tuple[nn.Module, hs.TrainedRun]:
        torch.manual_seed(0)
        net = MeanOfField()
        data = {"synthetic": {"channels": 1, "width": 8, "samples": 10, "targets": 1}}
        options: dict[str, Any] = {"batch_size": 2, "ema": 0.5, "device": "cpu"}
        run = hs.fit(net, data, output=tmp_path / "run", epochs=epochs, resume=resume, **options)
        return net, run

    trained(1, resume=False)
    net, run = trained(2, resume=True)
    before = [p.detach().clone() for p in net.parameters()]
    assert run.evaluate(split="validation") is not None
    assert all(torch.equal(p, q) for p, q in zip(before, net.parameters(), strict=True))
