"""The operators as torch knows them: schemas, references, forms on the meta device.

Registration goes to the dispatcher by `torch.library.Library`: plain functions, without the checks
that `torch.library.custom_op` makes at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hyperslab.ops.kernels.fused import (
    chain_backward,
    chain_backward_sums,
    chain_forward,
    channel_sums,
    forms,
    reorder,
)
from hyperslab.ops.kernels.fused.compiled import chains, sums, transposition


@dataclass(frozen=True, slots=True)
class FusedOperator:
    """One of them, by its schema.

    ``form`` gives shapes and strides on the meta device, ``compiled`` runs on the CPU, and
    ``reference`` everywhere else.
    """

    schema: str
    reference: Callable[..., Any]
    form: Callable[..., Any]
    compiled: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


FUSED_OPERATORS = (
    FusedOperator(
        # (2, K) in float64, sums of x and of x * x. groups 0: K = C, over batch and space; else
        # K = N * groups, over space and the channels of a group.
        "channel_sums(Tensor x, int groups) -> Tensor",
        channel_sums.reference,
        forms.channel_sums_form,
        sums.compiled_channel_sums,
    ),
    FusedOperator(
        # y in `dtype` and in x's memory format, and its marks (uint8; empty without `mark`).
        # scale, shift: (1, C) or (N, C). Computed in float32, of float64 in float64.
        "chain_forward(Tensor x, Tensor? scale, Tensor? shift, float slope, int[] pool, "
        "bool maximum, bool mark, ScalarType dtype) -> (Tensor, Tensor)",
        chain_forward.reference,
        forms.chain_forward_form,
        chains.compiled_chain_forward,
    ),
    FusedOperator(
        # (2, 1 or N, C) as scale, in float64: sums of du and of du * x. g: gradient of y. marks:
        # winners or nothing.
        "chain_backward_sums(Tensor g, Tensor marks, Tensor x, Tensor scale, Tensor shift, "
        "float slope, int[] pool, bool maximum) -> Tensor",
        chain_backward_sums.reference,
        forms.chain_backward_sums_form,
        sums.compiled_backward_sums,
    ),
    FusedOperator(
        # scale * du + b * x + c, each where it is given, of x's `shape`, in `dtype` and x's memory
        # format; without x in g's, which must then be that of the forward pass, by its strides.
        "chain_backward(Tensor g, Tensor marks, Tensor? x, Tensor? scale, Tensor? shift, "
        "Tensor? b, Tensor? c, float slope, int[] pool, bool maximum, int[] shape, "
        "ScalarType dtype) -> Tensor",
        chain_backward.reference,
        forms.chain_backward_form,
        chains.compiled_chain_backward,
    ),
    FusedOperator(
        "reorder(Tensor x, bool channels_last, ScalarType dtype) -> Tensor",
        reorder.reference,
        forms.reorder_form,
        transposition.compiled_reorder,
    ),
)


def _registered() -> torch.library.Library:
    library = torch.library.Library("hyperslab", "DEF")
    for operator in FUSED_OPERATORS:
        library.define(operator.schema)
        library.impl(operator.name, operator.reference, "CompositeExplicitAutograd")
        library.impl(operator.name, operator.form, "Meta")
        library.impl(operator.name, operator.compiled, "CPU")
    return library


LIBRARY = _registered()
"""Keeps the registration alive; others add versions for their device by another ``Library``."""
