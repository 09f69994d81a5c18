"""The list of formats, and what is said of one that is not in it (tier: no process)."""

from __future__ import annotations

import pickle
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

import hyperslab as hs
from hyperslab.formats import registry
from hyperslab.formats.arrays.writer import NpyWriter
from hyperslab.formats.convert import Request
from hyperslab.formats.registry import load_plugins, sources_of
from hyperslab.formats.source import ScanOptions
from hyperslab.geometry import Box
from tests.formats.nifti.lists import decathlon
from tests.formats.opening import source_of
from tests.formats.universes import Seat, counts, public
from tests.formats.writers import FORMATS

KNOWN = "hdf5, lbann, npy, tfrecord, zarr, nifti, sc18"


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered within a test is not known after it."""
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))


def test_a_name_or_a_suffix_is_registered_once(formats: None) -> None:
    toy = hs.formats.register("toy", suffixes=[".toy"], source=hs.formats.NpyFolder)
    assert (toy.suffixes, toy.writer) == ((".toy",), None)
    assert registry.named("toy") is toy
    with pytest.raises(ValueError, match=r"format 'toy' is registered already, by .*Npy"):
        hs.formats.register("toy", suffixes=[".toys"], source=hs.formats.NpyFolder)
    for suffix, owner in ((".toy", "toy"), (".h5", "hdf5"), (".my.npy", "npy"), ("z", "tfrecord")):
        with pytest.raises(
            ValueError, match=rf"files \*{suffix} are those of the format '{owner}'"
        ):
            hs.formats.register("other", suffixes=[suffix], source=hs.formats.NpyFolder)
    assert registry.names() == (*KNOWN.split(", "), "toy")


def test_what_is_said_of_formats_before_they_are_imported_is_so() -> None:
    for one in registry.formats():
        said = registry._BUILT_IN[one.name]
        assert one.writer is not None
        assert one.writer.compressions == said.compressions
        assert one.suffixes in (getattr(one.source, "suffixes", ()), ())


def test_what_is_no_source_writer_or_list_of_suffixes_is_refused(formats: None) -> None:
    toy: Any = {"suffixes": [".toy"], "source": hs.formats.NpyFolder}
    for wrong, words in (
        ({"source": int}, "source=.*give a class that is derived from"),
        ({"source": object()}, "source=.*give a class that is derived from"),
        ({"writer": NpyWriter}, "writer=.*give an instance of"),
        ({"suffixes": ".toy"}, r"suffixes='.toy': give a list, \[\".toy\"\]"),
    ):
        with pytest.raises(TypeError, match=words):
            hs.formats.register("toy", **toy | wrong)
    assert registry.names() == tuple(KNOWN.split(", "))


def test_a_plugin_that_ends_the_program_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_the_program.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(hs.DataError, match="plugin 'ends_the_program': cannot be imported: Sys"):
        load_plugins(["ends_the_program"])


def test_an_unknown_format_is_told_the_known_ones(tmp_path: Path, formats: None) -> None:
    with pytest.raises(hs.DataError, match=f"format='hdf': choose from {KNOWN}"):
        source_of(tmp_path, Seat(), format="hdf")
    with pytest.raises(hs.DataError, match=f"format 'hdf': choose from {KNOWN}"):
        Request("hdf")
    hs.formats.register("toy", suffixes=[".toy"], source=hs.formats.NpyFolder)
    with pytest.raises(hs.DataError, match=f"format 'toy': choose from {KNOWN}"):
        Request("toy")  # it has no writer


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_alone_is_the_same_in_another_process(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path)
    source = source_of(tmp_path, Seat())
    box = Box.whole(source.shape)
    alone: Any = pickle.loads(pickle.dumps(source.alone(1)))
    assert list(alone.names) == [source.names[1]]
    assert alone.read(0, box).tobytes() == source.read(1, box).tobytes()
    assert alone.files(0) == source.files(1)
    assert alone.storage(0) == source.storage(1)
    if not source.classes:
        assert alone.target(0).tolist() == source.target(1).tolist()


def test_writers_can_be_sent_to_another_process() -> None:
    for one in registry.formats():
        assert type(pickle.loads(pickle.dumps(one.writer))) is type(one.writer)
    assert NpyWriter.compressions == ("none",)


def test_the_current_folder_may_be_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with chdir(gone):
        gone.rmdir()
        load_plugins(["json"])
        with pytest.raises(hs.DataError, match="cannot be imported"):
            load_plugins(["no_such_module"])


def test_no_sample_of_several_folders_comes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("a", "a/deep", "b"):
        public(tmp_path / folder / "univ_0.hdf5", counts(0, (4, 4, 4, 4)))
    monkeypatch.chdir(tmp_path)

    def names(*folders: Path) -> list[str]:
        return list(sources_of(folders, Seat(), ScanOptions("last")).names)

    assert names(Path("b"), tmp_path / "a" / "deep") == ["b/univ_0", "a/deep/univ_0"]
    for folders in ((tmp_path / "a", Path("a/deep")), (Path("b"), tmp_path / "b")):
        with pytest.raises(hs.DataError, match=r"hold the sample '(deep/)?univ_0' 2 times"):
            names(*folders)


def test_channels_of_several_folders_come_in_one_order(tmp_path: Path) -> None:
    decathlon(tmp_path / "one", channels=2)
    decathlon(tmp_path / "two", channels=2, modality={"0": "T1w", "1": "FLAIR"})
    with pytest.raises(hs.DataError, match=r"two: has the channels T1w, FLAIR but .*one has FL"):
        sources_of([tmp_path / "one", tmp_path / "two"], Seat(), ScanOptions())
