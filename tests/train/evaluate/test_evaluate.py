"""Evaluation of a run made by hand: every sample once, the same numbers on every grid.

Tiers: no process; a few gloo ranks.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hyperslab.checkpoint.save_load import save
from hyperslab.cli import app
from hyperslab.cli.evaluate import show_evaluation
from hyperslab.data.sampler import samples_of
from hyperslab.errors import DataError, HyperslabError, LayoutError
from hyperslab.formats.synthetic import SyntheticVolumes
from hyperslab.formats.targets import Parameters
from hyperslab.models import MultiscaleNet
from hyperslab.recipe.load import recipe_for
from hyperslab.studies.table import number
from hyperslab.train.evaluate import (
    Evaluation,
    check_scales,
    evaluate,
    find_checkpoint,
    started_ranks,
    write_evaluation,
)
from tests.ranks import run_ranks
from tests.studies.report.fake import NAMES, RANGES, universes

pytestmark = pytest.mark.usefixtures("forked")

FRACTIONS = (0.5, 0.2, 0.3)
RECIPE = """\
model: {{name: multiscale, channels: [4, 8], hidden: 16}}
data: {{path: {data}, batch_size: 4, fractions: [0.5, 0.2, 0.3]}}
grid: {{depth: 2}}
device: cpu
output: {run}
"""


def network() -> MultiscaleNet:
    """Neither fresh nor trained: its running statistics and its last layer say something."""
    torch.manual_seed(4)
    model = MultiscaleNet(channels=(4, 8), hidden=16)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    torch.nn.init.normal_(model.head.get_parameter("6.weight"), std=0.05)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RUN/ with a recipe and one checkpoint; 23 universes: batches of 4 leave a rest."""
    folder = tmp_path_factory.mktemp("made")
    universes(folder / "universes", np.random.default_rng(2), count=23, size=16)
    run = folder / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(RECIPE.format(data=folder / "universes", run=run))
    save(run / "checkpoints" / "step-00000007", network(), position={"epoch": 3})
    (run / "checkpoints" / "best").symlink_to("step-00000007")
    return run


@pytest.fixture(scope="module")
def serial(made: Path) -> Evaluation:
    return evaluate(made)


def by_hand(run: Path) -> dict[str, dict[str, np.ndarray]]:
    """Each test sample through the plain network, one at a time, from its file."""
    files = sorted((run.parent / "universes").glob("*.hdf5"))
    chosen = samples_of([f.stem for f in files], "test", FRACTIONS, 0)
    model, found = network().eval(), {}
    for file in (files[i] for i in chosen):
        with h5py.File(file) as content:
            counts = torch.from_numpy(content["full"][()]).float().permute(3, 0, 1, 2)
            with torch.no_grad():
                predicted = model(torch.log1p(counts)[None])[0].numpy()
            found[file.stem] = {
                "true": content["unitPar"][()],
                "predicted": predicted,
                "physical": content["physPar"][()],
            }
    return found


def read(run: Path) -> list[dict[str, str]]:
    with (run / "evaluation" / "predictions.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_test_sample_once_and_as_the_plain_network_says(
    made: Path, serial: Evaluation
) -> None:
    expected, rows = by_hand(made), read(made)
    assert [row["sample"] for row in rows] == sorted(expected)
    assert len(rows) == 7, "more than a mini-batch and no multiple of it"
    for row in rows:
        sample = expected[row["sample"]]
        for i, name in enumerate(NAMES):
            assert float(row[f"true_{name}"]) == pytest.approx(sample["true"][i], abs=1e-6)
            predicted = sample["predicted"][i]
            assert float(row[f"predicted_{name}"]) == pytest.approx(predicted, abs=1e-5)
            low, high = RANGES[i]
            physical = low + (high - low) * (predicted + 1) / 2
            assert float(row[f"predicted_phys_{name}"]) == pytest.approx(physical, rel=1e-5)
            assert float(row[f"true_phys_{name}"]) == pytest.approx(sample["physical"][i])


