"""The operators as torch knows them: schemas, references, forms on the meta device.

Registration goes to the dispatcher by `torch.library.Library`: plain functions, without the checks
that `torch.library.custom_op` makes at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hyperslab.ops.kernels.fused import (
    chain_backward,
    chain_backward_sums,
    chain_forward,
    channel_sums,
    forms,
    reorder,
    statistics,
)
from hyperslab.ops.kernels.fused.compiled import chains, numbers, sums, transposition


@dataclass(frozen=True, slots=True)
class FusedOperator:
    """One of them, by its schema.

    ``form`` gives shapes and strides on the meta device, ``compiled`` runs on the CPU, and
    ``reference`` everywhere else; ``on_gpu``: there is a version for GPUs.
    """

    schema: str
    reference: Callable[..., Any]
    form: Callable[..., Any]
    compiled: Callable[..., Any]
    on_gpu: bool = True

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


FUSED_OPERATORS = (
    FusedOperator(
        # (3, K) in float64, of which parts and ranks each have their own, to be added up: the sum
        # of x, its square by the number of values, and the sum of squares around their mean.
        # groups 0: K = C, over batch and space; else K = N * groups, over space and the channels of
        # a group.
        "channel_sums(Tensor x, int groups) -> Tensor",
        channel_sums.reference,
        forms.channel_sums_form,
        sums.compiled_channel_sums,
    ),
    FusedOperator(
        # y in `dtype` and in x's memory format, and its marks (uint8; empty without `mark`).
        # norm: (3, 1 or N, C), mean, scale and shift. Computed in float32, of float64 in float64.
        "chain_forward(Tensor x, Tensor? norm, float slope, int[] pool, bool maximum, bool mark, "
        "ScalarType dtype) -> (Tensor, Tensor)",
        chain_forward.reference,
        forms.chain_forward_form,
        chains.compiled_chain_forward,
    ),
    FusedOperator(
        # The same into `y`, of the result's shape and memory format; the marks.
        "chain_forward_into(Tensor x, Tensor? norm, float slope, int[] pool, bool maximum, "
        "bool mark, Tensor(a!) y) -> Tensor",
        chain_forward.forward_into,
        forms.chain_forward_into_form,
        chains.compiled_chain_forward_into,
        on_gpu=False,
    ),
    FusedOperator(
        # (2, 1 or N, C) as norm, in float64: sums of du and of du * (x - mean). g: gradient of y.
        # marks: winners or nothing.
        "chain_backward_sums(Tensor g, Tensor marks, Tensor x, Tensor norm, float slope, "
        "int[] pool, bool maximum) -> Tensor",
        chain_backward_sums.reference,
        forms.chain_backward_sums_form,
        sums.compiled_backward_sums,
    ),
    FusedOperator(
        # scale * du + b * (x - mean) + c, of x's `shape`, in `dtype` and x's memory format; without
        # x in g's, which must then be that of the forward pass, by its strides. through: (2, 1 or
        # N, C), b and c; without it scale * du, and without norm du.
        "chain_backward(Tensor g, Tensor marks, Tensor? x, Tensor? norm, Tensor? through, "
        "float slope, int[] pool, bool maximum, int[] shape, ScalarType dtype) -> Tensor",
        chain_backward.reference,
        forms.chain_backward_form,
        chains.compiled_chain_backward,
    ),
    FusedOperator(
        # norm (3, R, C) in float32 and moments (4, R, C) of sums (3, R * C / pool) over `count`
        # values; weight, bias: (C) in float32.
        "normalisation(Tensor sums, Tensor? weight, Tensor? bias, int count, float eps, "
        "int channels, int pool) -> (Tensor, Tensor)",
        statistics.normalisation,
        forms.normalisation_form,
        numbers.compiled_normalisation,
    ),
    FusedOperator(
        # Gradients of weight and bias (2, C) in float32, and (2, R * C / pool) in float64, of
        # which the next one takes the sum over all ranks; from the sums of a backward pass.
        "parameter_gradients(Tensor sums, Tensor norm, Tensor moments, int pool) "
        "-> (Tensor, Tensor)",
        statistics.parameter_gradients,
        forms.parameter_gradients_form,
        numbers.compiled_parameter_gradients,
    ),
    FusedOperator(
        # What `chain_backward` takes: (2, R, C) in float32.
        "through_statistics(Tensor shared, Tensor norm, Tensor moments, int count, int pool) "
        "-> Tensor",
        statistics.through_statistics,
        forms.through_statistics_form,
        numbers.compiled_through_statistics,
    ),
    FusedOperator(
        "reorder(Tensor x, bool channels_last, ScalarType dtype) -> Tensor",
        reorder.reference,
        forms.reorder_form,
        transposition.compiled_reorder,
    ),
    FusedOperator(
        # The values of x in the type and memory format of `y`.
        "reorder_into(Tensor x, Tensor(a!) y) -> ()",
        reorder.reorder_into,
        forms.reorder_into_form,
        transposition.compiled_reorder_into,
        on_gpu=False,
    ),
)


def registered(
    operators: Sequence[FusedOperator], kind: Literal["DEF", "FRAGMENT"] = "FRAGMENT"
) -> torch.library.Library:
    """Make operators known to torch for as long as the returned library lives."""
    library = torch.library.Library("hyperslab", kind)
    for operator in operators:
        library.define(operator.schema)
        library.impl(operator.name, operator.reference, "CompositeExplicitAutograd")
        library.impl(operator.name, operator.form, "Meta")
        library.impl(operator.name, operator.compiled, "CPU")
    return library


LIBRARY = registered(FUSED_OPERATORS, "DEF")
"""Keeps the registration alive; others add versions for their device by another ``Library``."""
