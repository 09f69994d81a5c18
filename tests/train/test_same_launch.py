"""Ranks that are started differently do not train (tiers: two gloo ranks; two started by hand)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import hyperslab as hs
from hyperslab.comm import agreement, bootstrap
from hyperslab.comm.start.roll_call import compare_facts
from hyperslab.errors import RecipeError
from hyperslab.recipe.compare import launch_facts
from hyperslab.recipe.load import load_recipe
from hyperslab.train.profile.recorder import ProfilePolicy
from hyperslab.train.run import train
from tests.ranks import run_ranks

RECIPE = """
data: {synthetic: {width: 16, samples: 12}, batch_size: 4}
model: {variant: lbann}
grid: {depth: 2}
device: cpu
timeout: 60
"""

DIFFERENT = {
    "optimizer.learning_rate": "optimizer.learning_rate=0.01",
    "optimizer.name": "optimizer.name=sgd",
    "optimizer.clip": "optimizer.clip=1",
    "optimizer.betas": "optimizer.betas=[0.8,0.999]",
    "optimizer.eps": "optimizer.eps=1e-3",
    "optimizer.larc": "optimizer.larc={}",
    "optimizer.accumulate": "optimizer.accumulate=2",
    "optimizer.schedule.epochs": "optimizer.schedule.epochs=7",
    "optimizer.schedule.name": "optimizer.schedule.name=steps",
    "optimizer.schedule.warmup": "optimizer.schedule.warmup=1",
    "loss": "loss=l1",
    "model.dropout": "model.dropout=0.5",
    "model.batch_norm": "model.batch_norm=true",
    "model.statistics": "model.statistics=replica",
    "model.variant": "model.variant=mlperf",
    "grid.depth": "grid.depth=1 grid.height=2",
    "data.batch_size": "data.batch_size=2",
    "data.augment": "data.augment=true",
    "data.seed": "data.seed=1",
    "data.mode": "data.mode=direct",
    "data.repeat": "data.repeat=2",
    "data.fractions": "data.fractions=[0.6,0.2,0.2]",
    "data.on_error": "data.on_error=skip",
    "data.transform": "data.transform=null",
    "data.prefetch": "data.prefetch=0",
    "data.synthetic.samples": "data.synthetic.samples=13",
    "output": "output=elsewhere",
    "epochs": "epochs=7",
    "precision": "precision=bf16",
    "kernels": "kernels=torch",
    "memory": "memory=recompute",
    "seed": "seed=1",
    "checkpoint.every": "checkpoint.every=2",
    "follow_test": "follow_test=true",
    "timeout": "timeout=50",
    "--resume": "resume",
    "--profile": "profile",
    "versions.torch": "version",
}
"""By the key that the error has to name: what the last rank is started with."""


def launches(path: Path) -> dict[str, str]:
    """What a rank says to each."""
    found: dict[str, str] = {}
    last = hs.Grid(depth=2).rank == 1
    real = bootstrap.versions()
    for key, option in DIFFERENT.items():
        mine = option if last else ""
        with pytest.MonkeyPatch.context() as patch:
            theirs = real | ({"torch": "2.9.0"} if mine == "version" else {})
            patch.setattr(agreement, "versions", lambda theirs=theirs: theirs)
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


def by_hand(path: Path, *options: list[str]) -> list[tuple[int, str]]:
    """Exit code and words of ranks that are started with these options, one each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(len(options)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "hyperslab", "train", str(path), *mine],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, mine in enumerate(options)
    ]
    words = [process.communicate(timeout=300)[1] for process in processes]
    return [(process.returncode, said) for process, said in zip(processes, words, strict=True)]


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
