"""Recurrent layers equal the serial ones, or are refused (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import hyperslab as hs
from tests.ops.serial import Example, compare
from tests.ranks import run_ranks
from tests.selection import by_rotation

COVERS = {
    "linalg": {
        "gru",
        "lstm",
        "rnn_tanh",
        "rnn_relu",
        "gru_cell",
        "lstm_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
    }
}

LAYERS = ("gru", "lstm", "rnn_tanh", "rnn_relu")

FEATURES, HIDDEN = 4, 3

GRIDS = ({"data": 2, "depth": 2}, {"depth": 2, "height": 2}, {"data": 4})

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "both ways": {"bidirectional": True},
    "two layers": {"num_layers": 2},
    "no bias": {"bias": False},
    "sequence first": {"batch_first": False},
}


def layer_of(kind: str, **options: Any) -> nn.RNNBase:
    """In float64, and its parameters are constants: the weights that are tested scale them."""
    torch.manual_seed(0)
    given = {"batch_first": True, **options}
    if kind.startswith("rnn"):
        layer: nn.RNNBase = nn.RNN(FEATURES, HIDDEN, nonlinearity=kind[4:], **given)
    else:
        layer = {"gru": nn.GRU, "lstm": nn.LSTM}[kind](FEATURES, HIDDEN, **given)
    return layer.double().requires_grad_(False)


def recur(x: Any, scale: torch.Tensor, *, kind: str, options: dict[str, Any]) -> Any:
    """Over the planes of a volume, which are cut, or over its voxels; states are used, too."""
    layer = layer_of(kind, **options)
    parameters = {name: value * scale for name, value in layer.named_parameters()}
    steps = x.mean(-1).flatten(2).transpose(1, 2) if "bias" in options else x.mean((3, 4)).mT
    if not layer.batch_first:
        steps = steps.transpose(0, 1)
    y, after = torch.func.functional_call(layer, parameters, (steps,))
    last = after[0] + after[1].sin() if kind == "lstm" else after
    return torch.cat([y.sum(1 if layer.batch_first else 0), last[-1]], 1)


@pytest.mark.parametrize(("how", "kind"), by_rotation(OPTIONS, LAYERS))
def test_layers(kind: str, how: str) -> None:
    options = {"kind": kind, "options": OPTIONS[how]}
    cases = [
        Example(grid=grid, shape=(4, FEATURES, 5, 3, 2), weights=((),), options=options)
        for grid in GRIDS
    ]
    run_ranks(4, compare, recur, cases)


def whole_result(x: Any, first: torch.Tensor, *, kind: str) -> Any:
    """The sequence that comes out, of a state that is given for the whole batch."""
    given = (first, first * 2) if kind == "lstm" else first
    y, _ = layer_of(kind)(x.transpose(1, 2), given)
    return y


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_given_states(kind: str) -> None:
    cases = [
        Example(
            grid=grid, shape=(4, FEATURES, 7), weights=((1, 4, HIDDEN),), options={"kind": kind}
        )
        for grid in ({"data": 2, "width": 2}, {"width": 4}, {"data": 4})
    ]
    run_ranks(4, compare, whole_result, cases)


def step_by_step(x: Any, weight: torch.Tensor, *, kind: str) -> Any:
    """A cell goes over the planes; its first state is its own zeros."""
    torch.manual_seed(0)
    sizes = (FEATURES, HIDDEN)
    if kind.startswith("rnn"):
        cell: nn.RNNCellBase = nn.RNNCell(*sizes, nonlinearity=kind[4:])
    else:
        cell = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}[kind](*sizes)
    parameters = {name: p.detach().double() * weight for name, p in cell.named_parameters()}
    planes = x.mean((3, 4))
    state: Any = None
    for at in range(planes.shape[2]):
        state = torch.func.functional_call(cell, parameters, (planes[:, :, at], state))
    return state[0] * state[1] if kind == "lstm" else state


@pytest.mark.parametrize("kind", LAYERS)
def test_cells(kind: str) -> None:
    cases = [
        Example(grid=grid, shape=(4, FEATURES, 3, 2, 4), weights=((),), options={"kind": kind})
        for grid in GRIDS
    ]
    run_ranks(4, compare, step_by_step, cases)


def of_features(x: Any, weight: torch.Tensor, *, layer: bool) -> Any:
    """A weight and a bias that come from cut features: hypernetworks."""
    made = x.mean((0, 3, 4))[:, :HIDDEN].T  # (HIDDEN, FEATURES)
    bias = x.mean((0, 1, 3, 4))[:HIDDEN]
    steps, state = x.mean((3, 4)).transpose(1, 2), torch.zeros(1, 4, HIDDEN).to(x.dtype)
    if not layer:
        return torch.rnn_tanh_cell(steps[:, 0], state[0], made, weight, bias, bias)
    weights = [made, weight, bias, bias]
    return torch.rnn_tanh(steps, state, weights, True, 1, 0.0, True, False, True)[0]


@pytest.mark.parametrize("layer", [False, True])
def test_weights_of_features(layer: bool) -> None:
    cases = [
        Example(
            grid=grid,
            shape=(4, FEATURES, 5, 2, 2),
            weights=((HIDDEN, HIDDEN),),
            options={"layer": layer},
        )
        for grid in GRIDS
    ]
    run_ranks(4, compare, of_features, cases)


class Planes(nn.Module):
    """Every plane becomes features, over which a recurrent layer goes: as for series of slices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, FEATURES, 3, padding=1)
        self.over = nn.LSTM(FEATURES, HIDDEN, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * HIDDEN, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        planes = torch.relu(self.conv(x)).mean((3, 4)).transpose(1, 2)
        y, _ = self.over(planes)
        out: torch.Tensor = self.head(y.mean(1))
        return out


def train(axes: dict[str, int]) -> None:
    """Three steps of the unmodified network, against the serial one."""
    torch.manual_seed(0)
    serial, cut = Planes(), Planes()
    cut.load_state_dict(serial.state_dict())
    grid = hs.Grid(**axes)
    parallel = hs.parallelize(cut, grid)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (serial, cut)]
    for step in range(3):
        x = torch.randn(4, 1, 7, 5, 4, generator=torch.Generator().manual_seed(step))
        target = torch.ones(4, 2) * step
        for model, given, optimizer in (
            (serial, (x, target), optimizers[0]),
            (parallel, (hs.shard(x, grid), hs.shard(target, grid)), optimizers[1]),
        ):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(given[0]), given[1]).backward()
            optimizer.step()
    for own, other in zip(serial.parameters(), cut.parameters(), strict=True):
        assert torch.allclose(own, other, atol=1e-6)


