"""What a CUDA graph would leave out of its replays is refused (tiers: no process; gloo ranks).

The capture is pretended: torch is made to say that the current stream records a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.comm.bootstrap import world
from hyperslab.comm.collectives import AllGatheredInts
from hyperslab.comm.communicator import PendingMessages
from hyperslab.ops.operands import device_constant
from hyperslab.parallel.offload import move_to_host
from hyperslab.util.capture import is_capturing
from tests.ranks import run_ranks


@contextlib.contextmanager
def pretended_capture() -> Iterator[None]:
    with (
        mock.patch("torch.cuda.is_initialized", return_value=True),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=True),
    ):
        yield


def test_without_cuda_nothing_is_captured() -> None:
    assert not is_capturing()
    with pretended_capture():
        assert is_capturing()


def volume(grid: hs.Grid) -> hs.Sharded:
    return hs.shard(torch.randn(2, 3, 4, 6, 5), grid)


def attention(x: hs.Sharded) -> torch.Tensor:
    tokens = x.flatten(2)
    return F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.5)


RANDOM: dict[str, Callable[[hs.Sharded], object]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "uniform_": lambda x: x.uniform_(),
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_seed_is_not_drawn_once_for_all_replays(name: str) -> None:
    x = volume(hs.Grid())
    before = torch.get_rng_state()
    with pretended_capture(), pytest.raises(hs.UnsupportedOp, match="seed of a random operator"):
        RANDOM[name](x)
    assert torch.equal(torch.get_rng_state(), before)
    RANDOM[name](x)  # and nothing is left of the capture


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([1.5, -2.0], None), ([True, False], None), ([3], torch.int32), ([], None)],
    ids=str,
)
def test_no_replay_copies_a_constant_from_the_host(
    values: list[float], dtype: torch.dtype | None
) -> None:
    eager = device_constant(values, torch.device("cpu"), dtype)
    made: list[torch.Tensor] = []
    with pretended_capture(), mock.patch.object(torch.Tensor, "to", made.append):
        captured = device_constant(values, torch.device("cpu"), dtype)
    assert not made
    assert captured.dtype == eager.dtype
    assert torch.equal(captured, eager)


def test_what_draws_nothing_is_captured() -> None:
    x = volume(hs.Grid())
    net = nn.Sequential(nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.Dropout(0.5)).eval()
    expected = net(x).local
    with pretended_capture():
        torch.testing.assert_close(net(x).local, expected)


def refusals() -> dict[str, str]:
    """What two ranks say under a capture, and that the step before it and after it runs."""
    grid = hs.Grid(depth=2)
    x = volume(grid)
    torch.manual_seed(0)
    net = hs.parallelize(nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.Flatten()), grid)
    group = world()
    assert group is not None
    tries: dict[str, Callable[[], object]] = {
        "forward": lambda: net(x),
        "ring": lambda: attention(x),
        "mask": lambda: F.dropout3d(x, 0.5),
        "numbers": lambda: AllGatheredInts(grid, [1], None, "a comparison"),
        "offload": lambda: move_to_host(torch.ones(2)),
        "gloo": lambda: PendingMessages(group, [], [], "a halo exchange", True),
    }
    words = {}
    for name, run in tries.items():
        with pretended_capture():
            try:
                run()
            except hs.UnsupportedOp as error:
                words[name] = str(error)
    with torch.no_grad():
        expected = net(x).full()
        with pretended_capture():
            assert torch.equal(net(x).full(), expected)
    net(x).sum().backward()
    return words


def test_ranks_refuse_what_the_host_does_beside_a_step() -> None:
    first, second = run_ranks(2, refusals)
    assert first == second
    parts = {
        "forward": "a training forward of Sequential",
        "ring": "random states",
        "mask": "random states",
        "numbers": "a comparison",
        "offload": 'memory="offload"',
        "gloo": "a halo exchange",
    }
    assert first.keys() == parts.keys()
    for name, part in parts.items():
        assert part in first[name]
        assert "replay would leave it out" in first[name]
