"""Which backend and which device a rank gets (tier: no process; two gloo ranks; an accelerator)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.comm import bootstrap, communicator
from hyperslab.comm.bootstrap import (
    GLOO_ON_CUDA,
    backend_of,
    device_of_rank,
    start_distributed,
    start_ranks,
    take_own_device,
)
from hyperslab.comm.communicator import PendingMessages, communicators_of_world
from hyperslab.comm.launchers import RankVariables
from hyperslab.comm.shared_memory import shared_channels
from tests.gpus import needs_a_gpu, share_devices
from tests.ranks import run_ranks
from tests.worlds import groups_of


@pytest.mark.parametrize("wanted", ["x", "7", "GPU-0"])
def test_devices_are_not_hidden_by_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: str
) -> None:
    """With CUDA's torch, on a machine that has devices, of which the variable names none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(bootstrap, "NVIDIA_DEVICE_FILE", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    with pytest.raises(hs.LayoutError, match=f"^CUDA_VISIBLE_DEVICES='{wanted}' names no device"):
        start_ranks("auto", 60)
    assert not start_ranks("cpu", 60)
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert not start_ranks("auto", 60)


class Machine:
    """A machine with so many CUDA devices, on which no process group is really started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int, local_rank: int) -> None:
        self.backends: list[str] = []
        self.taken: list[int] = []
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": 29400}
        rank = {"RANK": local_rank, "WORLD_SIZE": 4, "LOCAL_RANK": local_rank}
        for name, value in (rank | where).items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "set_device", self.taken.append)
        monkeypatch.setattr(bootstrap, "_start", self._start)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def _start(self, _: RankVariables, backend: str, *__: Any) -> None:
        self.backends.append(backend)


@pytest.mark.parametrize(
    ("device", "devices", "local_rank", "backend", "taken"),
    [
        ("auto", 0, 3, "gloo", []),
        ("cpu", 2, 3, "gloo", []),
        ("auto", 4, 3, "nccl", [3]),
        ("cuda", 2, 1, "nccl", [1]),
        ("cuda-shared", 1, 3, GLOO_ON_CUDA, [0]),
        ("cuda-shared", 2, 3, GLOO_ON_CUDA, [1]),
    ],
)
def test_the_backend_follows_the_device(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    devices: int,
    local_rank: int,
    backend: str,
    taken: list[int],
) -> None:
    machine = Machine(monkeypatch, devices, local_rank)
    assert start_ranks(device, 60)
    assert machine.backends == [backend]
    assert machine.taken == taken


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_ranks_never_share_a_device_unasked(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    machine = Machine(monkeypatch, 1, 1)
    with pytest.raises(hs.LayoutError, match=r"this machine has 1\n(.|\n)*device=cuda-shared"):
        start_ranks(device, 60)
    with pytest.raises(hs.LayoutError, match=r'init_process_group\("cpu:gloo,cuda:gloo"\)'):
        start_distributed()
    assert not machine.backends


@pytest.mark.parametrize("visible", ["0", "2", "GPU-3f1a", " MIG-7c "])
def test_a_rank_that_sees_one_device_alone_takes_it(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    """``srun --gpus-per-task=1``: the fourth task of a node sees one device, as number 0."""
    machine = Machine(monkeypatch, 1, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert start_ranks("auto", 60)
    start_distributed()
    assert machine.backends == ["nccl", "nccl"]
    assert machine.taken == [0, 0]


@pytest.mark.parametrize("visible", ["0,1", "", "0,"])
def test_a_rank_that_sees_fewer_than_it_counts_is_refused(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    Machine(monkeypatch, 2 if visible == "0,1" else 1, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(hs.LayoutError, match="local rank 3 has no CUDA device"):
        start_ranks("auto", 60)


@pytest.mark.parametrize("device", ["cuda", "cuda-shared"])
def test_where_there_is_no_device_none_is_shared(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    Machine(monkeypatch, 0, 0)
    with pytest.raises(hs.LayoutError, match="this machine has 0") as caught:
        start_ranks(device, 60)
    assert "cuda-shared" not in str(caught.value)


def started_group(
    monkeypatch: pytest.MonkeyPatch, backend: str, bound: torch.device | None = None
) -> list[torch.device]:
    """Pretends that a program has started torch on a machine of four devices; the devices taken."""
    taken: list[torch.device] = []
    name, config = ("undefined", backend[1:]) if backend.startswith("?") else (backend, backend)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda _group=None: name)
    monkeypatch.setattr(dist, "get_backend_config", lambda _group=None: config)
    monkeypatch.setattr(dist, "get_rank", lambda: 6)
    monkeypatch.setattr(bootstrap, "default_group", lambda: SimpleNamespace(bound_device_id=bound))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return taken


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("gloo", "cpu"),
        ("nccl", "cuda"),
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("?cpu:gloo,cuda:nccl", "cuda"),
        ("?cpu:gloo", "cpu"),
        (GLOO_ON_CUDA, "cuda"),
    ],
)
def test_the_device_follows_the_backend(
    monkeypatch: pytest.MonkeyPatch, backend: str, kind: str
) -> None:
    """A question mark: as ``init_process_group()`` finds them, without a name."""
    started_group(monkeypatch, backend)
    assert device_of_rank().type == kind


def test_the_device_is_that_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    third = torch.device("cuda", 2)
    taken = started_group(monkeypatch, "nccl", third)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert device_of_rank() == third
    assert take_own_device() == third
    assert taken == [third]


def test_ranks_that_would_all_take_the_first_device_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = started_group(monkeypatch, "?cpu:gloo,cuda:nccl")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(hs.LayoutError, match=r"(?s)rank 6 is number 2 .*set_device\(2\)"):
        take_own_device()
    assert not taken
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each rank sees its own alone
    assert take_own_device() == torch.device("cuda", 0)


def test_a_grid_on_the_cpu_of_a_machine_with_devices_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started_group(monkeypatch, "gloo")
    with caplog.at_level("INFO", logger="hyperslab"):
        assert take_own_device().type == "cpu"
    assert "the grid is on the CPU, as its process group is (gloo)" in caplog.text


def without_a_name(store: str) -> tuple[str, bool, float]:
    """A program that starts torch in its shortest form, on two ranks."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(store=dist.FileStore(store, 2), rank=rank, world_size=2)
    try:
        grid = hs.Grid(depth=2)
        x = hs.shard(torch.ones(1, 1, 4, 2, 2), grid)
        return backend_of(), shared_channels() is not None, x.sum().item()
    finally:
        dist.destroy_process_group()


