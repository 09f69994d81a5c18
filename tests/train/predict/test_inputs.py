"""Which files are predicted, and what is done already (tier: no process)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hyperslab.checkpoint.run_state import DataCard
from hyperslab.errors import DataError
from hyperslab.formats.files import DataMap
from hyperslab.formats.targets import Parameters
from hyperslab.recipe.data import DataSection
from hyperslab.train.input_files import InputFile, input_name, inputs_for, list_inputs
from hyperslab.train.predict import JOURNAL, Journal, state_of_input

BY = {"checkpoint": "abc", "native": False}


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


def test_names_lose_the_suffix_that_says_what_they_are() -> None:
    assert [input_name(name) for name in ("a.nii.gz", "a.b.nii", "a.hdf5", "a.h5", "a.mha")] == [
        "a", "a.b", "a", "a", "a.mha",
    ]  # fmt: skip


def test_a_folder_gives_its_volumes_and_no_labels_or_masks(tmp_path: Path) -> None:
    touch(
        *(tmp_path / name for name in ("b.nii", "a.nii.gz", "c.hdf5", "notes.txt", ".hidden.nii")),
        *(tmp_path / name for name in ("segmentation-1.nii", "a-mask.nii.gz", "x/labelsTr/a.nii")),
        tmp_path / "x/labelsTs/b.nii",
        *(tmp_path / name for name in ("x/a.nii", ".cache/a.nii")),
    )
    found = list_inputs([tmp_path])
    assert [entry.name for entry in found] == ["a", "b", "c", "x/a"]
    assert found[3] == InputFile(tmp_path / "x" / "a.nii", "x/a")


def test_labels_that_a_list_names_are_no_scans(tmp_path: Path) -> None:
    names = ("1/ct.nii", "1/seg.nii", "2/ct.nii.gz", "2/truth.nii.gz", "3/ct.nii")
    touch(*(tmp_path / name for name in names), tmp_path / "1" / "other.csv")
    listed = {
        "labels": {"0": "background", "1": "liver"},
        "training": [{"image": "1/ct.nii", "label": "./1/seg.nii"}],
        "testing": ["3/ct.nii", "4/gone.nii"],
    }
    (tmp_path / "dataset.json").write_text(json.dumps(listed))
    rows = "# classes: background, liver\nimage,label\nct.nii.gz,truth.nii.gz\n"
    (tmp_path / "2" / "scans.csv").write_text(rows)
    assert [entry.name for entry in list_inputs([tmp_path])] == ["1/ct", "2/ct", "3/ct"]
    (tmp_path / "dataset.json").write_text("{}")
    assert [entry.name for entry in list_inputs([tmp_path])] == ["1/ct", "1/seg", "2/ct", "3/ct"]


def test_labels_that_lists_of_other_names_or_places_name_are_no_scans(tmp_path: Path) -> None:
    names = ("a.nii", "a_seg.nii", "b.nii", "b_seg.nii")
    touch(*(tmp_path / "files" / name for name in names))
    training = [{"image": "a.nii", "label": "a_seg.nii"}]
    listed = {"labels": {"0": "background", "1": "liver"}, "training": training}
    (tmp_path / "files" / "fold_0.json").write_text(json.dumps(listed))
    found = list_inputs([tmp_path / "files"])
    assert [entry.name for entry in found] == ["a", "b", "b_seg"]
    rows = "# classes: background, liver\nimage,label\nfiles/b.nii,files/b_seg.nii\n"
    (tmp_path / "list.csv").write_text(rows)
    about = DataCard((1, 4, 4, 4), (1, 4, 4, 4), ("background", "liver"), Parameters((), (), ()))
    for path in ("list.csv", "gone.csv"):
        data = DataSection(path=tmp_path / path, batch_size=1)
        found = inputs_for(about, [tmp_path / "files"], data)
        wanted = ["a", "b"] if path == "list.csv" else ["a", "b", "b_seg"]
        assert [entry.name for entry in found] == wanted
    (tmp_path / "link").symlink_to(tmp_path)
    data = DataSection(path=tmp_path / "link/list.csv", batch_size=1)
    found = inputs_for(about, [tmp_path / "files"], data)
    assert [entry.name for entry in found] == ["a", "b"]


def test_what_is_named_is_taken_even_if_it_is_not_there(tmp_path: Path) -> None:
    given = [tmp_path / "segmentation-1.nii", tmp_path / "gone.nii", tmp_path / "gone.nii"]
    assert [entry.name for entry in list_inputs(given)] == ["segmentation-1", "gone"]


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    touch(tmp_path / "a.nii", tmp_path / "x" / "a.hdf5")
    with pytest.raises(DataError, match=r"x/a\.hdf5 would both be written as a\n"):
        list_inputs([tmp_path / "a.nii", tmp_path / "x"])
    twice = [tmp_path / "x", tmp_path / "x" / ".." / "x", tmp_path / "x" / "a.hdf5"]
    assert [entry.path for entry in list_inputs(twice)] == [tmp_path / "x" / "a.hdf5"]


def test_a_folder_that_no_key_of_the_recipe_speaks_of(tmp_path: Path) -> None:
    """Scans, or files of other names than the training's, are taken as without keys."""
    touch(tmp_path / "scans" / "a.nii.gz", tmp_path / "new" / "b.h5")
    mapping = DataMap(files="train/*.h5", volume="ct")
    found = list_inputs([tmp_path / "scans", tmp_path / "new"], mapping=mapping)
    assert [entry.name for entry in found] == ["a", "b"]
    touch(tmp_path / "new" / "train" / "c.h5")
    assert [entry.name for entry in list_inputs([tmp_path / "new"], mapping=mapping)] == ["train/c"]
    fields = DataMap(fields=("gas/*", "stars/*"), of_files=True)
    with pytest.raises(DataError, match=r"holds no gas/\*"):
        list_inputs([tmp_path / "new"], mapping=fields)


