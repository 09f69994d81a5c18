"""Every pointwise rule against plain torch, with all arguments that torch takes (tier: a few
gloo ranks).
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.geometry import Cut, Partition
from hyperslab.ops.elementwise import apply_pointwise
from hyperslab.tensor.dispatch import RULES, op_name
from tests.ops.elementwise import test_alpha_dropout, test_creation, test_draws, test_dropout
from tests.ops.serial import average
from tests.ranks import run_ranks
from tests.selection import in_gate

COVERS = {
    "elementwise": {
        "__get__",  # of data
        "prelu", "to", "type", "type_as", "contiguous", "detach_", "frexp",
    }
}  # fmt: skip
SHAPE = (4, 3, 5, 4, 3)
UNCHECKED = {"torch.Tensor.cuda", "torch.Tensor.type", "torch.frexp", "torch.Tensor.frexp"}
"""The first needs a device which this tier has not; the others have tests below."""

TESTED_ELSEWHERE = {
    "torch.fake_quantize_per_channel_affine",
    "torch.fake_quantize_per_tensor_affine",
    "torch.functional.unravel_index",
    "torch.gradient",
    "torch.nn.functional.glu",
    "torch.searchsorted",
}
"""Take no such operands: see `test_unusual_operands`, `test_differences` and `test_softmax`."""

RANDOM = set[str]().union(
    *(
        m.COVERS["elementwise"]
        for m in (test_alpha_dropout, test_creation, test_draws, test_dropout)
    )
)
"""Draw random numbers, or make tensors from a shape."""


@functools.cache
def operands() -> dict[str, torch.Tensor]:
    """Random ones cost more than what is done with them: they are drawn once, and copied."""
    generator = torch.Generator().manual_seed(1)

    def floats() -> torch.Tensor:
        return torch.rand(SHAPE, generator=generator, dtype=torch.float64) * 0.8 + 0.1

    def integers() -> torch.Tensor:
        return torch.randint(1, 5, SHAPE, generator=generator)

    return {
        "x": floats(),
        "y": floats() - 0.5,
        "n": floats(),
        "z": floats(),
        "i": integers(),
        "j": integers(),
        "mask": integers() > 2,
        "channels": torch.rand(3, 1, 1, 1, generator=generator, dtype=torch.float64),
        "slopes": torch.rand(3, generator=generator, dtype=torch.float64),
    }


CALLS: list[tuple[Any, ...]] = [
    ("x",),
    ("n",),
    ("i",),
    ("x", "y"),
    ("n", "n"),  # without a gradient, which not every torch has for every function
    ("n", "x"),
    ("i", "j"),
    ("x", 0.5),
    ("x", 1),
    (2, "x"),
    ("x", "channels"),
    ("y", "slopes"),
    ("x", "y", "z"),
    ("x", "y", 0.3),
    ("y", -0.2, 0.2),
    ("x", "mask", 0.5),
    ("mask", "x", "y"),
]
TIGHT = {True: {"rtol": 1e-11, "atol": 1e-13}, False: {"rtol": 1e-6, "atol": 1e-7}}
OTHER_CUT = Partition(SHAPE, (None, None, None, Cut("depth", (0, 1, 4)), None))


def cut_first(grid: hs.Grid, index: int, value: torch.Tensor) -> torch.Tensor:
    """The first operand is cut, the others are ordinary tensors."""
    return hs.shard(value, grid) if index == 0 else value


def cut_differently(grid: hs.Grid, index: int, value: torch.Tensor) -> torch.Tensor:
    """All are cut, the later ones along another dim."""
    if value.dim() < len(SHAPE):
        return value
    x = hs.shard(value, grid)
    return x.redistribute(OTHER_CUT) if index else x


def call(
    function: Callable[..., Any],
    names: tuple[Any, ...],
    options: dict[str, Any],
    cut: Callable[[int, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """The result, what an operator in place made of its operand, and the operands' gradients."""
    values, leaves = operands(), []
    args = list(names)
    for index, name in enumerate(names):
        if isinstance(name, str):
            value = values[name].clone()
            if value.is_floating_point() and name != "n":
                leaves.append(value.requires_grad_())
                value = value * 1  # not a leaf: operators in place are allowed
            args[index] = cut(index, value)
    result = function(*args, **options)
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"{type(result)} is no tensor")
    changed = args[:1] if options or "_" in function.__name__ else []
    found = [result, *(value for value in changed if isinstance(value, torch.Tensor))]
    found = [v.full() if isinstance(v, hs.Sharded) else v for v in found]
    if found[0].requires_grad:
        real = torch.view_as_real(found[0]) if found[0].is_complex() else found[0]
        weights = torch.linspace(-1, 1, real.numel(), dtype=real.dtype)
        (real * weights.view(real.shape)).sum().backward()
        found += [torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves]
    return found


