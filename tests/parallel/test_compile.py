"""torch.compile and parallelised modules: the same result, or an error (tier: a few gloo ranks).

Nothing is compiled, so no test needs a compiler.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from tests.ops.serial import distance
from tests.ranks import run_ranks
from tests.selection import by_rotation

GRIDS = [{}, {"depth": 2}, {"data": 2, "height": 2}]
HOW = ["afterwards", "afterwards in place", "before", "before in place", "parts"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv3d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm3d(4)
        self.b = nn.Conv3d(4, 4, 4, stride=2, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        y = F.leaky_relu(self.b(F.relu(self.norm(self.a(x)))))
        if y.shape[2] == 4:  # a global extent, of which dynamo would make a guard
            y = y * 2
        return self.head(y.mean((2, 3, 4)))


def never(_graph: Any, _inputs: Any) -> Any:
    raise AssertionError("a graph was compiled")


def size(axes: dict[str, int]) -> int:
    return math.prod(axes.values())


def compiled(model: nn.Module, grid: hs.Grid, how: str, **options: Any) -> nn.Module:
    options |= {"backend": never}
    if how == "afterwards":
        return torch.compile(hs.parallelize(model, grid), **options)
    if how == "afterwards in place":
        hs.parallelize(model, grid).compile(**options)
        return model
    if how == "before":
        return hs.parallelize(torch.compile(model, **options), grid)
    if how == "before in place":
        model.compile(**options)
    else:
        model.a.compile(**options)
        model.norm = torch.compile(model.norm, **options)
    return hs.parallelize(model, grid)


def three_steps(axes: dict[str, int], how: str) -> float:
    """Differences of outputs, losses and gradients."""
    serial, parallel = Net().double(), Net().double()
    parallel.load_state_dict(serial.state_dict())
    grid = hs.Grid(**axes)
    module = compiled(parallel, grid, how)
    x = torch.randn(3, 2, 2, 9, 8, 7, dtype=torch.float64)
    y = torch.randn(3, 2, 3, dtype=torch.float64)
    errors = []
    for data, target in zip(x, y, strict=True):
        expected, found = serial(data), module(hs.shard(data, grid))
        errors.append(distance(found.full(), expected))
        for model, output in ((serial, expected), (parallel, found)):
            model.zero_grad()
            F.mse_loss(output, target).backward()
        for p, q in zip(parallel.parameters(), serial.parameters(), strict=True):
            errors.append(distance(p.grad, q.grad))
            with torch.no_grad():
                p -= 0.1 * p.grad
                q -= 0.1 * q.grad
    with torch.no_grad():
        expected = serial.eval()(x[0])
        parallel.eval()
        errors.append(distance(module(hs.shard(x[0], grid)).full(), expected))
    return max(errors)


@pytest.mark.parametrize(("how", "axes"), by_rotation(HOW, GRIDS), ids=str)
def test_the_same_result(axes: dict[str, int], how: str) -> None:
    assert max(run_ranks(size(axes), three_steps, axes, how)) <= 1e-10


def whole_graph() -> None:
    """A user who asks for one graph is told that there is none."""
    grid, model = hs.Grid(depth=2), Net()
    module = compiled(model, grid, "afterwards", fullgraph=True)
    x = torch.ones(2, 2, 8, 4, 4)
    with pytest.raises(hs.UnsupportedOp, match="runs eagerly"):
        module(hs.shard(x, grid))
    for call in (model, lambda v: model(v).sum(), lambda v: model(hs.shard(v, grid)).sum()):
        step = torch.compile(call, backend=never, fullgraph=True)
        with pytest.raises(hs.UnsupportedOp, match=r"^what works on cut .*hyperslab\.parallelize"):
            step(x)
    assert model(hs.shard(x, grid)).shape == (2, 3)


def not_silent() -> None:
    """A graph that was asked for before is not made, and the log says so."""
    model = Net()
    model.a.compile(backend=never, fullgraph=True)
    with mock.patch.object(hs.Grid, "log") as log:
        hs.parallelize(model, hs.Grid(depth=2))
        hs.parallelize(Net(), hs.Grid(depth=2))
    assert [call.args[0] for call in log.call_args_list if "eagerly" in call.args[0]] == [
        "Net: torch.compile has no effect, and its parts run eagerly, with fullgraph=True too: "
        "graphs "
        "cannot hold messages between ranks"
    ]


def test_what_was_compiled_before_is_named() -> None:
    run_ranks(2, not_silent)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch runs it eagerly without a word")
def test_one_graph_is_refused() -> None:
    run_ranks(2, whole_graph)


def other_functions() -> None:
    """A compiled function of the user's: refused; on ordinary tensors it compiles as ever."""
    grid, seen = hs.Grid(depth=2), []
    x = hs.shard(torch.randn(2, 2, 8, 4, 4), grid)
    model = hs.parallelize(Net(), grid)

    def backend(graph: Any, _inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    double = torch.compile(lambda v: v * 2, backend=backend)
    step = torch.compile(lambda v: model(v).sum(), backend=backend)
    cut = torch.compile(lambda v: model(hs.shard(v, grid)).sum(), backend=backend)
    with pytest.raises(hs.UnsupportedOp, match=r"^torch\.compile cannot trace a cut tensor"):
        cut(torch.ones(2, 2, 8, 4, 4))
    for function in (double, step):
        with pytest.raises(hs.UnsupportedOp, match=r"^torch\.compile cannot trace") as caught:
            function(x)
        # One of torch's frames stands between the caller's and ours, not all of its compiler's.
        assert [frame.name for frame in caught.traceback][-1] == "_is_view"
        assert len(caught.traceback) <= 3
        assert "2 x 2 x 8 x 4 x 4 (dim 2 in 2 by depth)" in str(caught.value)
        assert "torch.compiler.disable" in str(caught.value)
    assert not seen
    model(x)
    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    assert len(seen) == 1


def test_other_compiled_functions() -> None:
    run_ranks(2, other_functions)
