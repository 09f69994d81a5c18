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
from typing import Any

import pytest
import torch
from monai.networks.nets import VQVAE
from neuralop.models import FNO, UNO
from torch import nn

import hyperslab as hs
from tests.ops.serial import distance
from tests.ranks import run_ranks

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


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    network.__name__: network for network in (fno, padded_fno, tucker_fno, uno, vqvae)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_equal_to_serial(name: str, grid: str, dtype: torch.dtype) -> None:
    axes = GRIDS[grid]
    # neuraloperator keeps modes, and MONAI's codebook distances, in float32.
    tolerance = 1e-5 if dtype == torch.float64 else 1e-4
    for found in run_ranks(math.prod(axes.values()), apart, name, axes, dtype, serial(name, dtype)):
        assert max(found.values()) <= tolerance, found
