"""The host waits for no value in a step (tiers: no process; gloo ranks; an accelerator)."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.kernels.registry import choose_as_if_on
from tests.gpus import needs_a_gpu, share_devices
from tests.parallel.waiting import NETWORKS, NothingIsRead, waiting_is
from tests.ranks import run_ranks
from tests.selection import by_rotation
from tests.structure import SOURCE, parsed

TYPES = [torch.float32, torch.bfloat16]
OF_A_STEP = ("comm", "losses.py", "models", "ops", "parallel", "tensor")

# Where Python's numbers become a tensor on a device by a copy that waits.
WAITS = {
    "ops/elementwise.py": "torch's own new_tensor, which refuses cut tensors",
    "ops/indexing.py": "of a list or a tensor of positions that the user gives",
    "ops/views.py": "of counts that the user gives, on which the shape depends",
}


GLOO_WAITS = ("comm/communicator.py", "distributed_c10d.py", "nn/parallel/distributed.py")
"""gloo carries no CUDA tensors without the host."""


def steps(network: str, precision: torch.dtype) -> float:
    """A step in which nothing is read, with the kernels of a GPU; before it one that may read."""
    step = NETWORKS[network](hs.Grid(depth=2), precision)
    step()
    with choose_as_if_on("cuda"), NothingIsRead():
        loss = step()
    return loss.item()


@pytest.mark.parametrize(("network", "precision"), by_rotation(NETWORKS, TYPES), ids=str)
def test_a_step_reads_no_value(network: str, precision: torch.dtype) -> None:
    first, second = run_ranks(2, steps, network, precision)
    assert first == second


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
    ],
)
def test_reading_is_noticed(read) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AssertionError, match="reads values"), NothingIsRead():
        read(torch.ones(3))
    with NothingIsRead():
        F.relu(torch.ones(3))[1:]


def copies_that_wait(path: Path) -> Iterator[int]:
    """Lines where Python's numbers are copied to a device, and the host waits for the copy."""
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            to_device = any(
                keyword.arg == "device" and ast.unparse(keyword.value) != "'cpu'"
                for keyword in node.keywords
            )
            made = node.func.attr in ("tensor", "as_tensor") and to_device
            if made or node.func.attr == "new_tensor":
                yield node.lineno


def test_constants_travel_without_waiting() -> None:
    paths = [p for name in OF_A_STEP for p in [SOURCE / name, *(SOURCE / name).rglob("*.py")]]
    found = {
        str(path.relative_to(SOURCE))
        for path in paths
        if path.suffix == ".py" and list(copies_that_wait(path))
    }
    assert found == WAITS.keys(), "use hyperslab.ops.operands.device_constant"


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("precision", TYPES, ids=str)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_step_on_a_gpu_waits_for_nothing(network: str, precision: torch.dtype) -> None:
    grid = hs.Grid()
    step = NETWORKS[network](grid, precision)
    for _ in range(2):  # kernels are chosen and compiled, the optimiser makes its state
        step()
    with waiting_is("error"):
        step()


def waits(store: str, network: str) -> list[str]:
    """Files outside the messages' way in which the host waited in a step on a shared device."""
    share_devices(store)
    step = NETWORKS[network](hs.Grid(depth=2), torch.float32)
    for _ in range(2):
        step()
    with warnings.catch_warnings(record=True) as found, waiting_is("warn"):
        warnings.simplefilter("always")
        step()
    places = {warning.filename for warning in found if "synchroniz" in str(warning.message)}
    return sorted(place for place in places if not place.endswith(GLOO_WAITS))


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("network", NETWORKS)
def test_two_ranks_on_a_gpu_wait_for_messages_alone(network: str, tmp_path: Path) -> None:
    assert run_ranks(2, waits, str(tmp_path / "store"), network) == [[], []]
