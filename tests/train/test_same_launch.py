"""Ranks that are started differently do not train (tiers: two gloo ranks; two started by hand)."""

from __future__ import annotations

from pathlib import Path

import pytest

import hyperslab as hs
from hyperslab.comm import agreement
from hyperslab.comm.rendezvous import compare_facts
from hyperslab.errors import RecipeError
from hyperslab.recipe.compare import launch_facts
from hyperslab.recipe.load import load_recipe
from hyperslab.train.profiler import ProfilePolicy
from hyperslab.train.run import train
from hyperslab.util.optional_libraries import current_versions
from tests.ranks import run_ranks
from tests.train.differing import DIFFERENT, RECIPE, by_hand

pytestmark = pytest.mark.usefixtures("forked")


def launches(path: Path) -> dict[str, str]:
    """What a rank says to each."""
    found: dict[str, str] = {}
    last = hs.Grid(depth=2).rank == 1
    real = current_versions()
    for key, option in DIFFERENT.items():
        mine = option if last else ""
        with pytest.MonkeyPatch.context() as patch:
            theirs = real | ({"torch": "2.9.0"} if mine == "version" else {})
            patch.setattr(agreement, "current_versions", lambda theirs=theirs: theirs)
            recipe = load_recipe(path, mine.split(" ") if "=" in mine else [])
            profile = ProfilePolicy(steps=3) if mine == "profile" else None
            try:
                train(recipe, resume=mine == "resume", profile=profile)
            except RecipeError as error:
                found[key] = str(error)
    return found


def test_every_difference_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{RECIPE}output: {tmp_path / 'run'}\n")
    first, second = run_ranks(2, launches, path)
    assert first == second
    for key in DIFFERENT:
        assert first[key].startswith(f"the ranks differ in {key}: "), first[key]
        assert "start all ranks with the same command, recipe and versions" in first[key]
    rate = first["optimizer.learning_rate"]
    assert rate.startswith("the ranks differ in optimizer.learning_rate: 0.001 on rank 0, 0.01 on")
    assert not (tmp_path / "run").exists(), "nothing was started"


def test_a_folder_of_each_node_may_be_another(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE)
    options = ([], ["data.staging=/node/1"], ["data.staging=/node/2"])
    none, first, second = [launch_facts(load_recipe(path, [*mine])) for mine in options]
    assert compare_facts([first, second], ["a", "b"]) == ""
    assert "data.staging" in compare_facts([none, second], ["a", "b"])


def different_grids() -> str:
    axis = "height" if hs.Grid(depth=2).rank else "depth"
    with pytest.raises(RecipeError) as caught:
        hs.Grid(**{axis: 2})
    return str(caught.value)


def test_grids_of_a_program_that_differ() -> None:
    words = "the ranks differ in grid.depth: 2 on rank 0, 1 on rank 1\n    and in grid.height"
    assert all(found.startswith(words) for found in run_ranks(2, different_grids))


@pytest.mark.long
def test_ranks_started_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{RECIPE}output: {tmp_path / 'run'}\n")
    found = by_hand(path, [], ["optimizer.learning_rate=0.01"])
    words = (
        "error: the ranks differ in optimizer.learning_rate: 0.001 on rank 0, 0.01 on rank 1\n"
        "    start all ranks with the same command, recipe and versions\n"
    )
    assert found == [(1, words)] * 2
    (_, first), (_, second) = by_hand(path, [], ["optimizer.rate=0.01"])
    assert first.startswith("error: rank 1 says: override optimizer.rate=: unknown key")
    assert second.startswith("error: override optimizer.rate=: unknown key")
    assert not (tmp_path / "run").exists(), "nothing was started"
