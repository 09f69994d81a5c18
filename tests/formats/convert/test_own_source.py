"""Conversion of a user's own source, as generous or as wrong as it may be (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.formats import registry
from hyperslab.formats.convert import Request, convert
from hyperslab.geometry import Box

NAMES = ("a", "b", "c")
SHAPE = (2, 4, 4, 4)


class Own(hs.formats.Source):
    """Three samples, of which ``b`` is read as ``odd`` says."""

    odd: Any = None

    def __init__(self, folder: Path) -> None:
        self.names = NAMES
        self.shape = SHAPE
        self.dtype = np.dtype(np.int16)

    def read(self, sample: int, box: Box) -> Any:
        values = np.arange(np.prod(SHAPE), dtype=np.int16).reshape(SHAPE)[box.slices()]
        return type(self).odd(values) if sample == 1 else values

    def target(self, sample: int) -> Any:
        return np.full(1, sample, np.float32)


def broken(values: Any) -> Any:
    raise OSError(5, "broken disk")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> type[Own]:
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))
    hs.formats.register("own", source=Own)
    return Own


def run(folder: Path) -> list[str]:
    source = folder / "source"
    source.mkdir()
    outcomes = convert(source, folder / "out", Request("npy"), source_format="own")
    assert sum(outcome.state == "converted" for outcome in outcomes) >= len(NAMES) - 1
    return [outcome.reason for outcome in outcomes if outcome.reason]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (broken, "sample 'b': cannot be read: [Errno 5] broken disk"),
        (lambda values: values[:, :-1], "was read as (2, 3, 4, 4)"),
        (lambda values: None, "was read as ()"),
        (lambda values: values + 0.5, "was read as float64 with values that are no int16"),
    ],
    ids=["broken", "shape", "nothing", "fractions"],
)
def test_a_sample_that_its_source_cannot_give_is_left_out(
    tmp_path: Path, own: type[Own], monkeypatch: pytest.MonkeyPatch, odd: Any, words: str
) -> None:
    monkeypatch.setattr(own, "odd", staticmethod(odd))
    (reason,) = run(tmp_path)
    assert words in reason


def test_another_type_with_the_same_values_is_stored_as_said(
    tmp_path: Path, own: type[Own], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "odd", staticmethod(lambda values: values.astype(np.float64)))
    assert run(tmp_path) == []
    a, b = (np.load(tmp_path / "out" / f"{name}.npy") for name in "ab")
    assert a.dtype == b.dtype == np.int16
    assert a.tobytes() == b.tobytes()
