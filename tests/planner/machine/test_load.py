"""Machine files, shipped ones and bad ones (tier: no process)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperslab.errors import MachineError
from hyperslab.planner.machine import load_machine, shipped_machines
from hyperslab.util.optional_libraries import current_versions
from tests.planner.machine.test_machine import machine


def written(folder: Path, **changes: Any) -> Path:
    values = machine().model_dump(mode="json", exclude_none=True) | changes
    path = folder / "machine.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize("name", shipped_machines())
def test_shipped_machines_load(name: str) -> None:
    assert load_machine(name).name == name


def test_the_measured_machine_has_both_settings() -> None:
    laptop = load_machine("laptop-2core")
    assert laptop.measured
    assert [(setting.ranks, setting.threads) for setting in laptop.settings] == [(1, 2), (2, 1)]
    assert all(setting.operators for setting in laptop.settings)
    assert laptop.links


def test_the_published_machine_names_its_sources() -> None:
    lassen = load_machine("lassen-v100")
    assert not lassen.measured
    assert all(source.where and source.text for source in lassen.sources)
    values = lassen.model_dump(mode="json")
    for source in lassen.sources:  # each stands for a number that is there
        at: Any = values
        for key in source.key.split("."):
            at = at[int(key)] if isinstance(at, list) else at[key]
        assert at is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory": -1}, "'memory'"),
        ({"memori": 1}, "unknown key 'memori'"),
        ({"settings": []}, "'settings'"),
        ({"settings": [{"ranks": 1, "bandwidth": 1}]}, "'settings.0.flops' is missing"),
        (
            {"settings": [{"ranks": 1, "bandwidth": float("inf"), "flops": {"float32": 1}}]},
            "'settings.0.bandwidth'",
        ),
        (
            {"settings": [{"ranks": 1, "bandwidth": 1, "flops": {"float33": 1}}]},
            "'float33' is not a dtype",
        ),
        ({"links": {"wire": []}}, "'links.wire"),
        ({"links": {"device": []}}, "leave out up_to"),
        ({"date": "yesterday"}, "'date'"),
        ({"device": "gpu"}, "'device'"),
        ({"format": 2, "memori": 1}, "its format is not 1"),
    ],
)
def test_a_bad_value_names_file_and_key(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(MachineError) as caught:
        load_machine(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_mistake_inside_is_one_error(tmp_path: Path) -> None:
    setting = machine().settings[0].model_dump() | {"speed": 3}
    with pytest.raises(MachineError) as caught:
        load_machine(written(tmp_path, settings=[setting]))
    assert str(caught.value).endswith("unknown key 'settings.0.speed'")
    assert "\n" not in str(caught.value)


def test_a_long_value_is_cut_short(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as caught:
        load_machine(written(tmp_path, memory=["much"] * 1000))
    assert len(str(caught.value)) < 400


def test_a_bad_call_names_its_place(tmp_path: Path) -> None:
    setting = machine().settings[0].model_dump()
    setting["operators"] = [{"call": "aten.f(", "seconds": 1}]
    with pytest.raises(MachineError, match=r"settings\.0\.operators\.0\.call.*is not a call"):
        load_machine(written(tmp_path, settings=[setting]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2", "is not valid YAML"),
        ("12", "no `key: value` lines"),
        ("\x00", "is not valid YAML"),
    ],
)
def test_other_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(MachineError, match=words):
        load_machine(path)


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(MachineError, match=r"no machine file lassen\n.*lassen-v100"):
        load_machine("lassen")


def test_a_folder_is_no_machine(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot read"):
        load_machine(tmp_path)


def test_other_versions_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, versions={"torch": "1.13.1", "hyperslab": "0.0.1"})
    with caplog.at_level(logging.WARNING):
        load_machine(path)
    assert "torch 1.13.1 (here" in caplog.text
    assert "hyperslab 0.0.1 (here" in caplog.text
    assert str(path) in caplog.text


def test_these_versions_pass_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_machine(written(tmp_path, versions=current_versions()))
    assert caplog.text == ""


def test_another_format_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_machine(written(tmp_path, format=2))
    assert "has format 2" in caplog.text


def test_a_file_that_has_changed_is_read_anew(tmp_path: Path) -> None:
    for memory in (1, 2):  # of one length, and perhaps of one time
        assert load_machine(written(tmp_path, memory=memory)).memory == memory
