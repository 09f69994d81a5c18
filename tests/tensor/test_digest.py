"""Checksums see every bit in its place (tier: no process)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hyperslab.tensor import inputs

SHAPE = (2, 3, 4, 5, 6)
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def of_cpu(x: torch.Tensor) -> int:
    return inputs.digest_in_memory(x, tuple(range(x.dim())))


def of_device(x: torch.Tensor) -> int:
    return int(inputs.digest_on_device(x))


@pytest.fixture(params=[of_cpu, of_device], ids=["cpu", "device"])
def number(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], int]:
    return request.param  # type: ignore[no-any-return]


def values(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 9, SHAPE, generator=generator).to(torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_tensors_have_equal_digests(
    dtype: torch.dtype, number: Callable[[torch.Tensor], int]
) -> None:
    x = values(dtype)
    assert number(x) == number(x.clone())
    assert number(x) != number(values(dtype).flip(2))
    assert number(x) == number(x.contiguous(memory_format=torch.channels_last_3d))
    repeated = x[:1].expand(4, *SHAPE[1:])
    assert number(repeated) == number(repeated.clone())
    assert number(x[..., 1:3]) == number(x[..., 1:3].clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_swap_of_two_voxels_is_seen(
    dtype: torch.dtype, number: Callable[[torch.Tensor], int]
) -> None:
    x = torch.ones(64, dtype=dtype)
    x[::2] = -1  # they differ in the highest bit alone
    swapped = []
    for i in range(0, 64, 2):
        y = x.clone()
        y[i] = 1
        y[i + 1] = -1
        swapped.append(number(y))
    assert len({number(x), *swapped}) == 33


def test_bits_that_compare_equal_are_seen(number: Callable[[torch.Tensor], int]) -> None:
    zero = torch.zeros(5)
    assert number(zero) != number(-zero)
    nan = np.full(5, np.nan, np.float32)
    payload = nan.copy()
    payload.view(np.uint32)[3] |= 1
    assert number(torch.from_numpy(nan)) != number(torch.from_numpy(payload))
    assert number(torch.from_numpy(nan)) == number(torch.from_numpy(nan.copy()))


def test_conjugates_and_scalars(number: Callable[[torch.Tensor], int]) -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    assert number(x.conj()) == number(torch.tensor([1 - 2j, 3 + 1j]))
    assert number(torch.tensor(3.0)) != number(torch.tensor(4.0))
    assert number(torch.zeros(0)) == number(torch.zeros(0))


def test_a_tensor_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "DIGEST_CHUNK", 7)
    x = torch.arange(30.0)
    swapped = x.clone()
    swapped[[3, 10]] = x[[10, 3]]  # the same place of two chunks
    assert of_device(x) != of_device(swapped)
    assert of_device(x) == of_device(x.clone())


def test_what_lies_otherwise_in_memory_needs_no_copy() -> None:
    x = values(torch.float32)
    last = x.contiguous(memory_format=torch.channels_last_3d)
    order = inputs.memory_order(last)
    assert order == (0, 2, 3, 4, 1)
    assert last.permute(order).is_contiguous()
    assert inputs.digest_in_memory(last, order) == of_cpu(x.permute(order))
    assert inputs.memory_order(x[..., ::2]) == (0, 1, 2, 3, 4)
    assert inputs.memory_order(x.expand(2, 2, *SHAPE[1:])[0]) == (0, 1, 2, 3, 4)
