"""Where another library's error would speak, ours does (tier: two gloo ranks)."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import hyperslab as hs
from tests.ranks import run_ranks


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(1, 2, 3, padding=1, bias=False),
        nn.BatchNorm3d(2),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(2, 1),
    ).double()


def volume() -> torch.Tensor:
    return torch.randn(2, 1, 5, 6, 7, generator=torch.Generator().manual_seed(1)).double()


def saved() -> None:
    net = hs.parallelize(network(), hs.Grid(depth=2))
    with pytest.raises(hs.LayoutError, match="cannot be copied or pickled"):
        torch.save(net, io.BytesIO())
    torch.save(net.state_dict(), io.BytesIO())


def test_a_parallelised_module_is_not_pickled() -> None:
    run_ranks(2, saved)


def exported() -> None:
    net = hs.parallelize(network(), hs.Grid(depth=2)).eval()
    for trace in (torch.export.export, torch.jit.trace):
        with pytest.raises(hs.LayoutError, match="is traced"):
            trace(net, (volume(),))
    for scripted in (net, nn.Sequential(net)):
        with pytest.raises(hs.LayoutError, match=r"^torch\.jit\.script cannot compile the"):
            torch.jit.script(scripted)
    assert not hasattr(net.forward, "__globals__")  # an error of ours only where it is read
    plain = network().eval()
    plain.load_state_dict(net.state_dict())
    program = torch.export.export(plain, (volume(),)).module()
    torch.testing.assert_close(program(volume()), plain(volume()))


@pytest.mark.filterwarnings("ignore")
def test_a_parallelised_module_is_not_exported_and_a_plain_one_is() -> None:
    run_ranks(2, exported)


def synchronised(statistics: str) -> list[Any]:
    results = []
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    for before, after in ((convert, nn.Identity()), (nn.Identity(), convert), (nn.Identity(),) * 2):
        net = before(network())
        net = after(hs.parallelize(net, hs.Grid(data=2), batch_norm=statistics))
        loss = net(hs.shard(volume(), hs.Grid(data=2))).square().mean()
        loss.backward()
        gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        results.append((loss.detach(), *gradients, *net.buffers()))
    return results


@pytest.mark.parametrize("statistics", ["grid", "replica"])
def test_sync_batch_norm_is_batch_norm_over_the_grid(statistics: str) -> None:
    for *converted, plain in run_ranks(2, synchronised, statistics):
        for results in converted:
            for ours, theirs in zip(results, plain, strict=True):
                torch.testing.assert_close(ours, theirs)


def stepped_in_hooks() -> None:
    grid = hs.Grid(depth=2)
    net = hs.parallelize(network(), grid)

    def step(parameter: torch.Tensor) -> None:
        torch.optim.SGD([parameter], lr=0.1).step()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    loss = net(hs.shard(volume(), grid)).square().mean()
    with pytest.raises(hs.LayoutError, match=r"changed while the backward pass ran"):
        loss.backward()

    def step_and_free(parameter: torch.Tensor) -> None:
        step(parameter)
        parameter.grad = None

    early = network()
    for parameter in early.parameters():
        parameter.register_post_accumulate_grad_hook(step_and_free)
    loss = hs.parallelize(early, grid)(hs.shard(volume(), grid)).square().mean()
    with pytest.raises(hs.LayoutError, match=r"used and freed while the backward pass ran"):
        loss.backward()


def test_a_step_in_a_hook_is_refused() -> None:
    run_ranks(2, stepped_in_hooks)


def held_back() -> None:
    grid = hs.Grid(depth=2)
    with pytest.raises(hs.LayoutError, match="Sequential is not parallelised"):
        hs.no_sync(network())
    net = hs.parallelize(network(), grid)
    expected = network()
    for _ in range(2):
        expected(volume()).square().mean().backward()
    with hs.no_sync(net):
        net(hs.shard(volume(), grid)).square().mean().backward()
    net(hs.shard(volume(), grid)).square().mean().backward()
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_gradients_accumulate_without_messages() -> None:
    run_ranks(2, held_back)
