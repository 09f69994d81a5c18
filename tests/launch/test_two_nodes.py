"""Two nodes without common memory, and a cable that is cut (tier: two ranks under torchrun).

`make soak KINDS=cables` cuts at any moment.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hyperslab.checkpoint.retention import latest
from hyperslab.recipe.load import load_recipe
from hyperslab.train.run import train
from tests.nodes import Nodes, NodesError

PATIENCE = 200.0  # [s]

RECIPE = """
data: {synthetic: {width: 16, samples: 40}, batch_size: 2}
model: {variant: lbann}
grid: {depth: 2}
device: cpu
timeout: 6
epochs: 100000
checkpoint: {every_steps: 2}
"""


@pytest.mark.long
def test_a_cut_cable_ends_both_nodes_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    recipe, out = tmp_path / "run.yaml", tmp_path / "run"
    recipe.write_text(f"{RECIPE}output: {out}\n")
    told = [tmp_path / f"node{node}.txt" for node in range(2)]
    try:
        nodes = Nodes()
    except NodesError as reason:
        pytest.skip(str(reason))
    with nodes:
        line = ["-m", "hyperslab", "train", str(recipe)]
        running = [nodes.torchrun(node, 1, line, told[node]) for node in range(2)]
        end = time.monotonic() + PATIENCE
        while latest(out) is None:
            assert time.monotonic() < end, [file.read_text() for file in told]
            assert all(one.poll() is None for one in running), [file.read_text() for file in told]
            time.sleep(0.1)
        nodes.cut()
        codes = [one.wait(PATIENCE) for one in running]
    assert codes == [1, 1]
    for node, file in enumerate(told):
        words = file.read_text()
        assert words.count("\nerror: ") == 1
        assert f"\nerror: rank {node} lost contact with rank {1 - node} during " in words
    assert "node0" in told[0].read_text()
    newest = latest(out)
    assert newest is not None
    steps = int(newest.name[-8:])
    train(load_recipe(recipe, ["grid.depth=1", f"epochs={steps // 16 + 1}"]), resume=True)
    assert latest(out) != newest
