"""A trace against the step that it stands for, operator by operator (tier: a few gloo ranks)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.planner.records import Exchange, Sum, Trace
from hyperslab.planner.trace import Workload, trace_step
from tests.parallel.test_steps import thin
from tests.planner.trace.listen import Heard, Listener, counts
from tests.ranks import run_ranks
from tests.selection import in_gate


def thin_cosmoflow() -> nn.Module:
    model = hs.models.CosmoFlow(16, batch_norm=True)
    thin(model, lambda n: n if n == 4 else n // 8)  # four come in, four go out
    return model


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cosmoflow": (thin_cosmoflow, (2, 4, 16, 16, 16)),
    "unet": (lambda: hs.models.UNet3D(2, 3, channels=4, levels=2), (2, 2, 12, 16, 20)),
}
GRIDS = {
    "2": {"depth": 2},
    "3": {"height": 3},
    "replicas": {"data": 2, "width": 2},
    "2x2": {"depth": 2, "height": 2},
}
CASES = [f"{network} {grid}" for network in NETWORKS for grid in GRIDS]


def mean_square(prediction: torch.Tensor, _target: object) -> torch.Tensor:
    return prediction.square().mean()


def listen(network: str, extents: dict[str, int], bf16: bool) -> tuple[Heard, int]:
    """One real step on this rank: what it ran and sent, and the bytes that autograd kept."""
    build, shape = NETWORKS[network]
    grid = hs.Grid(**extents)
    model = hs.parallelize(build(), grid)
    x = hs.shard(torch.randn(shape), grid)
    with model.no_sync():  # ranks compare their parameters at the first two, as at few later ones
        for _ in range(2):
            model(x)
    storages: dict[int, int] = {}
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with model.no_sync(), Listener() as listener:
        with (
            torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=bf16),
        ):
            loss = mean_square(model(x), None)
        loss.backward()
    return listener.heard, sum(storages.values())


def traced(network: str, extents: dict[str, int], bf16: bool, rank: int) -> Trace:
    build, shape = NETWORKS[network]
    precision = torch.bfloat16 if bf16 else None
    return trace_step(Workload(build, shape, loss=mean_square, precision=precision), extents, rank)


def calls_of(trace: Trace) -> Counter[tuple[str, tuple[tuple[int, ...], ...]]]:
    found: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
    for operator in trace.operators:
        shapes = [spec.shape for spec in operator.call.tensors()]
        if counts(operator.call.name, shapes):
            found[operator.call.name, tuple(shapes)] += 1
    return found


KEPT = [  # each grid once, each network twice with both types
    ("cosmoflow 2", "float32"),
    ("cosmoflow 2x2", "bfloat16"),
    ("unet 3", "bfloat16"),
    ("unet replicas", "float32"),
]


@pytest.mark.parametrize(
    ("case", "dtype"), in_gate(itertools.product(CASES, ("float32", "bfloat16")), kept=KEPT)
)
def test_a_trace_is_what_every_rank_does(case: str, dtype: str) -> None:
    network, grid = case.split()
    extents, bf16 = GRIDS[grid], dtype == "bfloat16"
    size = torch.tensor(list(extents.values())).prod().item()
    for rank, (heard, saved) in enumerate(run_ranks(int(size), listen, network, extents, bf16)):
        trace = traced(network, extents, bf16, rank)
        exchanges = [event for event in trace.events if isinstance(event, Exchange)]
        sums = [e for e in trace.events if isinstance(e, Sum) and e.purpose == "statistics"]
        assert calls_of(trace) == heard.calls
        assert [e.sends for e in exchanges] == heard.sends
        assert [e.receives for e in exchanges] == heard.receives
        assert [(e.ranks, e.nbytes) for e in sums] == heard.sums
        assert trace.saved == pytest.approx(saved, rel=0.01)
        assert trace.rank == rank
        assert not trace.not_traced


def test_gradients_travel_in_the_buckets_of_torch() -> None:
    """The first bucket is of at least 1 MiB, others of 25 MiB, the last of what is left."""
    layers = [nn.Linear(1000, 1000, bias=False) for _ in range(10)]  # 3.8 MiB each
    workload = Workload(lambda: nn.Sequential(*layers), (2, 1000))
    sums = [e for e in trace_step(workload, {"data": 2}).events if isinstance(e, Sum)]
    gradients = [e.nbytes for e in sums if e.purpose == "gradients"]
    assert gradients == [4_000_000, 7 * 4_000_000, 2 * 4_000_000]
    assert {e.ranks for e in sums} == {(0, 1)}
    assert {e.rounded for e in sums} == {0}


def test_of_rounded_gradients_those_of_float32_are_marked() -> None:
    layers = [nn.Linear(10, 10, bias=False), nn.Linear(10, 20, bias=False).double()]

    def build() -> nn.Module:
        return nn.Sequential(layers[0], Doubled(layers[1]))

    workload = Workload(build, (2, 10), gradients="bf16")
    sums = [e for e in trace_step(workload, {"data": 2}).events if isinstance(e, Sum)]
    (found,) = [e for e in sums if e.purpose == "gradients"]
    assert (found.nbytes, found.rounded) == (400 + 1600, 400)


class Doubled(nn.Module):
    """Runs a layer in float64."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.double())


def test_a_loss_and_an_optimizer_are_part_of_it() -> None:
    def adam(parameters):  # type: ignore[no-untyped-def]
        return torch.optim.Adam(parameters)

    workload = Workload(
        lambda: nn.Linear(64, 32), (4, 64), (4, 32), loss=F.mse_loss, optimizer=adam
    )
    trace = trace_step(workload, {"data": 2})
    parameters = 4 * (64 * 32 + 32)
    assert trace.parameters == trace.gradients == parameters
    assert trace.optimizer_state == pytest.approx(2 * parameters, rel=0.01)
    assert {e.stage for e in trace.operators} == {"forward", "backward", "optimizer"}
    assert trace.flops("forward") == 2 * 2 * 64 * 32  # two of four samples
    assert trace.peak >= 4 * parameters
