"""A cosmologist's own files, data set, network and loop: in plain torch, and cut over ranks.

    python examples/own_data_serial.py FOLDER
    torchrun --nproc-per-node 2 examples/own_data.py FOLDER 2

The two files differ by five lines: those with ``hs`` or ``boxes``. With them each rank reads, keeps
and computes its part of every volume, and the losses are the same. FOLDER holds ``delta_0.npy``,
``delta_1.npy``, ..., each a density contrast of 32 x 32 x 32 voxels, and ``parameters.txt`` with a
row of parameters for each.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FOLDER = Path(sys.argv[1])
TABLE = np.loadtxt(FOLDER / "parameters.txt", dtype=np.float32, ndmin=2)


class Universes(Dataset):
    """Density contrasts and their parameters, which become -1 to 1."""

    def __len__(self):
        return len(TABLE)

    def __getitem__(self, i):
        delta = np.load(FOLDER / f"delta_{i}.npy", mmap_mode="r")[None]
        x = torch.from_numpy(np.log(2 + delta))
        low, high = TABLE.min(0), TABLE.max(0)
        return x, torch.from_numpy(2 * (TABLE[i] - low) / (high - low) - 1)


class Network(nn.Module):
    """Three convolutions, the last of which sees a quarter of the width, and a mean."""

    def __init__(self, outputs):
        super().__init__()
        self.c1 = nn.Conv3d(1, 8, 3, padding=1, padding_mode="circular")
        self.c2 = nn.Conv3d(8, 16, 3, stride=2, padding=1)
        self.c3 = nn.Conv3d(16, 32, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm3d(32)
        self.out = nn.Linear(32, outputs)

    def forward(self, x):
        x = nn.functional.leaky_relu(self.c1(x))
        x = nn.functional.leaky_relu(self.c2(x))
        x = nn.functional.leaky_relu(self.norm(self.c3(x)))
        return self.out(x.mean((2, 3, 4)))


data = Universes()
torch.manual_seed(0)
network = Network(TABLE.shape[1])
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, eps=1e-3)
loader = DataLoader(data, 4, sampler=torch.utils.data.DistributedSampler(data, 1, 0))

for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    total = 0.0
    for x, y in loader:
        loss = nn.functional.mse_loss(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: {total / len(loader):.6f}", flush=True)
