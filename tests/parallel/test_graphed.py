"""A replayed step is the eager one (tiers: no process; gloo ranks).

No graph was ever made on a GPU: `tests.parallel.pretended_graph` records on the CPU.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.kernels.registry import choose_as_if_on
from hyperslab.parallel.graphed import CudaRecorder
from tests.gpus import needs_a_gpu
from tests.parallel.pretended_graph import pretended_device
from tests.parallel.test_steps import thin
from tests.ranks import run_ranks
from tests.selection import by_rotation, in_gate

STEPS = 6


class Mixed(nn.Module):
    """Dropout of volumes, of channels and of a matrix, batch norm, and an ordinary input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4)
        self.second = nn.Conv3d(4, 4, 3, stride=2, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.norm(self.first(x)).relu(), 0.3, self.training)
        y = y * time.sin().view(-1, 1, 1, 1, 1)
        y = F.dropout3d(self.second(y), 0.2, self.training)
        return self.head(F.dropout(y.mean((2, 3, 4)), 0.5, self.training))


def mixed(grid: hs.Grid) -> tuple[nn.Module, Callable[[int], tuple[Any, ...]], Any]:
    def batch(number: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(number)
        x, time, y = (
            torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in ((2, 1, 8, 6, 6), (2,), (2, 2))
        )
        return hs.shard(x, grid), time, y

    return Mixed(), batch, F.mse_loss


def cosmoflow(grid: hs.Grid) -> tuple[nn.Module, Callable[[int], tuple[Any, ...]], Any]:
    def batch(number: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(2, 4, 16, 16, 16, generator=generator, dtype=torch.float64)
        return hs.shard(x, grid), torch.rand(2, 4, generator=generator, dtype=torch.float64)

    model = hs.models.CosmoFlow(16, batch_norm=True, dropout=0.3)
    thin(model, lambda n: n if n == 4 else n // 8)  # four come in, four go out
    return model, batch, F.mse_loss


def unet(grid: hs.Grid) -> tuple[nn.Module, Callable[[int], tuple[Any, ...]], Any]:
    def batch(number: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(2, 1, 8, 8, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (2, 8, 8, 4), generator=generator)
        return hs.shard(x, grid), hs.shard(y, grid, channels=False)

    return hs.models.UNet3D(1, 3, channels=2, levels=2), batch, F.cross_entropy


NETWORKS = {"mixed": mixed, "cosmoflow": cosmoflow, "unet": unet}


def program(network: str, grid: hs.Grid, *, graphs: bool) -> Iterator[list[torch.Tensor]]:
    """Each step's loss, gradients and buffers; the parameters and the host's random state."""
    torch.manual_seed(1)
    model, batch, wrong = NETWORKS[network](grid)
    model = hs.parallelize(model.double(), grid)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)
    ran = 0

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        nonlocal ran
        ran += 1
        loss = wrong(model(*inputs[:-1]), inputs[-1])
        loss.backward()
        return loss

    run = hs.graphed(step) if graphs else step
    torch.manual_seed(2)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = run(*(x.to(grid.device) for x in batch(number)))
        yield [loss.detach().clone(), *gradients_of(model), *(b.clone() for b in model.buffers())]
        optimizer.step()
    assert ran == (4 if graphs else STEPS)  # one that finds modules, two of a kind, the capture
    yield [*(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def apart(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    assert len(found) == len(expected)
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def trained(network: str, axes: dict[str, int], *, graphs: bool) -> list[list[torch.Tensor]]:
    with pretended_device() as device, choose_as_if_on("cuda"):
        found = [*program(network, hs.Grid(**axes), graphs=graphs)]
        return [*found, [device.state]]


def compared(network: str, axes: dict[str, int]) -> list[float]:
    eager, replayed = (trained(network, axes, graphs=graphs) for graphs in (False, True))
    assert not torch.equal(eager[0][0], eager[1][0])
    return [*map(apart, replayed, eager)]


@pytest.mark.parametrize(
    ("network", "axes"), by_rotation(NETWORKS, [{"depth": 2}, {"data": 2}]), ids=str
)
def test_replays_are_the_eager_steps(network: str, axes: dict[str, int]) -> None:
    for found in run_ranks(2, compared, network, axes):
        assert all(difference < 1e-12 for difference in found), found


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("network", NETWORKS)
def test_replays_on_a_gpu_are_the_eager_steps(network: str) -> None:
    with mock.patch.object(import_module("hyperslab.parallel.graphed"), "EAGER_CALLS", 2):
        eager, replayed = (
            [*program(network, hs.Grid(), graphs=graphs)] for graphs in (False, True)
        )
    assert max(map(apart, replayed, eager)) < 1e-10


def small(grid: hs.Grid) -> nn.Module:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv3d(1, 2, 3, padding=1),
        nn.Dropout(0.3),
        nn.BatchNorm3d(2),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(2, 1),
    )
    return hs.parallelize(net.double(), grid)


def volume(number: int, grid: hs.Grid, depth: int = 8) -> hs.Sharded:
    generator = torch.Generator().manual_seed(number)
    return hs.shard(torch.randn(2, 1, depth, 4, 5, generator=generator, dtype=torch.float64), grid)


def irregular(*, graphs: bool, set_to_none: bool) -> tuple[list[list[torch.Tensor]], int]:
    """Two shapes, gradients that add up, a mode that changes, weights that move."""
    found = []
    ran = 0
    with pretended_device(eager_calls=1):
        grid = hs.Grid(depth=2)
        net = small(grid)

        def step(x: torch.Tensor, *, factor: float) -> dict[str, torch.Tensor]:
            nonlocal ran
            ran += 1
            y = net(x)
            loss = (y * factor).square().mean()
            loss.backward()
            return {"loss": loss, "prediction": y}

        run = hs.graphed(step) if graphs else step
        for number in range(28):
            if number == 24:
                for p in net.parameters():
                    p.data = p.data.clone()
            net.train(number % 12 < 8)
            last = number % 2 == 1
            with contextlib.nullcontext() if last else net.no_sync():
                outputs = run(volume(number, grid, 6 if number % 4 < 2 else 9), factor=0.5)
            values = [outputs["loss"].detach().clone(), outputs["prediction"].full().detach()]
            found.append([*values, *(b.clone() for b in net.buffers())])
            if last:
                found.append(gradients_of(net))
                net.zero_grad(set_to_none)
    return found, ran


def irregular_compared(set_to_none: bool) -> float:
    eager, ran = irregular(graphs=False, set_to_none=set_to_none)
    replayed, captured = irregular(graphs=True, set_to_none=set_to_none)
    assert captured < ran == 28
    return max(map(apart, replayed, eager))


@pytest.mark.parametrize("set_to_none", in_gate([True, False], kept=[False]))
def test_each_kind_of_step_has_a_graph(set_to_none: bool) -> None:
    assert max(run_ranks(2, irregular_compared, set_to_none)) < 1e-12


def zeroed_inside() -> None:
    """The step lets its gradients go itself, and its results are kept."""
    with pretended_device():
        grid = hs.Grid(depth=2)
        net = small(grid).eval()

        def step(x: torch.Tensor) -> torch.Tensor:
            net.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        run = hs.graphed(step)
        losses = [run(volume(number, grid)) for number in range(8)]
        replayed = gradients_of(net)
        for number, loss in enumerate(losses):
            assert not loss.requires_grad
            assert torch.equal(loss, step(volume(number, grid)).detach()), number
        assert apart(replayed, gradients_of(net)) == 0
        with pytest.raises(RuntimeError, match="does not require grad"):
            losses[-1].backward()


def test_gradients_may_be_zeroed_in_the_step() -> None:
    run_ranks(2, zeroed_inside)


class Uncalled(nn.Module):
    """Uses parameters of a part that is not called, as attention uses those of its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(1, 2, 3, padding=1)
        self.factors = nn.ParameterList([torch.ones(2, 1, 1, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factors[0]


def trained_outside(*, graphs: bool) -> tuple[list[torch.Tensor], int]:
    """Leaves that no module holds are trained too; one is made in each step."""
    ran = 0
    with pretended_device():
        torch.manual_seed(4)
        grid = hs.Grid(depth=2)
        net = hs.parallelize(Uncalled().double(), grid)
        share = torch.zeros((), dtype=torch.float64, requires_grad=True)
        trained = [*net.parameters(), share]
        optimizer = torch.optim.SGD(trained, 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            nonlocal ran
            ran += 1
            own = torch.zeros((), dtype=torch.float64, requires_grad=True)
            loss = net(x).square().mean() * share.exp() - share + own
            loss.backward()
            return loss

        run = hs.graphed(step) if graphs else step
        for number in range(8):
            if number == 6:
                share.data = share.data.clone()
            optimizer.zero_grad()
            run(volume(number, grid))
            optimizer.step()
    return [p.detach().clone() for p in trained], ran


def trained_outside_compared() -> float:
    replayed, ran = trained_outside(graphs=True)
    assert ran == 6  # it finds modules, then the leaf; two of a kind; two captures
    return apart(replayed, trained_outside(graphs=False)[0])


def test_leaves_outside_called_modules_are_trained() -> None:
    assert max(run_ranks(2, trained_outside_compared)) < 1e-12


def test_a_step_in_inference_mode_is_another_kind() -> None:
    with pretended_device():
        run = hs.graphed(lambda x: x * 2)
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                found = [run(torch.full((2,), float(n))).sum().item() for n in range(6)]
            assert found == [*range(0, 24, 4)]


def unlike(*, graphs: bool) -> tuple[list[list[torch.Tensor]], int]:
    """Two ranks' steps, of which the second one has another number, a kind of its own, for long."""
    found = []
    ran = 0
    with pretended_device(eager_calls=1):
        grid = hs.Grid(depth=2)
        torch.manual_seed(1)
        model, batch, wrong = mixed(grid)
        model = hs.parallelize(model.double(), grid)

        def step(x: torch.Tensor, time: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
            nonlocal ran
            ran += 1
            loss = wrong(model(x, time), y)
            loss.backward()
            return loss

        run = hs.graphed(step) if graphs else step
        torch.manual_seed(2)
        for number in range(9):
            model.zero_grad()
            loss = run(*batch(number), min(number, 5) * grid.rank)
            found.append([loss.detach().clone(), *gradients_of(model)])
    return found, ran


def unlike_compared() -> float:
    eager, _ = unlike(graphs=False)
    replayed, ran = unlike(graphs=True)
    assert ran == 7  # six, of which the last is the first of its kind on the second rank; a capture
    return max(map(apart, replayed, eager))


def test_ranks_replay_together_or_not_at_all() -> None:
    """Else one of them compares its inputs with the others' behind the step, where none does."""
    assert max(run_ranks(2, unlike_compared)) < 1e-12


def strays() -> list[str]:
    """What ranks say of what one of them did otherwise, once their steps are replayed."""
    words = []
    with pretended_device():
        grid = hs.Grid(depth=2)

        def another_weight(net: nn.Module) -> None:
            with torch.no_grad():
                net[0].bias += grid.rank

        def another_state(_: nn.Module) -> None:
            torch.manual_seed(grid.rank)

        def nothing(_: nn.Module) -> None:
            pass

        for stray, offset in ((another_weight, 0), (another_state, 0), (nothing, 1)):
            net = small(grid)

            def step(x: torch.Tensor, net: nn.Module = net) -> None:
                net(hs.shard(x, grid)).sum().backward()

            run = hs.graphed(step)
            torch.manual_seed(5)
            with mock.patch("hyperslab.ops.elementwise.CHECK_EVERY", 1):
                for number in range(9):
                    net.zero_grad()
                    x = volume(number, grid).full()
                    if number == 6:
                        stray(net)
                        x = x + offset * grid.rank
                    try:
                        run(x)
                    except hs.HyperslabError as error:
                        words.append(f"{number}: {error}")
                        break
    return words


def test_ranks_are_compared_behind_replays() -> None:
    first, second = run_ranks(2, strays)
    assert first == second
    for found, expected in zip(
        first, ("7: the parameters of", "6: the ranks' random states", "6: rank"), strict=True
    ):
        assert found.startswith(expected), first


class Drawing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(np.random.rand())  # noqa: NPY002


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Conv3d(1, 1, 1), nn.Conv3d(1, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def refusals() -> dict[str, str]:
    words: dict[str, str] = {}
    with pretended_device(eager_calls=1):
        grid = hs.Grid(data=2)
        recomputed = nn.Sequential(nn.Conv3d(1, 1, 1), nn.Dropout(0.5), nn.AvgPool3d(2))
        nets = {
            "plain": hs.parallelize(nn.Conv3d(1, 1, 1), grid),
            "drawing": hs.parallelize(nn.Sequential(nn.Conv3d(1, 1, 1), Drawing()), grid),
            "unused": hs.parallelize(Unused(), grid),
            "recomputed": hs.parallelize(nn.Sequential(recomputed), grid, memory="recompute"),
        }

        def ran(name: str) -> Callable[..., torch.Tensor]:
            def step(x: torch.Tensor, *_: object) -> torch.Tensor:
                loss = nets[name](x).square().mean()
                loss.backward()
                return loss

            return step

        def reading(x: torch.Tensor) -> float:
            return ran("plain")(x).item()

        def stepping(x: torch.Tensor) -> None:
            ran("plain")(x)
            torch.optim.SGD(nets["plain"].parameters(), 0.1).step()

        def adding(x: torch.Tensor, total: torch.Tensor) -> None:
            total += ran("plain")(x).detach()

        def scaling(x: torch.Tensor) -> torch.Tensor:
            return ran("plain")(x.mul_(2))

        found = volume(0, grid).float().requires_grad_()

        def finding(x: torch.Tensor) -> torch.Tensor:
            return ran("plain")(x + found)

        x = volume(0, grid).float()
        tries: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            "drawing": (ran("drawing"), (x,)),
            "unused": (ran("unused"), (x,)),
            "recomputed": (ran("recomputed"), (x,)),
            "reading": (reading, (x,)),
            "stepping": (stepping, (x,)),
            "adding": (adding, (x, torch.zeros(()))),
            "scaling": (scaling, (x.clone(),)),
            "finding": (finding, (x,)),
            "gradient": (ran("plain"), (x.clone().requires_grad_(),)),
            "array": (ran("plain"), (x, np.zeros(3))),
        }
        for name, (step, given) in tries.items():
            run = hs.graphed(step)
            for _ in range(4):
                for net in nets.values():
                    net.zero_grad()
                try:
                    run(*given)
                except hs.HyperslabError as error:
                    words[name] = str(error)
                    if name == "reading":  # it ended in a capture, which computes nothing
                        assert gradients_of(nets["plain"]) == []
        with torch.autocast("cpu", torch.bfloat16):
            try:
                hs.graphed(ran("plain"))(x)
            except hs.HyperslabError as error:
                words["autocast"] = str(error)
    return words


def test_what_no_graph_repeats_is_refused() -> None:
    first, second = run_ranks(2, refusals)
    assert first == second
    expected = {
        "drawing": "draws random numbers on the host",
        "unused": "which parameters the losses of other replicas used",
        "recomputed": "that a backward pass computes again",
        "reading": "cannot be captured.*_local_scalar_dense",
        "stepping": "changed parameters",
        "adding": "changed an argument in place",
        "scaling": "changed an argument in place",
        "finding": "the gradient of a cut tensor that it finds",
        "gradient": "requires a gradient",
        "array": "a ndarray, whose values",
        "autocast": "enter torch.autocast inside the step",
    }
    assert first.keys() == expected.keys(), first
    for name, words in expected.items():
        assert re.search(words, first[name], re.DOTALL), first[name]


def test_without_a_gpu_the_step_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    run = hs.graphed(step)
    with caplog.at_level(logging.INFO, "hyperslab"):
        assert [run(torch.full((2,), float(i))).item() for i in range(20)] == [*range(0, 40, 2)]
    assert caplog.text.count("step runs eagerly") == 1


def test_many_kinds_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with pretended_device():
        run = hs.graphed(lambda x, rate: x * rate)
        for number in range(20):
            run(torch.ones(2), 0.1 * number)
    (record,) = [r for r in caplog.records if r.name == "hyperslab.parallel.graphed"]
    assert "pass numbers that change as tensors" in record.message


def test_a_capture_that_fails_says_why() -> None:
    @contextlib.contextmanager
    def ends_badly(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")

    def step() -> None:
        raise hs.LayoutError("first")

    with (
        mock.patch("torch.cuda.Stream"),
        mock.patch("torch.cuda.CUDAGraph"),
        mock.patch("torch.cuda.graph", ends_badly),
        mock.patch("torch.autograd.graph.set_override_stale_capture_stream", create=True),
    ):
        recorder = CudaRecorder(torch.device("cuda"))
        with pytest.raises(hs.LayoutError, match="first"):
            recorder.record(step)
        with pytest.raises(RuntimeError, match="invalidated"):
            recorder.record(lambda: None)


def test_arguments_lie_on_one_device() -> None:
    run = hs.graphed(lambda x, y: x)
    with pytest.raises(hs.LayoutError, match="on cpu and meta"):
        run(torch.ones(1), torch.ones(1, device="meta"))
