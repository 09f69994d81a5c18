"""Targets of recipes: made where they are right, and refused before they are called where not
(tier: no process)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyperslab.errors import RecipeError
from hyperslab.recipe.data import DataSection
from hyperslab.recipe.instantiate import (
    A_LOSS,
    A_NETWORK,
    A_SCHEDULE,
    A_SOURCE,
    AN_OPTIMIZER,
    Maker,
    RightKind,
)
from hyperslab.recipe.section import TargetSection
from hyperslab.recipe.trust import Trust
from tests.recipe import own_classes

HERE = "tests.recipe.own_classes"
OWN = Trust(own=True)


def section_of(target: str, trust: Trust = OWN, **arguments: Any) -> TargetSection:
    values = {"target": target, **arguments}
    return TargetSection.model_validate(values, context={"trust": trust})


def make(target: str, kind: RightKind = A_NETWORK, *given: Any, **arguments: Any) -> Any:
    references = {"data.channels": 3, "data.outputs": 2}
    return Maker("model", kind, given, references)(section_of(target, **arguments))


def test_a_class_gets_its_arguments() -> None:
    net = make(f"{HERE}.Net", channels=1, outputs="${data.outputs}", width=6, slope="1e-3")
    assert isinstance(net, own_classes.Net)
    assert (net.head.out_features, net.head.in_features) == (2, 6)
    assert net.body[1].negative_slope == 1e-3  # YAML 1.1 reads 1e-3 as a text


def test_a_function_that_says_what_it_returns_is_called() -> None:
    assert isinstance(make(f"{HERE}.network", channels=1, outputs=1), own_classes.Net)


def test_what_is_nested_is_made_too_and_lists_become_tensors() -> None:
    inner = {"target": "torch.nn.SmoothL1Loss", "beta": 0.5}
    loss = make(f"{HERE}.Wrapped", A_LOSS, loss=inner, weight=[1.0, 2.0])
    assert isinstance(loss.loss, nn.SmoothL1Loss)
    assert loss.loss.beta == 0.5
    assert loss.weight.tolist() == [1, 2]


def test_a_loss_may_be_a_function_which_is_not_called_now() -> None:
    huber = make("torch.nn.functional.huber_loss", A_LOSS, delta=0.5)
    a, b = torch.zeros(3), torch.tensor([0.1, 1.0, -2.0])
    assert huber(a, b) == nn.functional.huber_loss(a, b, delta=0.5)
    scaled = make(f"{HERE}.scaled_error", A_LOSS, scale=2)
    assert scaled(a, b) == 2 * (b * b).mean()
    with pytest.raises(RecipeError, match="scaled_error needs the argument 'scale'"):
        make(f"{HERE}.scaled_error", A_LOSS)


def test_optimizers_schedules_and_sources() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = make("torch.optim.AdamW", AN_OPTIMIZER, [weight], lr=1e-2, betas=[0.8, 0.9])
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    schedule = make("torch.optim.lr_scheduler.StepLR", A_SCHEDULE, optimizer, step_size=3)
    assert schedule.optimizer is optimizer
    assert len(make(f"{HERE}.Blobs", A_SOURCE, count=3).names) == 3


WRONG = {
    "no such module": ("no_such.Net", {}, r"no_such\.Net cannot be imported: No module named"),
    "no such class": (f"{HERE}.Nett", {}, r"has no 'Nett'\n    nearest: tests\S*\.Net$"),
    "one word": ("Net", {}, r"cannot be imported: write package\.Class"),
    "not a network": (
        "collections.OrderedDict",
        {},
        r"class of another kind \(dict\), not a torch",
    ),
    "a module": ("os.path", {}, r"os\.path is a module, not a torch\.nn\.Module"),
    "an unknown argument": (f"{HERE}.Net", {"chanels": 1}, r"'chanels'\n    nearest: 'channels'"),
    "a missing one": (f"{HERE}.Net", {"channels": 1}, r"needs the argument 'outputs'"),
    "a wrong type": (
        f"{HERE}.Net",
        {"channels": "three", "outputs": 1},
        r"bad value 'three' for 'model\.channels': it should be a valid integer.*Net wants",
    ),
    "what it refuses": (
        f"{HERE}.Net",
        {"channels": 1, "outputs": 1, "width": 2000},
        r"does not take its arguments: ValueError: far too wide$",
    ),
    "what ends the program": (f"{HERE}.Leaves", {}, "does not take its arguments: SystemExit"),
    "no such reference": (
        f"{HERE}.Net",
        {"channels": "${data.chanels}", "outputs": 1},
        r"model\.channels=\$\{data\.chanels\} is not known here: there are \$\{data\.channels\}",
    ),
}


@pytest.mark.parametrize(("target", "arguments", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(target: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        make(target, **arguments)


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("os.system", {"command": "touch attacked"}),
        ("subprocess.Popen", {"args": "touch attacked", "shell": True}),
        ("builtins.eval", {"source": "open('attacked', 'w')"}),
        ("builtins.exec", {"source": "open('attacked', 'w')"}),
        ("torch.load", {"f": "attacked", "weights_only": False}),
        ("pathlib.Path.touch", {"self": "attacked"}),
        (f"{HERE}.silent", {}),
        (f"{HERE}.Wrapped", {"loss": {"target": "os.system", "command": "touch attacked"}}),
        (f"{HERE}.Wrapped", {"loss": [{"target": f"{HERE}.silent"}]}),
    ],
)
@pytest.mark.parametrize("kind", [A_NETWORK, A_LOSS, AN_OPTIMIZER, A_SCHEDULE, A_SOURCE])
def test_nothing_of_another_kind_is_called(
    target: str,
    arguments: dict[str, Any],
    kind: RightKind,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError):
        make(target, kind, **arguments)
    assert os.listdir(tmp_path) == []
    assert own_classes.CALLED == []


def test_a_function_that_says_nothing_has_to_be_named_by_the_user() -> None:
    section = section_of(f"{HERE}.silent")
    with pytest.raises(
        RecipeError, match=r"-> Module`, or name it .*: model\.target=tests\S*silent"
    ):
        Maker("model", A_NETWORK)(section)
    named = section_of(f"{HERE}.silent", Trust(named=frozenset({f"{HERE}.silent"})))
    assert isinstance(Maker("model", A_NETWORK)(named), own_classes.Net)
    own_classes.CALLED.clear()


def test_checking_calls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_classes.Net, "__init__", lambda self, channels, outputs: 1 / 0)
    section = section_of(f"{HERE}.Net", channels=1, outputs=2)
    Maker("model", A_NETWORK).check(section)
    with pytest.raises(RecipeError, match="takes no argument 'width'"):
        Maker("model", A_NETWORK).check(section.model_copy(update={"arguments": {"width": 1}}))


def test_a_section_is_written_as_one_would_write_it() -> None:
    values = {"target": "a.B", "width": 3, "arguments": {"target": 5}}
    section = TargetSection.model_validate(values)
    assert section.arguments == {"width": 3, "target": 5}
    assert section.model_dump(mode="json") == values


def test_data_may_be_a_source_of_anybodys() -> None:
    values = {"target": f"{HERE}.Blobs", "batch_size": 2, "count": 5, "width": 6}
    context = {"trust": OWN}
    section = DataSection.model_validate(values, context=context)
    source = section.origin
    assert isinstance(source, own_classes.Blobs)
    assert (len(source.names), source.shape) == (5, (1, 6, 6, 6))
    assert section.where == f"data.target {HERE}.Blobs"
    assert DataSection.model_validate(section.model_dump(mode="json")) == section
    with pytest.raises(ValueError, match=r"both are; .*data\.target takes the place of both"):
        DataSection.model_validate({**values, "path": "x"})
    with pytest.raises(RecipeError, match="Blobs takes no argument 'batchsize'"):
        DataSection.model_validate({**values, "batchsize": 2}, context=context).origin  # noqa: B018
