"""The page of own data: its recipes are recipes, its three ways are taken (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest

import hyperslab as hs
from hyperslab.formats import DataMap
from hyperslab.formats.convert.run import Request, convert
from hyperslab.recipe.load import load_recipe
from tests.docs.blocks import DOCS, blocks_of
from tests.formats.arrays.published import camels, quijote

PAGE = (DOCS / "own-data.md").read_text()
RECIPES = [block.code for block in blocks_of(PAGE) if block.language == "yaml"]


@pytest.mark.parametrize("text", RECIPES)
def test_its_recipes_are_read(tmp_path: Path, text: str) -> None:
    if "batch_size" not in text:
        text += "  batch_size: 4\n"
    (tmp_path / "mine.yaml").write_text(text)
    assert load_recipe(tmp_path / "mine.yaml").data.batch_size > 0


def test_there_are_recipes_and_sections_that_errors_name() -> None:
    assert len(RECIPES) >= 5
    for title in (
        "Keys",
        "Arrays",
        "Channels",
        "Tables",
        "Splits",
        "A DataLoader of your own",
        "A Source",
    ):
        assert f"# {title}\n" in PAGE


class Halves(hs.Source):
    """A source of one's own: the file of many volumes, seen as a user's class sees it."""

    def __init__(self, folder: Path) -> None:
        self.inner = hs.formats.MappedFolder.open_folder(folder, hs.formats.ScanOptions())
        self.names = self.inner.names[:6]
        self.shape = self.inner.shape
        self.dtype = self.inner.dtype

    def read(self, sample: int, box: hs.geometry.Box) -> hs.formats.source.Array:
        return self.inner.read(sample, box) / 2

    def target(self, sample: int) -> hs.formats.source.Array:
        return self.inner.target(sample)


def test_a_source_of_ones_own(tmp_path: Path) -> None:
    grids = camels(tmp_path)
    options = {"batch_size": 2, "split": "all", "transform": None}
    with hs.open(Halves(tmp_path), hs.Grid(), **options) as data:  # type: ignore[arg-type]
        x, y = next(data.epoch(0))
    assert x.full()[1, 0].numpy() == pytest.approx(grids[1] / 2)
    assert tuple(y.shape) == (2, 6)


def test_converted_files_open_without_a_word(tmp_path: Path) -> None:
    quijote(tmp_path, count=4)
    convert(tmp_path / "latin_hypercube", tmp_path / "out", Request("hdf5"))
    whole = hs.geometry.Box((0, 0, 0, 0), (1, 16, 16, 16))
    one, other = (
        hs.open(path, hs.Grid(), batch_size=1, split="all").source
        for path in (tmp_path / "latin_hypercube", tmp_path / "out")
    )
    assert one.parameters.names == other.parameters.names
    found = {name: sample for sample, name in enumerate(other.names)}
    for sample, name in enumerate(one.names):
        twin = found[name]
        assert (one.read(sample, whole) == other.read(twin, whole)).all()
        assert other.target(twin) == pytest.approx(one.target(sample))


def test_a_map_in_python(tmp_path: Path) -> None:
    camels(tmp_path, fields=("Mcdm", "T"))
    said = DataMap(files="Grids_T_*", ranges={"sigma_8": (0.5, 1.5)})
    with hs.open(tmp_path, hs.Grid(), batch_size=3, mapping=said, transform="log1p_mean") as data:
        assert data.parameters.ranges["sigma_8"] == pytest.approx((0.5, 1.5))
