"""What is mutated: good files of a kind, and how hyperslab reads them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.soak.fuzz.mutate import Change, mutate

Digest = str


@dataclass(frozen=True)
class Subject:
    """A kind of file. ``make`` puts good ones into a folder, ``read`` reads that as users do.

    ``summed``: names of files of which every byte that matters is under a checksum. ``blind``:
    whether that cannot tell these bytes from those. ``keys``: of a recipe, one of which an error
    may name in place of the file.
    """

    make: Callable[[Path], object]
    read: Callable[[Path], Digest]
    changes: tuple[Change, ...]
    files: str = "*"
    summed: Callable[[Path], bool] = lambda path: False
    blind: Callable[[bytes, bytes], bool] = lambda before, after: before == after
    forge: Callable[[bytes, random.Random], bytes] | None = None
    keys: tuple[str, ...] = ()

    def spoil(self, folder: Path, rng: random.Random) -> tuple[Path, str, bool]:
        """Change a file; which, how, and whether a checksum has to tell."""
        files = sorted(p for p in folder.rglob(self.files) if p.is_file() and p.stat().st_size)
        path = rng.choice(files)
        data = path.read_bytes()
        forged = self.forge is not None and rng.random() < 0.5
        if forged and self.forge is not None:
            changed = self.forge(data, rng)
            how = "forged"
        else:
            changed, how = mutate(data, self.changes, rng)
        path.write_bytes(changed)
        return path, how, self.summed(path) and not forged and not self.blind(data, changed)