def test_a_folder_called_as_an_array_is_none(tmp_path: Path) -> None:
    touch(tmp_path / "all.npy" / "a.npy")
    assert [entry.name for entry in list_inputs([tmp_path])] == ["all.npy/a"]


def test_a_folder_without_volumes_is_refused(tmp_path: Path) -> None:
    touch(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"no \*\.nii or .* to predict in it or below"):
        list_inputs([tmp_path])


@pytest.fixture
def entry(tmp_path: Path) -> InputFile:
    touch(tmp_path / "a.nii")
    return InputFile(tmp_path / "a.nii", "a")


def test_what_is_noted_is_done_until_it_changes(tmp_path: Path, entry: InputFile) -> None:
    journal = Journal(tmp_path / "out", BY)
    assert not journal.done(entry)
    journal.add(entry, state_of_input(entry), samples={"a": [0.5]})
    again = Journal(tmp_path / "out", BY)
    assert again.done(entry)
    assert again.rows["a"]["samples"] == {"a": [0.5]}
    os.utime(entry.path, (1, 1))
    assert not again.done(entry)
    entry.path.unlink()
    assert not again.done(entry)


def test_another_network_has_done_nothing(
    tmp_path: Path, entry: InputFile, caplog: pytest.LogCaptureFixture
) -> None:
    Journal(tmp_path, BY).add(entry, state_of_input(entry))
    Journal(tmp_path, BY)
    assert not caplog.records
    Journal(tmp_path, {**BY, "network": "third"})
    assert f"{tmp_path} holds 1 results of another network" in caplog.text
    Journal(tmp_path, BY).add(entry, state_of_input(entry))
    assert not Journal(tmp_path, {**BY, "checkpoint": "other"}).done(entry)
    assert not Journal(tmp_path, BY).done(entry), "and what the other did is no longer the first's"


def test_a_line_that_was_being_written_does_not_count(tmp_path: Path, entry: InputFile) -> None:
    Journal(tmp_path, BY).add(entry, state_of_input(entry))
    path = tmp_path / JOURNAL
    path.write_text(path.read_text() + '{"name": "b", "pa')
    journal = Journal(tmp_path, BY)
    assert journal.done(entry)
    assert list(journal.rows) == ["a"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    touch(tmp_path / "out")
    with pytest.raises(DataError, match=f"cannot write into {tmp_path / 'out'}"):
        Journal(tmp_path / "out", BY)
