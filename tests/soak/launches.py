"""Two ranks that are started differently, by hand, as processes of their own."""

from __future__ import annotations

import time
from typing import Any

from tests.soak.campaign import Campaign, Settings, must, patience
from tests.train.differing import DIFFERENT, RECIPE, by_hand

AS_OPTIONS = {"resume": ["--resume"], "profile": ["--profile", "--profile-steps=3"]}

KINDS = [key for key, option in DIFFERENT.items() if option != "version"]
"""A process of its own has the versions that are installed."""

PATIENCE = 60.0  # [s] until both ranks have ended, on a machine that does other things, too


class Launches(Campaign):
    """Refused on both ranks by the key that differs, before anything is started.

    Any ``len(KINDS)`` cases one after the other are all kinds.
    """

    weight = 0.3

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.recipe = settings.folder / "recipe.yaml"
        self.recipe.write_text(f"{RECIPE}output: {settings.folder / 'run'}\n")
        self.slowest = 0.0

    def play(self, number: int) -> str:
        key = KINDS[number % len(KINDS)]
        option = DIFFERENT[key]
        mine = AS_OPTIONS.get(option, option.split(" "))
        options = [mine, []] if self.rng(number).random() < 0.5 else [[], mine]
        begin = time.monotonic()
        ends = by_hand(self.recipe, *options)
        seconds = time.monotonic() - begin
        words = f"error: the ranks differ in {key}"
        must(all(code == 1 and said.startswith(words) for code, said in ends), f"{key}: {ends}")
        must(not (self.settings.folder / "run").exists(), f"{key}: something was started")
        must(seconds < patience(PATIENCE), f"{key}: it took {seconds:.0f} s")
        self.slowest = max(self.slowest, seconds)
        return f"{key}: refused by name after {seconds:.1f} s"

    def summary(self) -> dict[str, Any]:
        return {"slowest refusal [s]": round(self.slowest, 1)}