def test_errors_compare_with_the_mean_of_the_training_split(made: Path, serial: Evaluation) -> None:
    files = sorted((made.parent / "universes").glob("*.hdf5"))
    units = {}
    for file in files:
        with h5py.File(file) as content:
            units[file.stem] = content["unitPar"][()]
    chosen = samples_of([f.stem for f in files], "train", FRACTIONS, 0)
    mean = np.mean([units[files[i].stem] for i in chosen], axis=0)
    written = json.loads((made / "evaluation" / "metrics.json").read_text())
    test = by_hand(made)
    for i, name in enumerate(NAMES):
        errors = written["parameters"][name]
        true = np.array([sample["true"][i] for sample in test.values()])
        off = np.array([sample["predicted"][i] for sample in test.values()]) - true
        assert errors["mse"] == pytest.approx((off**2).mean(), rel=1e-4)
        assert errors["mse_of_mean"] == pytest.approx(((true - mean[i]) ** 2).mean(), rel=1e-4)
        assert errors["ratio"] == pytest.approx(errors["mse"] / errors["mse_of_mean"])
        assert written["training_mean"][name] == pytest.approx(mean[i])
    assert (written["samples"], written["split"], written["epochs"]) == (7, "test", 3)
    assert written["checkpoint"] == "step-00000007"


def test_the_table_of_metrics_holds_the_same_numbers(made: Path, serial: Evaluation) -> None:
    with (made / "evaluation" / "metrics.csv").open() as file:
        rows = {row.pop("parameter"): row for row in csv.DictReader(file)}
    assert {n: {k: float(v) for k, v in row.items()} for n, row in rows.items()} == serial.errors
    assert not list((made / "evaluation").glob(".*")), "nothing half-written is left"


def test_one_sample_gives_json_without_nan(made: Path) -> None:
    """A split of one sample has no correlation: null, which any reader of JSON takes."""
    run = Path(shutil.copytree(made, made.parent / "single", symlinks=True))
    result = evaluate(run, overrides=["data.fractions=[0.9,0.05,0.05]"])
    assert result.facts["samples"] == 1

    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = (run / "evaluation" / "metrics.json").read_text()
    assert json.loads(text, parse_constant=refuse)["parameters"]["n_s"]["correlation"] is None


def test_the_universe_of_every_sub_volume_is_written_and_its_average_is_recalibrated(
    made: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(made, tmp_path / "run", symlinks=True))
    folder = run.parent / "large"
    universes(folder, np.random.default_rng(6), count=20, size=32)
    overrides = [f"data.path={folder}", "data.subvolume=16"]
    result = evaluate(run, overrides=overrides, calibrate=True)
    rows = read(run)
    assert len(rows) == 6 * 8
    assert all(row["sample"].startswith(row["volume"] + "_") for row in rows)
    assert len({row["volume"] for row in rows}) == 6
    with (run / "evaluation" / "validation.csv").open() as file:
        seen = list(csv.DictReader(file))
    assert len({row["volume"] for row in seen}) == 4
    written = json.loads((run / "evaluation" / "metrics.json").read_text())
    for name in NAMES:

        def means(of: list[dict[str, str]], kind: str, name: str = name) -> np.ndarray:
            names = sorted({row["volume"] for row in of})
            parts = [[float(r[f"{kind}_{name}"]) for r in of if r["volume"] == n] for n in names]
            return np.array(parts).mean(1)

        true, predicted = means(rows, "true"), means(rows, "predicted")
        found = written["averaged"]["parameters"][name]
        assert found["mse"] == pytest.approx(((predicted - true) ** 2).mean())
        slope, intercept = np.polyfit(means(seen, "predicted"), means(seen, "true"), 1)
        found = written["recalibrated"]
        assert found["slope"][name] == pytest.approx(slope, rel=1e-6)
        mse = ((slope * predicted + intercept - true) ** 2).mean()
        assert found["parameters"][name]["mse"] == pytest.approx(mse, rel=1e-6)
    console = Console(file=io.StringIO(), width=80)
    show_evaluation(result, run, console)
    assert "and recalibrated" in console.file.getvalue()
    evaluate(run)
    assert not (run / "evaluation" / "validation.csv").exists(), "of another evaluation"


@pytest.mark.parametrize("split", ["validation", "all"])
def test_what_lines_were_fitted_to_does_not_judge_them(made: Path, split: str) -> None:
    with pytest.raises(DataError, match="measure the test split"):
        evaluate(made, split=split, calibrate=True)


