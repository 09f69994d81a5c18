"""Offloaded activations return as they were (tiers: no process; 2 gloo ranks)."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.errors import HyperslabError, LayoutError
from hyperslab.parallel.offload import OffloadFile, _unchanged, is_dense
from hyperslab.parallel.parallelize import Memory
from tests.ops.serial import distance
from tests.ops.slabs.test_stages import slabs_of
from tests.parallel.test_recompute import networks, step
from tests.ranks import run_ranks


def gradients(name: str, memory: Memory, axes: dict[str, int]) -> dict[str, torch.Tensor]:
    model, x, y = networks(name)
    grid = hs.Grid(**axes)
    hs.parallelize(model, grid, memory=memory)
    with slabs_of(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hyperslab.parallel.offload.OFFLOADED_FROM", 64)
        found = step(model, hs.shard(x, grid), hs.shard(y, grid, channels=name != "unet"))
    return {key: value.clone() for key, value in found.items()}  # views of what ranks share


@pytest.mark.parametrize("name", ["norm", "unet"])
def test_gradients_are_those_of_slabs_bit_by_bit(name: str) -> None:
    expected = run_ranks(2, gradients, name, "tile", {"depth": 2})
    for one, other in zip(
        run_ranks(2, gradients, name, "offload", {"depth": 2}), expected, strict=True
    ):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert torch.equal(one[key], value), key


class Squares(nn.Module):
    """Keeps what it is given, and how it lies in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.exp().square() * x).sum()


def plain_and_offloaded(layer: type[nn.Module], patch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Two networks of one layer, of which the second offloads whatever autograd keeps."""
    patch.setattr("hyperslab.parallel.offload.OFFLOADED_FROM", 1)
    models: list[nn.Module] = [nn.Sequential(layer()) for _ in range(2)]
    hs.parallelize(models[1], hs.Grid(), memory="offload")
    return models


def test_a_penalty_on_gradients_of_offloaded_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for model in plain_and_offloaded(Squares, monkeypatch):
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 3, 4).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
        penalty = gradient.square().sum()
        penalty.backward(retain_graph=True)
        penalty.backward()
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)


class ChangedLater(nn.Module):
    """Changes what autograd has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.weight).sigmoid()
        z = y * 1
        y.add_(1)
        return z


def test_a_change_in_place_is_refused_where_torch_refuses_it() -> None:
    model = ChangedLater()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.ones(2, 3)).sum().backward()
    hs.parallelize(model, hs.Grid(), memory="offload")
    with pytest.raises(LayoutError, match=r"tensor \(2, 3\) .* was changed in place"):
        model(torch.ones(2, 3)).sum().backward()


def test_parameters_stay_and_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperslab.parallel.offload.OFFLOADED_FROM", 1)
    moved = []
    move = OffloadFile.move
    monkeypatch.setattr(OffloadFile, "move", lambda own, x: moved.append(x.shape) or move(own, x))
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    hs.parallelize(model, hs.Grid(), memory="offload")
    y = model(torch.ones(4, 3))
    assert moved == [(4, 5)] * len(moved)
    assert moved
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(LayoutError, match="was changed in place"):
        y.sum().backward()


def test_a_forward_without_a_backward_keeps_nothing() -> None:
    """The result of a function, which its backward pass needs, would keep the function."""
    model = hs.parallelize(nn.Sequential(nn.Sigmoid(), nn.Tanh()), hs.Grid(), memory="offload")
    x = torch.zeros(3, requires_grad=True)
    for _ in range(5):
        model(x)
    gc.collect()
    kept = [one for one in gc.get_objects() if isinstance(one, partial) and one.func is _unchanged]
    assert not kept


class Checkpointed(nn.Module):
    """Checkpoints a part of itself, within a checkpoint or not."""

    def __init__(self, reentrant: bool, outer: bool | None) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1, bias=False), nn.BatchNorm3d(3))
        self.second = nn.Sequential(nn.Conv3d(3, 2, 3, padding=1), nn.GroupNorm(1, 2))
        self.reentrant = reentrant
        self.outer = outer

    def inner(self, x: torch.Tensor) -> Any:
        y = F.relu(self.first(x))
        z = checkpoint(self.second, y, use_reentrant=self.reentrant)
        assert isinstance(z, torch.Tensor)
        return z * y[:, :2]

    def forward(self, x: torch.Tensor) -> Any:
        if self.outer is None:
            return self.inner(x * 2)
        return checkpoint(self.inner, x * 2, use_reentrant=self.outer)


