"""Recomputed stages change nothing but memory (tiers: no process; 2 and 4 gloo ranks)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.parallel.recompute import recompute_stages
from tests.ops.serial import distance
from tests.parallel.test_steps import thin
from tests.ranks import run_ranks
from tests.selection import by_rotation


def networks(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 4, 16, 16, 16, generator=generator)
    if name == "unet":
        y = torch.randint(3, (2, 16, 16, 16), generator=generator)
        return hs.models.UNet3D(4, 3, channels=2, levels=2), x, y
    y = torch.rand(2, 4, generator=generator)
    return hs.models.CosmoFlow(16, batch_norm=name == "norm", dropout=0.3), x, y


def loss(model: nn.Module, x: Any, y: Any) -> torch.Tensor:
    prediction = model(x)
    wrong = F.mse_loss if prediction.dim() == 2 else F.cross_entropy
    return wrong(prediction, y)


def step(model: nn.Module, x: Any, y: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    loss(model, x, y).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, **{name: b.double() for name, b in model.named_buffers()}}


@pytest.mark.parametrize("name", ["plain", "norm", "unet"])
def test_gradients_and_running_statistics_are_the_same_numbers(name: str) -> None:
    model, x, y = networks(name)
    expected = step(model, x, y)
    again, _, _ = networks(name)
    keys = list(again.state_dict())
    assert recompute_stages(again) > 1
    assert list(again.state_dict()) == keys
    found = step(again, x, y)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    if name == "norm":
        assert again.get_buffer("features.norm1.num_batches_tracked") == 1


def in_place(*, nested: bool) -> nn.Module:
    torch.manual_seed(3)
    parts = [
        nn.Conv3d(3, 4, 3, padding=1),
        nn.BatchNorm3d(4, momentum=None),
        nn.MaxPool3d(2),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv3d(4, 4, 3, padding=1),
        nn.MaxPool3d(2),
        nn.Sequential(nn.LeakyReLU(0.2, inplace=True), nn.Conv3d(4, 4, 1), nn.Dropout(0.3)),
    ]
    whole = [nn.Sequential(nn.LeakyReLU(0.2, inplace=True), *parts)] if nested else parts
    return nn.Sequential(nn.Conv3d(2, 3, 1), *whole, nn.Flatten(), nn.Linear(32, 4)).double()


class Shifted(nn.Module):
    """As users write it: torch cannot tell that it works in place."""

    def forward(self, x: Any) -> Any:
        x += 1
        return x


@pytest.mark.parametrize("cut", [False, True])
def test_a_stage_that_changes_its_input_is_refused(cut: bool) -> None:
    stage = nn.Sequential(Shifted(), nn.Conv3d(2, 2, 3, padding=1), nn.BatchNorm3d(2))
    model = nn.Sequential(nn.Conv3d(1, 2, 1), stage)
    x: Any = torch.ones(2, 1, 4, 4, 4)
    recompute_stages(model)
    if cut:
        grid = hs.Grid()
        model, x = hs.parallelize(model, grid), hs.shard(x, grid)
    with pytest.raises(hs.LayoutError, match="begins with Shifted changes its input in place"):
        model(x)


@pytest.mark.parametrize("nested", [False, True])
def test_layers_that_work_in_place_overwrite_nothing_that_is_kept(nested: bool) -> None:
    x = torch.randn(2, 2, 8, 8, 8, generator=torch.Generator().manual_seed(4)).double()
    expected = step(in_place(nested=nested), x, torch.zeros(2, 4).double())
    again = in_place(nested=nested)
    assert recompute_stages(again) > 2
    found = step(again, x, torch.zeros(2, 4).double())
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def of_buffers() -> nn.Module:
    torch.manual_seed(3)
    convolution = nn.utils.parametrizations.spectral_norm(nn.Conv3d(2, 3, 3, padding=1))
    norm = nn.InstanceNorm3d(3, track_running_stats=True)
    return nn.Sequential(convolution, nn.Tanh(), norm, nn.Conv3d(3, 2, 1), nn.Tanh()).double()


def test_buffers_are_updated_once_and_found_as_they_were() -> None:
    """A call in between leaves the gradients of the first one as they are."""
    x = torch.randn(2, 2, 5, 4, 3, dtype=torch.float64)
    found = []
    for again in (False, True):
        model = of_buffers()
        if again:
            recompute_stages(model)
        total = model(x).square().sum()
        with torch.no_grad():
            model(2 * x)
        total.backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_layers_are_in_the_mode_in_which_they_ran() -> None:
    """Whatever the network is in when its backward pass begins."""
    x = torch.randn(2, 2, 5, 4, 3, dtype=torch.float64)
    found = []
    for again in (False, True):
        torch.manual_seed(3)
        norm, drop = nn.BatchNorm3d(3), nn.Dropout(0.5)
        model = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), norm, drop, nn.Tanh()).double()
        if again:
            recompute_stages(model)
        total = model(x).square().sum()
        model.eval()
        total.backward()
        assert not any(part.training for part in model)
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_parameters_that_have_changed_are_refused() -> None:
    model = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.ReLU())
    recompute_stages(model)
    total = model(torch.randn(2, 2, 5, 4, 3)).square().sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(hs.LayoutError, match=r"begins with Conv3d has other param(?s:.*)backward"):
        total.backward()


class Residual(nn.Sequential):
    """Adds its input to what its layers make of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize("replaced", [False, True])
