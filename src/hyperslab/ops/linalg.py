"""Contracts tensors over labelled dims: products, Einstein sums, linear and recurrent layers.

All but linear layers come down to `contract`; over a contracted dim that is cut the partial
results are summed. A linear layer shares its filters among ranks instead
(`hyperslab.ops.filter_parallel`). In recurrent layers and cells a rank has whole sequences of its
part of the batch.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from hyperslab.comm import Grid, all_reduce_sum, fetch, log_once, per_grid
from hyperslab.errors import LayoutError
from hyperslab.geometry import Cut, Partition
from hyperslab.ops.elementwise import apply_pointwise, check_whole_mask
from hyperslab.ops.filter_parallel import filter_share, operand_type, shard_parameter
from hyperslab.ops.operands import LAYOUTS, first_cuts, own_slices, whole_of
from hyperslab.ops.overloads import Operator, register_each
from hyperslab.ops.placement import cut_elsewhere, with_whole
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe, gather_first
from hyperslab.util.torch_internals import EnableTorchFunction

DimLabel = Hashable
"""Names a dim, the same in every operand; extents of 1 are broadcast."""

_Labels = tuple[tuple[DimLabel, ...], ...]


def contract(
    name: str,
    operands: Sequence[torch.Tensor],
    inputs: Sequence[Sequence[DimLabel]],
    output: Sequence[DimLabel],
    run: Callable[..., torch.Tensor],
    *,
    linear: bool = True,
) -> torch.Tensor:
    """Computes ``run(*blocks)``; contracts labels that are not in ``output``, new ones are whole.

    Distribution scheme: 1. cut every label as in the first operand that is cut there; an axis cuts
    one label only, 2. bring the operands to these cuts, and take this rank's part of ordinary ones,
    3. contract the blocks on every rank, 4. sum partial results over the ranks that share a
    contracted label.

    Args:
        linear: whether the result is a sum over the contracted labels; if not, they must be whole.

    Raises:
        LayoutError: extents differ, or a contracted label is cut and the result is no sum.
    """
    like = next(t for t in operands if isinstance(t, Sharded))
    held = tuple([t.partition if isinstance(t, Sharded) else t.shape for t in operands])
    kind = (name, held, tuple(map(tuple, inputs)), tuple(output), linear)
    plan = _lay_out_contraction(like.grid, *kind, operands=operands)
    blocks = [
        t.redistribute(own, f"aligning operands of {name}").block
        if isinstance(t, Sharded)
        else t[own_slices(like.grid, own)]
        if own.axes
        else t
        for t, own in zip(operands, plan.operands, strict=True)
    ]
    result = all_reduce_sum(run(*blocks), like.grid.group(plan.summed), f"the sum of {name}")
    if plan.result is not None:
        return like.like(result, plan.result, consumed=True)
    pairs = list(zip(operands, inputs, strict=True))
    return wrap_labelled(result, pairs, output, plan.extents, plan.cuts)


@dataclass(frozen=True, slots=True)
class _Contraction:
    """Holds how a contraction is cut.

    ``operands``: how each is for it. ``summed``: the axes over whose ranks partial results are
    added up. ``extents``, ``cuts``: of the labels. ``result``: None if it is an ordinary tensor,
    or has labels that no operand has.
    """

    operands: tuple[Partition, ...]
    summed: tuple[str, ...]
    extents: dict[DimLabel, int]
    cuts: dict[DimLabel, Cut]
    result: Partition | None


@per_grid
def _lay_out_contraction(
    grid: Grid,
    name: str,
    held: tuple[Partition | torch.Size, ...],
    inputs: tuple[tuple[DimLabel, ...], ...],
    output: tuple[DimLabel, ...],
    linear: bool,
    *,
    operands: Sequence[torch.Tensor],
) -> _Contraction:
    """Cuts what is contracted; ``held`` is how the operands are cut, or an ordinary one's shape."""
    pairs = list(zip(operands, inputs, strict=True))
    extents = label_extents(name, pairs)
    cuts = _label_cuts(name, pairs)
    summed = tuple(cut.axis for label, cut in cuts.items() if label not in output)
    if summed and not linear:
        raise LayoutError(
            f"{name} needs the whole of a dim that is cut along {', '.join(summed)} of {grid}\n"
            f"{describe(operands)}{gather_first(*summed)}"
        )
    aligned = tuple(operand_partition(t, labels, extents, cuts) for t, labels in pairs)
    first = next(own for each, own in zip(held, inputs, strict=True) if type(each) is Partition)
    kept = tuple(cuts.get(label) for label in output)
    result = None
    if all(label in extents for label in output) and not _is_ordinary(first, output, kept):
        result = Partition(tuple(extents[label] for label in output), kept)
    return _Contraction(aligned, summed, extents, cuts, result)


