"""Distributes recurrent layers and cells: a rank has whole sequences of its part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hyperslab.comm import log_once
from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.ops.elementwise.random import check_whole_mask
from hyperslab.ops.linalg.contraction import DimLabel, contract
from hyperslab.ops.operands import whole_of
from hyperslab.ops.overloads import Operator, register_each
from hyperslab.tensor import Sharded, gather
from hyperslab.tensor.dispatch import describe

States = torch.Tensor | Sequence[torch.Tensor]
"""Types a layer's initial states: one tensor, for an LSTM two."""

Recurrence = Callable[[torch.Tensor, States], tuple[torch.Tensor, ...]]
"""Runs a layer or a cell on a rank's blocks: from its input and states to its results."""


@register_each("gru", "rnn_tanh", "rnn_relu", "lstm", family="linalg")
def recurrent_layer(
    operator: Operator,
    input: torch.Tensor,
    hx: States,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The batch may be cut; sequences and features that are cut are gathered.

    Distribution scheme: 1. every rank gets whole sequences of its part of the batch, 2. it runs
    the layer on them.
    """
    name = operator.__name__
    if not isinstance(has_biases, bool):  # the other signature: data, sizes, states, parameters
        raise LayoutError(
            f"{name} of packed sequences has no rule for a cut tensor\n{describe([input, params])}"
            "    give the padded sequences, or leave the cut with x.full() before they are packed"
        )
    labels: list[DimLabel] = ["batch", "step"] if batch_first else ["step", "batch"]
    weights = _whole(name, params)

    def run(block: torch.Tensor, states: States) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = operator(
            block, states, weights, has_biases, num_layers, dropout, train, bidirectional,
            batch_first,
        )  # fmt: skip
        return found

    p = dropout if train and num_layers > 1 else 0.0
    return _recur(name, input, hx, [*labels, "in"], ["layer", "batch", "state"], run, p)


@register_each("gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "lstm_cell", family="linalg")
def recurrent_cell(
    operator: Operator,
    input: torch.Tensor,
    hx: States,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The batch may be cut; features that are cut are gathered."""
    name = operator.__name__
    weights = _whole(name, (w_ih, w_hh, b_ih, b_hh))

    def run(block: torch.Tensor, states: States) -> tuple[torch.Tensor, ...]:
        found: torch.Tensor | tuple[torch.Tensor, ...] = operator(block, states, *weights)
        return (found,) if isinstance(found, torch.Tensor) else found

    found = _recur(name, input, hx, ["batch", "in"], ["batch", "state"], run)
    return found if name == "lstm_cell" else found[0]


def _whole(name: str, weights: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Makes weights whole, which may come from cut features."""
    return [None if w is None else whole_of(w, f"the weights of {name}") for w in weights]


def _recur(
    name: str,
    input: torch.Tensor,
    hx: States,
    of_input: list[DimLabel],
    of_state: list[DimLabel],
    run: Recurrence,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Runs a recurrence; its result and final states are cut along their batch only."""
    single = isinstance(hx, torch.Tensor)
    states = [hx] if isinstance(hx, torch.Tensor) else list(hx)
    operands = [
        _with_whole_sequences(name, x, labels)
        for x, labels in [(input, of_input), *((state, of_state) for state in states)]
    ]
    _check_batch(name, operands, [of_input, *[of_state] * len(states)])
    check_whole_mask(operands, dropout, name)
    after: list[torch.Tensor] = []

    def first(block: torch.Tensor, *blocks: torch.Tensor) -> torch.Tensor:
        y, *rest = run(block, blocks[0] if single else blocks)
        after.extend(rest)
        return y

    output: list[DimLabel] = [*of_input[:-1], "out"]
    inputs = [of_input, *([*of_state[:-1], (label, "state")] for label in range(len(states)))]
    y = contract(name, operands, inputs, output, first, linear=False)
    return (y, *(_state(y, of_input, block, of_state) for block in after))


def _check_batch(
    name: str, operands: Sequence[torch.Tensor], labels: Sequence[Sequence[DimLabel]]
) -> None:
    """Refuses states of another batch, which a block of one sample could not reveal.

    Raises:
        LayoutError: they differ, or nothing but a weight is cut.
    """
    batches = {x.shape[own.index("batch")] for x, own in zip(operands, labels, strict=True)}
    if len(batches) > 1 or not any(isinstance(x, Sharded) for x in operands):
        raise LayoutError(
            f"{name}: the input and its states have to have one batch, and one of them has to be "
            f"cut where a weight is\n{describe(operands)}"
        )


def _with_whole_sequences(name: str, x: torch.Tensor, labels: Sequence[DimLabel]) -> torch.Tensor:
    """Gathers all cut dims but the batch."""
    if x.dim() != len(labels):
        raise LayoutError(f"{name} takes tensors of {len(labels)} dims, not\n{describe([x])}")
    if not isinstance(x, Sharded):
        return x
    axes = [
        cut.axis
        for label, cut in zip(labels, x.partition.cuts, strict=True)
        if cut is not None and label != "batch"
    ]
    if not axes:
        return x
    log_once(
        x.grid,
        f"{name}: the sequences of {x.partition} are gathered along {', '.join(axes)}; "
        "its ranks repeat the work",
    )
    return gather(x, axes)


def _state(
    y: torch.Tensor, of_result: Sequence[DimLabel], block: torch.Tensor, labels: Sequence[DimLabel]
) -> torch.Tensor:
    """Wraps a final state, cut as the batch of the result is."""
    if not isinstance(y, Sharded):
        return block
    batch = of_result.index("batch")
    whole = Partition.whole(block.shape)
    partition = whole.with_dim(labels.index("batch"), y.shape[batch], y.partition.cuts[batch])
    return y.like(block, partition)
