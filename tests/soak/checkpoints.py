"""Checkpoints whose writing ends before any change of the file system, and mutated ones."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from hyperslab.checkpoint import best_in, files, folder_of
from hyperslab.checkpoint.files import MANIFEST
from hyperslab.checkpoint.retention import latest, save_step
from hyperslab.checkpoint.save_load import load
from hyperslab.errors import CheckpointError
from tests.checkpoint.forged import write_sums
from tests.checkpoint.killed import FAILED, ends_before
from tests.checkpoint.test_save_load import network, same, tensors
from tests.soak.campaign import Campaign, Settings, must

CHANGES = 45
"""As many as a checkpoint takes, about."""

Mutation = Callable[[random.Random, Path], None]


class Checkpoints(Campaign):
    """The newest complete one and the best are always found; what is damaged is never taken."""

    weight = 0.3

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.ended: Counter[str] = Counter()
        self.models = {seed: network(seed) for seed in range(1, 5)}
        self.log = logging.getLogger("hyperslab")
        self.level = self.log.level
        self.log.setLevel(logging.CRITICAL)  # each damage is a warning

    def close(self) -> None:
        self.log.setLevel(self.level)

    def play(self, number: int) -> str:
        rng = self.rng(number)
        run = self.settings.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        with mock.patch.object(os, "fsync", return_value=None):
            play = rng.choice((self._killed, self._mutated, self._mutated))
            words = play(rng, run)
        self.ended[words.split(",")[0]] += 1
        return words

    def summary(self) -> dict[str, Any]:
        return {"ended": dict(self.ended)}

    def _save(self, run: Path, step: int, *, best: bool, keep: int) -> None:
        position = {"best_step": 1}
        save_step(run, step, *self.models[step], best=best, keep=keep, position=position)

    def _killed(self, rng: random.Random, run: Path) -> str:
        keep = rng.randint(1, 3)
        exchanged = rng.random() < 0.5
        self._save(run, 1, best=True, keep=keep)
        self._save(run, 2, best=rng.random() < 0.5, keep=keep)
        newest = 2
        kills = []
        with mock.patch.object(files, "exchange", files.exchange if exchanged else _cannot):
            for _ in range(rng.randint(1, 4)):
                step = rng.randint(newest, 4)
                best = rng.random() < 0.5
                change = rng.randrange(CHANGES)

                def act(step: int = step, best: bool = best) -> None:
                    self._save(run, step, best=best, keep=keep)

                ended = ends_before(change, act)
                must(ended != FAILED, f"step {step} failed before change {change}")
                kills.append(f"{step}@{change}")
                newest = self._check(run, newest)
        return f"killed, keep {keep}, exchange {exchanged}, {' '.join(kills)}"

    def _check(self, run: Path, at_least: int) -> int:
        """The step of the newest: no older than what was there before, and as it was saved."""
        found = [latest(run), best_in(folder_of(run))]
        for path in found:
            assert path is not None
            step = int(path.name.strip(".").removesuffix(".replaced")[-8:])
            must(self._equals(path, step), f"{path} is not what was saved")
        newest = found[0]
        assert newest is not None
        step = int(newest.name.strip(".").removesuffix(".replaced")[-8:])
        must(step >= at_least, f"step {at_least} is lost: the newest is {newest.name}")
        return step

    def _equals(self, path: Path, step: int) -> bool:
        model, optimizer = network(1)
        load(path, model, optimizer)
        return same(tensors(model, optimizer), tensors(*self.models[step]))

    def _mutated(self, rng: random.Random, run: Path) -> str:
        for step in (1, 2):
            self._save(run, step, best=step == 1, keep=2)
        newest = folder_of(run) / "step-00000002"
        before = _contents(newest)
        name = rng.choice(sorted(before))
        mutation = rng.choice(MUTATIONS)
        mutation(rng, newest / name)
        meant = rng.random() < 0.5 and name != MANIFEST and (newest / name).is_file()
        if meant:
            write_sums(newest, format=2)
        words = f"{mutation.__name__} of {name}{', meant' if meant else ''}"
        changed = _contents(newest) != before
        found = latest(run)
        if changed and not meant:
            must(found == newest.with_name("step-00000001"), f"{words}: {found} is the newest")
        model, optimizer = network(1)
        try:
            load(newest, model, optimizer)
        except CheckpointError:
            return f"mutated and refused, {words}"
        if changed and not meant:
            must(False, f"{words}: it was loaded")
        return f"mutated and loaded, {words}"


def _cannot(_a: Path, _b: Path) -> bool:
    return False


def _contents(path: Path) -> dict[str, object]:
    """By file; of the manifest, what it says."""
    found: dict[str, object] = {}
    for file in sorted(path.iterdir()):
        data = file.read_bytes() if file.is_file() and not file.is_symlink() else None
        found[file.name] = data
        if file.name == MANIFEST and data is not None:
            try:
                found[file.name] = json.loads(data)
            except (ValueError, RecursionError):
                found[file.name] = data
    return found


def bits(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 3, 40))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def more(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    path.write_bytes(data[:at] + rng.randbytes(rng.randint(1, 99)) + data[at:])


def noughts(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    begin = rng.randrange(len(data))
    data[begin : begin + 64] = bytes(len(data[begin : begin + 64]))
    path.write_bytes(data)


def other(rng: random.Random, path: Path) -> None:
    path.write_bytes(rng.choice((b"", b"{}", b"[" * 99_999, rng.randbytes(300), b'{"a":' * 9_999)))


def word(rng: random.Random, path: Path) -> None:
    """Numbers and names of JSON, in safetensors' headers too."""
    data = path.read_bytes()
    old = rng.choice((b"[", b'"', b"7", b"0", b"F32", b"shape", b"$", b"state", b"0.weight"))
    new = rng.choice(
        (b"]", b"-1", b"99999999999999999999", b"F64", b"null", b"$call", b"../x", b"{")
    )
    path.write_bytes(data.replace(old, new, rng.choice((1, -1))))


def gone(_rng: random.Random, path: Path) -> None:
    path.unlink()


def link(rng: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(rng.choice(("/dev/zero", "/dev/tty", path.name, "..", "manifest.json")))


def pipe(_rng: random.Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


MUTATIONS: tuple[Mutation, ...] = (bits, bits, cut, more, noughts, other, word, gone, link, pipe)
