"""Draws random numbers, dropout masks and new tensors that do not depend on the grid.

In reading order: dropout, whose mask is torch's own where it is small, and a hash of a seed and
the global index for a volume; creation of tensors from a cut one (new_zeros, rand_like and
their kin); numbers that are written into a tensor, or drawn by its probabilities; dropout for
networks of SELUs (Klambauer et al. 2017).
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import Grid, per_grid
from hyperslab.errors import CommError, LayoutError
from hyperslab.geometry import Partition
from hyperslab.kernels.random_bits import uniform_bits
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.ops.operands import check_writable, operand_block
from hyperslab.ops.overloads import Integers, Operator, integers, register_each
from hyperslab.ops.placement import check_unbatched
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe, gather_first

CHECK_EVERY = 64
"""Counts the calls between two checks that all ranks are in the same random state."""


def dropout_shape(x: Sharded, shape: tuple[int, ...], p: float, inplace: bool) -> Sharded:
    """Multiply by one global mask of ``shape``, drawn in full on every rank as torch draws it."""
    check_random_state(x)
    scale = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p, True)
    return _multiply_by_mask(x, own_part_of_mask(scale, x), 1.0, inplace)


def own_part_of_mask(mask: torch.Tensor, x: Sharded) -> torch.Tensor:
    """Narrows a global mask, whose extents are those of ``x`` or 1, to this rank's block."""
    for dim, extent in enumerate(mask.shape):
        if extent != 1:
            lo, hi = x.box.interval(dim)
            mask = mask.narrow(dim, lo, hi - lo)
    return mask


def dropout_volume(x: Sharded, p: float, inplace: bool) -> Sharded:
    """Drops elements by a hash of one drawn seed and each element's global index.

    A mask drawn in full would take the memory of the whole activation on every rank.
    """
    check_random_state(x)
    seed = int(torch.randint(2**62, ()).item())
    keep = uniform_bits(x.partition.shape, x.box, seed, x.device) >= math.floor(p * 2**31)
    return _multiply_by_mask(x, keep, 1 / (1 - p) if p < 1 else 0.0, inplace)


def _multiply_by_mask(x: Sharded, mask: torch.Tensor, scale: float, inplace: bool) -> Sharded:
    if inplace:
        check_writable(x, "dropout")
        torch.Tensor.mul_(torch.Tensor.mul_(x, mask), scale)
        x.note_change()
        return x
    return x.like(x.block * mask * scale if scale != 1.0 else x.block * mask, fresh=True)


@per_grid
def _random_calls(_grid: Grid) -> Iterator[int]:
    """Counts the random operators that have run on a grid."""
    return itertools.count()


def check_random_state(x: Sharded) -> None:
    """Checks now and then that all ranks are in one random state, so that they draw alike.

    Raises:
        CommError: the ranks' random states differ.
    """
    grid = x.grid
    if grid.size == 1 or next(_random_calls(grid)) % CHECK_EVERY != 0:
        return
    state = torch.get_rng_state() if x.device.type == "cpu" else torch.cuda.get_rng_state(x.device)
    if not grid.same_on_all(zlib.crc32(state.numpy().tobytes())):
        raise CommError(
            "the ranks' random states differ, so they would not drop the same elements\n"
            "    call torch.manual_seed(seed) with the same seed on every rank, and draw random "
            "numbers on all ranks alike"
        )


def check_whole_mask(tensors: Sequence[torch.Tensor | None], p: float, name: str) -> None:
    """Refuses dropout inside ``name`` unless every rank has all: only then are its masks serial.

    Raises:
        LayoutError: one of the tensors is cut.
        CommError: the ranks' random states differ.
    """
    cut = [t for t in tensors if isinstance(t, Sharded)]
    if p <= 0:
        return
    axes = dict.fromkeys(axis for t in cut for axis in t.partition.axes)
    if axes:
        raise LayoutError(
            f"{name} draws its dropout mask for the block only\n{describe(cut)}"
            f"    use a dropout of 0 in it; or, of all of these,\n{gather_first(*axes)}"
        )
    check_random_state(cut[0])


