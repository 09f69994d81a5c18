"""`hyperslab plan`, and `train` with grid=auto (tier: no process)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from matplotlib.image import imread
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.planner.machine import load_machine, save_machine
from tests.planner.small import recipe_file
from tests.planner.traces import traced_once

__all__ = ["traced_once"]

pytestmark = pytest.mark.usefixtures("traced_once")

V100 = ("--machine", "lassen-v100")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in arguments], prog_name="hyperslab")


def test_a_plan_is_printed_written_and_drawn(tmp_path: Path) -> None:
    path = recipe_file(tmp_path)
    numbers = tmp_path / "plan.json"
    picture = tmp_path / "plan.png"
    result = run("plan", path, "--ranks", 4, *V100, "--json", numbers, "--figure", picture)
    assert result.exit_code == 0, result.output
    assert "4 ranks of lassen-v100: 4 samples of 4 x 16 x 16 x 16 a step" in result.output
    assert "best" in result.output
    assert "least " in result.output
    assert "memory=recompute: " in result.output
    assert "precision=bf16: " in result.output
    said = json.loads(numbers.read_text())
    assert said["ranks"] == 4
    assert said["grids"][0]["fits"]
    assert imread(picture).shape[1] == 1200


def test_what_the_rules_say_of_a_grid_is_a_remark_of_the_plan_and_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = run("plan", recipe_file(tmp_path), "--ranks", 4, *V100, "data.batch_size=1")
    remarks = [line for line in result.output.splitlines() if line.startswith("note ")]
    assert any("is too thin to be cut along" in line for line in remarks)
    assert len(remarks) == len({*remarks})
    assert caplog.messages == []


def test_overrides_count(tmp_path: Path) -> None:
    path = recipe_file(tmp_path)
    output = run("plan", path, "--ranks", 2, *V100, "data.batch_size=1").output
    assert "1 samples of" in output
    assert "illegal    data=2: a mini-batch of 1 is not cut over 2 replicas" in output


def test_larc_judges_norms_by_values_that_a_trace_has_not(tmp_path: Path) -> None:
    larc = ("optimizer.larc.trust=0.002", "--machine", "laptop-2core")  # on a CPU alone
    result = run("plan", recipe_file(tmp_path), "--ranks", 1, *larc)
    assert result.exit_code == 0, result.output


def test_a_time_of_which_a_file_knows_nothing_is_unknown(tmp_path: Path) -> None:
    """`lassen-v100` has measured no operator either, but says what was published."""
    machine = load_machine("laptop-2core")
    for setting in machine.settings:
        machine = machine.with_setting(setting.model_copy(update={"operators": ()}))
    save_machine(machine, tmp_path / "empty.yaml")
    words = ("plan", recipe_file(tmp_path), "--ranks", 2)
    output = " ".join(run(*words, "--machine", tmp_path / "empty.yaml").output.split())
    assert "time unknown: 100% of the step" in output
    assert "operators unlike any that laptop-2core has measured" in output
    assert "the step from unknown to unknown" in output
    assert "unknown" not in run(*words, *V100).output


def test_one_rank_is_no_ranks(tmp_path: Path) -> None:
    output = run("plan", recipe_file(tmp_path), "--ranks", 1, *V100).output
    assert output.startswith("1 rank of lassen-v100: ")
    assert "least      1 rank: data=1" in output


def test_what_a_machine_does_not_know_is_said(tmp_path: Path) -> None:
    machine = load_machine("lassen-v100")
    links = {name: link for name, link in machine.links.items() if name != "network"}
    path = tmp_path / "one-node.yaml"
    save_machine(machine.model_copy(update={"links": links, "note": "a guess"}), path)
    recipe = recipe_file(tmp_path)
    within = run("plan", recipe, "--ranks", 4, "--machine", path).output
    assert ": a guess" in within
    assert "'network'" not in within
    beyond = run("plan", recipe, "--ranks", 8, "--machine", path).output
    assert "no numbers of links of the class 'network', which 8 ranks need" in beyond


def test_nothing_fits(tmp_path: Path) -> None:
    result = run("plan", recipe_file(tmp_path), "--ranks", 2, *V100, "--memory", "1MiB")
    assert result.exit_code == 1
    assert "no grid of 2 ranks fits into 1.00 MiB a rank" in result.output
    assert "least      no number of ranks: parameters" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory", "much"], "give a size, such as 16GiB"),
        (["--memory", "0"], "give a size, such as 16GiB"),
        (["--figure", "plan.txt"], "give a name that ends with .png"),
        (["grid=auto"], "give --ranks"),
        (["--shape", "4,x"], "give C,D,H,W"),
        (["--shape", "4,16,16"], "--shape 4,16,16: give C,D,H,W, such as 4,512,512,512"),
        (["--shape", "4,16,0,16"], "--shape 4,16,0,16: give C,D,H,W"),
        (["--shape", "4,3,16,16"], "--shape 4,3,16,16: "),
        (["--machine", "nowhere"], "there is no machine file nowhere"),
        (["--ranks", "17", *V100], "no grid of 17 ranks is possible"),
        (["--ranks", "2", *V100, "--json", "nowhere/plan.json"], "cannot write --json"),
    ],
)
def test_bad_input(tmp_path: Path, words: list[str], said: str) -> None:
    result = run("plan", recipe_file(tmp_path), *words)
    assert result.exit_code != 0
    message = str(result.exception) if "error" not in result.output.lower() else result.output
    assert said in " ".join(message.split())


def test_auto_needs_a_number_of_ranks(tmp_path: Path) -> None:
    result = run("train", recipe_file(tmp_path), "grid=auto")
    assert "give --ranks" in str(result.exception)


def test_the_volume_may_be_said(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, data={"path": "nowhere", "batch_size": 4}, model={"width": None})
    result = run("plan", path, *V100, "--shape", "4,16,16,16")
    assert "assumed    volumes of 4 x 16 x 16 x 16, as asked for" in result.output