def test_what_a_sequential_does_itself_and_layers_that_are_replaced_later(replaced: bool) -> None:
    x = torch.randn(2, 3, 6, 5, 4, generator=torch.Generator().manual_seed(4)).double()
    found = []
    for again in (False, True):
        torch.manual_seed(3)
        inner = Residual(nn.Conv3d(4, 4, 3, padding=1), nn.Tanh())
        parts = [nn.Conv3d(3, 4, 3, padding=1), nn.ReLU(), inner, nn.MaxPool3d(2), nn.Dropout(0.5)]
        model = nn.Sequential(*parts, nn.Conv3d(4, 2, 1)).double()
        if again:
            assert recompute_stages(model) == 2
        if replaced:
            model[1], model[4] = nn.GELU(), nn.Identity()
            model.append(nn.Sigmoid())
        torch.manual_seed(7)
        model(x).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def saved_bytes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = loss(model, x, y)
    del result
    return sum(kept.values())


@pytest.mark.parametrize(("name", "share"), [("norm", 0.3), ("unet", 0.6)])
def test_little_is_kept_but_the_stages_inputs(name: str, share: float) -> None:
    model, x, y = networks(name)
    plain = saved_bytes(model, x, y)
    recompute_stages(model)
    assert saved_bytes(model, x, y) < share * plain


def test_a_prediction_is_not_recomputed() -> None:
    model, x, _ = networks("norm")
    recompute_stages(model)
    model.eval()
    with torch.no_grad():
        assert not model(x).requires_grad


def cut_target(y: torch.Tensor, grid: hs.Grid) -> hs.Sharded:
    """Numbers are cut along the batch, labels like the volume."""
    if y.is_floating_point():
        return hs.shard(y.double(), grid)
    partition = grid.partition(y.shape, channels=False)
    block = y[partition.box(grid.coords).slices()]
    return hs.Sharded.from_local(block.contiguous(), partition, grid)


def on_a_grid(axes: dict[str, int], name: str) -> float:
    grid = hs.Grid(**axes)
    found = []
    for recomputed in (False, True):
        model, x, y = networks(name)
        if name != "unet":  # of nine million weights, ranks would do little but average gradients
            thin(model, lambda n: n if n == 4 else n // 8)
        if recomputed:
            recompute_stages(model)
        model = hs.parallelize(model.double(), grid)
        cut = hs.shard(x.double(), grid)
        found.append(step(model, cut, cut_target(y, grid)))
    kept, again = found
    assert kept.keys() == again.keys()
    return max(distance(again[key], value) for key, value in kept.items())


GRIDS = {"2": {"depth": 2}, "2 in replicas": {"data": 2, "height": 2}}


@pytest.mark.parametrize(("name", "grid"), by_rotation(["unet", "norm"], GRIDS))
def test_on_a_grid(name: str, grid: str) -> None:
    axes = GRIDS[grid]
    ranks = math.prod(axes.values())
    assert max(run_ranks(ranks, on_a_grid, axes, name)) <= 1e-12


def test_a_graph_that_is_kept_is_run_backward_again() -> None:
    model = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU())
    hs.parallelize(model, hs.Grid(), memory="recompute")
    y = model(hs.shard(torch.randn(1, 2, 8, 8, 8), hs.Grid())).square().sum()
    y.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    y.backward()
    second = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(first) == len(second) == 4
    assert all(map(torch.equal, first, second))
