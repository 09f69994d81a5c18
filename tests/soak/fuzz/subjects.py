"""What is mutated: good files of each kind, and how hyperslab reads them."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import numpy as np
import torch

import hyperslab as hs
from hyperslab.convert.request import Request
from hyperslab.convert.run import convert
from hyperslab.formats import DataMap
from hyperslab.formats.registry import source_of
from hyperslab.formats.tfrecord.records import masked
from hyperslab.machine import load_machine
from hyperslab.predict.journal import Journal
from hyperslab.recipe.load import load_recipe
from hyperslab.report import write_report
from hyperslab.sweep.load import load_sweep
from tests.formats import writers
from tests.formats.mapped.published import camels, quijote
from tests.report.fake import fake_run
from tests.soak.fuzz.mutate import BINARY, HDF5, TEXT, Change, mutate

Digest = str


@dataclass(frozen=True)
class Subject:
    """A kind of file. ``make`` puts good ones into a folder, ``read`` reads that as users do.

    ``summed``: names of files of which every byte that matters is under a checksum.
    """

    make: Callable[[Path], object]
    read: Callable[[Path], Digest]
    changes: tuple[Change, ...]
    files: str = "*"
    summed: Callable[[Path], bool] = lambda path: False
    forge: Callable[[bytes, random.Random], bytes] | None = None

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
        return path, how, self.summed(path) and not forged and changed != data


def read_samples(folder: Path, mapping: DataMap | None = None) -> Digest:
    source = source_of(folder, hs.Grid(), mapping=mapping)
    digest = hashlib.sha256(repr((source.shape, source.dtype, source.classes)).encode())
    try:
        for sample in range(len(source.names)):
            whole = hs.geometry.Box.whole(source.shape)
            digest.update(np.ascontiguousarray(source.read(sample, whole)).tobytes())
            corner = hs.geometry.Box((0, 0, 0, 0), (source.shape[0], 2, 2, 2))
            source.read(sample, corner)
            if source.classes:
                whole = hs.geometry.Box(whole.lo[1:], whole.hi[1:])
                digest.update(source.labels(sample, whole).tobytes())
            else:
                digest.update(np.asarray(source.target(sample), np.float64).tobytes())
            source.storage(sample)
            source.extras(sample)
            digest.update(source.names[sample].encode("utf-8", "surrogateescape"))
    finally:
        source.close()
    return digest.hexdigest()


def converted(
    format: str, compression: str = "none", scans: bool = False
) -> Callable[[Path], None]:
    """Files as `hyperslab convert` writes them."""

    def make(folder: Path) -> None:
        origin = folder.with_name("origin")
        (writers.lits_hdf5 if scans else writers.tfrecords(False))(origin)
        convert(origin, folder, Request(format, compression=compression))
        shutil.rmtree(origin)
        (folder / "conversion.jsonl").unlink()

    return make


def keyed_by_user(folder: Path) -> None:
    folder.mkdir()
    for i in range(3):
        with h5py.File(folder / f"sim_{i}.hdf5", "w") as file:
            file["grid/delta"] = np.random.default_rng(i).random((8, 8, 8)).astype(np.float32)
            file.create_group("Header").attrs["Omega0"] = 0.1 * i


def read_by_keys(folder: Path) -> Digest:
    return read_samples(folder, DataMap(volume="grid/delta", targets=("Header@Omega0",)))


def zips(folder: Path) -> None:
    folder.mkdir()
    for i in range(3):
        values = np.random.default_rng(i).random((8, 8, 8))
        np.savez(folder / f"sim_{i}.npz", delta=values, parameters=np.array([0.1 * i, 1.0]))


def read_zips(folder: Path) -> Digest:
    return read_samples(folder, DataMap(volume="delta", targets=("parameters",)))


def journal(folder: Path) -> None:
    writers.tfrecords(False)(folder / "origin")
    convert(folder / "origin", folder / "out", Request("hdf5"))


def go_on(folder: Path) -> Digest:
    before = sorted(path for path in folder.parent.parent.glob("*"))
    convert(folder / "origin", folder / "out", Request("hdf5"))
    assert sorted(path for path in folder.parent.parent.glob("*")) == before
    return read_samples(folder / "out")


def predictions(folder: Path) -> None:
    folder.mkdir()
    rows = [{"by": "me"}, *({"name": f"a{i}", "path": "x", "bytes": i} for i in range(4))]
    (folder / "predictions.jsonl").write_text("".join(f"{row}\n" for row in map(_json, rows)))


def _json(value: Any) -> str:
    return json.dumps(value)


def read_predictions(folder: Path) -> Digest:
    return repr(sorted(Journal(folder, {"by": "me"}).rows))


def copied(file: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        shutil.copy(file, folder / "it.yaml")
        if "sweeps" in file:
            (folder / "it.yaml").write_text(
                Path(file).read_text().replace("../", f"{Path('recipes').absolute()}/")
            )

    return make


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv3d(1, 4, 3), torch.nn.BatchNorm3d(4))


def checkpoint(folder: Path) -> None:
    folder.mkdir()
    model = network()
    hs.save(folder / "step", model, torch.optim.Adam(model.parameters()), epoch=3)


def read_checkpoint(folder: Path) -> Digest:
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    extra = hs.load(folder / "step", model, torch.optim.Adam(model.parameters()))
    state = [value.numpy().tobytes() for value in model.state_dict().values()]
    return hashlib.sha256(repr(sorted(extra.items())).encode() + b"".join(state)).hexdigest()


def run(folder: Path) -> None:
    fake_run(folder, epochs=3, wanted=3)


def read_page(folder: Path) -> Digest:
    write_report(folder / "run")
    return ""


def packed(data: bytes, rng: random.Random) -> bytes:
    """Change what is within, and pack it again with right sums."""
    return gzip.compress(mutate(gzip.decompress(data), BINARY, rng)[0], 1, mtime=0)


def framed(data: bytes, rng: random.Random) -> bytes:
    """Change what is within a record, and make its sums anew."""
    body, _ = mutate(data[12:-4], BINARY, rng)
    head = struct.pack("<Q", len(body))
    sums = [struct.pack("<I", masked(google_crc32c.value(part))) for part in (head, body)]
    return head + sums[0] + body + sums[1]


def framed_in_gzip(data: bytes, rng: random.Random) -> bytes:
    return gzip.compress(framed(gzip.decompress(data), rng), 1, mtime=0)


def always(path: Path) -> bool:
    return True


def chunks(path: Path) -> bool:
    return path.suffix != ".json"


def weights(path: Path) -> bool:
    return path.name != "manifest.json"


SUBJECTS: dict[str, Subject] = {
    "hdf5": Subject(converted("hdf5"), read_samples, HDF5, "*.hdf5", always),
    "hdf5-gzip": Subject(converted("hdf5", "gzip"), read_samples, HDF5, "*.hdf5", always),
    "hdf5-foreign": Subject(writers.universes, read_samples, HDF5, "*.hdf5"),
    "hdf5-benchmark": Subject(writers.benchmark, read_samples, HDF5, "*.h5"),
    "hdf5-scans": Subject(converted("hdf5", scans=True), read_samples, HDF5, "*.hdf5", always),
    "zarr": Subject(converted("zarr", "zstd"), read_samples, BINARY, "*", chunks),
    "zarr-foreign": Subject(writers.zarrs, read_samples, BINARY),
    "zarr-scans": Subject(writers.zarr_scans, read_samples, TEXT, "*.json"),
    "npy": Subject(writers.npy("first"), read_samples, BINARY),
    "npy-table": Subject(writers.npy("none"), read_samples, TEXT, "*.csv"),
    "camels": Subject(camels, read_samples, BINARY, "*.npy"),
    "camels-table": Subject(camels, read_samples, TEXT, "*.txt"),
    "quijote-table": Subject(
        quijote, lambda folder: read_samples(folder / "latin_hypercube"), TEXT, "*.txt"
    ),
    "hdf5-keys": Subject(keyed_by_user, read_by_keys, HDF5, "*.hdf5"),
    "npz": Subject(zips, read_zips, BINARY, "*.npz"),
    "tfrecord": Subject(writers.tfrecords(False), read_samples, BINARY, "*", always, framed),
    "tfrecord-gzip": Subject(
        writers.tfrecords(True), read_samples, BINARY, "*", always, framed_in_gzip
    ),
    "nifti": Subject(writers.niftis(".nii", False), read_samples, BINARY),
    "nifti-gzip": Subject(
        writers.niftis(".nii.gz", True), read_samples, BINARY, "*", always, packed
    ),
    "recipe": Subject(
        copied("recipes/demo.yaml"), lambda f: repr(load_recipe(f / "it.yaml")), TEXT
    ),
    "sweep": Subject(
        copied("recipes/sweeps/figure9.yaml"), lambda f: repr(load_sweep(f / "it.yaml")), TEXT
    ),
    "machine": Subject(
        copied("src/hyperslab/machine/shipped/lassen-v100.yaml"),
        lambda f: repr(load_machine(f / "it.yaml")),
        TEXT,
    ),
    "journal": Subject(journal, go_on, TEXT, "conversion.jsonl"),
    "predictions": Subject(predictions, read_predictions, TEXT),
    "checkpoint": Subject(checkpoint, read_checkpoint, (*BINARY, *TEXT), "*", weights),
    "page": Subject(run, read_page, TEXT, "*.*"),
}
