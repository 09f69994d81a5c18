"""Train a network of one's own with a plain loop of torch on volumes that are cut over two ranks.

    srun --ntasks 2 python examples/slurm_train.py --out runs/cut
    torchrun --nproc-per-node 2 examples/slurm_train.py --out runs/cut

It differs from `slurm_train_serial.py` by five lines. `sbatch slurm/script.sbatch` runs it.
"""

import argparse
import os
from pathlib import Path

import hyperslab as hs
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Fields(Dataset[tuple[Tensor, Tensor]]):
    """Random fields (1, D, H, W), smoothed a little or more; the target is how much."""

    def __init__(self, count: int = 16, size: int = 16) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        field = torch.randn((1, self.size, self.size, self.size), generator=random)
        amount = torch.rand((1,), generator=random)
        smooth = nn.functional.avg_pool3d(field, 3, stride=1, padding=1)
        return amount * smooth + (1 - amount) * field, amount


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2)),
        *(nn.Conv3d(8, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 1)),
    )


def train(epochs: int, out: Path) -> None:
    grid = hs.Grid(depth=2)
    main = grid.is_main
    torch.manual_seed(0)
    model = hs.parallelize(network(), grid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    newest, start = out / "newest.pt", 1
    if newest.exists():
        state = torch.load(newest, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    for epoch in range(start, epochs + 1):
        order = torch.Generator().manual_seed(epoch)
        total = torch.zeros(())
        for x, y in DataLoader(Fields(), batch_size=4, shuffle=True, generator=order):
            loss = nn.functional.mse_loss(model(hs.shard(x, grid)), y.to(grid.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        if main:
            print(f"epoch {epoch}  loss {total / 4:.6f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            out.mkdir(parents=True, exist_ok=True)
            torch.save({**state, "epoch": epoch}, out / "next.pt")
            os.replace(out / "next.pt", newest)  # whole or not at all


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Train on random fields.")
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--out", type=Path, default=Path("runs/fields"))
    given = options.parse_args()
    train(given.epochs, given.out)
