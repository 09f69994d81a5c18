"""What a process with ``TRITON_INTERPRET=1``, or a GPU, runs: kernels against plain references.

Triton reads that variable when it is imported, and the tests' own process may have done so before.
The interpreter takes a millisecond for each tile, so that blocks are small; it cuts float32 off to
bfloat16 instead of rounding it (3.9), so that results of that type may be one unit away.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hyperslab.kernels.memory_format import CHANNELS_LAST
from hyperslab.kernels.registry import OPERATORS

REFERENCES = {one.name: one.reference for one in OPERATORS.values() if one.cuda}
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative L2
TYPES = list(TOLERANCE)

# Shape, pooling, normalisation: 0 none, 1 per channel, 2 per sample and channel. Channels that fill
# bytes and that do not, blocks that end within a byte and within a tile, every number of dims.
BLOCKS: list[tuple[tuple[int, ...], list[int], int]] = [
    ((2, 2, 4, 2, 6), [2, 2, 2], 0),
    ((1, 8, 4, 4, 2), [2, 2, 2], 0),
    ((2, 24, 2, 3, 2), [1, 3, 2], 0),
    ((1, 3, 3, 3, 5), [], 0),
    ((2, 4, 2, 2, 2), [], 0),
    ((2, 2, 3, 5, 8), [], 0),
    ((1, 5, 6, 4), [3, 2], 0),
    ((2, 2, 9), [], 0),
    ((1, 3, 4, 2, 6), [2, 2, 2], 1),
    ((2, 16, 2, 2, 4), [2, 1, 2], 2),
    ((2, 2, 3, 3, 5), [], 2),
    ((1, 2, 13, 13, 13), [], 1),
    ((1, 3, 6, 4), [3, 2], 1),
    ((3, 5), [], 2),
]


def formats(shape: Sequence[int]) -> list[torch.memory_format]:
    """Many channels channels last only: contiguous, each is a tile of its own."""
    last = CHANNELS_LAST.get(len(shape))
    return [*([torch.contiguous_format] if shape[1] < 8 else []), *([last] if last else [])]


def check(name: str, *arguments: Any) -> list[torch.Tensor]:
    """The kernel's results are the reference's, which are returned."""
    expected = REFERENCES[name](*arguments)
    found = OPERATORS[name].triton(*arguments)
    if isinstance(expected, torch.Tensor):
        expected, found = [expected], [found]
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), name
        if b.dtype == torch.uint8:
            assert torch.equal(a, b), (name, arguments[0].shape)
            continue
        assert torch.equal(a.isfinite(), b.isfinite()), name
        assert torch.equal(a.isnan(), b.isnan()), name
        finite = b.isfinite()
        error = (a.double() - b.double())[finite].norm()
        tolerance = TOLERANCE.get(b.dtype, 1e-5)
        assert error <= tolerance * b.double()[finite].norm(), (name, b.dtype, error)
    return list(expected)


def block(shape: Sequence[int], dtype: torch.dtype, form: torch.memory_format) -> torch.Tensor:
    """With ties, zeros of both signs, infinities and NaN."""
    x = torch.randn(*shape)
    x[0] = (x[0] * 2).round() / 2
    x.view(-1)[::23] = -0.0
    x.view(-1)[5::61] = torch.nan
    x.view(-1)[7::71] = -torch.inf
    return x.to(dtype).contiguous(memory_format=form)


def chains() -> Iterator[tuple[Any, ...]]:
    """Each block in each format, with activation, kind of pooling and type in turn."""
    turns = itertools.cycle(itertools.product(TYPES, (0.0, 0.01, 1.0), (False, True)))
    for shape, pool, scales in BLOCKS:
        for form in formats(shape):
            for _ in range(2):
                dtype, slope, maximum = next(turns)
                next(turns)
                yield shape, pool, scales, form, dtype, slope, maximum and bool(pool)


def check_chains() -> None:
    """Forward with its marks, backward without and with statistics, and the sums for these."""
    for shape, pool, scales, form, dtype, slope, maximum in chains():
        x = block(shape, dtype, form)
        rows = shape[0] if scales == 2 else 1
        norm = torch.randn(3, rows, shape[1]) if scales else None
        y, marks = check("chain_forward", x, norm, slope, pool, maximum, True, dtype)
        g = torch.randn(y.shape).to(dtype).contiguous(memory_format=form)
        if scales:
            x = torch.randn(*shape).to(dtype).contiguous(memory_format=form)
            _, marks = check("chain_forward", x, norm, slope, pool, maximum, True, dtype)
            check("chain_backward_sums", g, marks, x, norm, slope, pool, maximum)
            factors = [x, norm, torch.randn(2, rows, shape[1])]
        else:
            factors = [None] * 3
        check("chain_backward", g, marks, *factors, slope, pool, maximum, shape, dtype)


def check_channel_sums(x: torch.Tensor, groups: int) -> None:
    """Parts may be others than the reference's: the sums of x and of x * x are the same."""
    found, expected = (
        version(x, groups)
        for version in (OPERATORS["channel_sums"].triton, REFERENCES["channel_sums"])
    )
    assert found.shape == expected.shape
    assert torch.allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.allclose(found[1:].sum(0), expected[1:].sum(0), rtol=1e-5)


