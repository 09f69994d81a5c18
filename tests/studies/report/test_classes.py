"""The page of a segmentation's run: scores, curves, masks (tier: no process)."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from hyperslab.errors import DataError
from hyperslab.studies.report import write_report
from hyperslab.studies.report.volumes import CLASS_COLOURS, class_colour, scans
from hyperslab.studies.run_folder import read_run
from hyperslab.studies.table import DASH
from tests.studies.report.fake_scans import CONFUSION, SHAPE, fake_run
from tests.studies.report.test_report import Outline
from tests.train.scans import CLASSES


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run(tmp_path_factory.mktemp("scans"))


@pytest.fixture(scope="module")
def page(finished: Path) -> str:
    return write_report(finished).read_text()


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_page_is_whole_and_loads_nothing(page: str) -> None:
    outline = Outline(page)
    assert outline.open == []
    assert len(set(outline.ids)) == len(outline.ids)
    assert outline.references <= set(outline.ids)
    assert all(url.startswith("data:image/png;base64,") for url in outline.loaded)
    for title in ("Loss by epoch", "Dice by epoch", "Loss by step", "volume-1", "volume-3"):
        assert outline.headings.count(title) == 1
    for title in ("Across depth", "Across height", "Across width"):
        assert outline.headings.count(title) == 2, "of each of the two scans"
    assert page.count("<figure>") == len(outline.alts) == 3 + 2 * 3 + 3


def test_every_class_has_its_scores_and_the_share_of_each_confusion(page: str) -> None:
    for i, name in enumerate(CLASSES):
        assert page.count(f'<th scope="row">{name}') == 2
        total = sum(CONFUSION[i])
        assert f"{100 * CONFUSION[i][i] / total:.1f} %" in page
        assert f"{total:,}" in page
    dice = 2 * 3000 / (2 * 3000 + 400 + 260)
    assert page.count(f"{dice:.3f}") >= 2, "in a tile and in the table"


@pytest.mark.usefixtures("undrawn")
def test_only_samples_of_the_test_split_were_never_seen(run: Path, page: str) -> None:
    words = "samples of the test split, which the network never saw, on its own lattice"
    assert words in page
    path = run / "evaluation" / "metrics.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "split": "train"}))
    changed = write_report(run).read_text()
    assert "samples of the train split, on its own lattice" in changed
    assert "test split" not in changed
    assert "of the voxels, train split" in changed


@pytest.mark.usefixtures("undrawn")
def test_surfaces_have_a_table_of_their_own_with_whole_samples(run: Path) -> None:
    path = run / "evaluation" / "metrics.json"
    found = json.loads(path.read_text())
    found["classes"]["organ"] |= {
        "hausdorff_95_mm": 12.53,
        "average_surface_distance_mm": None,
        "surface_dice": 0.25,
        "samples_both": 2.0,
    }
    found["surfaces"] = {"tolerance_mm": 2.0}
    path.write_text(json.dumps(found))
    page = write_report(run).read_text()
    row = re.search(
        r'<th scope="col">average \[mm\]</th>.*?<tbody>\s*(<tr>.*?</tr>)', page, re.DOTALL
    )
    assert row is not None
    cells = re.findall(r"<td>(.*?)</td>", row.group(1))
    assert cells == ["12.5", DASH, "0.250", "2", DASH, DASH]
    assert "within 2.00 mm" in page


def test_masks_have_the_colours_of_the_legend(page: str) -> None:
    legend = re.findall(r"background: (#[0-9a-f]{6})\"></span>(\w+)", page)
    assert legend == [(CLASS_COLOURS[0], "organ"), (CLASS_COLOURS[1], "lesion")]
    for value, _ in legend:
        assert page.count(f"stroke: {value}") >= 2 * 3, "the true mask's line in every plane"


def test_colours_begin_again() -> None:
    assert class_colour(1) == class_colour(1 + len(CLASS_COLOURS)) == CLASS_COLOURS[0]


def test_planes_go_through_the_centre_of_what_is_no_background(finished: Path) -> None:
    first, _ = scans(read_run(finished))
    with h5py.File(finished.parent / "scans" / "volume-1.hdf5") as file:
        true, values = file["segmentation"][0], file["volume"][0]
    centre = np.argwhere(true > 0).mean(0).round().astype(int)
    assert list(first.at.values()) == centre.tolist()
    assert first.shape == SHAPE
    np.testing.assert_array_equal(first.true["height"], true[:, centre[1]])
    np.testing.assert_array_equal(first.values["width"], values[:, :, centre[2]])
    with np.load(finished / "evaluation" / "masks.npz") as file:
        np.testing.assert_array_equal(first.predicted["depth"], file["masks"][0][centre[0]])


@pytest.mark.usefixtures("undrawn")
def test_not_evaluated(tmp_path: Path) -> None:
    run = fake_run(tmp_path, evaluated=False)
    page = write_report(run).read_text()
    assert page.count(f"hyperslab evaluate {run}") == 2
    assert "Dice by epoch" in page


@pytest.mark.usefixtures("undrawn")
def test_scans_that_moved_away(run: Path) -> None:
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("/scans", "/gone"))
    page = write_report(run).read_text()
    assert "No scan of this run can be shown" in page
    assert "/gone" in page


def test_a_scan_that_is_gone_or_has_changed_is_named(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished.parent, tmp_path / "copy"))
    recipe = (folder / "run" / "recipe.yaml").read_text()
    text = recipe.replace(str(finished.parent), str(folder))
    (folder / "run" / "recipe.yaml").write_text(text)
    (folder / "scans" / "volume-1.hdf5").rename(folder / "scans" / "other.hdf5")
    (folder / "scans" / "volume-10.hdf5").write_bytes(b"damaged, and not the one that is gone")
    with pytest.raises(DataError, match=r"does not hold volume-1 now"):
        scans(read_run(folder / "run"))
    with h5py.File(folder / "scans" / "volume-1.hdf5", "w") as file:
        file["volume"], file["segmentation"] = np.ones((1, 4, 4, 4), "i2"), np.ones((1, 4, 4, 4))
    with pytest.raises(DataError, match=r"volume-1.*\(1, 4, 4, 4\)"):
        scans(read_run(folder / "run"))


@pytest.mark.usefixtures("undrawn")
def test_a_class_that_is_nowhere_has_dashes(run: Path) -> None:
    path = run / "evaluation" / "metrics.json"
    text = re.sub(r'"(dice|iou|precision|recall)": [^,}]*', r'"\1": null', path.read_text())
    path.write_text(text)
    page = write_report(run).read_text()
    assert Outline(page).open == []
    assert "Dice: organ" not in page


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", '"many"'])
@pytest.mark.usefixtures("undrawn")
def test_scores_that_are_no_numbers_have_dashes(run: Path, value: str) -> None:
    path = run / "evaluation" / "metrics.json"
    keys = "dice|iou|precision|recall|true_positives|false_negatives"
    path.write_text(re.sub(rf'"({keys})": [^,}}]*', rf'"\1": {value}', path.read_text()))
    page = write_report(run).read_text()
    assert Outline(page).open == []
    assert "Dice: organ" not in page


@pytest.mark.usefixtures("undrawn")
def test_masks_that_do_not_unpack_are_named(run: Path) -> None:
    path = run / "evaluation" / "masks.npz"
    data = bytearray(path.read_bytes())
    at = data.index(b"masks.npy") + len("masks.npy") + 20  # within what deflate has packed
    data[at : at + 64] = b"\xff" * 64
    path.write_bytes(data)
    with pytest.raises(zlib.error), np.load(path) as file:
        file["masks"]
    assert "masks.npz holds no masks" in write_report(run).read_text()


@pytest.mark.parametrize("content", [b"x", b""])
@pytest.mark.usefixtures("undrawn")
def test_broken_masks_are_named(run: Path, content: bytes) -> None:
    (run / "evaluation" / "masks.npz").write_bytes(content)
    page = write_report(run).read_text()
    assert "masks.npz holds no masks" in page


LIES = {
    "of more voxels than its scan": {"masks": np.zeros((2, 512, 512, 512), np.uint8)},
    "of wider numbers": {"masks": np.zeros((2, *SHAPE), np.int64)},
    "of more samples": {"samples": [f"volume-{i}" for i in range(400)]},
    "of long names": {"samples": ["volume-1" + "x" * (1 << 18), "volume-3"]},
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.usefixtures("undrawn")
def test_masks_that_unpack_to_much_are_not_unpacked(run: Path, lie: str) -> None:
    path = run / "evaluation" / "masks.npz"
    with np.load(path) as file:
        held = {key: file[key] for key in file.files}
    np.savez_compressed(path, **{**held, **LIES[lie]})
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"masks\.npz holds no masks|a mask \("):
            scans(read_run(run))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    if lie == next(iter(LIES)):
        assert "No scan of this run can be shown" in write_report(run).read_text()


@pytest.mark.parametrize("window", ["/etc/passwd", "[200, -100]", "[1, x]", "[.nan, 1]", "{a: b}"])
@pytest.mark.usefixtures("undrawn")
def test_a_window_of_any_value(run: Path, window: str) -> None:
    recipe = (run / "recipe.yaml").read_text()
    assert "[-100.0, 200.0]" in recipe
    (run / "recipe.yaml").write_text(recipe.replace("[-100.0, 200.0]", window))
    assert "No scan of this run can be shown" in write_report(run).read_text()


def test_a_page_reads_no_files_outside_of_the_data(tmp_path: Path) -> None:
    """Whatever the recipe of a run's folder permits; the user has trained with nothing of it."""
    run = fake_run(tmp_path / "theirs")
    scan = tmp_path / "theirs" / "scans" / "volume-1.hdf5"
    with h5py.File(scan, "a") as file, h5py.File(tmp_path / "secret.hdf5", "w") as other:
        file.copy("volume", other)
        del file["volume"]
        file["volume"] = h5py.ExternalLink(other.filename, "volume")
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(
        recipe.replace("batch_size", "outside_files: true, batch_size")
    )
    with pytest.raises(DataError, match=r"secret\.hdf5"):
        scans(read_run(run))
