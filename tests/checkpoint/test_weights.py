"""Weights that others read, and that torch has cut (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import hyperslab as hs
from hyperslab.checkpoint import snapshot
from hyperslab.checkpoint.save_load import load, save
from tests.checkpoint.test_save_load import network, read, same, save_on_ranks, tensors, written
from tests.ranks import run_ranks


def split_weights_on_ranks(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "MOST_IN_ONE_FILE", 0)
        written(path, 2)


def test_any_reader_of_safetensors_reads_the_weights(tmp_path: Path) -> None:
    model, _ = network(2)
    expected = model.state_dict()
    run_ranks(2, save_on_ranks, tmp_path / "one")
    run_ranks(3, split_weights_on_ranks, tmp_path / "many")
    one = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "many").glob("model-*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    parts = {file: load_file(tmp_path / "many" / file) for file in files}
    many = {name: parts[file].pop(name) for name, file in index["weight_map"].items()}
    assert not any(parts.values())
    for found in (one, many):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert same(read(tmp_path / "many")[0], tensors(*network(2)))


def shard_with_torch(path: Path) -> bool:
    """Weights and moments that torch has cut over ranks, in place of ours."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    made = []
    for seed in (2, 3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * seed)
        model(torch.rand(4, 5)).sum().backward()
        optimizer.step()
        made.append((model, optimizer))
    (model, optimizer), (other, restored) = made
    save(path, model, optimizer)
    load(path, other, restored)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(
        torch.equal(a.full_tensor(), b.full_tensor())  # type: ignore[attr-defined]
        and torch.equal(
            optimizer.state[a]["exp_avg"].full_tensor(), restored.state[b]["exp_avg"].full_tensor()
        )
        for a, b in pairs
    )


def test_tensors_that_torch_has_cut(tmp_path: Path) -> None:
    assert run_ranks(2, shard_with_torch, tmp_path / "a") == [True, True]
    weights = load_file(tmp_path / "a" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        "0.weight": (7, 5),
        "0.bias": (7,),
        "1.weight": (3, 7),
        "1.bias": (3,),
    }


def save_a_cut_buffer(path: Path) -> None:
    module = nn.BatchNorm1d(6)
    module.running_mean[:] = hs.shard(torch.randn(1, 1, 6), hs.Grid(width=2))[0, 0]
    with pytest.raises(hs.errors.CheckpointError, match="running_mean is cut"):
        save(path, module)


def test_a_buffer_that_is_cut_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, save_a_cut_buffer, tmp_path / "c")
