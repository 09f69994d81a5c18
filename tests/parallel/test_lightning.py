"""A grid under Lightning and torchmetrics: what adds up over ranks (tier: two and four gloo ranks).

The pair of programs on docs/coming-from/lightning.md is run by tests/docs/test_pairs.py.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hyperslab as hs
from hyperslab.comm.grid import warn_of_metrics
from tests.docs.test_pairs import variables_of_torchrun
from tests.ranks import fresh_groups, run_ranks


def voxels(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, (4, 6, 5, 4), generator=generator)


def counted() -> list[int]:
    """Confusion matrices over ranks: of all samples, and of each replica's own."""
    from torchmetrics.classification import BinaryConfusionMatrix

    grid = hs.Grid(data=2, depth=2)
    with pytest.raises(hs.LayoutError, match="no axis 'dta', but data, depth, height, width"):
        grid.process_group("dta")
    whole = BinaryConfusionMatrix(process_group=grid.process_group())
    cut = [hs.shard(voxels(seed), grid, channels=False) for seed in (0, 1)]
    whole.update(*(x.full() for x in cut))
    of_replica = BinaryConfusionMatrix(process_group=grid.process_group("data"))
    mine = slice(2 * grid.coords["data"], 2 * grid.coords["data"] + 2)
    of_replica.update(voxels(0)[mine], voxels(1)[mine])
    assert torch.equal(whole.compute(), of_replica.compute())
    return whole.compute().flatten().tolist()


def test_metrics_of_full_tensors_count_a_voxel_once() -> None:
    a, b = voxels(0).flatten(), voxels(1).flatten()
    expected = [int(((b == t) & (a == p)).sum()) for t in (0, 1) for p in (0, 1)]
    assert run_ranks(4, counted) == [expected] * 4


@contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """Collects what hyperslab logs within, on this rank."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("hyperslab")
    log.addHandler(handler)
    try:
        yield records
    finally:
        log.removeHandler(handler)


def warned(asks: bool) -> int:
    from torchmetrics import MeanMetric

    with logged() as records:
        grid = hs.Grid(depth=2)
        if asks:
            grid.process_group()
        x = hs.shard(voxels(0), grid, channels=False)
        x.full()
        metric = MeanMetric(process_group=grid.process_group() if asks else None)
        x.full()
        assert metric.sync_on_compute
    return sum("every voxel once a rank" in record.getMessage() for record in records)


@pytest.mark.parametrize("asks", [False, True])
def test_a_full_tensor_beside_torchmetrics_is_warned_of_once(asks: bool) -> None:
    assert run_ranks(2, warned, asks) == [0 if asks else 1, 0]


def test_a_search_for_metrics_disturbs_no_other_thread() -> None:
    """A tuple that is being made must not be referred to: Python ends it with a SystemError."""
    import torchmetrics  # noqa: F401 - or nothing is searched for

    done = threading.Event()

    def make_tuples() -> None:
        while not done.is_set():
            tuple(n % 2 for n in range(40))

    with ThreadPoolExecutor(2) as threads:
        making = [threads.submit(make_tuples) for _ in range(2)]
        for _ in range(20):
            warn_of_metrics(hs.Grid())
        done.set()
        for each in making:
            each.result()


def small() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.AdaptiveAvgPool3d(1), nn.Flatten())


def twice() -> list[str]:
    with logged() as records:
        grid = hs.Grid(depth=2)
        net = hs.parallelize(small(), grid)
        wrapped = DistributedDataParallel(net)
        for _ in range(2):
            wrapped(hs.shard(torch.ones(1, 1, 6, 6, 6), grid)).sum().backward()
    return [record.getMessage() for record in records if "once more" in record.getMessage()]


def test_a_second_average_is_warned_of_once() -> None:
    fresh_groups()
    said = run_ranks(2, twice)
    fresh_groups()
    assert [len(lines) for lines in said] == [1, 0]
    assert "Sequential runs in a DistributedDataParallel" in said[0][0]


def fit(mistake: str) -> str:
    import lightning as L
    from torchmetrics import MeanMetric

    from hyperslab.parallel.lightning import GridStrategy

    class Fit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small()
            if mistake == "metric":
                self.average = MeanMetric()

        def configure_model(self) -> None:
            if mistake != "plain":
                self.net = hs.parallelize(self.net, self.trainer.strategy.grid)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            grid = self.trainer.strategy.grid
            x, y = (hs.shard(t, grid, batch="replica") for t in batch)
            loss = F.mse_loss(self.net(x), y)
            if mistake == "sum":
                self.log("loss", loss, reduce_fx="sum", sync_dist=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with mock.patch.dict(os.environ, variables_of_torchrun()):
        trainer = L.Trainer(
            devices=2, strategy=GridStrategy(depth=2), accelerator="cpu", max_epochs=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        data = TensorDataset(torch.ones(2, 1, 6, 6, 6), torch.ones(2, 2))
        try:
            trainer.fit(Fit(), DataLoader(data, batch_size=1))
        except hs.LayoutError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("plain", "no part of Fit is parallelised"),
        ("metric", r"the metric average adds up over all ranks"),
        ("sum", "once per rank"),
    ],
)
def test_what_would_be_wrong_on_a_grid_is_refused(mistake: str, words: str) -> None:
    for said in run_ranks(2, fit, mistake):
        assert words in said
