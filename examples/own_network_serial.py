"""A cosmologist's own network on universes in HDF5 files: in plain torch, and cut over ranks.

    hyperslab simulate universes/ --count 16 --size 32
    python examples/own_network_serial.py universes/
    torchrun --nproc-per-node 2 examples/own_network.py universes/ 2

The two files differ by five lines: those with ``hs`` or ``grid``. The losses are the same.
docs/own-networks.md has the same network trained by ``hs.fit``, with checkpoints and a report.
"""

import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn

FILES = sorted(Path(sys.argv[1]).rglob("*.hdf5"))


class Network(nn.Module):
    """A residual stage between two that halve the width, then a mean over space."""

    def __init__(self, channels, outputs, width=8):
        super().__init__()
        self.first = nn.Conv3d(channels, width, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm3d(width)
        self.stage = nn.Conv3d(width, width, 5, padding=2)
        self.last = nn.Conv3d(width, 2 * width, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * width, outputs)

    def forward(self, x):
        x = self.first(torch.log1p(x))
        x = self.last(nn.functional.silu(x + self.stage(self.norm(x))))
        return self.head(nn.functional.silu(x).mean((2, 3, 4)))


def universe(path):
    """Counts (C, D, H, W) and the parameters, which lie between -1 and 1."""
    with h5py.File(path) as file:
        counts = np.moveaxis(file["full"][()], -1, 0).astype(np.float32)
        return torch.from_numpy(counts), torch.tensor(file["unitPar"][()], dtype=torch.float32)


data = [universe(path) for path in FILES]
torch.manual_seed(0)
network = Network(len(data[0][0]), len(data[0][1]))
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, eps=1e-3)

for epoch in range(3):
    total, steps = 0.0, 0
    for batch in torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).split(4):
        x = torch.stack([data[i][0] for i in batch])
        y = torch.stack([data[i][1] for i in batch])
        loss = nn.functional.mse_loss(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, steps = total + loss.item(), steps + 1
    print(f"epoch {epoch}: {total / steps:.6f}", flush=True)