def _is_ordinary(
    first: Sequence[DimLabel], output: Sequence[DimLabel], kept: Sequence[Cut | None]
) -> bool:
    """Tells if a result is ordinary: its first dim is gone and nothing is cut, as for sums."""
    return not any(kept) and (not first or first[0] not in output)


Labelled = Sequence[tuple[torch.Tensor, Sequence[DimLabel]]]
"""Lists operands with the labels of their dims."""


def wrap_labelled(
    result: torch.Tensor,
    operands: Labelled,
    output: Sequence[DimLabel],
    extents: dict[DimLabel, int],
    cuts: dict[DimLabel, Cut],
) -> torch.Tensor:
    """Wraps a block of a result, whose dims are cut as their labels are."""
    like, first = next((t, own) for t, own in operands if isinstance(t, Sharded))
    kept = tuple(cuts.get(label) for label in output)
    if _is_ordinary(first, output, kept):
        return result
    shape = (extents.get(label, n) for label, n in zip(output, result.shape, strict=True))
    return like.like(result, Partition(tuple(shape), kept))


def label_extents(name: str, operands: Labelled) -> dict[DimLabel, int]:
    """Reads the extent of every label, of which operands may have 1."""
    extents: dict[DimLabel, int] = {}
    for tensor, labels in operands:
        for label, extent in zip(labels, tensor.shape, strict=True):
            known = extents.get(label, 1)
            if 1 not in (known, extent) and known != extent:
                raise LayoutError(
                    f"{name}: {known} and {extent} elements in one dim of the global shapes\n"
                    f"{describe(tensor for tensor, _ in operands)}"
                )
            extents[label] = extent if known == 1 else known
    return extents


def _label_cuts(name: str, operands: Labelled) -> dict[DimLabel, Cut]:
    dims = [
        (tensor, labels, label, cut)
        for tensor, labels in operands
        if isinstance(tensor, Sharded)
        for label, cut in zip(labels, tensor.partition.cuts, strict=True)
    ]
    for tensor, labels, label, cut in dims:
        if cut is not None and list(labels).count(label) > 1:
            raise LayoutError(
                f"{name}: the diagonal of a dim that is cut: {tensor.partition}\n"
                f"{gather_first(cut.axis)}"
            )
    return first_cuts((label, cut) for _, _, label, cut in dims)


def operand_partition(
    tensor: torch.Tensor,
    labels: Sequence[DimLabel],
    extents: dict[DimLabel, int],
    cuts: dict[DimLabel, Cut],
) -> Partition:
    """Returns an operand's partition, cut as its labels are; not where it is broadcast.

    It is the operand's own object where it is equal, see `hyperslab.tensor.sharded`.
    """
    own = tuple(tensor.shape)
    kept = [
        cuts.get(label) if extent == extents[label] else None
        for label, extent in zip(labels, own, strict=True)
    ]
    partition = Partition(own, tuple(kept))
    if isinstance(tensor, Sharded) and tensor.partition == partition:
        return tensor.partition
    return partition