@pytest.mark.parametrize("axes", [{"data": 2, "depth": 2}, {"depth": 2, "width": 2}], ids=str)
def test_a_network_trains(axes: dict[str, int]) -> None:
    run_ranks(4, train, axes)


def samples_take_the_cut() -> None:
    """No rank has all sequences where there are as many as ranks; under dropout each has."""
    full = torch.randn(3, FEATURES, 6)
    steps = hs.shard(full, hs.Grid(width=2)).transpose(1, 2)
    layer = nn.LSTM(FEATURES, HIDDEN, 2, batch_first=True)
    y, (state, _) = layer(steps)
    assert y.partition.cuts[0] is not None
    assert state.partition.cuts[1] is not None
    assert torch.allclose(y.full(), layer(full.transpose(1, 2))[0], atol=1e-6)
    layer.dropout = 0.5
    assert layer(steps)[0].partition.axes == ()
    assert layer(steps[:1])[0].partition.axes == ()  # one sample for two ranks


def test_samples_take_the_cut() -> None:
    run_ranks(2, samples_take_the_cut)


def refused(case: str) -> None:
    x = hs.shard(torch.randn(4, FEATURES, 6), hs.Grid(data=2))
    steps = x.transpose(1, 2)
    state = hs.shard(torch.zeros(4, HIDDEN), hs.Grid(data=2)).unsqueeze(0)
    padded = pack_padded_sequence(torch.randn(6, 4, FEATURES), torch.tensor([6, 5, 4, 3]))
    weights = [torch.randn(HIDDEN, FEATURES), torch.randn(HIDDEN, HIDDEN)]
    {
        "dropout": lambda: nn.GRU(FEATURES, HIDDEN, 2, dropout=0.5, batch_first=True)(steps),
        "packed": lambda: nn.GRU(FEATURES, HIDDEN, batch_first=True)(
            pack_padded_sequence(steps, torch.tensor([6, 5, 4, 3]), batch_first=True)
        ),
        "packed, of cut states": lambda: nn.GRU(FEATURES, HIDDEN)(padded, state),
        "packed, of two cut states": lambda: nn.LSTM(FEATURES, HIDDEN)(padded, (state, state)),
        "another batch": lambda: torch.rnn_tanh_cell(steps[:, 0], torch.zeros(1, HIDDEN), *weights),
        "only a weight": lambda: torch.rnn_tanh_cell(
            torch.ones(1, FEATURES), torch.ones(1, HIDDEN), x[:HIDDEN, :, 0], weights[1]
        ),
    }[case]()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("dropout", "(?s)gru draws its dropout mask for the block only.*gather.x, .'data',"),
        ("packed", r"(?s)pack_padded_sequence.*pack x.full\(\), so that every rank"),
        ("packed, of cut states", "gru of packed sequences has no rule"),
        ("packed, of two cut states", "lstm of packed sequences has no rule"),
        ("another batch", "the input and its states have to have one batch"),
        ("only a weight", "one of them has to be cut where a weight is"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises((hs.LayoutError, hs.UnsupportedOp), match=message):
        run_ranks(2, refused, case)


def same_masks() -> None:
    """Where only space is cut, the masks between layers are those of the serial run."""
    layer = nn.GRU(FEATURES, HIDDEN, 2, dropout=0.5, batch_first=True)
    full = torch.randn(4, FEATURES, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    cut = hs.shard(full, hs.Grid(width=2), channels=False)
    torch.manual_seed(2)
    expected, _ = layer(full.transpose(1, 2))
    torch.manual_seed(2)
    found, _ = layer(cut.transpose(1, 2))
    assert torch.allclose(found.full(), expected, atol=1e-6)


def test_masks_between_layers() -> None:
    run_ranks(2, same_masks)