def check_sums() -> None:
    for (shape, _, _), groups in zip(BLOCKS, itertools.cycle([0, 1]), strict=False):
        for form in formats(shape):
            x = (torch.randn(*shape) + 1).to(TYPES[len(shape) % 3]).contiguous(memory_format=form)
            check_channel_sums(x, groups and shape[1])


def check_far_from_zero() -> None:
    """Nothing is lost of the variance of channels whose mean is far larger than its root."""
    x = torch.randn(2, 3, 5, 7, 9) + 1e4
    for form in formats(x.shape):
        sums = OPERATORS["channel_sums"].triton(x.contiguous(memory_format=form), 0)
        check("normalisation", sums, None, None, x.numel() // 3, 1e-5, 3, 1)
        _, moments = REFERENCES["normalisation"](sums, None, None, x.numel() // 3, 1e-5, 3, 1)
        exact = x.double().transpose(0, 1).flatten(1).var(1, correction=0)
        assert torch.allclose(moments[1, 0], exact, rtol=1e-6, atol=0)


def check_numbers() -> None:
    """Of batch norm, of instance norm, of groups; with and without weight and bias."""
    for rows, channels, pool in ((1, 5, 1), (3, 140, 1), (2, 12, 4)):
        values = torch.randn(rows * channels // pool, 30, dtype=torch.float64) + 3
        sums = REFERENCES["channel_sums"](values[None], rows * channels // pool)
        weight, bias = torch.randn(2, channels)
        check("normalisation", sums, None, None, 30, 1e-5, channels, pool)
        norm, moments = check("normalisation", sums, weight, bias, 30, 1e-5, channels, pool)
        given = torch.randn(2, rows, channels, dtype=torch.float64)
        *_, shared = check("parameter_gradients", given, norm, moments, pool)
        check("through_statistics", shared, norm, moments, 30, pool)


def check_running() -> None:
    """In place; what the kernel does not take goes to the reference."""
    for channels, momentum, dtype in ((5, 0.1, TYPES[0]), (140, 0.9, TYPES[0]), (5, 1.0, TYPES[1])):
        moments = torch.randn(4, 1, channels, dtype=torch.float64).exp()
        found = torch.randn(2, channels).to(dtype)
        expected = found.clone()
        OPERATORS["running_statistics"].triton(moments, *found, momentum, 1.25)
        REFERENCES["running_statistics"](moments, *expected, momentum, 1.25)
        torch.testing.assert_close(found, expected)


def check_reorder() -> None:
    for shape in ((2, 3, 5, 7), (1, 16, 3, 5, 11), (2, 70, 2, 3, 17)):
        for form, to_last in itertools.product(formats(shape), (False, True)):
            x = torch.randn(*shape).contiguous(memory_format=form)
            check("reorder", x, to_last, torch.float16)


def check_dropout() -> None:
    """The same bits, wherever a box lies in its volume; nothing, half and all is dropped."""
    volumes = (
        ((2, 3, 5, 7, 9), (1, 0, 2, 3, 1), (1, 3, 3, 4, 8)),
        ((1, 16, 6, 8, 1100), (0, 0, 1, 2, 3), (1, 16, 2, 3, 11)),
        ((3, 70000, 20000), (1, 69990, 19990), (2, 5, 7)),
        ((2, 4, 9), (0, 1, 0), (2, 3, 9)),
        ((7, 5), (2, 1), (3, 4)),
    )
    turns = itertools.cycle(itertools.product(TYPES, (0.3, 0.0, 1.0, 0.5)))
    for shape, first, own in volumes:
        for form in formats(own):
            for _ in range(3):
                dtype, p = next(turns)
                x = block(own, dtype, form)
                seed = torch.randint(2**62, ())
                found = OPERATORS["drop_elements"].triton(x, shape, first, seed, p)
                expected = REFERENCES["drop_elements"](x, shape, first, seed, p)
                assert found.stride() == expected.stride()
                if dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1":
                    check("drop_elements", x, shape, first, seed, p)  # it cuts off
                    assert torch.equal(found == 0, expected == 0)
                else:
                    assert torch.equal(found.isnan(), expected.isnan())
                    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def check_wide() -> None:
    """The same in 64 bits, as for a sample of more than 2^31 elements."""
    from hyperslab.kernels.cuda import tiles

    tiles.NARROW = 0
    x = torch.randn(2, 4, 4, 2, 2)
    norm = torch.randn(3, 1, 4)
    for form in formats(x.shape):
        x = x.contiguous(memory_format=form)
        for given in (norm, None):
            y, marks = check("chain_forward", x, given, 0.0, [2] * 3, True, True, x.dtype)
        nothing = [None] * 3
        check("chain_backward", y, marks, *nothing, 0.0, [2] * 3, True, x.shape, x.dtype)
        check("chain_backward_sums", y, marks, x, norm, 0.0, [2] * 3, True)
        check_channel_sums(x, 0)
        check("reorder", x, form == torch.contiguous_format, x.dtype)
        check("drop_elements", x, [2, 4, 8, 2, 2], [0, 0, 1, 0, 0], torch.tensor(5), 0.5)


if __name__ == "__main__":
    torch.set_default_device(os.environ.get("HYPERSLAB_TEST_DEVICE", "cpu"))
    torch.manual_seed(0)
    check_chains()
    check_sums()
    check_far_from_zero()
    check_numbers()
    check_running()
    check_reorder()
    check_dropout()
    check_wide()
    print("equal")