def batch_labels(count: int) -> list[DimLabel]:
    """Returns labels for leading dims, which are broadcast from the right."""
    return [("batch", index) for index in range(-count, 0)]


def matrix_product(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not a.dim() or not b.dim():
        raise LayoutError(f"{name} of a number\n{describe([a, b])}    use a * b")
    return contract(name, (a, b), *_labels_of_product(a.dim(), b.dim()), torch.matmul)


@functools.lru_cache(LAYOUTS)
def _labels_of_product(a: int, b: int) -> tuple[_Labels, tuple[DimLabel, ...]]:
    """Returns the labels of both factors, of ``a`` and ``b`` dims, and of their product."""
    left: list[DimLabel] = [*batch_labels(a - 2), "row", "inner"][-a:]
    right: list[DimLabel] = ["inner"]
    if b > 1:
        right = [*batch_labels(b - 2), "inner", "column"]
    output = [*batch_labels(max(a, b, 2) - 2), *left[-2:-1], *(right[-1:] if b > 1 else [])]
    return (tuple(left), tuple(right)), tuple(output)


@register(
    torch.matmul, torch.Tensor.matmul, torch.linalg.matmul, torch.Tensor.__matmul__, merged=True
)
def matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Takes any cut dims; over a contracted cut dim the partial products are summed."""
    return matrix_product("matmul", input, other)


@register(torch.Tensor.__rmatmul__, merged=True)
def reversed_matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Multiplies as matmul, the second by the first."""
    return matrix_product("matmul", other, input)


@register_each((torch.cross, torch.Tensor.cross), torch.linalg.cross, dims=["dim"])
def cross(
    operator: Operator, input: torch.Tensor, other: torch.Tensor, dim: int | None = None
) -> Sharded:
    """Runs along a dim, which becomes whole if it is cut; the others are broadcast."""
    if dim is None and operator is torch.cross:
        dim = next((d for d, extent in enumerate(input.shape) if extent == 3), None)
    dim = input.dim() - 1 if dim is None else dim
    whole = [
        with_whole(x, (dim,), "cross") if isinstance(x, Sharded) else x for x in (input, other)
    ]
    return cast(Sharded, apply_pointwise(torch.linalg.cross, whole, {"dim": dim}))


DIMS_OF_PRODUCT = {"mm": (2, 2), "bmm": (3, 3), "mv": (2, 1), "dot": (1, 1)}


@register_each(*DIMS_OF_PRODUCT, merged=True)
def fixed_product(
    operator: Operator, input: torch.Tensor, other: Any = None, **options: Any
) -> torch.Tensor:
    """Takes any cut dims; over a contracted cut dim the partial products are summed."""
    name = operator.__name__
    for word in ("mat2", "vec", "tensor"):  # by which torch knows the second factor
        other = options.pop(word, other)
    dims = DIMS_OF_PRODUCT[name]
    if options:
        raise LayoutError(f"{name} of cut tensors with other options has no rule: {options}")
    if dims != (input.dim(), other.dim()):
        raise LayoutError(f"{name} takes {dims} dims\n{describe([input, other])}    use matmul")
    return matrix_product(name, input, other)


ADDED_PRODUCTS: Mapping[str, tuple[tuple[str, str], tuple[int, int], Operator]] = {
    "addbmm": (("batch1", "batch2"), (3, 3), partial(torch.einsum, "bij,bjk->ik")),
    "addmm": (("mat1", "mat2"), (2, 2), torch.mm),
    "addmv": (("mat", "vec"), (2, 1), torch.mv),
    "addr": (("vec1", "vec2"), (1, 1), torch.outer),
    "baddbmm": (("batch1", "batch2"), (3, 3), torch.bmm),
}
"""Lists products to which a tensor is added: their factors' names, their numbers of dims."""


@register_each(*ADDED_PRODUCTS, merged=True)
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
    """Multiplies as the product, then adds the first part, broadcast by global shape."""
    name = operator.__name__
    (first, second), dims, run = ADDED_PRODUCTS[name]
    a, b = named.pop(first, a), named.pop(second, b)
    if a is None or b is None or named:
        raise TypeError(f"{name} takes {first} and {second}, not {', '.join(named) or 'one'}")
    if not all(isinstance(t, torch.Tensor) for t in (a, b)):
        raise LayoutError(f"{name} takes a tensor, {first} and {second}")
    cut = any(isinstance(t, Sharded) for t in (a, b))
    if (a.dim(), b.dim()) != dims or not cut:
        raise LayoutError(
            f"{name} takes {first} and {second} of {dims[0]} and {dims[1]} dims, one "
            f"of them cut\n{describe([input, a, b])}    use their product, and add to it"
        )
    exact = not (input.is_floating_point() or input.is_complex())
    if exact and not all(isinstance(n, int) for n in (alpha, beta)):
        raise LayoutError(f"{name} of {input.dtype}: alpha and beta have to be integers")
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        product = run(a, b)
        y = product if alpha == 1 else product * alpha
        added = input if beta == 1 else input * beta
        y = y if beta == 0 else y + added
        return y.to(product.dtype)  # autocast may have lowered it; numbers raise bool


@register(torch.einsum, merged=True)
def einsum(equation: str, *operands: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Takes any cut dims; over contracted cut dims the partial sums are summed."""
    tensors: list[torch.Tensor] = []
    for operand in operands:
        tensors.extend((operand,) if isinstance(operand, torch.Tensor) else operand)
    found = _einsum_labels(equation, tuple([t.dim() for t in tensors]))
    if found is None:
        raise LayoutError(f"einsum: {equation!r} does not fit\n{describe(tensors)}")
    inputs, output = found
    for tensor, labels in zip(tensors, inputs, strict=True):
        diagonal = len(set(labels)) < len(labels)
        if diagonal and isinstance(tensor, Sharded) and tensor.partition.merged:
            tensor.gather_merged()
    return contract("einsum", tensors, inputs, output, partial(torch.einsum, equation))


def _introduce_to_opt_einsum() -> None:
    """Tells opt_einsum, through which tensorly calls torch, that cut tensors are torch's.

    It goes by the package of their class. Torch imports it where it is installed.
    """
    library = torch.backends.opt_einsum.get_opt_einsum()
    dispatch = getattr(getattr(library, "backends", None), "dispatch", None)
    aliases = getattr(dispatch, "_aliases", None)
    if aliases is not None:
        aliases["hyperslab"] = "opt_einsum.backends.torch"


_introduce_to_opt_einsum()


@functools.lru_cache(LAYOUTS)
def _einsum_labels(
    equation: str, dims: tuple[int, ...]
) -> tuple[_Labels, tuple[DimLabel, ...]] | None:
    """Reads the labels of every operand and of the result; an ellipsis stands for leading dims.

    None if an operand has another number of dims.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(dims):
        raise LayoutError(f"einsum: {len(terms)} terms in {equation!r}, {len(dims)} operands")
    counts = [n - len(term.replace("...", "")) for term, n in zip(terms, dims, strict=True)]
    if any(n < 0 or (n and "..." not in term) for n, term in zip(counts, terms, strict=True)):
        return None
    if not arrow:
        times = Counter(left.replace("...", "").replace(",", ""))
        right = "..." + "".join(sorted(label for label, n in times.items() if n == 1))
    inputs = tuple(_expand_ellipsis(term, n) for term, n in zip(terms, counts, strict=True))
    return inputs, _expand_ellipsis(right, max(counts))


def _expand_ellipsis(term: str, count: int) -> tuple[DimLabel, ...]:
    front, _, back = term.partition("...")
    return (*front, *(batch_labels(count) if "..." in term else []), *back)


@register(torch.tensordot)
def tensordot(
    a: torch.Tensor,
    b: torch.Tensor,
    dims: int | Sequence[Sequence[int]] | torch.Tensor = 2,
) -> torch.Tensor:
    """Takes any cut dims; over contracted cut dims the partial sums are summed."""
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
    run = partial(torch.tensordot, dims=(first, second))
    return contract("tensordot", (a, b), (left, right), output, run)


@register_each("outer", merged=True)
def outer(operator: Operator, input: torch.Tensor, vec2: torch.Tensor) -> torch.Tensor:
    """Multiplies all pairs of elements; each vector keeps its cut where another axis cuts it."""
    if (input.dim(), vec2.dim()) != (1, 1):
        raise LayoutError(f"outer takes two vectors\n{describe([input, vec2])}")
    return contract("outer", (input, vec2), (["row"], ["column"]), ["row", "column"], operator)


@register(F.bilinear)
def bilinear(
    input1: torch.Tensor,
    input2: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs over the last dims of both inputs; weight and bias are ordinary."""
    if not any(isinstance(t, Sharded) for t in (input1, input2, weight)):
        return F.bilinear(input1, input2, weight, whole_of(bias, "the bias of bilinear"))
    batch = batch_labels(input1.dim() - 1)
    y = contract(
        "bilinear",
        (input1, input2, weight),
        ([*batch, "i"], [*batch, "j"], ["o", "i", "j"]),
        [*batch, "o"],
        lambda a, b, w: torch.einsum("...i,oij,...j->...o", a, w, b),
    )
    with EnableTorchFunction():  # as above
        return y if bias is None else (y + bias).to(y.dtype)


@register(F.linear, merged=True)
def linear_layer(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Sharded:
    """Makes the last dim whole if it is cut; of many filters each rank computes its share."""
    if not isinstance(input, Sharded):
        raise LayoutError(
            f"linear: the input has to be cut\n{describe([input, weight])}"
            "    use input @ weight.mT, and add the bias"
        )
    weight = whole_of(weight, "the filters of linear")
    bias = whole_of(bias, "the bias of linear")
    last = input.dim() - 1
    input = with_whole(input, (last,), "linear")
    partition = _partition_of_linear(input.partition, weight.shape[0])
    share = filter_share(input, weight, partition, last) if weight.dim() == 2 else None
    if share is None:
        y = F.linear(input.native_local, weight, bias)
        return input.like(y, partition, consumed=True)
    homes = input.policy.homes
    own = (homes, share.rows, share.index)
    weight = shard_parameter(weight, operand_type(weight), *own)
    bias = bias if bias is None else shard_parameter(bias, bias.dtype, *own)
    y = F.linear(input.local, weight, bias)
    y = fetch(y, share.plan, what="the gather of the filters of linear")
    return input.like(y, partition)


@functools.lru_cache(LAYOUTS)
def _partition_of_linear(input: Partition, filters: int) -> Partition:
    return input.with_dim(input.ndim - 1, filters, None)


MATRIX_FUNCTIONS = {
    torch.linalg.cholesky: (torch.cholesky, torch.Tensor.cholesky),
    torch.linalg.det: (torch.det, torch.Tensor.det),
    torch.linalg.eigh: (),
    torch.linalg.eigvalsh: (),
    torch.linalg.inv: (torch.inverse, torch.Tensor.inverse),
    torch.linalg.matrix_exp: (torch.matrix_exp, torch.Tensor.matrix_exp),
    torch.linalg.pinv: (torch.pinverse, torch.Tensor.pinverse),
    torch.linalg.qr: (),
    torch.linalg.slogdet: (torch.slogdet, torch.Tensor.slogdet),
    torch.linalg.svd: (),
    torch.linalg.svdvals: (),
    torch.logdet: (torch.Tensor.logdet,),
}
"""Maps functions of one matrix to their other names in torch, of the same options."""


@register_each(*((own, *others) for own, others in MATRIX_FUNCTIONS.items()))
def matrix_function(operator: Operator, *matrix: Any, **options: Any) -> Any:
    """Runs on each matrix, of the last two dims, which become whole; those before may be cut."""
    named = [options.pop(name) for name in ("A", "input") if name in options]
    x, *more = (*named, *matrix)
    if not isinstance(x, Sharded) or x.dim() < 2 or any(isinstance(m, Sharded) for m in more):
        raise LayoutError(
            f"{operator.__name__} takes one cut tensor, of matrices in its last two dims, and "
            f"numbers\n{describe([x, *more])}    use x.full()"
        )
    batch = x.dim() - 2
    x = with_whole(x, (batch, batch + 1), operator.__name__)

    def wrap(result: torch.Tensor) -> torch.Tensor:
        partition = _partition_of_matrices(x.partition, batch, result.shape[batch:])
        return result if partition is None else x.like(result, partition, consumed=True)

    found = operator(x.local, *more, **options)
    if isinstance(found, torch.Tensor):
        return wrap(found)
    return type(found)(map(wrap, found))


@functools.lru_cache(LAYOUTS)
def _partition_of_matrices(
    partition: Partition, batch: int, own: tuple[int, ...]
) -> Partition | None:
    """Returns how a result for each matrix of a batch is cut; None for one of a single matrix."""
    cuts = (*partition.cuts[:batch], *[None] * len(own))
    return Partition((*partition.shape[:batch], *own), cuts) if batch else None


@register_each(torch.linalg.solve, torch.linalg.solve_triangular)
def solve(
    operator: Operator, A: torch.Tensor, B: torch.Tensor, *, left: bool = True, **options: bool
) -> torch.Tensor:
    """Solves for columns, cut or not; the rows of either operand become whole."""
    name = operator.__name__.removeprefix("linalg_")
    a, b = A, B
    n = a.shape[-1] if a.dim() > 1 else -1
    vectors = b.dim() < 2 or (name == "solve" and b.shape == a.shape[:-1])
    if not left or vectors or a.shape[-2:] != (n, n) or b.shape[-2] != n:
        raise LayoutError(
            f"{name} takes square matrices and columns of as many numbers, on the right\n"
            f"{describe([a, b])}    use b.unsqueeze(-1) for vectors, and .mT for rows"
        )
    if isinstance(a, Sharded):
        a = with_whole(a, (a.dim() - 2, a.dim() - 1), name)
    if isinstance(b, Sharded):
        b = with_whole(b, (b.dim() - 2,), name)
    first, second = batch_labels(a.dim() - 2), batch_labels(b.dim() - 2)
    inputs = [[*first, "row", "inner"], [*second, "row", "column"]]
    output = [*max(first, second, key=len), "row", "column"]
    run = partial(operator, **options)
    return contract(name, (a, b), inputs, output, run, linear=False)


IF_NECESSARY = "use_mm_for_euclid_dist_if_necessary"
"""Names torch's default: a product of matrices where there are more than 25 vectors."""


@register(torch.cdist)
def cdist(
    x1: torch.Tensor,
    x2: torch.Tensor,
    p: float = 2.0,
    compute_mode: str = IF_NECESSARY,
) -> torch.Tensor:
    """The vectors of either set may be cut; the numbers of a vector must be whole."""
    if min(x1.dim(), x2.dim()) < 2:
        raise LayoutError(f"cdist takes tensors of two dims or more\n{describe([x1, x2])}")
    if compute_mode == IF_NECESSARY:  # a block has fewer vectors than the whole
        product = max(x1.shape[-2], x2.shape[-2]) > 25
        compute_mode = f"{'' if product else 'donot_'}use_mm_for_euclid_dist"

    run = partial(torch.cdist, p=p, compute_mode=compute_mode)
    first, second = batch_labels(x1.dim() - 2), batch_labels(x2.dim() - 2)
    inputs = [[*first, "row", "number"], [*second, "column", "number"]]
    batch = max(first, second, key=len)
    return contract("cdist", [x1, x2], inputs, [*batch, "row", "column"], run, linear=False)


States = torch.Tensor | Sequence[torch.Tensor]
"""Types a layer's initial states: one tensor, for an LSTM two."""

Recurrence = Callable[[torch.Tensor, States], tuple[torch.Tensor, ...]]
"""Runs a layer or a cell on a rank's blocks: from its input and states to its results."""


@register_each("gru", "rnn_tanh", "rnn_relu", "lstm", merged=True)
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
    """Keeps a cut batch; if it is whole, it takes over a cut of steps or features, else gathers.

    Distribution scheme: 1. give every rank whole sequences of its part of the batch, in one
    exchange, 2. run the layer on them.
    """
    name = operator.__name__
    if not isinstance(has_biases, bool):  # the other signature: data, sizes, states, parameters
        raise LayoutError(
            f"{name} of packed sequences has no rule for a cut tensor\n{describe([input, params])}"
            "    give the padded sequences, or leave the cut with x.full() before they are packed"
        )
    labels: list[DimLabel] = ["batch", "step"] if batch_first else ["step", "batch"]
    weights = [whole_of(weight, f"the weights of {name}") for weight in params]
    options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)

    def run(block: torch.Tensor, states: States) -> tuple[torch.Tensor, ...]:
        return cast(tuple[torch.Tensor, ...], operator(block, states, weights, *options))

    p = dropout if train and num_layers > 1 else 0.0
    return _recur(name, input, hx, [*labels, "in"], ["layer", "batch", "state"], run, p)


@register_each("gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "lstm_cell")
def recurrent_cell(
    operator: Operator,
    input: torch.Tensor,
    hx: States,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The batch may be cut; cut features become whole as those of a layer."""
    name = operator.__name__
    given = (w_ih, w_hh, b_ih, b_hh)  # which may come from cut features
    weights = [whole_of(weight, f"the weights of {name}") for weight in given]

    def run(block: torch.Tensor, states: States) -> tuple[torch.Tensor, ...]:
        found: torch.Tensor | tuple[torch.Tensor, ...] = operator(block, states, *weights)
        return (found,) if isinstance(found, torch.Tensor) else found

    found = _recur(name, input, hx, ["batch", "in"], ["batch", "state"], run)
    return found if name == "lstm_cell" else found[0]


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
        _with_whole_sequences(name, x, labels, spread=dropout == 0)
        for x, labels in [(input, of_input), *((state, of_state) for state in states)]
    ]
    # States of another batch, which a block of one sample could not reveal.
    labels = [of_input, *[of_state] * len(states)]
    batches = {x.shape[own.index("batch")] for x, own in zip(operands, labels, strict=True)}
    if len(batches) > 1 or not any(isinstance(x, Sharded) for x in operands):
        raise LayoutError(
            f"{name}: the input and its states have to have one batch, and one of them has to be "
            f"cut where a weight is\n{describe(operands)}"
        )
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


def _with_whole_sequences(
    name: str, x: torch.Tensor, labels: Sequence[DimLabel], *, spread: bool
) -> torch.Tensor:
    """Makes all dims whole but the batch, which takes over a cut if it has none (``spread``).

    Not under dropout, whose mask every rank then has to have for all of the batch.
    """
    if x.dim() != len(labels):
        raise LayoutError(f"{name} takes tensors of {len(labels)} dims, not\n{describe([x])}")
    if not isinstance(x, Sharded):
        return x
    dims = [dim for dim, label in enumerate(labels) if label != "batch"]
    partition, axes = cut_elsewhere(x.partition, dims, dims)
    if not spread:
        axes = tuple(cut.axis for dim in dims if (cut := x.partition.cuts[dim]) is not None)
        partition = x.partition.without(axes)
    if axes:
        log_once(
            x.grid,
            f"{name}: the sequences of {x.partition} are gathered along {', '.join(axes)}; "
            "its ranks repeat the work",
        )
    return x.redistribute(partition, f"whole sequences for {name}")


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
