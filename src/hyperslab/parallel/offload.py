"""Moves what autograd keeps to a file, or from a GPU to its host, until the backward pass."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hyperslab.comm import Grid
from hyperslab.errors import HyperslabError, LayoutError
from hyperslab.tensor import Sharded
from hyperslab.util.capture import refuse_capture
from hyperslab.util.free_memory import FreedMemory
from hyperslab.util.torch_internals import (
    DisableTorchFunctionSubclass,
    tree_leaves,
    version_of,
)

OFFLOADED_FROM = 1 << 20
"""Bytes of a tensor from which on it is moved; smaller ones take less memory than time."""


Load = Callable[[], torch.Tensor]
"""Returns a tensor that lies elsewhere, or an equal one with the same strides."""


Move = Callable[[torch.Tensor], Load]
"""Copies a tensor that `is_dense` elsewhere; what it returns frees the copy when it goes."""


def offload_activations(module: nn.Module, move: Move) -> None:
    """Let a module have its activations moved from forward to backward; in place.

    Stay where they are: small tensors, parameters, and the module's inputs, which the caller has
    anyway. What is deferred at the end of the forward is computed there, as its operands would
    be kept behind it.
    """
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with _moving(move, (args, kwargs, [*module.parameters(), *module.buffers()])):
            result = forward(*args, **kwargs)
            for leaf in tree_leaves(result):
                if isinstance(leaf, Sharded):
                    leaf.force()
        return result

    module.forward = run


def move_for(grid: Grid) -> Move:
    """Choose where this rank's activations go: page-locked memory of a GPU's host, or a file.

    With a file the process gives freed blocks back to the system: a file is for those to whom
    memory counts more than time.
    """
    if grid.device.type == "cuda":
        return move_to_host
    return OffloadFile(grid.rank, FreedMemory()).move


@contextmanager
def _moving(move: Move, owned: Any) -> Iterator[None]:
    """Move what autograd keeps in this context, and load it where a backward pass asks for it.

    What shares memory with a tensor in ``owned`` stays.
    """
    with DisableTorchFunctionSubclass():  # a `Sharded` has its block's storage
        tensors = [leaf for leaf in tree_leaves(owned) if isinstance(leaf, torch.Tensor)]
        staying = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def pack(tensor: torch.Tensor) -> Load:
        with DisableTorchFunctionSubclass():
            tensor = tensor.detach()  # a function's result would keep the function that keeps it
            plain = type(tensor) is torch.Tensor and tensor.nbytes >= OFFLOADED_FROM
            if not plain or tensor.untyped_storage().data_ptr() in staying:
                return partial(_unchanged, tensor, version_of(tensor))
        tensor = tensor.resolve_conj().resolve_neg()  # bytes know neither
        return move(tensor if is_dense(tensor) else tensor.clone())

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda load: load()):
        yield


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Return a tensor that stays: torch looks for changes in place only without hooks."""
    with DisableTorchFunctionSubclass():
        changed = version_of(tensor) != version
    if changed:
        raise LayoutError(
            f"a tensor {tuple(tensor.shape)} that the backward pass needs was changed in place "
            "since the forward pass\n    change a clone() of it, or change it after the backward "
            "pass"
        )
    return tensor


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell if a tensor's elements fill a range of memory, each place once, in some order of dims.

    >>> is_dense(torch.empty(2, 3).t()), is_dense(torch.empty(2, 3)[:, :2])
    (True, False)
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def move_to_host(tensor: torch.Tensor) -> Load:
    """Copy a tensor of a GPU to page-locked memory, in the order of its stream."""
    refuse_capture(
        'memory="offload", whose copies on the host are gone at the next replay,',
        'use memory="tile" or "recompute", or run this step eagerly',
    )
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    return partial(copy.to, tensor.device, non_blocking=True)


