"""TensorBoard's event files, in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorboardLog:
    """Writes into ``run / "tensorboard"``; what is there of later steps is hidden."""

    def __init__(self, run: Path, step: int) -> None:
        self.board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def flush(self) -> None:
        self.board.flush()

    def close(self) -> None:
        self.board.close()
