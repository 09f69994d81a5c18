"""Which files belong together, by their names (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperslab.errors import DataError
from hyperslab.formats.nifti.source import Pair, find_pairs, nifti_stem


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_lits_in_one_folder_and_in_several(tmp_path: Path) -> None:
    touch(tmp_path, "volume-10.nii", "segmentation-10.nii", "volume-2.nii.gz")
    touch(tmp_path, "masks/segmentation-2.nii", "notes.nii", "volume-3.nii.json", "volume-x.nii")
    touch(tmp_path, ".trash/volume-4.nii", "._volume-2.nii.gz", "masks/.segmentation-2.nii")
    (tmp_path / "volume-5.nii").mkdir()
    assert find_pairs(tmp_path) == [
        Pair("volume-2", tmp_path / "volume-2.nii.gz", tmp_path / "masks/segmentation-2.nii"),
        Pair("volume-10", tmp_path / "volume-10.nii", tmp_path / "segmentation-10.nii"),
    ]


def test_the_decathlon(tmp_path: Path) -> None:
    task = tmp_path / "Task03_Liver"
    touch(task, "imagesTr/liver_7.nii.gz", "labelsTr/liver_7.nii.gz", "imagesTs/liver_8.nii.gz")
    touch(task, "elsewhere/liver_9.nii.gz", "imagesTr/._liver_7.nii.gz", "imagesTr/lung_1.nii.gz")
    one, test = find_pairs(tmp_path)
    assert one == Pair(
        "liver_7", task / "imagesTr/liver_7.nii.gz", task / "labelsTr/liver_7.nii.gz"
    )
    assert (test.name, test.test) == ("liver_8", True)
    assert "imagesTs/liver_8.nii.gz: a test volume, published without labels" in test.problem


def test_what_is_no_pair_says_why(tmp_path: Path) -> None:
    touch(tmp_path, "volume-1.nii", "segmentation-2.nii", "test-volume-3.nii", "segmentation-3.nii")
    touch(tmp_path, "volume-3.nii", "volume-4.nii", "volume-4.nii.gz", "segmentation-4.nii")
    touch(tmp_path, "volume-5.nii", "a/segmentation-5.nii", "b/segmentation-5.nii")
    pairs = {pair.name: pair for pair in find_pairs(tmp_path)}
    assert sorted(pairs) == [
        "segmentation-2",
        "test-volume-3",
        *(f"volume-{i}" for i in (1, 3, 4, 5)),
    ]
    assert pairs["volume-3"].problem == ""
    assert pairs["volume-1"].problem == f"{tmp_path}/volume-1.nii: has no labels"
    assert "segmentation-2.nii: labels without a volume" in pairs["segmentation-2"].problem
    assert "published without labels" in pairs["test-volume-3"].problem
    assert [name for name, pair in pairs.items() if pair.test] == ["test-volume-3"]
    assert "volume-4.nii and " in pairs["volume-4"].problem
    assert "volume-4.nii.gz; keep one of them" in pairs["volume-4"].problem
    assert "a/segmentation-5.nii and" in pairs["volume-5"].problem


def test_a_folder_without_any(tmp_path: Path) -> None:
    touch(tmp_path, "image.nii", "liver_1.nii.gz")
    with pytest.raises(DataError, match=r"no volume-N\.nii\[\.gz\] or imagesTr"):
        find_pairs(tmp_path)
    with pytest.raises(DataError, match="nowhere: is not a folder"):
        find_pairs(tmp_path / "nowhere")


def test_stem() -> None:
    assert [nifti_stem(Path(name)) for name in ("a/b.nii", "b.nii.gz")] == ["b", "b"]