def test_which_checkpoint(made: Path, tmp_path: Path) -> None:
    newest = made / "checkpoints" / "step-00000007"
    for which in ("best", "latest", "step-00000007", str(newest)):
        assert find_checkpoint(made, which) == newest.resolve()
    with pytest.raises(DataError, match="no checkpoint 'step-9'; it has: best, step-00000007"):
        find_checkpoint(made, "step-9")
    with pytest.raises(DataError, match="it has none"):
        find_checkpoint(tmp_path, "best")


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != os.W_OK)
    monkeypatch.setattr("hyperslab.cli.evaluate.verify_checksums", None)
    ended = CliRunner().invoke(app, ["evaluate", str(made)])
    assert f"{made} cannot be written, and its evaluation is written there" in str(ended.exception)


def test_the_grid_of_an_evaluation_is_its_own(made: Path) -> None:
    def axes(ranks: int, *overrides: str) -> dict[str, int]:
        grid = recipe_for(made, overrides, ranks=ranks).grid.model_dump()
        return {axis: n for axis, n in grid.items() if n > 1}

    assert axes(1) == {}
    assert axes(2) == {"depth": 2}
    assert axes(4) == {"data": 4}
    assert axes(2, "grid.width=2") == {"width": 2}


def test_what_cannot_be_evaluated(made: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not the folder of a run"):
        evaluate(tmp_path)
    with pytest.raises(LayoutError, match="2 places but there are 1 ranks"):
        evaluate(made, overrides=["grid.depth=2"])
    with pytest.raises(DataError, match="no split 'tset'"):
        evaluate(made, split="tset")


def test_a_corrupt_checkpoint_and_a_folder_in_the_way(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made, tmp_path / "run", symlinks=True))
    shutil.rmtree(run / "evaluation", ignore_errors=True)
    (run / "evaluation").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write into .*evaluation"):
        evaluate(run)
    (run / "checkpoints" / "step-00000007" / "state.json").write_bytes(b"x")
    with pytest.raises(HyperslabError, match=r"state\.json"):
        evaluate(run)


