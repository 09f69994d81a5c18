"""Matrix products and Einstein sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.ops.linalg.contraction import Label, batch_labels, contract
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe


def product(name: str, a: torch.Tensor, b: torch.Tensor) -> Any:
    """The product of matrices or vectors, as `torch.matmul` has it."""
    if not a.dim() or not b.dim():
        raise LayoutError(f"{name} of a number\n{describe([a, b])}    use a * b")
    left: list[Label] = [*batch_labels(a.dim() - 2), "row", "inner"][-a.dim() :]
    right: list[Label] = ["inner"]
    if b.dim() > 1:
        right = [*batch_labels(b.dim() - 2), "inner", "column"]
    batch = batch_labels(max(a.dim(), b.dim(), 2) - 2)
    output = [*batch, *left[-2:-1], *right[-1:]] if b.dim() > 1 else [*batch, *left[-2:-1]]
    return contract(name, (a, b), (left, right), output, torch.matmul)


def _register_product(*functions: Callable[..., Any], dims: tuple[int, int] | None) -> None:
    """``dims``: how many dims the two operands must have."""

    def rule(input: Any, other: Any, *, out: Any = None, **options: Any) -> Any:
        """Any dims cut; over a contracted dim that is cut the partial products are summed."""
        name = functions[0].__name__
        if out is not None or options:
            raise LayoutError(f"{name} of cut tensors with out= or other options has no rule")
        if dims not in (None, (input.dim(), other.dim())):
            raise LayoutError(f"{name} takes {dims} dims\n{describe([input, other])}    use matmul")
        return product(name, input, other)

    register(*functions, family="product")(rule)


_register_product(
    torch.matmul,
    torch.Tensor.matmul,
    torch.linalg.matmul,
    torch.Tensor.__matmul__,
    dims=None,
)
_register_product(torch.mm, torch.Tensor.mm, dims=(2, 2))
_register_product(torch.bmm, torch.Tensor.bmm, dims=(3, 3))
_register_product(torch.mv, torch.Tensor.mv, dims=(2, 1))
_register_product(torch.dot, torch.Tensor.dot, dims=(1, 1))


def _register_sum(name: str, dims: int) -> None:
    def rule(
        input: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1, out: Any = None
    ) -> Any:
        """As the product; then the sum, whose first part is broadcast by global shape."""
        if out is not None or not all(isinstance(t, torch.Tensor) for t in (a, b)):
            raise LayoutError(f"{name} takes a tensor and two matrices, and no out=")
        y: Any = next(t for t in (a, b, input) if isinstance(t, Sharded))
        if (a.dim(), b.dim()) != (dims, dims) or y is input:
            raise LayoutError(
                f"{name} takes matrices of {dims} dims, one of them cut\n{describe([input, a, b])}"
                "    use a @ b, and add to it"
            )
        y = _scaled(product(name, a, b), alpha)
        return y if beta == 0 else _sum(y, _scaled(input, beta))

    register(getattr(torch, name), getattr(torch.Tensor, name), family="product")(rule)


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1:
        return x
    return x.like(x.local * factor) if isinstance(x, Sharded) else x * factor


def _sum(y: torch.Tensor, bias: torch.Tensor) -> Any:
    """Of the product's type, which autocast may have lowered."""
    if not isinstance(y, Sharded) and not isinstance(bias, Sharded):
        return y + bias.to(y.dtype)
    total = apply_pointwise(torch.add, (y, bias), {})
    return total.like(total.local.to(y.dtype))


_register_sum("addmm", 2)
_register_sum("baddbmm", 3)


@register(torch.einsum, family="product")
def einsum(equation: str, *operands: Any) -> Any:
    """Any dims cut; over contracted dims that are cut the partial sums are summed."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    inputs, output = _labels(equation, operands)
    return contract(
        "einsum", operands, inputs, output, lambda *blocks: torch.einsum(equation, *blocks)
    )


def _labels(
    equation: str, operands: Sequence[torch.Tensor]
) -> tuple[list[list[Label]], list[Label]]:
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


def _expanded(term: str, count: int) -> list[Label]:
    front, _, back = term.partition("...")
    return [*front, *(batch_labels(count) if "..." in term else []), *back]


@register(torch.tensordot, family="product")
def tensordot(a: Any, b: Any, dims: Any = 2, out: Any = None) -> Any:
    """Any dims cut; over contracted dims that are cut the partial sums are summed."""
    if out is not None:
        raise LayoutError("tensordot(out=...) has no rule; use its return value")
    dims = dims.tolist() if isinstance(dims, torch.Tensor) else dims
    if isinstance(dims, int):
        dims = list(range(-dims, 0)), list(range(dims))
    first = [d % a.dim() for d in dims[0]]
    second = [d % b.dim() for d in dims[1]]
    left: list[Label] = [("a", d) for d in range(a.dim())]
    right: list[Label] = [("b", d) for d in range(b.dim())]
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


@register(F.bilinear, family="product")
def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
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
