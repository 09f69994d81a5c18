"""Checks that all ranks hold the same network, parameters, inputs and random states.

In reading order: `check_same_network` before parameters are made equal; `share_random_states`
for what ranks that compute the same have to draw alike; `EqualParameters` at training forwards
1, 2, 4, 8, ...; `EqualLosses` at their backward passes; `OrdinaryInputs` for ordinary tensors that
enter a parallelised module in training.
"""

from __future__ import annotations

import json
import logging
import math
import random
import socket
import struct
import weakref
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hyperslab.comm import Grid, log_once, per_grid
from hyperslab.comm.agreement import all_gather, broadcast_from_main, keeping_contact
from hyperslab.comm.bootstrap import world
from hyperslab.comm.collectives import AllGatheredInts
from hyperslab.comm.communicator import as_sent
from hyperslab.comm.rendezvous import compare_facts
from hyperslab.errors import LayoutError
from hyperslab.tensor import Sharded
from hyperslab.tensor.dispatch import average_gradient
from hyperslab.tensor.inputs import comparisons_of, describe_ranks, digest_of_all
from hyperslab.util.capture import do_beside
from hyperslab.util.torch_internals import tree_leaves

DEVICE_IN_REPR = (nn.ParameterList, nn.ParameterDict)
"""Lists modules whose ``repr`` names the device, in which ranks differ."""


def check_same_network(module: nn.Module, grid: Grid, options: Mapping[str, Any]) -> None:
    """Compare parameters, buffers, torch's own layers, and how `parallelize` was called.

    What a layer of a user's says of itself may be different on every rank, and is not compared.

    Raises:
        LayoutError: names the first difference, with the ranks.
    """
    facts = {
        "options": dict(options),
        "tensors": {
            name: f"{tuple(t.shape)} {t.dtype}" + " frozen" * (not t.requires_grad)
            for name, t in (*module.named_parameters(), *module.named_buffers())
        },
        "layers": {
            name: f"{type(part).__name__}({part.extra_repr()})"
            for name, part in module.named_modules()
            if type(part).__module__.startswith("torch.nn.")
            and not isinstance(part, DEVICE_IN_REPR)
        },
    }
    words = json.dumps(facts)
    if grid.same_on_all(zlib.crc32(words.encode())):
        return
    found = all_gather((socket.gethostname(), words))
    difference = compare_facts([json.loads(w) for _, w in found], [host for host, _ in found])
    first = difference.splitlines()[0].removeprefix("the ranks differ in ")
    raise LayoutError(
        f"the ranks' {type(module).__name__} differ in {first or 'the order of their parameters'}\n"
        "    build the same network on every rank, and parallelize it alike"
    )


RandomStates = Literal["replica", "own"]
RANDOM_STATES: tuple[str, ...] = get_args(RandomStates)


def share_random_states(grid: Grid, states: RandomStates) -> None:
    """Torch seeds every process differently; ranks that drop elements must draw alike.

    So must, with "replica", data sets of the ranks of a replica, which draw from NumPy's and
    Python's generators, too.
    """
    state = torch.get_rng_state().to(grid.device)
    dist.broadcast(state, group=world(), group_src=0)
    torch.set_rng_state(state.cpu())
    if grid.device.type == "cuda":
        state = torch.cuda.get_rng_state(grid.device).to(grid.device)
        dist.broadcast(state, group=world(), group_src=0)
        torch.cuda.set_rng_state(state.cpu(), grid.device)
    if states != "replica":
        return
    # The legacy generator is the one that data sets draw from.
    of_numpy, of_python = broadcast_from_main(
        lambda: (np.random.get_state(), random.getstate())  # noqa: NPY002
    )
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002
    replica = grid.coords["data"]
    if replica > 0:  # other replicas than rank 0's seed theirs by its states
        random.seed((random.getrandbits(128) << 32) + replica)
        words = np.random.randint(0, 1 << 32, 4, dtype=np.uint32)  # noqa: NPY002
        np.random.seed([*words.tolist(), replica])  # noqa: NPY002


ROUNDING_EPSILONS = 64  # machine epsilons that processors of different kinds may be apart