def test_a_full_disk_leaves_the_evaluation_that_was_there(
    made: Path, serial: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the predictions would be of one checkpoint and the errors of another."""
    write_evaluation(replace(serial, validation=serial.predictions), tmp_path / "evaluation")
    before = {path.name: path.read_bytes() for path in (tmp_path / "evaluation").iterdir()}
    assert "validation.csv" in before

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    other = replace(serial, errors=dict(reversed(serial.errors.items())))
    with monkeypatch.context() as patch:
        patch.setattr("hyperslab.train.evaluate.atomic_files.write_json", no_room)
        with pytest.raises(OSError, match="No space left"):
            write_evaluation(other, tmp_path / "evaluation")
    assert {path.name: path.read_bytes() for path in (tmp_path / "evaluation").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation"]
    write_evaluation(other, tmp_path / "evaluation")
    assert {path.name for path in (tmp_path / "evaluation").iterdir()} == {*before} - {
        "validation.csv"
    }


def test_a_kill_between_two_files_leaves_no_evaluation(
    serial: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "evaluation"
    write_evaluation(serial, folder)
    replace_file = Path.replace
    moved: list[str] = []

    def killed(path: Path, target: Path) -> Path:
        if target.parent == folder:
            assert "metrics.json" not in {file.name for file in folder.iterdir()}
            moved.append(path.name)
            if len(moved) == 2:
                raise KeyboardInterrupt
        return replace_file(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_evaluation(serial, folder)
    assert len(moved) == 2
    assert {file.name for file in folder.iterdir()} == {"metrics.csv", "predictions.csv"}
    write_evaluation(serial, folder)
    assert (folder / "metrics.json").exists()


def test_every_parameter_is_printed(made: Path, serial: Evaluation) -> None:
    console = Console(file=io.StringIO(), width=80)
    show_evaluation(serial, made, console)
    text = console.file.getvalue()
    assert "7 samples of the test split, step-00000007" in text
    for name in NAMES:
        assert re.search(rf"{name} +{number(serial.errors[name]['ratio'])} ", text)
        assert f" {number(100 * serial.errors[name]['relative_error'])} %" in text


GLOO = "[gloo/unbound_buffer.cc:129] Timed out waiting 6000ms. This is typically caused by cables"


def lose_a_rank(made: str, words: str) -> str:
    recipe = recipe_for(Path(made), ["grid.depth=2"])
    with pytest.raises(RuntimeError) as caught, started_ranks(recipe, "evaluate", Path(made)):
        raise RuntimeError(words)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_what_torch_says_of_a_lost_rank_names_it(made: Path) -> None:
    """Such as where the parameters are made equal; other errors stay what they are."""
    found = run_ranks(2, lose_a_rank, str(made), GLOO)
    assert [words.splitlines()[0] for words in found] == [
        f"CommError: rank {rank} lost contact with rank {1 - rank} during evaluate with "
        "timeout=600 s: [gloo/unbound_buffer.cc:129] Timed out waiting 6000ms."
        for rank in (0, 1)
    ]
    assert run_ranks(2, lose_a_rank, str(made), "a bug") == ["RuntimeError: a bug"] * 2


@pytest.mark.long
def test_the_command_starts_ranks(made: Path, serial: Evaluation, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made, tmp_path / "run", symlinks=True))
    shutil.rmtree(run / "evaluation")
    command = [sys.executable, "-m", "hyperslab", "evaluate", str(run), "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("samples of the test split") == 1, "only one rank prints"
    written = json.loads((run / "evaluation" / "metrics.json").read_text())
    assert written["grid"]["depth"] == 2
    ratio = serial.errors["n_s"]["ratio"]
    assert written["parameters"]["n_s"]["ratio"] == pytest.approx(ratio, rel=1e-4)


def test_the_command_refuses_a_grid_that_does_not_match(made: Path) -> None:
    result = CliRunner().invoke(app, ["evaluate", str(made), "--ranks", "3", "grid.depth=2"])
    assert isinstance(result.exception, LayoutError)
    assert "--ranks is 3 but the grid has 2 places" in str(result.exception)


def on_ranks(run: Path, overrides: tuple[str, ...]) -> tuple[np.ndarray, dict[str, float]]:
    result = evaluate(run, overrides=overrides)
    return result.predictions.predicted, result.errors["sigma_8"]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param(("grid.data=2",), marks=pytest.mark.long),
        ("grid.data=2", "grid.width=2"),
        pytest.param(("grid.data=3", "data.batch_size=5"), marks=pytest.mark.long),
    ],
    ids=["depth=2", "data=2", "data=2,width=2", "data=3"],
)
def test_the_same_on_every_grid(
    made: Path, serial: Evaluation, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    run = Path(shutil.copytree(made, tmp_path / "run", symlinks=True))
    ranks = recipe_for(run, overrides, ranks=2).grid
    for predicted, errors in run_ranks(ranks.size, on_ranks, run, overrides):
        np.testing.assert_allclose(predicted, serial.predictions.predicted, atol=1e-5)
        assert errors["ratio"] == pytest.approx(serial.errors["sigma_8"]["ratio"], rel=1e-4)
    assert [row["sample"] for row in read(run)] == list(serial.predictions.samples)


def test_a_folder_of_too_few_to_be_split_is_measured_as_a_whole(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two universes, of which one would validate and one test."""
    few = tmp_path / "few"
    few.mkdir()
    for file in sorted((made.parent / "universes").glob("*.hdf5"))[:2]:
        shutil.copy(file, few)
    words = ["grid.depth=1", f"data.path={few}"]
    result = evaluate(made, split="all", overrides=words)
    assert result.facts["samples"] == 2
    assert "few has no training split: errors are compared" in caplog.text
    with pytest.raises(DataError, match="no volume for split 'train'"):
        evaluate(made, split="test", overrides=words)


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ({"a": (0.2, 0.4), "b": (63, 77)}, {"a": (0.2, 0.4), "b": (63, 77)}, ""),
        ({"a": (0.27, 0.33), "b": (63, 77)}, {"a": (0.2, 0.4), "b": (63, 77)}, "a as -1 to 1 for"),
        ({"a": (0.2, 0.4), "b": (63, 77)}, {"a": (0.2, 0.4), "b": (70, 70)}, ""),  # never varied
        ({"a": (-1, 1), "b": (-1, 1)}, {"a": (0.2, 0.4), "b": (63, 77)}, ""),  # not known
    ],
)
def test_targets_that_are_scaled_otherwise_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: dict[str, tuple[float, float]],
    there: dict[str, tuple[float, float]],
    words: str,
) -> None:
    """Universes of other ranges, say: each has its parameters from -1 to 1."""
    source = SyntheticVolumes((1, 8, 8, 8), 5, targets=2)
    monkeypatch.setattr(SyntheticVolumes, "parameters", Parameters.of_ranges(here))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(data="universes", run=tmp_path))
    recipe = recipe_for(tmp_path, [])
    with pytest.raises(DataError, match=words) if words else nullcontext():
        check_scales(recipe, source, range(5), Parameters.of_ranges(there))
