"""Two nodes whose cable is cut at any moment, from the start of the ranks on."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperslab.checkpoint.retention import latest
from hyperslab.recipe.load import load_recipe
from hyperslab.train.run import train
from tests.nodes import Nodes, NodesError
from tests.soak.campaign import Campaign, Settings, Unavailable, must

RECIPE = """
data: {{synthetic: {{width: 16, samples: 40}}, batch_size: 2}}
model: {{variant: lbann}}
grid: {{{grid}}}
device: cpu
timeout: {limit}
epochs: {epochs}
checkpoint: {{every_steps: {every}}}
output: {out}
"""

BATCHES = 16  # mini-batches of an epoch

SLACK = 30.0
"""[s] beyond the limit: until all Python has been imported, torchrun has gathered its ranks, and a
machine that does other things, too, has had time for it."""


@dataclass(frozen=True)
class Case:
    """Two ranks by hand, or more by torchrun, and the moment of the cut."""

    torchrun: bool
    ranks: int  # of a node
    grid: str
    limit: float  # [s]
    every: int  # steps between two checkpoints
    steps: int  # before the cut; with none it comes ``seconds`` after the start
    seconds: float
    node: int  # whose end of the cable

    def __str__(self) -> str:
        how = f"torchrun, {self.ranks} a node" if self.torchrun else "by hand"
        when = f"after step {self.steps}" if self.steps else f"after {self.seconds:.1f} s"
        return f"{how}, {self.grid}, limit {self.limit:g} s: cut {when} at node {self.node}"


class Cables(Campaign):
    """Every rank ends with one error within the limit, and what was checkpointed goes on."""

    weight = 0.5

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.ends: Counter[str] = Counter()
        self.longest = 0.0
        try:
            Nodes().close()
        except NodesError as reason:
            raise Unavailable(str(reason)) from None

    def play(self, number: int) -> str:
        case = self.draw(number)
        folder = self.settings.folder / str(number)
        folder.mkdir()
        out, told = folder / "run", [folder / f"node{node}.txt" for node in range(2)]
        recipe = folder / "run.yaml"
        text = {"grid": case.grid, "limit": case.limit, "every": case.every, "out": out}
        recipe.write_text(RECIPE.format(epochs=100000, **text))
        with Nodes() as nodes:
            line = ["-m", "hyperslab", "train", str(recipe)]
            running = [
                nodes.torchrun(node, case.ranks, line, told[node])
                if case.torchrun
                else nodes.rank(node, line, told[node])
                for node in range(2)
            ]
            started = _await(case, out, running, told)
            nodes.cut(case.node)
            cut = time.monotonic()
            for one in running:
                one.wait(case.limit + 2 * SLACK)
            took = time.monotonic() - cut
        must([one.returncode for one in running] == [1, 1], f"{case}: {_words(told)}")
        if not started:
            self.ends["not all came within the limit"] += 1
            shutil.rmtree(folder)
            return f"{case}: not all came within the limit, before the cut"
        must(took < case.limit + SLACK, f"{case}: it took {took:.0f} s\n{_words(told)}")
        self.longest = max(self.longest, took - case.limit)
        ends = [self._check_words(case, file) for file in told]
        self.ends.update(ends)
        kept = self._resume(case, recipe, out)
        shutil.rmtree(folder)
        return f"{case}: {', '.join(ends)} after {took:.1f} s, {kept}"

    def draw(self, number: int) -> Case:
        rng = self.rng(number)
        torchrun = rng.random() < 0.4
        ranks = rng.choice([1, 2]) if torchrun else 1
        grid = rng.choice(["depth: 2", "data: 2", "width: 2"] if ranks == 1 else ["depth: 4"])
        # torchrun's own agents wait for each other as long as they want: ranks are ours.
        steps = rng.randint(1, 30) if torchrun or rng.random() < 0.4 else 0
        seconds = rng.uniform(0, 25)
        limit = rng.choice([4.0, 8.0])
        return Case(
            torchrun, ranks, grid, limit, rng.choice([1, 3, 5]), steps, seconds, rng.randrange(2)
        )

    def _check_words(self, case: Case, file: Path) -> str:
        """One error for every rank, of a rank or of the place where they meet; how it ended."""
        text = "\n" + file.read_text()
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        must(len(errors) == case.ranks, f"{case}: {len(errors)} errors\n{text}")
        must(case.torchrun or "Traceback" not in text, f"{case}: a traceback\n{text}")
        for error in errors:
            named = "rank" in error and ("lost contact" in error or "did not come" in error)
            must(named or "does not reach rank 0" in error, f"{case}: {error}")
        return errors[0].partition("during")[0].partition(" within")[0][:60].strip()

    def _resume(self, case: Case, recipe: Path, out: Path) -> str:
        """What was checkpointed goes on, in one process."""
        newest = latest(out) if out.exists() else None
        if newest is None:
            return "nothing checkpointed"
        steps = int(newest.name[-8:])
        must(steps > case.steps - 2 * case.every, f"{case}: {newest} is too old")
        alone = ["grid.data=1", "grid.depth=1", "grid.width=1", f"epochs={steps // BATCHES + 1}"]
        train(load_recipe(recipe, alone), resume=True)
        after = latest(out)
        must(after is not None and after.name > newest.name, f"{case}: {newest} does not go on")
        return f"resumed from step {steps}"

    def summary(self) -> dict[str, Any]:
        return {
            "how ranks ended": dict(sorted(self.ends.items())),
            "longest end beyond the limit [s]": round(self.longest, 1),
        }


def _await(case: Case, out: Path, running: list[subprocess.Popen[str]], told: list[Path]) -> bool:
    """Until the moment of the cut; whether the ranks found each other, if that was waited for.

    On a busy machine their imports may take longer apart than the limit: they say so, and end.
    """
    begun = time.monotonic()
    if not case.steps:
        time.sleep(case.seconds)
        return True
    while _steps(out / "steps.csv") < case.steps:
        if any(one.poll() is not None for one in running):
            must(" did not come to " in _words(told), f"{case}: ended\n{_words(told)}")
            return False
        patient = time.monotonic() - begun < 200
        must(patient, f"{case}: does not get there\n{_words(told)}")
        time.sleep(0.05)
    return True


def _steps(history: Path) -> int:
    return len(history.read_text().splitlines()) - 1 if history.exists() else 0


def _words(told: list[Path]) -> str:
    return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in told)
