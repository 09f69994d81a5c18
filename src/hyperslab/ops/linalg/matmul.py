"""Matrix products and Einstein sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError
from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.ops.linalg.contraction import DimLabel, batch_labels, contract
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe


def matrix_product(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of matrices or vectors, as `torch.matmul` has it."""
    if not a.dim() or not b.dim():
        raise LayoutError(f"{name} of a number\n{describe([a, b])}    use a * b")
    left: list[DimLabel] = [*batch_labels(a.dim() - 2), "row", "inner"][-a.dim() :]
    right: list[DimLabel] = ["inner"]
    if b.dim() > 1:
        right = [*batch_labels(b.dim() - 2), "inner", "column"]
    batch = batch_labels(max(a.dim(), b.dim(), 2) - 2)
    output = [*batch, *left[-2:-1], *right[-1:]] if b.dim() > 1 else [*batch, *left[-2:-1]]
    return contract(name, (a, b), (left, right), output, torch.matmul)


@register(
    torch.matmul, torch.Tensor.matmul, torch.linalg.matmul, torch.Tensor.__matmul__, family="linalg"
)
def matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Any dims cut; over a contracted dim that is cut the partial products are summed."""
    return matrix_product("matmul", input, other)


DIMS_OF_PRODUCT = {"mm": (2, 2), "bmm": (3, 3), "mv": (2, 1), "dot": (1, 1)}


@register_each(*DIMS_OF_PRODUCT, family="linalg")
def fixed_product(
    operator: Operator, input: torch.Tensor, other: torch.Tensor, **options: object
) -> torch.Tensor:
    """Any dims cut; over a contracted dim that is cut the partial products are summed."""
    name = operator.__name__
    dims = DIMS_OF_PRODUCT[name]
    if options:
        raise LayoutError(f"{name} of cut tensors with other options has no rule: {options}")
    if dims != (input.dim(), other.dim()):
        raise LayoutError(f"{name} takes {dims} dims\n{describe([input, other])}    use matmul")
    return matrix_product(name, input, other)


DIMS_OF_FACTORS = {"addmm": 2, "baddbmm": 3}


@register_each(*DIMS_OF_FACTORS, family="linalg")
def add_product(
    operator: Operator,
    input: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
    **named: torch.Tensor,
) -> torch.Tensor:
    """As the product; then the sum, whose first part is broadcast by global shape."""
    name = operator.__name__
    factor = "mat" if name == "addmm" else "batch"
    a, b = named.pop(f"{factor}1", a), named.pop(f"{factor}2", b)
    if a is None or b is None or named:
        raise TypeError(f"{name} takes {factor}1 and {factor}2, not {', '.join(named) or 'one'}")
    dims = DIMS_OF_FACTORS[name]
    if not all(isinstance(t, torch.Tensor) for t in (a, b)):
        raise LayoutError(f"{name} takes a tensor and two matrices")
    cut = any(isinstance(t, Sharded) for t in (a, b))
    if (a.dim(), b.dim()) != (dims, dims) or not cut:
        raise LayoutError(
            f"{name} takes matrices of {dims} dims, one of them cut\n{describe([input, a, b])}"
            "    use a @ b, and add to it"
        )
    y = _scaled(matrix_product(name, a, b), alpha)
    return y if beta == 0 else _sum(y, _scaled(input, beta))


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1:
        return x
    return x.like(x.local * factor) if isinstance(x, Sharded) else x * factor


def _sum(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Of the product's type, which autocast may have lowered."""
    if not isinstance(y, Sharded) and not isinstance(bias, Sharded):
        return y + bias.to(y.dtype)
    total = apply_pointwise(torch.add, (y, bias), {})
    return total.like(total.local.to(y.dtype))


@register(torch.einsum, family="linalg")
def einsum(equation: str, *operands: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Any dims cut; over contracted dims that are cut the partial sums are summed."""
    tensors: list[torch.Tensor] = []
    for operand in operands:
        tensors.extend((operand,) if isinstance(operand, torch.Tensor) else operand)
    inputs, output = _labels(equation, tensors)
    return contract(
        "einsum", tensors, inputs, output, lambda *blocks: torch.einsum(equation, *blocks)
    )


def _introduce_to_opt_einsum() -> None:
    """Tell opt_einsum, through which tensorly calls torch, that cut tensors are torch's.

    It goes by the package of their class. Torch imports it where it is installed.
    """
    library = torch.backends.opt_einsum.get_opt_einsum()
    dispatch = getattr(getattr(library, "backends", None), "dispatch", None)
    aliases = getattr(dispatch, "_aliases", None)
    if aliases is not None:
        aliases["hyperslab"] = "opt_einsum.backends.torch"


_introduce_to_opt_einsum()


def _labels(
    equation: str, operands: Sequence[torch.Tensor]
) -> tuple[list[list[DimLabel]], list[DimLabel]]:
    """The labels of every operand and of the result; an ellipsis stands for leading dims."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise LayoutError(f"einsum: {len(terms)} terms in {equation!r}, {len(operands)} operands")
    counts = [
        t.dim() - len(term.replace("...", "")) for term, t in zip(terms, operands, strict=True)
    ]
    if any(n < 0 or (n and "..." not in term) for n, term in zip(counts, terms, strict=True)):
        raise LayoutError(f"einsum: {equation!r} does not fit\n{describe(operands)}")
    if not arrow:
        times = Counter(left.replace("...", "").replace(",", ""))
        right = "..." + "".join(sorted(label for label, n in times.items() if n == 1))
    inputs = [_expanded(term, n) for term, n in zip(terms, counts, strict=True)]
    return inputs, _expanded(right, max(counts))


def _expanded(term: str, count: int) -> list[DimLabel]:
    front, _, back = term.partition("...")
    return [*front, *(batch_labels(count) if "..." in term else []), *back]


@register(torch.tensordot, family="linalg")
def tensordot(
    a: torch.Tensor,
    b: torch.Tensor,
    dims: int | Sequence[Sequence[int]] | torch.Tensor = 2,
) -> torch.Tensor:
    """Any dims cut; over contracted dims that are cut the partial sums are summed."""
    given = dims.tolist() if isinstance(dims, torch.Tensor) else dims
    last, front = (range(-given, 0), range(given)) if isinstance(given, int) else given
    first = [d % a.dim() for d in last]
    second = [d % b.dim() for d in front]
    left: list[DimLabel] = [("a", d) for d in range(a.dim())]
    right: list[DimLabel] = [("b", d) for d in range(b.dim())]
    output = [label for d, label in enumerate(left) if d not in first]
    output += [label for d, label in enumerate(right) if d not in second]
    for d, e in zip(first, second, strict=True):
        right[e] = left[d]
    return contract(
        "tensordot",
        (a, b),
        (left, right),
        output,
        lambda x, y: torch.tensordot(x, y, dims=(first, second)),
    )


@register(F.bilinear, family="linalg")
def bilinear(
    input1: torch.Tensor,
    input2: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Over the last dims of both inputs; weight and bias are ordinary."""
    batch = batch_labels(input1.dim() - 1)
    y = contract(
        "bilinear",
        (input1, input2, weight),
        ([*batch, "i"], [*batch, "j"], ["o", "i", "j"]),
        [*batch, "o"],
        lambda a, b, w: torch.einsum("...i,oij,...j->...o", a, w, b),
    )
    return y if bias is None else _sum(y, bias)
