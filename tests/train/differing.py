"""Ranks that are started differently: in which ways, and by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.ports import unused_port

RECIPE = """
data: {synthetic: {width: 16, samples: 12}, batch_size: 4}
model: {variant: lbann}
grid: {depth: 2}
device: cpu
timeout: 60
"""

DIFFERENT = {
    "optimizer.learning_rate": "optimizer.learning_rate=0.01",
    "optimizer.name": "optimizer.name=sgd",
    "optimizer.clip": "optimizer.clip=1",
    "optimizer.betas": "optimizer.betas=[0.8,0.999]",
    "optimizer.eps": "optimizer.eps=1e-3",
    "optimizer.larc": "optimizer.larc={}",
    "optimizer.accumulate": "optimizer.accumulate=2",
    "optimizer.schedule.epochs": "optimizer.schedule.epochs=7",
    "optimizer.schedule.name": "optimizer.schedule.name=steps",
    "optimizer.schedule.warmup": "optimizer.schedule.warmup=1",
    "loss": "loss=l1",
    "model.dropout": "model.dropout=0.5",
    "model.batch_norm": "model.batch_norm=true",
    "model.statistics": "model.statistics=replica",
    "model.variant": "model.variant=mlperf",
    "grid.depth": "grid.depth=1 grid.height=2",
    "data.batch_size": "data.batch_size=2",
    "data.augment": "data.augment=true",
    "data.seed": "data.seed=1",
    "data.mode": "data.mode=direct",
    "data.repeat": "data.repeat=2",
    "data.fractions": "data.fractions=[0.6,0.2,0.2]",
    "data.on_error": "data.on_error=skip",
    "data.transform": "data.transform=null",
    "data.prefetch": "data.prefetch=0",
    "data.synthetic.samples": "data.synthetic.samples=13",
    "output": "output=elsewhere",
    "epochs": "epochs=7",
    "precision": "precision=bf16",
    "kernels": "kernels=torch",
    "memory": "memory=recompute",
    "seed": "seed=1",
    "checkpoint.every": "checkpoint.every=2",
    "layers": "layers=5",
    "follow_test": "follow_test=true",
    "timeout": "timeout=50",
    "--resume": "resume",
    "--profile": "profile",
    "versions.torch": "version",
}
"""By the key that the error has to name: what the last rank is started with."""


def by_hand(path: Path, *options: list[str]) -> list[tuple[int, str]]:
    """Exit code and words of ranks that are started with these options, one each."""
    port = str(unused_port())
    world = {"WORLD_SIZE": str(len(options)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "hyperslab", "train", str(path), *mine],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, mine in enumerate(options)
    ]
    words = [process.communicate(timeout=300)[1] for process in processes]
    return [(process.returncode, said) for process, said in zip(processes, words, strict=True)]
