"""A grid under Lightning and torchmetrics: what adds up over ranks (tier: two and four gloo ranks).

The pair of programs on docs/coming-from/lightning.md is run by tests/docs/test_pairs.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
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


def warned(asks: bool, cut: bool) -> tuple[int, float]:
    """Count warnings of metrics that are made after the last gather, and add up the results."""
    from torchmetrics import SumMetric

    with logged() as records:
        grid = hs.Grid(depth=2)
        group = grid.process_group() if asks else None
        x = hs.shard(voxels(0).double(), grid, channels=False)
        given = x if cut else x.full()
        total = 0.0
        for _ in range(3):
            metric = SumMetric(process_group=group).double()
            metric(given)  # its value is of this rank alone
            total += metric.compute().item()
    return sum("every voxel once a rank" in record.getMessage() for record in records), total


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_a_metric_that_counts_voxels_once_a_rank_is_warned_of_once(asks: bool, cut: bool) -> None:
    total = 3.0 * voxels(0).sum().item()
    expected = [(0, total)] * 2 if asks else [(1, 2 * total), (0, 2 * total)]
    assert run_ranks(2, warned, asks, cut) == expected


PREDICTED = torch.randn(4, 3, 6, 5, 4, generator=torch.Generator().manual_seed(2)).double()
WANTED = voxels(3) + voxels(4)  # the three classes of the voxels
SCORES = PREDICTED[:, 0].contiguous()
NOISY = SCORES.flip(0) + 0.5 * SCORES


def metrics_of(process_group: Any) -> dict[str, tuple[Any, torch.Tensor, torch.Tensor]]:
    """Make some of torchmetrics' metrics, each with what it is updated with."""
    import torchmetrics as tm
    from torchmetrics.segmentation import DiceScore, GeneralizedDiceScore, MeanIoU

    options = {"process_group": process_group}
    classes = {"task": "multiclass", "num_classes": 3, **options}
    indices = {"num_classes": 3, "input_format": "index", **options}
    of_classes = {
        "accuracy": tm.Accuracy(average="micro", **classes),
        "F1": tm.F1Score(average="micro", **classes),
        "Jaccard": tm.JaccardIndex(**classes),
        "confusion": tm.ConfusionMatrix(**classes),
    }
    of_indices = {
        "Dice": DiceScore(**indices),
        "generalised Dice": GeneralizedDiceScore(**indices),
        "IoU": MeanIoU(**indices),
    }
    of_values = {
        "squares": tm.MeanSquaredError(**options),
        "absolute": tm.MeanAbsoluteError(**options),
        "R2": tm.R2Score(**options),
    }
    of_one = {
        "mean": tm.MeanMetric(**options),
        "sum": tm.SumMetric(**options),
        "largest": tm.MaxMetric(**options),
        "all": tm.CatMetric(**options),
    }
    return {
        **{name: (made, PREDICTED, WANTED) for name, made in of_classes.items()},
        **{name: (made, PREDICTED.argmax(1), WANTED) for name, made in of_indices.items()},
        **{name: (made, SCORES, NOISY) for name, made in of_values.items()},
        **{name: (made, SCORES, None) for name, made in of_one.items()},
    }


def computed(extents: dict[str, int], given: str) -> dict[str, Any]:
    """Compute all metrics, which are handed this rank alone; a refusal gives its error."""
    grid = hs.Grid(**extents)
    results: dict[str, Any] = {}
    for name, (metric, *tensors) in metrics_of(grid.process_group()).items():
        metric = metric.set_dtype(torch.float64)
        values = [hs.shard(t, grid, channels=t.dim() == 5) for t in tensors if t is not None]
        if name == "R2":
            values = [x.flatten() for x in values]
        try:
            metric.update(*(x.full() if given == "full" else x for x in values))
            results[name] = metric.compute()
        except hs.HyperslabError as error:
            results[name] = str(error)
    return results


@pytest.mark.parametrize("extents", [{"depth": 2}, {"data": 2}], ids=str)
@pytest.mark.parametrize("given", ["full", "cut"])
def test_metrics_of_torchmetrics_are_the_serial_ones(extents: dict[str, int], given: str) -> None:
    """Their states are counts, sums, squares or all values; what has no rule is refused."""
    [serial] = run_ranks(1, computed, {}, "full")
    refused = set()
    for results in run_ranks(2, computed, extents, given):
        for name, result in results.items():
            if isinstance(result, str):
                refused.add(name)
                assert "x.full()" in result, name
            else:
                # Some of them average in float32, in another order; one voxel of 480 is 2e-3.
                torch.testing.assert_close(result, serial[name], rtol=1e-6, atol=0)
    of_cut = {"Dice", "all"} | ({"generalised Dice"} if "depth" in extents else set())
    assert refused == (of_cut if given == "cut" else set())


def confused() -> tuple[int, int]:
    """Count warnings of a matrix of cut voxels that ranks add up, and the voxels in it."""
    from torchmetrics import ConfusionMatrix

    with logged() as records:
        grid = hs.Grid(depth=2)
        metric = ConfusionMatrix(task="multiclass", num_classes=3)
        metric.update(hs.shard(PREDICTED, grid), hs.shard(WANTED, grid, channels=False))
        voxels = int(metric.compute().sum())
    return sum("every voxel once a rank" in record.getMessage() for record in records), voxels


def test_a_matrix_that_counts_cut_voxels_once_a_rank_is_warned_of() -> None:
    voxels = 2 * WANTED.numel()
    assert run_ranks(2, confused) == [(1, voxels), (0, voxels)]


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


def test_a_misspelt_axis_is_named() -> None:
    from hyperslab.parallel.lightning import GridStrategy

    with pytest.raises(hs.LayoutError, match="takes no argument 'dept'\n    it takes data, depth"):
        GridStrategy(dept=2)
    assert GridStrategy(depth=2, static_graph=True, timeout=None).extents["depth"] == 2