def accepted(function: Callable[..., Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """The calls that plain torch takes, and what it makes of them."""
    options_of = [{}, {"inplace": True}] if "functional" in op_name(function) else [{}]
    for names in CALLS:
        for options in options_of:
            try:
                expected = call(function, names, options, lambda _, value: value)
            except (TypeError, RuntimeError, ValueError, AttributeError, IndexError):
                continue
            # Gradients may be torch's zeros without memory, which cannot be sent: they are copied.
            plain = [torch.empty(v.shape, dtype=v.dtype).copy_(v.detach()) for v in expected]
            yield names, options, plain


def averaged(found: list[torch.Tensor]) -> list[torch.Tensor]:
    """The means over ranks, in one message for each type."""
    result = list(found)
    for dtype in {v.dtype for v in found if v.is_floating_point()}:
        own = [i for i, v in enumerate(found) if v.dtype == dtype]
        sizes = [found[i].numel() for i in own]
        means = average(torch.cat([found[i].detach().reshape(-1) for i in own])).split(sizes)
        for i, mean in zip(own, means, strict=True):
            result[i] = mean.view(found[i].shape)
    return result


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.allclose(a, b, **TIGHT[a.dtype == torch.float64], equal_nan=True)
        for a, b in zip(found, expected, strict=True)
    )


def pointwise() -> list[Callable[..., Any]]:
    modules = {f: getattr(rule.run, "__module__", None) for f, rule in RULES.items()}
    own = [f for f, module in modules.items() if module == apply_pointwise.__module__]
    own = [f for f in own if op_name(f).split(".")[-1] not in RANDOM]
    return [f for f in own if op_name(f) not in UNCHECKED | TESTED_ELSEWHERE]


def spellings(functions: list[Callable[..., Any]]) -> set[Callable[..., Any]]:
    """Functions that are another one of the same name: torch.abs, Tensor.abs, Tensor.__abs__."""
    first: dict[str, Callable[..., Any]] = {}
    for function in functions:
        name = op_name(function).split(".")[-1]
        first.setdefault(name.strip("_") if name.startswith("__") else name, function)
    return set(functions) - set(first.values())


def check(part: int, parts: int, few: int | None) -> dict[str, int]:
    """How many calls of each rule were equal; the ones that were not are an error.

    ``few``: so many calls of what is but another spelling, and every other one of the rest.
    """
    warnings.simplefilter("ignore")
    grid, checked = hs.Grid(depth=2), {}
    functions = pointwise()[part::parts]
    # Each rank makes the references of every other function, and hands them to the other one.
    again = spellings(pointwise())
    mine = []
    for turn, function in enumerate(functions[grid.rank :: 2]):
        calls = list(itertools.islice(accepted(function), few if function in again else None))
        mine.append(calls[turn % 2 :: 2] or calls if few else calls)
    of_ranks: list[Any] = [mine] * 2
    dist.all_gather_object(of_ranks, mine)
    for index, function in enumerate(functions):
        name, equal_calls = op_name(function), 0
        is_moved = False  # how operands come to one cut is the same for all that a function takes
        for names, options, expected in of_ranks[index % 2][index // 2]:
            several = sum(isinstance(name, str) for name in names) > 1
            cuts = [cut_first, cut_differently] if several and not is_moved else [cut_first]
            is_moved = is_moved or several
            for cut in cuts:
                try:
                    found = call(function, names, options, lambda i, v, c=cut: c(grid, i, v))
                except (hs.UnsupportedOp, hs.LayoutError):
                    continue
                assert equal(averaged(found), expected), (name, names, options, cut.__name__)
                equal_calls += 1
        checked[name] = equal_calls
    return checked


@pytest.mark.parametrize("few", in_gate([1, None], kept=[1]))
@pytest.mark.parametrize("part", range(4))
def test_every_rule_equals_torch(part: int, few: int | None) -> None:
    checked = run_ranks(2, check, part, 4, few)[0]
    never = {name for name, calls in checked.items() if calls == 0}
    assert len(checked) > 50
    assert not never


def broadcasts() -> None:
    """By global shapes, from the right."""
    grid = hs.Grid(data=2, depth=2)
    full, row = torch.randn(4, 3, 6, 5, 5), torch.randn(4, 1, 6, 1, 1)
    x, cut_row = hs.shard(full, grid), hs.shard(row, grid)
    plane, scalar = torch.randn(6, 1, 1), torch.tensor(2.0)
    for value in (row, plane, scalar, torch.randn(1, 3, 1, 1, 1), torch.randn(5)):
        assert torch.equal((x + value).full(), full + value)
        assert torch.equal((value - x).full(), value - full)
    assert torch.equal((x * cut_row).full(), full * row)
    assert torch.equal((cut_row * x).full(), full * row)
    assert torch.equal((cut_row * full).full(), full * row)
    assert torch.equal((2 ** x.abs()).full(), 2 ** full.abs())
    larger = torch.randn(2, 4, 3, 6, 5, 5)
    assert torch.equal((x * larger).full(), full * larger)


def test_broadcasting() -> None:
    run_ranks(4, broadcasts)


def in_place() -> None:
    grid, full = hs.Grid(depth=2), torch.randn(2, 3, 6, 4, 4)
    x = hs.shard(full.clone(), grid)
    before = x.local.data_ptr()
    y = x
    y += 1
    y *= torch.full((3, 1, 1, 1), 2.0)
    F.relu(y, inplace=True)
    assert y is x
    assert x.local.data_ptr() == before
    assert torch.equal(x.full(), F.relu((full + 1) * 2))


def in_place_with_another_cut() -> None:
    """The first operand keeps its cut, whether it is cut more, less or along another dim."""
    grid = hs.Grid(depth=2, height=2)
    full, other = torch.randn(2, 3, 5, 4, 6), torch.randn(2, 3, 5, 4, 6)
    more, less = hs.shard(full, grid).partition, Partition(full.shape, (None,) * 5)
    moved = Partition(full.shape, (None, Cut("height", (0, 1, 3)), None, None, None))
    for mine, its in itertools.permutations((more, less, moved, more.without("depth")), 2):
        a, b = full.clone().requires_grad_(), other.clone().requires_grad_()
        x, y = (hs.shard(v, grid).redistribute(p) for v, p in ((a * 1, mine), (b, its)))
        z = x
        z *= y
        assert z is x
        assert x.partition == mine
        assert torch.equal(x.full(), full * other)
        (x.full() * full).sum().backward()
        assert torch.allclose(a.grad, other * full)
        assert torch.allclose(b.grad, full * full)


def test_in_place_with_another_cut() -> None:
    run_ranks(4, in_place_with_another_cut)


def in_place_modules() -> None:
    """Modules say ``inplace`` by position or by name: the cut tensor itself comes back."""
    grid, full = hs.Grid(depth=2), torch.randn(2, 3, 6, 4, 4, dtype=torch.float64)
    for kind in (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Hardtanh, nn.ReLU6, nn.SiLU, nn.CELU):
        leaf, serial = full.clone().requires_grad_(), full.clone().requires_grad_()
        x = hs.shard(leaf, grid) * 2
        assert kind(inplace=True)(x) is x
        assert x.grad_fn is not None
        assert x.grad_fn.name() != "CopySlices"  # it would copy the whole gradient
        x.full().sum().backward()
        expected = kind()(serial * 2)
        expected.sum().backward()
        assert torch.allclose(x.full(), expected, rtol=1e-12)
        assert torch.allclose(leaf.grad, serial.grad, rtol=1e-12)


def test_modules_in_place() -> None:
    run_ranks(2, in_place_modules)


def test_in_place() -> None:
    run_ranks(2, in_place)


def by_name() -> None:
    """All operands by their names, in any order; no positions at all."""
    full = torch.randn(2, 3, 6, 4, 4)
    x, y = hs.shard(full, hs.Grid(depth=2)), hs.shard(full.flip(2), hs.Grid(depth=2))
    calls: list[Callable[[Any, Any], Any]] = [
        lambda x, y: torch.sub(other=y, input=x, alpha=2),
        lambda x, y: torch.clamp(input=x, min=y),
        lambda x, y: torch.where(condition=x > 0, input=x, other=y),
        lambda x, y: F.elu(input=x * 1, inplace=True),
        lambda x, y: F.gelu(input=x),
        lambda x, y: torch.bmm(input=x[0, 0], mat2=y[0, 0].mT),
        lambda x, y: x[:, []],
    ]
    for call in calls:
        assert torch.allclose(call(x, y).full(), call(full, full.flip(2)), atol=1e-6)


def test_operands_by_name() -> None:
    run_ranks(2, by_name)


def slopes() -> None:
    """Of all channels or each, zeros included; a gradient is differentiated again."""
    grid = hs.Grid(depth=2)
    for count, dtype in itertools.product((1, 3), (torch.float64, torch.bfloat16)):
        full = torch.randint(-2, 3, (2, 3, 6, 4, 4)).to(dtype)
        found = []
        for cut in (False, True):
            leaf = full.clone().requires_grad_()
            weight = torch.linspace(0.25, 0.5, count).to(dtype).requires_grad_()
            y = F.prelu(hs.shard(leaf, grid) if cut else leaf, weight)
            y = y.full() if isinstance(y, hs.Sharded) else y
            gradients = torch.autograd.grad((y * y).sum(), leaf, create_graph=True)
            (gradients[0] ** 2).sum().backward()
            assert leaf.grad is not None
            assert weight.grad is not None
            found.append((y, *gradients, leaf.grad, average(weight.grad)))
        for a, b in zip(*found, strict=True):
            assert torch.allclose(a, b, rtol=1e-12 if dtype == torch.float64 else 2e-2)


def test_slopes_of_prelu() -> None:
    run_ranks(2, slopes)


def slopes_of_infinities() -> None:
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 0.0])
    x, gradient = (
        part.reshape(1, 6, 6, 1, 1) for part in torch.meshgrid(values, values, indexing="ij")
    )
    found = []
    for cut in (False, True):
        leaf = x.clone().requires_grad_()
        weight = torch.linspace(0.25, 0.5, 6).requires_grad_()
        y = F.prelu(hs.shard(leaf, hs.Grid(depth=2)) if cut else leaf, weight)
        y = y.full() if isinstance(y, hs.Sharded) else y
        y.backward(gradient)
        found.append((leaf.grad, average(weight.grad)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def test_slopes_of_prelu_where_values_are_no_numbers() -> None:
    run_ranks(2, slopes_of_infinities)


def test_slopes_of_prelu_twice() -> None:
    """At zero torch's second derivative is not that of its first one."""
    found = []
    for cut in (False, True):
        leaf = torch.tensor([0.0, -0.0, 1.0, -1.0]).view(1, 4, 1, 1).requires_grad_()
        weight = torch.linspace(0.25, 0.5, 4).requires_grad_()
        y = F.prelu(hs.shard(leaf, hs.Grid()) if cut else leaf, weight)
        first = torch.autograd.grad(y.sum(), (leaf, weight), create_graph=True)
        mixed = first[0].sum() + first[1].square().sum()
        found.append((*first, *torch.autograd.grad(mixed, (leaf, weight))))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_leaky_slope_of_zero_is_not_relu() -> None:
    x = torch.tensor([-torch.inf, torch.nan, -1.0, 2.0]).view(1, 1, 4)
    found = []
    for cut in (False, True):
        leaf = x.clone().requires_grad_()
        y = F.leaky_relu((hs.shard(leaf, hs.Grid()) if cut else leaf) * 2, 0.0)
        y.sum().backward()
        found.append((y.full() if isinstance(y, hs.Sharded) else y, leaf.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, equal_nan=True)


def taken_apart() -> None:
    """A number is its mantissa times a power of two, of which only the mantissa has a gradient."""
    leaf = torch.randn(2, 3, 6, 4, 4, dtype=torch.float64, requires_grad=True)
    serial = leaf.detach().clone().requires_grad_()
    found, expected = hs.shard(leaf, hs.Grid(depth=2)).frexp(), serial.frexp()
    assert torch.equal(found.mantissa.full(), expected.mantissa)
    assert torch.equal(found.exponent.full(), expected.exponent)
    found.mantissa.square().sum().backward()
    expected.mantissa.square().sum().backward()
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, serial.grad, rtol=1e-12)


def test_mantissas_and_exponents() -> None:
    run_ranks(2, taken_apart)


def truncated(x: torch.Tensor) -> torch.Tensor:
    """The last state of a loop whose states are detached in place, with gradients of two steps."""
    state = x * 0.5
    for step in range(4):
        state = torch.tanh(state * 2 + x)
        if step == 1:
            state.detach_()
            assert not state.requires_grad
    return state


def detached_in_place() -> None:
    full = torch.randn(2, 3, 6, 4, 4, dtype=torch.float64)
    leaf, serial = full.clone().requires_grad_(), full.clone().requires_grad_()
    got, expected = truncated(hs.shard(leaf, hs.Grid(depth=2))).full(), truncated(serial)
    for y in (got, expected):
        (y**2).sum().backward()
    assert torch.allclose(got, expected, rtol=1e-12)
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, serial.grad, rtol=1e-12)


def test_detaching_in_place() -> None:
    run_ranks(2, detached_in_place)


def langevin(x: Any) -> Any:
    """Steps along gradients that are taken by ``.data``, of a leaf and of its gradient."""
    x.requires_grad_()
    for _ in range(3):
        (x**3).mean().backward()
        x.data.add_(x.grad.data, alpha=-2.0).clamp_(-1, 1)
        x.grad.data.zero_()
    return x.detach()


def changed_by_data() -> None:
    full = torch.randn(2, 3, 6, 4, 4, dtype=torch.float64)
    found = langevin(hs.shard(full.clone(), hs.Grid(depth=2))).full()
    assert torch.allclose(found, langevin(full.clone()), rtol=1e-12)


def test_changes_by_data() -> None:
    run_ranks(2, changed_by_data)


def refused(case: str) -> None:
    grid = hs.Grid(depth=2)
    x = hs.shard(torch.randn(2, 3, 6, 4, 4), grid)
    if case == "shapes":
        x + torch.randn(5)
    elif case == "local shape":
        x + torch.randn(2, 3, 3, 4, 4)
    elif case == "out":
        torch.add(x, x, out=x)
    elif case == "ordinary in place":
        torch.randn(2, 3, 6, 4, 4).add_(x)
    elif case == "growing in place":
        x.add_(torch.randn(4, 2, 3, 6, 4, 4))
    elif case == "grids":
        x + hs.shard(torch.randn(2, 3, 6, 4, 4), hs.Grid(height=2))
    elif case == "rrelu":
        F.rrelu(x, training=True)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("shapes", "do not broadcast"),
        ("local shape", "do not broadcast"),
        ("out", r"add\(out=...\) has no rule"),
        ("ordinary in place", "in place would change the cut"),
        ("growing in place", "in place would change the cut"),
        ("grids", "operands on two grids"),
        ("rrelu", "random slopes"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(2, refused, case)


def types() -> None:
    full = torch.randn(2, 3, 6, 4, 4)
    x = hs.shard(full, hs.Grid(depth=2))
    assert x.type() == full.type()
    for kind in (torch.float64, torch.int32, "torch.DoubleTensor"):
        found, expected = x.type(kind), full.type(kind)
        assert found.dtype == expected.dtype
        assert torch.equal(found.full(), expected)


def test_types_by_their_names() -> None:
    run_ranks(2, types)


def as_another_one() -> None:
    full = torch.randn(2, 3, 6, 4, 4)
    x = hs.shard(full, hs.Grid(depth=2))
    like = torch.zeros(1)
    copies = [
        x.to(like, copy=True),
        x.to(x, False, True),
        x.to(tensor=like, copy=True, memory_format=torch.channels_last_3d),
    ]
    assert copies[2].is_contiguous(memory_format=torch.channels_last_3d)
    for y in copies:
        y.add_(1)
        assert torch.equal(y.full(), full + 1)
    assert torch.equal(x.full(), full)
    assert x.to(like) is x


def test_to_another_tensor_takes_its_options() -> None:
    run_ranks(2, as_another_one)