class EqualParameters:
    """Looks at a module's parameters on all ranks, at its training forwards 1, 2, 4, 8, ...

    At the first there is what was done since `hyperslab.parallelize` made them equal (weights
    loaded on one rank alone), at the second a step of the optimiser (another learning rate on one
    rank). After that nothing new is expected, and the cost fades away.
    """

    def __init__(self, module: nn.Module, grid: Grid) -> None:
        self.module = module
        self.grid = grid
        self.forwards = 0
        self._owed: AllGatheredInts | None = None  # of the last look, by a CUDA device

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare parameters at a forward that all ranks make together, as on cut tensors.

        Raises:
            LayoutError: parameters differ by more than rounding.
        """
        cut = any(type(value) is Sharded for value in args)
        if not cut and not any(isinstance(value, Sharded) for value in tree_leaves((args, kwargs))):
            return
        do_beside(self._look, "the comparison of parameters")

    def _look(self) -> None:
        self._read()
        self.forwards += 1
        if self.forwards & (self.forwards - 1):
            return
        on_host, on_device = digest_of_all(self.module.parameters(), self.grid.device)
        self._owed = AllGatheredInts(
            self.grid, [on_host], on_device, "the comparison of parameters"
        )
        if self.grid.device.type == "cpu":
            self._read()

    def _read(self) -> None:
        """Judge the last look, on a CUDA device at the next forward, which waits for nothing."""
        owed, self._owed = self._owed, None
        if owed is not None:
            rows = owed.read()
            if any(row != rows[0] for row in rows):
                self._compare()

    def _compare(self) -> None:
        """Find out which parameter differs, and by how much, as all ranks know that one does."""
        found: str | None = None
        for name, parameter in self.module.named_parameters():
            first = parameter.detach().contiguous().clone()
            with keeping_contact("the comparison of parameters"):
                dist.broadcast(as_sent(first), group=world(), group_src=0)
            if found is None and not _equal_up_to_rounding(parameter.detach(), first):
                found = name
        names = all_gather(found)
        strangers = [rank for rank, name in enumerate(names) if name is not None]
        if not strangers:
            log_once(
                self.grid,
                f"the parameters of {type(self.module).__name__} differ between ranks by rounding: "
                "are their processors of different kinds?",
                logging.WARNING,
            )
            return
        raise LayoutError(
            f"the parameters of {type(self.module).__name__} are no longer equal on all ranks: "
            f"{describe_ranks(strangers)} has another {names[strangers[0]]!r} than rank 0, at "
            f"forward {self.forwards} of its training\n    load and change parameters on every "
            "rank alike, or before hyperslab.parallelize, which gives all ranks those of rank 0;\n"
            "    use the same optimiser, learning rate and clipping on every rank"
        )


def _equal_up_to_rounding(x: torch.Tensor, first: torch.Tensor) -> bool:
    if torch.equal(x, first):
        return True
    if not x.is_floating_point():
        return False
    tolerance = ROUNDING_EPSILONS * torch.finfo(x.dtype).eps
    return bool((x - first).abs().max() <= tolerance * first.abs().max())


class EqualLosses:
    """Looks at the losses of all ranks, at backward passes 1, 2, 4, 8, ... of a grid's modules.

    Gradients are those of the ranks' mean loss. Where the losses differ each rank has put numbers
    of its own into them, which no other check sees.
    """

    def __init__(self, grid: weakref.ref[Grid]) -> None:
        self._grid = grid
        self.passes = 0
        self._owed: AllGatheredInts | None = None  # of the last look, by a CUDA device
        self._resolution = 0.0
        self._said = False

    def look(self, outputs: Sequence[torch.Tensor]) -> None:
        """Compare the numbers with which a pass has begun; cut ones are equal on all ranks."""
        grid = self._grid()
        if grid is None or not grid.has_values:
            return
        ordinary = [y for y in outputs if type(y) is torch.Tensor]  # torch takes graph edges, too
        losses = [
            y.detach().reshape(()) for y in ordinary if y.numel() == 1 and y.is_floating_point()
        ]
        do_beside(partial(self._look, grid, losses), "the comparison of losses")

    def _look(self, grid: Grid, losses: Sequence[torch.Tensor]) -> None:
        self._read(grid)
        self.passes += 1
        if self.passes & (self.passes - 1):
            return
        self._resolution = max((torch.finfo(y.dtype).eps for y in losses), default=0.0)
        total = sum((y.double() for y in losses), torch.zeros((), dtype=torch.float64))
        bits = total.view(torch.int64)
        self._owed = AllGatheredInts(grid, [], bits, "the comparison of losses")
        if grid.device.type == "cpu":
            self._read(grid)

    def _read(self, grid: Grid) -> None:
        """Judge the last look, on a CUDA device at the next pass, which waits for nothing."""
        owed, self._owed = self._owed, None
        if owed is None:
            return
        found = [struct.unpack("d", struct.pack("q", bits))[0] for (bits,) in owed.read()]
        losses = [math.inf if math.isnan(loss) else loss for loss in found]
        lowest, highest = min(losses), max(losses)
        # Processors of different kinds round otherwise, which adds up in a network.
        alike = math.isclose(lowest, highest, rel_tol=math.sqrt(self._resolution))
        if not alike and not self._said:
            self._said = True  # of other numbers it would be another message
            log_once(
                grid,
                f"the ranks' losses differ: {lowest:.6g} on rank {losses.index(lowest)}, "
                f"{highest:.6g} on rank {losses.index(highest)}; gradients are those of their "
                "mean\n    make a loss of numbers that are equal on all ranks: x.shape, not "
                "x.local.shape; random\n    numbers of torch, for those of NumPy and Python differ "
                "between replicas",
                logging.WARNING,
            )


@per_grid
def equal_losses(grid: Grid) -> EqualLosses:
    """Return that of a grid."""
    return EqualLosses(weakref.ref(grid))


Ordinary = Literal["check", "trust"]
ORDINARY: tuple[str, ...] = get_args(Ordinary)


class OrdinaryInputs:
    """Checks that the ordinary inputs of the module ``name`` are equal on all ranks."""

    def __init__(self, name: str, grid: Grid) -> None:
        self.name = name
        self.grid = grid

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayoutError | None:
        """Return the error of a training on these arguments, which have no cut tensor among them.

        All ranks call this. Where they all pass nothing but cut tensors there is no message.

        Raises:
            LayoutError: ordinary tensors beside cut ones are not equal on all ranks. (On a CUDA
                device of later forwards than the first: from the next one.)
        """
        if not kwargs and all(type(value) is Sharded for value in args):
            return None
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        ordinary = [x for x in given if not isinstance(x, Sharded | nn.Parameter)]
        if len(ordinary) == len(given):
            numbers = [x for x in ordinary if x.is_floating_point() or x.is_complex()]
            return self._alone(numbers[0]) if numbers else None
        if ordinary:
            self._compare(ordinary)
        return None

    def average_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the gradients of ordinary tensors averaged that enter beside cut ones."""
        if not kwargs and all(type(value) is Sharded for value in args):
            return
        for x in tree_leaves((args, kwargs)):
            if type(x) is torch.Tensor and x.requires_grad:
                average_gradient(x, self.grid)

    def _alone(self, x: torch.Tensor) -> LayoutError:
        return LayoutError(
            f"an ordinary tensor {tuple(x.shape)} {x.dtype} enters the parallelised {self.name} in "
            f"training on {self.grid.size} ranks without a cut one: each rank would train alone on "
            "what it holds\n    cut it: hyperslab.shard(x, grid), or hyperslab.scatter(x, grid) "
            "where one rank holds it\n    if each rank should compute its own, use "
            'hyperslab.parallelize(module, grid, ordinary_inputs="trust")'
        )

    def _compare(self, ordinary: Sequence[torch.Tensor]) -> None:
        name = self.name
        forms = "; ".join(f"{tuple(x.shape)} {x.dtype}" for x in ordinary)

        def judge(found: Sequence[Sequence[int]]) -> None:
            strangers = [rank for rank, row in enumerate(found) if row != found[0]]
            if strangers:
                raise LayoutError(
                    f"{describe_ranks(strangers)} would pass other ordinary tensors to {name} than "
                    f"rank 0, beside cut ones\n    on this rank they are {forms}\n    an ordinary "
                    "tensor has to be equal on every rank: draw random numbers\n    "
                    "from torch's generator, cut it by hyperslab.shard, or use "
                    'hyperslab.parallelize(module, grid, ordinary_inputs="trust")'
                )

        what = "the comparison of ordinary inputs"

        def compare() -> None:
            on_host, on_device = digest_of_all(ordinary, self.grid.device)
            numbers = [zlib.crc32(forms.encode()), on_host]
            rows = AllGatheredInts(self.grid, numbers, on_device, what)
            comparisons_of(self.grid).add(rows, (name, forms), judge)

        do_beside(compare, what)
