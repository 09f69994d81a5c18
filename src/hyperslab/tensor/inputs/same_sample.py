"""The check that ranks which share a sample cut the same one.

Legend: a *statement* is what a rank says about the tensor that it hands in: its `Form`, the order
in which its dims lie in memory, and a digest of the samples that this rank takes part in.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from hyperslab.comm import Grid
from hyperslab.comm.rows import Rows
from hyperslab.errors import LayoutError
from hyperslab.tensor.inputs.comparisons import comparisons_of
from hyperslab.tensor.inputs.digest import digest_in_memory, digest_on_device, memory_order
from hyperslab.tensor.inputs.handed_in import (
    FORM,
    Form,
    check_form,
    forms_in_words,
    ranks_in_words,
)

_REMEDY = (
    "    let one rank hand its tensor out: hyperslab.scatter(x, grid)\n"
    "    or give all ranks of a replica the same samples: the same seeds for NumPy, Python and "
    'torch, and\n    DistributedSampler(data, grid.data, grid.coords["data"]) with '
    'hyperslab.shard(x, grid, batch="replica")'
)


def check_same_sample(tensor: torch.Tensor, form: Form, grid: Grid) -> None:
    """All ranks call this. Nothing is waited for on a CUDA device but at the first of a form.

    Raises:
        LayoutError: the ranks' forms differ, or the samples of ranks that share them, or the form
            is not that of a tensor that can be cut.
    """
    if not grid.has_values or grid.size == 1:
        check_form(form)
        return
    samples = torch.zeros(())
    if form.can_be_cut:
        lo, hi = form.samples(grid.coords["data"], grid)
        plain = tensor.detach().as_subclass(torch.Tensor)
        samples = plain[lo:hi] if form.shape else plain
    counted = tuple(range(samples.dim()))
    on_cpu = grid.device.type == "cpu"
    rows = _state(samples, form, memory_order(samples) if on_cpu else counted, grid)
    if on_cpu and len({row[FORM] for row in rows.read()}) > 1:
        rows = _state(samples, form, counted, grid)  # in an order that does not depend on memory
    judge = functools.partial(compare, sharers=_sharers(form, grid))
    comparisons_of(grid).add(rows, form, judge)
    check_form(form)


def _state(samples: torch.Tensor, form: Form, order: tuple[int, ...], grid: Grid) -> Rows:
    numbers = [*form.numbers(), sum(dim << 4 * i for i, dim in enumerate(order))]
    last = None
    if samples.device.type == "cpu":
        numbers.append(digest_in_memory(samples, order))
    else:
        last = digest_on_device(samples)
    return Rows(grid, numbers, last, "the comparison of the ranks' samples")


def _sharers(form: Form, grid: Grid) -> tuple[tuple[int, ...], ...]:
    """The ranks that compute the same samples, and are to hold them."""
    replicas: dict[object, list[int]] = {}
    for rank in range(grid.size):
        data = grid.coords_of(rank)["data"]
        key = data if form.of_replica else form.samples(data, grid)
        replicas.setdefault(key, []).append(rank)
    return tuple(map(tuple, replicas.values()))


def compare(rows: Sequence[Sequence[int]], sharers: Sequence[Sequence[int]]) -> None:
    """What the ranks state, by rank; ``sharers`` are those that hold the same samples.

    Raises:
        LayoutError: see `check_same_sample`.
    """
    forms = [Form.read(row) for row in rows]
    if len(set(forms)) > 1:
        raise LayoutError(
            "the ranks hand in different tensors to be cut as one\n"
            + "".join(f"    {words}\n" for words in forms_in_words(dict(enumerate(forms))))
            + "    hand in tensors of one shape and type on every rank: of an uneven last "
            "mini-batch too\n    (drop_last=True), or let one rank hand its tensor out: "
            "hyperslab.scatter(x, grid)"
        )
    for ranks in sharers:
        first, *others = ranks
        strangers = [rank for rank in others if rows[rank][FORM + 1] != rows[first][FORM + 1]]
        if strangers:
            raise LayoutError(
                f"{ranks_in_words(strangers)} would cut another sample than rank {first}, with "
                f"which it is to be shared: same shape, other values\n"
                f"    {ranks_in_words(ranks)} share the samples of a tensor {forms[first]}\n"
                f"{_REMEDY}\n    check=False switches this comparison off"
            )