def checkpointed(memory: Memory, reentrant: bool, outer: bool | None) -> float:
    found = []
    for axes in ({"depth": 2}, None):
        torch.manual_seed(3)
        model = Checkpointed(reentrant, outer).double()
        x = torch.randn(2, 2, 7, 6, 5, dtype=torch.float64).requires_grad_()
        cut = x
        if axes is not None:
            grid = hs.Grid(**axes)
            hs.parallelize(model, grid, memory=memory)
            cut = hs.shard(x, grid)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hyperslab.parallel.offload.OFFLOADED_FROM", 64)
            model(cut).square().mean().backward()
        found.append(
            [x.grad, *(p.grad for p in model.parameters()), *(b.double() for b in model.buffers())]
        )
    return max(distance(b, a) for b, a in zip(*found, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("memory", "outer"), [("offload", None), ("none", False)])
def test_checkpoints_where_hooks_keep_tensors(
    memory: Memory, reentrant: bool, outer: bool | None
) -> None:
    """Torch returns blocks there, and what is called again has to find them cut."""
    assert max(run_ranks(2, checkpointed, memory, reentrant, outer)) < 1e-10


FORMS = {
    "contiguous": torch.arange(120.0).reshape(2, 3, 4, 5),
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one channel": torch.arange(40.0).reshape(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "turned": torch.arange(120).reshape(2, 3, 4, 5).permute(3, 1, 0, 2),
    "bfloat16": torch.arange(7, dtype=torch.bfloat16),
    "complex": torch.arange(6).to(torch.complex64).reshape(2, 3).t(),
    "bool": torch.tensor([True, False, True]),
    "no dims": torch.tensor(3.5, dtype=torch.float64),
    "a part": torch.arange(60.0)[12:36].reshape(4, 6),
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_returns_with_its_strides(form: str) -> None:
    tensor = FORMS[form]
    assert is_dense(tensor)
    returned = OffloadFile(0).move(tensor)()
    assert returned.stride() == tensor.stride()
    assert returned.dtype == tensor.dtype
    assert torch.equal(returned, tensor)


def test_gaps_and_repetitions_are_no_dense_tensors() -> None:
    assert not is_dense(torch.arange(3.0).expand(4, 3))
    assert not is_dense(torch.arange(24.0).reshape(4, 6)[:, 1:5])
    assert not is_dense(torch.arange(24.0)[::2])


def test_repeated_elements_are_kept_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperslab.parallel.offload.OFFLOADED_FROM", 1)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Expanding())
    hs.parallelize(model, hs.Grid(), memory="offload")
    x = torch.arange(3.0)
    model(x).backward()
    weight = model[0].weight.detach().clone().requires_grad_()
    ((x @ weight.t()).expand(4, 3) ** 3).sum().backward()
    assert torch.equal(model[0].weight.grad, weight.grad)


class Conjugating(nn.Module):
    """Keeps tensors of which only a bit says that they are conjugate, or negative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * x
        return (y.conj() * (y.exp() + y.conj().imag ** 3)).abs().sum()


def test_conjugate_tensors_return(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for model in plain_and_offloaded(Conjugating, monkeypatch):
        x = torch.complex(torch.linspace(-1, 1, 6), torch.linspace(0, 2, 6)).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x), x)
        found.append(gradient)
    assert torch.equal(*found)


class Expanding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.expand(4, 3) ** 3).sum()


def test_places_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    file = OffloadFile(0)
    for turn in range(3):
        kept = [file.move(torch.full((1000,), turn + part, dtype=torch.int16)) for part in range(5)]
        del kept[2]  # a hole, which is free when what lies behind it is
        assert [int(load()[-1]) for load in kept] == [turn + part for part in (0, 1, 3, 4)]
        kept.clear()
    assert file._file is not None
    assert os.fstat(file._file).st_size == 4 * mmap.ALLOCATIONGRANULARITY + 2000
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_a_place_stays_as_long_as_what_was_loaded() -> None:
    file = OffloadFile(0)
    kept = file.move(torch.zeros(1000))
    loaded, again = kept(), kept()
    loaded[0] = 1  # on a page of its own
    del kept
    other = file.move(torch.full((1000,), 2.0))
    assert loaded.sum() == 1
    assert not again.any()
    assert torch.equal(other(), torch.full((1000,), 2.0))
    del loaded, again, other
    third = file.move(torch.ones(1000))
    assert file._places[0].begin == 0
    assert len(file._places) == 1
    assert third().all()


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_and_a_missing_folder_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        with pytest.raises(HyperslabError, match=rf"rank 3: .*{tmp_path}: No space left") as error:
            OffloadFile(3).move(torch.ones(5))
    assert "set TMPDIR to a folder on a disk with more room" in str(error.value)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    with pytest.raises(HyperslabError, match=r"rank 0: .*nowhere: No such file"):
        OffloadFile(0).move(torch.ones(5))


def test_a_place_that_could_not_be_written_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    file = OffloadFile(0)
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        with pytest.raises(HyperslabError):
            file.move(torch.ones(5))
    gc.collect()  # of the error nothing stays
    kept = file.move(torch.ones(5))
    assert len(file._places) == 1
    assert kept().all()


def test_a_forked_process_does_not_write_to_the_same_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = OffloadFile(0)
    kept = file.move(torch.ones(5))
    monkeypatch.setattr("os.getpid", lambda: -1)
    for use in (kept, lambda: file.move(torch.zeros(5))):
        with pytest.raises(HyperslabError, match="forked from the one that has"):
            use()
