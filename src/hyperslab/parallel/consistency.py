"""Checks that all ranks hold the same network, parameters, inputs and random states.

In reading order: `check_same_network` before parameters are made equal; `share_random_states`
for what ranks that compute the same have to draw alike; `EqualParameters` at training forwards
1, 2, 4, 8, ...; `EqualLosses` at their backward passes; `OrdinaryInputs` for ordinary tensors that
enter a parallelised module in training.
"""

from __future__ import annotations

import logging
import math
import random
import struct
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hyperslab.comm import AllGatheredInts, Grid, log_once, per_grid
from hyperslab.comm.agreement import (
    all_gather,
    broadcast_from_main,
    difference_of_ranks,
    keeping_contact,
)
from hyperslab.comm.bootstrap import named, world
from hyperslab.comm.communicator import as_sent
from hyperslab.errors import LayoutError
from hyperslab.tensor import Sharded
from hyperslab.tensor.dispatch import average_gradient
from hyperslab.tensor.inputs import JudgeRows, comparisons_of, digest_of_all
from hyperslab.util.capture import do_beside
from hyperslab.util.torch_internals import tree_leaves

PARAMETERS_COMPARED = "the comparison of parameters"

DEVICE_IN_REPR = (nn.ParameterList, nn.ParameterDict)
"""Lists modules whose ``repr`` names the device, in which ranks differ."""


def check_same_network(module: nn.Module, grid: Grid, options: Mapping[str, Any]) -> None:
    """Compare parameters, buffers, torch's own layers, and how `parallelize` was called.

    What a layer of a user's says of itself may be different on every rank, and is not compared.
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
    difference = difference_of_ranks(facts)
    if difference is None:
        return
    first = difference.partition("\n")[0].removeprefix("the ranks differ in ")
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
    cuda = grid.device.type == "cuda"

    def present() -> tuple[Any, ...]:
        of_device = torch.cuda.get_rng_state(grid.device) if cuda else None
        # The legacy generator is the one that data sets draw from.
        of_numpy = np.random.get_state()  # noqa: NPY002
        return torch.get_rng_state(), of_device, of_numpy, random.getstate()

    of_torch, of_device, of_numpy, of_python = broadcast_from_main(present)
    torch.set_rng_state(of_torch)
    if cuda:
        torch.cuda.set_rng_state(of_device, grid.device)
    if states != "replica":
        return
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002
    replica = grid.coords["data"]
    if replica > 0:  # other replicas than rank 0's seed theirs by its states
        random.seed((random.getrandbits(128) << 32) + replica)
        words = np.random.randint(0, 1 << 32, 4, dtype=np.uint32)  # noqa: NPY002
        np.random.seed([*words.tolist(), replica])  # noqa: NPY002


ROUNDING_EPSILONS = 64  # machine epsilons that processors of different kinds may be apart


class _RareLooks:
    """Compares numbers of all ranks at turns 1, 2, 4, 8, ..., so that the cost fades away.

    On a CUDA device a look is judged at the next turn, which waits for nothing.
    """

    def __init__(self) -> None:
        self.turns = 0
        self._owed: tuple[AllGatheredInts, JudgeRows] | None = None

    def turn(self, look: Callable[[], AllGatheredInts], judge: JudgeRows) -> None:
        self._settle()
        self.turns += 1
        if self.turns.bit_count() == 1:
            rows = look()
            self._owed = rows, judge
            if rows.at_once:
                self._settle()

    def _settle(self) -> None:
        owed, self._owed = self._owed, None
        if owed is not None:
            rows, judge = owed
            judge(rows.read())


class EqualParameters:
    """Looks at a module's parameters on all ranks, at its training forwards 1, 2, 4, 8, ...

    At the first there is what was done since `hyperslab.parallelize` made them equal (weights
    loaded on one rank alone), at the second a step of the optimiser (another learning rate on one
    rank). After that nothing new is expected.
    """

    def __init__(self, module: nn.Module, grid: Grid) -> None:
        self.module = module
        self.grid = grid
        self._looks = _RareLooks()

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare parameters at a forward that all ranks make together, as on cut tensors."""
        cut = any(type(value) is Sharded for value in args)
        if not cut and not any(isinstance(value, Sharded) for value in tree_leaves((args, kwargs))):
            return
        do_beside(partial(self._looks.turn, self._look, self._judge), PARAMETERS_COMPARED)

    def _look(self) -> AllGatheredInts:
        on_host, on_device = digest_of_all(self.module.parameters(), self.grid.device)
        return AllGatheredInts(self.grid, [on_host], on_device, PARAMETERS_COMPARED)

    def _judge(self, rows: Sequence[Sequence[int]]) -> None:
        """Find out which parameter differs, and by how much, if all ranks know that one does."""
        if all(row == rows[0] for row in rows):
            return
        found: str | None = None
        for name, parameter in self.module.named_parameters():
            first = parameter.detach().contiguous().clone()
            with keeping_contact(PARAMETERS_COMPARED):
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
            f"{named(strangers)} has another {names[strangers[0]]!r} than rank 0, at "
            f"forward {self._looks.turns} of its training\n    load and change parameters on every "
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
        self._looks = _RareLooks()
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
        what = "the comparison of losses"

        def look() -> AllGatheredInts:
            total = sum((y.double() for y in losses), torch.zeros((), dtype=torch.float64))
            return AllGatheredInts(grid, [], total.view(torch.int64), what)

        resolution = max((torch.finfo(y.dtype).eps for y in losses), default=0.0)
        judge = partial(self._judge, resolution)
        do_beside(partial(self._looks.turn, look, judge), what)

    def _judge(self, resolution: float, rows: Sequence[Sequence[int]]) -> None:
        found = [struct.unpack("d", struct.pack("q", bits))[0] for (bits,) in rows]
        losses = [math.inf if math.isnan(loss) else loss for loss in found]
        lowest, highest = min(losses), max(losses)
        # Processors of different kinds round otherwise, which adds up in a network.
        alike = math.isclose(lowest, highest, rel_tol=math.sqrt(resolution))
        if not alike and not self._said:
            self._said = True  # of other numbers it would be another message
            grid = self._grid()
            assert grid is not None
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
                    f"{named(strangers)} would pass other ordinary tensors to {name} than "
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
