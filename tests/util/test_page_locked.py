"""Page-locked memory of exactly the size that is asked for, CUDA pretended (tier: no process)."""

from __future__ import annotations

import ctypes
import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.data.assemble import BatchAssembler, LocalBatch
from hyperslab.data.dataset import DeviceCopy
from hyperslab.geometry import Partition
from hyperslab.util import page_locked as module
from hyperslab.util.page_locked import LARGE, LentBuffers, PageLockedBuffers, page_locked
from tests.recipe.own_classes import Blobs


class Cudart:
    """Registers memory; looks at it when it is unregistered, while it must still be there."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.fails = False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 0
        if self.fails:
            return 1
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, self.registered.pop(address))  # unmapped, it would be a fault
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    fake = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    own = torch.empty
    with torch.device("meta"):
        own(0)  # now torch has noted what makes tensors: it would keep the one below for ever

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = own(*size, **options)
        made.pinned_by_torch = pin_memory  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr(torch, "empty", empty)
    return fake


def test_no_byte_more_is_locked(cudart: Cudart) -> None:
    memory = page_locked(LARGE + 4097)
    assert list(cudart.registered.values()) == [LARGE + 4097]
    assert memory.data_ptr() in cudart.registered
    part = memory[5:9]
    memory.fill_(7)
    del memory
    gc.collect()
    assert cudart.registered  # somebody has a part of it
    assert part.tolist() == [7] * 4
    del part
    gc.collect()
    assert not cudart.registered


def test_torchs_own_memory_is_the_way_out(cudart: Cudart) -> None:
    assert page_locked(LARGE - 1).pinned_by_torch  # type: ignore[attr-defined]
    cudart.fails = True
    assert page_locked(LARGE).pinned_by_torch  # type: ignore[attr-defined]
    assert not cudart.registered


class Copied:
    """The event of a copy."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_a_buffer_is_lent_again_when_it_was_copied(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGE", 0)
    buffers = PageLockedBuffers()
    event: Any = Copied()
    first = buffers.lend((3, 5), torch.int16)
    assert first.shape == (3, 5)
    assert first.dtype == torch.int16
    first.numpy()[:] = np.arange(15).reshape(3, 5)
    address = first.data_ptr()
    buffers.copying(torch.zeros(3), Copied())  # type: ignore[arg-type]
    buffers.copying(first, event)
    second = buffers.lend((3, 5), torch.int16)  # somebody has the first one
    assert second.data_ptr() != address
    array = first.numpy()
    del first
    assert buffers.lend((15,), torch.int16).data_ptr() not in (address, second.data_ptr())
    event.done = True
    assert buffers.lend((30,), torch.uint8).data_ptr() != address  # an array of it is there
    del array
    again = buffers.lend((30,), torch.uint8)
    assert again.data_ptr() == address


def test_buffers_of_other_shapes_do_not_pile_up(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGE", 0)
    buffers = PageLockedBuffers()
    for turn in range(3):
        for size in (40, 60):  # values and targets
            buffers.lend((size,), torch.uint8)
        assert sorted(cudart.registered.values()) == [40, 60], turn
    for size in range(100, 200):
        buffers.lend((size,), torch.uint8)
    gc.collect()
    assert len(cudart.registered) <= PageLockedBuffers.kept + 1


@pytest.mark.parametrize("large", [0, LARGE])
def test_plain_memory_is_used_again(monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    monkeypatch.setattr(module, "LARGE", large)
    buffers = LentBuffers()
    first = buffers.lend((3, 5), torch.float32).fill_(1)
    address = first.data_ptr()
    second = buffers.lend((3, 5), torch.float32).fill_(2)
    assert first.sum() == 15  # somebody has it
    del first
    third = buffers.lend((5, 3), torch.float32)
    assert third.data_ptr() == address
    assert second.sum() == 30


def test_nothing_is_lent_of_no_samples() -> None:
    assert LentBuffers().lend((0, 4), torch.float32).shape == (0, 4)


def test_a_batch_under_way_to_the_device_is_not_lent(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGE", 0)
    for context in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, context, lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    buffers = PageLockedBuffers()
    shape = (1, 1, 2, 2, 2)

    def load(_epoch: int, _step: int, _ahead: object) -> LocalBatch:
        values = buffers.lend(shape, torch.int16)
        part = Partition(shape, (None,) * 5)
        return LocalBatch(values, torch.zeros(1, 2), part, part, (0,), kept=False)

    grid = SimpleNamespace(device=torch.device("cpu"))
    planner = SimpleNamespace(boxes=SimpleNamespace(grid=grid))
    assembler: Any = SimpleNamespace(load=load, buffers=buffers, planner=planner)
    copy = DeviceCopy(assembler)
    events = [Copied(), Copied()]
    copy.stream = SimpleNamespace(record_event=iter(events).__next__)  # type: ignore[assignment]
    first = copy.start(0, 0, None)
    assert first is not None
    assert first.arrived is events[0]
    address = first.values.data_ptr()
    del first
    second = copy.start(0, 1, None)
    assert second is not None
    assert second.values.data_ptr() != address
    events[0].done = True
    assert buffers.lend(shape, torch.int16).data_ptr() == address


def test_batches_lie_in_it(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a device, to which nothing is copied here; the last mini-batch is smaller."""

    def epochs() -> list[torch.Tensor]:
        with hs.open(Blobs(10, width=5), hs.Grid(), batch_size=3, split="all") as data:
            return [x.full() for epoch in range(2) for x, _ in data.epoch(epoch)]

    expected = epochs()
    monkeypatch.setattr(module, "LARGE", 0)
    monkeypatch.setattr(BatchAssembler, "_pinned", True)
    sizes: list[int] = []
    register = cudart.cudaHostRegister

    def watched(address: int, nbytes: int, flags: int) -> int:
        sizes.append(nbytes)
        return register(address, nbytes, flags)

    monkeypatch.setattr(cudart, "cudaHostRegister", watched)
    for found, values in zip(epochs(), expected, strict=True):
        assert torch.equal(found, values)
    assert {*sizes} == {4 * 125 * 3, 4 * 125}
    assert len(sizes) < 8  # mini-batches of both epochs