class OffloadFile:
    """Holds tensors of the CPU in a file without a name, which goes with the process.

    It lies in ``TMPDIR``, else in ``/var/tmp``, which is on a disk where ``/tmp`` is memory. Its
    places are a stack: a backward pass frees them from the end. What is loaded is the file's own
    pages, of which one that is written is copied: reading into fresh memory took three times as
    long. Between two of its tensors the stages of a step end, and ``freed`` is given back.
    """

    def __init__(self, rank: int, freed: FreedMemory | None = None) -> None:
        self._rank = rank
        self._freed = freed
        self._folder = os.environ.get("TMPDIR") or "/var/tmp"
        self._file: int | None = None
        self._process = 0  # which has made it
        self._places: list[_Place] = []

    def move(self, tensor: torch.Tensor) -> Load:
        self._refuse_forks()
        moved = _InFile(self, self._take(tensor.nbytes), tensor)  # frees it if it is not written
        with self._named_errors():
            self._write(_bytes_of(tensor), moved.place.begin)
        if self._freed is not None:
            self._freed.give_back()
        return moved

    def map(self, place: _Place) -> _Mapped:
        """Map the pages of a place, which are read now."""
        self._refuse_forks()
        if self._freed is not None:
            self._freed.give_back()
        assert self._file is not None
        with self._named_errors():
            nbytes = place.end - place.begin
            pages = _Mapped(self._file, nbytes, flags=mmap.MAP_PRIVATE, offset=place.begin)
            try:
                pages.madvise(_POPULATE_READ)
            except OSError as error:
                if error.errno != errno.EINVAL:  # before Linux 5.14 they are read when touched
                    raise
        return pages

    def _refuse_forks(self) -> None:
        """Refuse a process that was forked since: both would write to the same places."""
        if self._file is not None and os.getpid() != self._process:
            raise HyperslabError(
                f"rank {self._rank}: memory=offload: this process was forked from the one that has "
                "the activations' file\n    parallelize the network in the process that trains it"
            )

    def _take(self, nbytes: int) -> _Place:
        while self._places and self._places[-1].free:
            self._places.pop()
        begin = self._places[-1].end if self._places else 0
        begin += -begin % mmap.ALLOCATIONGRANULARITY
        self._places.append(_Place(begin, begin + nbytes))
        return self._places[-1]

    def _write(self, data: memoryview, begin: int) -> None:
        """Write all of ``data``, of which one call of the system may take a part."""
        if self._file is None:
            self._file, name = tempfile.mkstemp(dir=self._folder)
            self._process = os.getpid()
            weakref.finalize(self, os.close, self._file)
            os.unlink(name)
        while len(data):
            done = os.pwrite(self._file, data, begin)
            data = data[done:]
            begin += done

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise HyperslabError(
                f"rank {self._rank}: memory=offload: the activations' file in {self._folder}: "
                f"{error.strerror or error}\n    set TMPDIR to a folder on a disk with more room, "
                "or use memory=recompute"
            ) from error


_POPULATE_READ = 22
"""Asks for all pages at once, with an error where one cannot be read; Python has no name for it."""


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.as_strided((tensor.numel(),), (1,))
    array: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array.data


@dataclass(slots=True)
class _Place:
    begin: int
    end: int
    free: bool = False


class _Mapped(mmap.mmap):
    source: _InFile  # whose place stays as long


class _InFile:
    """Stands for a tensor in the file, and frees its place when it goes."""

    def __init__(self, file: OffloadFile, place: _Place, tensor: torch.Tensor) -> None:
        self._file = file
        self.place = place
        self._form = tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def __call__(self) -> torch.Tensor:
        if self.place.begin == self.place.end:
            return torch.empty_strided(*self._form, dtype=self._dtype)
        pages = self._file.map(self.place)
        pages.source = self
        return torch.frombuffer(pages, dtype=self._dtype).as_strided(*self._form)

    def __del__(self) -> None:
        self.place.free = True  # and no more: it may be any thread's turn