def test_a_group_without_a_backends_name(tmp_path: Path) -> None:
    assert run_ranks(2, without_a_name, str(tmp_path / "store")) == [("gloo", True, 16.0)] * 2


def through_host() -> None:
    """What would carry CUDA tensors carries those of the CPU, too."""
    made = communicators_of_world()
    me = dist.get_rank()
    other = 1 - me
    sent = torch.arange(24.0).view(2, 3, 4).transpose(0, 2) + 100 * me
    buffers = [torch.zeros(4, 3, 2), torch.zeros(5, dtype=torch.bfloat16)]
    sends = [(other, sent), (other, torch.full((5,), me, dtype=torch.bfloat16))]
    receives = [(other, buffer) for buffer in buffers]
    arrived = PendingMessages(made.halos.group, sends, receives, "a test", True).wait()
    assert all(a is b for a, b in zip(arrived, buffers, strict=True))
    assert torch.equal(buffers[0], sent - 100 * me + 100 * other)
    assert torch.equal(buffers[1], torch.full((5,), other, dtype=torch.bfloat16))


def test_messages_through_the_host() -> None:
    run_ranks(2, through_host)


def staged(store: str) -> list[bool]:
    """Whether messages go through the host, were there a CUDA device."""
    share_devices(store)
    world = dist.group.WORLD
    assert world is not None
    found = [device_of_rank().type == "cpu"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        for device in ("cpu", "cuda"):
            here = torch.device(device)
            monkeypatch.setattr(communicator, "device_of_rank", lambda _group, d=here: d)
            found.append(communicator.GroupCommunicator(world)._through_host)
    return found


def test_gloo_carries_cuda_tensors_through_the_host(tmp_path: Path) -> None:
    assert (
        run_ranks(2, staged, str(tmp_path / "store"))
        == [[not torch.cuda.is_available(), False, True]] * 2
    )


def gradients(device: torch.device, grid: hs.Grid) -> list[torch.Tensor]:
    """Loss and gradients of a U-Net, whose layers need every kind of communication."""
    torch.manual_seed(0)  # the same numbers on every rank and on a device as on another
    model = hs.parallelize(hs.models.UNet3D(channels=4).double().to(device), grid)
    x = torch.randn(2, 1, 32, 32, 32, dtype=torch.float64).to(device)
    y = torch.randint(3, (2, 32, 32, 32)).to(device)
    cut = [x, y]
    if grid.size > 1:
        cut = [hs.shard(x, grid), hs.shard(y, grid, channels=False)]
    loss = F.cross_entropy(model(cut[0]), cut[1])
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


def on_one_device(store: str, axes: dict[str, int]) -> list[torch.Tensor]:
    share_devices(store)
    grid = hs.Grid(**axes)
    assert grid.device.type == "cuda"
    world = dist.group.WORLD
    assert world is not None
    assert len(groups_of(world)) == 4
    return gradients(grid.device, grid)


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("axes", [{"depth": 2}, {"data": 2, "height": 2}], ids=str)
def test_several_ranks_on_one_device_give_the_serial_gradients(
    axes: dict[str, int], tmp_path: Path
) -> None:
    ranks = axes.get("data", 1) * 2
    found = run_ranks(ranks, on_one_device, str(tmp_path / "store"), axes)[0]
    serial = gradients(torch.device("cuda"), hs.Grid())
    assert len(found) == len(serial)
    for ours, theirs in zip(found, serial, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