@register(F.dropout, torch.dropout, family="elementwise", merged=True)
def dropout(
    input: Sharded,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool | None = None,
) -> Sharded:
    """One global mask, the same on every grid; torch's own for a contiguous matrix."""
    if not drops_anything(p, training if train is None else train):
        return input
    if input.dim() > 2:
        return dropout_volume(input, p, inplace)
    return dropout_shape(input, tuple(input.shape), p, inplace)


@register(torch.dropout_, family="elementwise")
def dropout_(input: Sharded, p: float, train: bool) -> Sharded:
    """The same in place."""
    return dropout(input, p, train, inplace=True)


BATCHED_DIMS = {
    "dropout1d": (3,),
    "dropout2d": (4,),
    "dropout3d": (5,),
    "feature_dropout": (2, 3, 4, 5),
}


@register_each(*BATCHED_DIMS, family="elementwise")
def feature_dropout(
    operator: Operator,
    input: Sharded,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Sharded:
    """Whole channels: torch's own mask, the same on every grid."""
    name = operator.__name__
    active = drops_anything(p, training)
    alone = name in ("dropout1d", "dropout3d") and input.dim() == BATCHED_DIMS[name][0] - 1
    if alone:
        check_unbatched(input, name)
    elif input.dim() not in BATCHED_DIMS[name]:
        raise LayoutError(f"{name} needs a batched input, got {input.partition}")
    if not active:
        return input
    front = 1 if alone else 2
    shape = (*input.shape[:front], *[1] * (input.dim() - front))
    return dropout_shape(input, shape, p, inplace)


def drops_anything(p: float, training: bool) -> bool:
    """Returns whether anything is dropped.

    Raises:
        ValueError: ``p`` is no probability.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return training and p > 0.0


def _new_like(
    x: Sharded,
    shape: tuple[int, ...],
    make: Callable[[tuple[int, ...]], torch.Tensor],
    requires_grad: bool,
) -> torch.Tensor:
    """Calls ``make`` with the shape of this rank's block, or of the whole where no cut follows."""
    partition = x.partition
    if len(shape) != partition.ndim or any(shape[d] != x.shape[d] for d in partition.cut_dims):
        return make(shape).requires_grad_(requires_grad)
    partition = Partition(shape, partition.cuts)
    y = x.like(make(partition.box(x.grid.coords).shape), partition)
    return torch.Tensor.requires_grad_(y, requires_grad)


@register_each("new_zeros", "new_ones", "new_empty", family="elementwise")
def new_constant(
    operator: Operator,
    self: Sharded,
    *sizes: Integers,
    size: Integers | None = None,
    requires_grad: bool = False,
    **options: object,
) -> torch.Tensor:
    """Cut as x where the shape has x's extents in the cut dims; else an ordinary tensor."""
    shape = integers(*sizes) if size is None else integers(size)
    return _new_like(self, shape, lambda own: operator(self.local, own, **options), requires_grad)


@register(torch.Tensor.new_full, family="elementwise")
def new_full(
    self: Sharded,
    size: Sequence[int],
    fill_value: float,
    *,
    requires_grad: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Cut as x where the shape has x's extents in the cut dims; else an ordinary tensor."""

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        return self.local.new_full(shape, fill_value, **options)

    return _new_like(self, tuple(size), make, requires_grad)


@register(torch.Tensor.new_tensor, family="elementwise")
def new_tensor(self: torch.Tensor, data: object, **options: Any) -> torch.Tensor:
    """An ordinary tensor, equal on all ranks."""
    if isinstance(data, Sharded) or not isinstance(self, Sharded):
        raise LayoutError("new_tensor of a cut tensor has no rule; use x.clone().detach()")
    return self.local.new_tensor(data, **options)


@register(torch.empty_like, family="elementwise")
def empty_like(input: Sharded, **options: object) -> Sharded:
    """Cut as the other; its values are arbitrary."""
    return apply_pointwise(torch.empty_like, (input,), options)


@register(torch.rand_like, family="elementwise")
def rand_like(input: Sharded, **options: Any) -> Sharded:
    """The same on every grid; without spatial dims equal to torch's own."""
    return _random(input, torch.rand, _uniform, **options)


@register(torch.randn_like, family="elementwise")
def randn_like(input: Sharded, **options: Any) -> Sharded:
    """The same on every grid; without spatial dims equal to torch's own."""
    return _random(input, torch.randn, _normal, **options)


def _random(
    x: Sharded,
    draw: Callable[..., torch.Tensor],
    values: Callable[[Sharded, torch.Tensor], torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    **options: Any,
) -> Sharded:
    """Draws the whole by torch's ``draw``, or a volume's block by global indices (``values``)."""
    check_random_state(x)
    kind = dtype or x.dtype
    if x.dim() <= 2:
        device = options.get("device") or x.device
        block = draw(x.shape, dtype=kind, device=device)[x.box.slices()]
    else:
        block = torch.empty_like(x.local, dtype=kind, **options)
        block.copy_(values(x, block))
    y = x.like(block)
    torch.Tensor.requires_grad_(y, requires_grad)
    return y


def _uniform(x: Sharded, like: torch.Tensor) -> torch.Tensor:
    """Draws multiples of the type's resolution in [0, 1), as torch does."""
    digits = min(31, 1 - round(math.log2(torch.finfo(like.dtype).eps)))
    return _random_bits(x, like).bitwise_right_shift(31 - digits).to(like.dtype) / 2**digits


def _normal(x: Sharded, like: torch.Tensor) -> torch.Tensor:
    """Transforms two uniform numbers in (0, 1] into a normal one (Box and Muller 1958)."""
    kind = torch.float64 if like.dtype == torch.float64 else torch.float32
    radius, angle = ((_random_bits(x, like).to(kind) + 1) / 2**31 for _ in range(2))
    return radius.log_().mul_(-2).sqrt_() * angle.mul_(2 * math.pi).cos_()


def _random_bits(x: Sharded, like: torch.Tensor) -> torch.Tensor:
    seed = int(torch.randint(2**62, ()).item())
    return uniform_bits(x.partition.shape, x.box, seed, like.device)


def drawn_whole(x: Sharded) -> bool:
    """Returns whether the whole tensor is small, one number for a sample and channel."""
    return math.prod(x.shape[2:]) == 1


def bernoulli_block(x: Sharded, p: float | torch.Tensor) -> torch.Tensor:
    """Draws this rank's block of zeros and ones, which have the probability ``p``."""
    check_random_state(x)
    if drawn_whole(x):
        with torch.no_grad():
            chances = p.full() if isinstance(p, Sharded) else p
            whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            return whole.bernoulli_(chances)[x.box.slices()]
    seed = int(torch.randint(2**62, ()).item())
    bits = uniform_bits(x.partition.shape, x.box, seed, x.device)
    if not isinstance(p, torch.Tensor):
        return (bits < math.floor(p * 2**31)).to(x.dtype)
    chances = operand_block(p, target=x.partition, like=x).detach()
    return (bits < chances.double() * 2**31).to(x.dtype)


def _check_generator(generator: torch.Generator | None, name: str) -> None:
    if generator is not None:
        raise LayoutError(
            f"{name} of a cut tensor draws from torch's own generator, which is the same on all "
            "ranks\n    leave generator= out, and call torch.manual_seed"
        )


@register(torch.bernoulli, torch.Tensor.bernoulli, family="elementwise")
def bernoulli(
    input: Sharded, p: float | None = None, *, generator: torch.Generator | None = None
) -> Sharded:
    """The same on every grid; torch's own for a contiguous matrix."""
    _check_generator(generator, "bernoulli")
    ones = bernoulli_block(input, input if p is None else p)
    return input.like(ones, fresh=True)


@register_each("bernoulli_", family="elementwise")
def bernoulli_(
    _: object,
    self: Sharded,
    p: float | torch.Tensor = 0.5,
    *,
    generator: torch.Generator | None = None,
) -> Sharded:
    """In place, the same on every grid; torch's own for a contiguous matrix."""
    _check_generator(generator, "bernoulli_")
    return write_block(self, bernoulli_block(self, p))


@register(torch.Tensor.uniform_, family="elementwise")
def uniform_(self: Sharded, *bounds: float, generator: Any = None, **named: float) -> Sharded:
    """In place, the same on every grid; torch's own for a contiguous matrix."""
    _check_generator(generator, "uniform_")
    low, high = _two_numbers(bounds, named, {"from": 0.0, "to": 1.0})
    if drawn_whole(self):
        return _drawn_by_torch(self, "uniform_", low, high)
    block = rand_like(self).block
    return write_block(self, block * (high - low) + low)


@register(torch.Tensor.normal_, family="elementwise")
def normal_(self: Sharded, *moments: float, generator: Any = None, **named: float) -> Sharded:
    """In place, the same on every grid; torch's own for a contiguous matrix."""
    _check_generator(generator, "normal_")
    mean, std = _two_numbers(moments, named, {"mean": 0.0, "std": 1.0})
    if drawn_whole(self):
        return _drawn_by_torch(self, "normal_", mean, std)
    return write_block(self, randn_like(self).block * std + mean)


@register(torch.Tensor.exponential_, family="elementwise")
def exponential_(
    self: Sharded, lambd: float = 1.0, *, generator: torch.Generator | None = None
) -> Sharded:
    """In place, the same on every grid; torch's own for a contiguous matrix."""
    _check_generator(generator, "exponential_")
    if not lambd > 0:
        raise ValueError(f"exponential_ with the rate {lambd}: it has to be above 0")
    if not self.is_floating_point():
        raise ValueError(f"exponential_ of {self.dtype}: takes floating-point numbers")
    return write_block(self, exponential_block(self, lambd))


def exponential_block(x: Sharded, rate: float = 1.0) -> torch.Tensor:
    """Draws this rank's block of exponential numbers; their logarithm is finite, as torch's."""
    if drawn_whole(x):
        check_random_state(x)
        whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return whole.exponential_(rate)[x.box.slices()]
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    uniform = rand_like(x, dtype=kind).block
    half_a_step = torch.finfo(kind).eps / 4
    return uniform.clamp_min_(half_a_step).log_().div_(-rate).to(x.dtype)


def _two_numbers(
    given: tuple[float, ...], named: dict[str, float], default: dict[str, float]
) -> Any:
    """Reads two numbers, by position or by name; torch has checked both before."""
    return (default | dict(zip(default, given, strict=False)) | named).values()


def _drawn_by_torch(x: Sharded, name: str, *options: float) -> Sharded:
    check_random_state(x)
    whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return write_block(x, getattr(whole, name)(*options)[x.box.slices()])


def write_block(x: Sharded, block: torch.Tensor) -> Sharded:
    """Writes this rank's block of new values into ``x``, in place."""
    y: Sharded = apply_pointwise(torch.Tensor.copy_, (x, x.like(block)), {})
    return y


SELU_LIMIT = 1.7580993408473766
"""Replaces dropped values, negated, before all are scaled: the limit of SELU (section 2)."""


@register_each("alpha_dropout", "feature_alpha_dropout", family="elementwise")
def alpha_dropout(
    operator: Operator,
    input: Sharded,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    train: bool | None = None,
) -> Sharded:
    """The same on every grid; whole channels, and matrices that are contiguous, as torch's own."""
    whole_channels = operator.__name__ == "feature_alpha_dropout"
    active = drops_anything(p, training if train is None else train)
    if not input.is_floating_point():
        raise ValueError(f"alpha dropout of {input.dtype}: takes floating-point numbers")
    if whole_channels and input.dim() < 2:
        raise ValueError(f"alpha dropout of whole channels has no channels in {input.partition}")
    if not active:
        return input
    kept = _kept_channels(input, p) if whole_channels else bernoulli_block(input, 1 - p)
    scale = ((SELU_LIMIT**2 * p + 1) * (1 - p)) ** -0.5 if p < 1 else 0.0
    shift = (kept - (1 - p)) * (SELU_LIMIT * scale)
    y = input.block * (kept * scale) + shift
    return write_block(input, y) if inplace else input.like(y, fresh=True)


def _kept_channels(x: Sharded, p: float) -> torch.Tensor:
    """Draws this rank's part of a mask over batch and channels as torch does."""
    check_random_state(x)
    shape = (*x.shape[:2], *[1] * (x.dim() - 2))
    return own_part_of_mask(torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p), x)
