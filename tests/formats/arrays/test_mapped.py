"""Arrays by key and tables of targets, good and bad (tier: no process)."""

from __future__ import annotations

import gc
import os
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import hyperslab as hs
from hyperslab.errors import DataError
from hyperslab.formats import DataMap, MappedFolder
from hyperslab.formats.arrays.open import array_header
from hyperslab.formats.arrays.scan import TargetTable, read_target_table, rows_of_samples
from hyperslab.geometry import Box
from tests.formats.opening import source_of

N = 3
SHAPE = (5, 6, 7)
VALUES = np.random.default_rng(0).random((N, *SHAPE)).astype(np.float32)
OMEGA = [0.1, 0.2, 0.4]


def opened(path: Path, **said: Any) -> MappedFolder:
    source = source_of(path, hs.Grid(), mapping=DataMap(**said))
    assert isinstance(source, MappedFolder)
    return source


def check(source: MappedFolder, values: Any = VALUES, channels: int = 1) -> None:
    """Every box is what numpy says, here and in another process."""
    assert source.shape == (channels, *SHAPE)
    box = Box((0, 1, 0, 3), (channels, 5, 4, 7))
    for one in (source, pickle.loads(pickle.dumps(source))):
        for sample in range(N):
            expected = np.reshape(values[sample], (channels, *SHAPE))[box.slices()]
            assert np.array_equal(one.read(sample, box), expected)
            assert np.array_equal(one.alone(sample).read(0, box), expected)


def write_groups(folder: Path, make: Callable[[Path], Any], suffix: str) -> None:
    for i in range(N):
        root = make(folder / f"sim_{i}{suffix}")
        root.create_group("grid").create_array("delta", data=VALUES[i])
        header = root.create_group("Header")
        header.attrs["Omega0"] = OMEGA[i]
        header.attrs["pair"] = [float(i), 1.0 - i]
        header.create_array("vector", data=np.array([i, 2.0 * i]))


@pytest.mark.parametrize("kind", ["hdf5", "zarr"])
def test_keys_of_arrays_and_attributes(tmp_path: Path, kind: str) -> None:
    if kind == "zarr":
        write_groups(tmp_path, lambda p: zarr.create_group(p, zarr_format=3), ".zarr")
    else:
        for i in range(N):
            with h5py.File(tmp_path / f"sim_{i}.hdf5", "w") as file:
                file["grid/delta"] = VALUES[i]
                file.create_group("Header").attrs["Omega0"] = OMEGA[i]
                file["Header"].attrs["pair"] = [float(i), 1.0 - i]
                file["Header/vector"] = [i, 2.0 * i]
    words = ("Header@Omega0", "Header@pair", "Header/vector")
    source = opened(tmp_path, volume="grid/delta", targets=words)
    check(source)
    assert source.parameters.names == ("Omega0", "pair_0", "pair_1", "vector_0", "vector_1")
    physical = [source.parameters.physical(source.target(i)) for i in range(N)]
    assert np.allclose(physical, [[OMEGA[i], i, 1 - i, i, 2 * i] for i in range(N)])
    assert source.target(0)[0] == pytest.approx(-1)
    with pytest.raises(DataError, match=r"has no 'grid/nabla'.*\n.*data\.keys\.volume"):
        opened(tmp_path, volume="grid/nabla", targets=words)
    with pytest.raises(DataError, match=r"'Header' has no attribute 'OmegaX'; it has Omega0, pair"):
        opened(tmp_path, volume="grid/delta", targets=("Header@OmegaX",))
    with pytest.raises(DataError, match=r"'grid' is a group, which has delta"):
        opened(tmp_path, volume="grid", targets=words)


def test_zips_of_arrays(tmp_path: Path) -> None:
    for i in range(N):
        np.savez(tmp_path / f"s{i}.npz", delta=VALUES[i], other=np.ones(3), om=OMEGA[i])
    check(opened(tmp_path, volume="delta", targets=("om",)))
    with pytest.raises(DataError, match=r"does not tell which array is the volume; it has delta"):
        opened(tmp_path, targets=("om",))
    np.savez_compressed(tmp_path / "s1.npz", delta=VALUES[1], om=1.0)
    with pytest.raises(DataError, match=r"s1.npz: 'delta' is compressed.*\n.*numpy.savez \(not"):
        opened(tmp_path, volume="delta", targets=("om",))


@pytest.mark.parametrize("stored", ["C", "F", "big", "double", "channels", "last", "hdf5"])
def test_many_volumes_in_one_array(tmp_path: Path, stored: str) -> None:
    table = tmp_path / "p.txt"
    table.write_text("".join(f"{omega}\n" for omega in OMEGA))
    values: Any = VALUES
    if stored == "channels":
        values = np.stack([VALUES, 2 * VALUES], 1)
    path = tmp_path / f"all.{'hdf5' if stored == 'hdf5' else 'npy'}"
    if stored == "hdf5":
        with h5py.File(path, "w") as file:
            file.create_dataset("fields/delta", data=values, chunks=(1, 5, 2, 7))
    else:
        written = {
            "F": np.asfortranarray(values),
            "big": values.astype(">f4"),
            "double": values.astype(np.float64),
            "last": np.stack([VALUES, 2 * VALUES], -1),
        }
        np.save(path, written.get(stored, values))
    options: Any = {"channels": {"channels": "first", "last": "last"}.get(stored)}
    said = DataMap(volume="fields/delta" if stored == "hdf5" else "", table=table)
    source = source_of(path, hs.Grid(), mapping=said, **options)
    assert isinstance(source, MappedFolder)
    assert source.dtype == np.float32
    channels = 2 if stored in ("channels", "last") else 1
    check(source, np.stack([VALUES, 2 * VALUES], 1) if channels == 2 else VALUES, channels)


def arrays(folder: Path) -> Path:
    for i in range(N):
        np.save(folder / f"v{i}.npy", VALUES[i])
    return folder


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("name,a,b\nv2,5,6\nv0.npy,1,2\nv1,3,4\n", ("a", "b")),
        ("file a b\nx/v2 5 6\nx/v0 1 2\nx/v1 3 4\n", ("a", "b")),
        ("# made by hand\n# a\tb\n1\t2\n3\t4\n5\t6\n", ("a", "b")),
        ("1 2\n3 4\n\n5 6\n", ("y0", "y1")),
        ("a;b\n1;2\n3;4\n5;6\n", ("a", "b")),
        ("id,a,b\n2,5,6\n0,1,2\n1,3,4\n", ("a", "b")),
        (",a,b\n0,1,2\n2,5,6\n1,3,4\n", ("a", "b")),  # as pandas writes it
        ("\ta\tb\n2\t5\t6\n0\t1\t2\n1\t3\t4\n", ("a", "b")),
        ("# id a b\n2.00e+00 5 6\n0.00e+00 1 2\n1.00e+00 3 4\n", ("a", "b")),  # numpy.savetxt
        ("# simulation of three universes\n1 2\n3 4\n5 6\n", ("y0", "y1")),
        ("# Realization a b\n02 5 6\n00 1 2\n01 3 4\n17 8 9\n", ("a", "b")),
    ],
)
def test_tables_by_name_and_by_row(tmp_path: Path, text: str, columns: tuple[str, ...]) -> None:
    table = arrays(tmp_path) / "table.csv"
    table.write_text(text)
    source = opened(tmp_path, table=Path("table.csv"))
    assert source.parameters.names == columns
    found = [source.parameters.physical(source.target(i)) for i in range(N)]
    assert np.allclose(found, [[1, 2], [3, 4], [5, 6]])
    check(source)


def test_a_table_of_numpy_with_names_and_ranges(tmp_path: Path) -> None:
    table = arrays(tmp_path) / "table.npy"
    np.save(table, [[1.0, 2], [3, 4], [5, 6]])
    source = opened(tmp_path, table=table, columns=("a", "b"), ranges={"b": (0.0, 8.0)})
    assert source.parameters.ranges == {"a": (1, 5), "b": (0, 8)}
    assert source.target(0) == pytest.approx([-1, -0.5])
    with pytest.raises(DataError, match=r"data.ranges has c, but the targets are a, b"):
        opened(tmp_path, table=table, columns=("a", "b"), ranges={"c": (0.0, 8.0)})
    with pytest.raises(DataError, match=r"data.columns names 1 targets \(a\) but there are 2"):
        opened(tmp_path, table=table, columns=("a",))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 2\n3 nan\n5 6\n", "line 2 holds [3.0, nan]; needs finite numbers"),
        ("1 2\n3\n5 6\n", "line 2 has 1 fields but line 1 has 2"),
        ("1 2\n3 4\n", "has rows 0 to 1, but sample 'v2' would have row 2"),
        ("name,a\nv0,1\nv1,2\nx,3\n", "has no row for sample 'v2'"),
        ("name,a\nv0,1\nv0,2\nv2,3\n", "has two rows for 'v0'"),
        ("name,a\nv0,1\nv1,b\nv2,3\n", "line 3: 'b' is not a number"),
        ("# nothing\n", "has no row of numbers"),
        ("\ud7ff\0\n", "table.txt"),
    ],
)
def test_bad_tables_are_named(tmp_path: Path, text: str, words: str) -> None:
    table = arrays(tmp_path) / "table.txt"
    table.write_text(text)
    with pytest.raises(DataError) as caught:
        opened(tmp_path, table=table)
    assert words in str(caught.value)
    assert str(table) in str(caught.value)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    bad = np.array([[Evil()]], object)
    np.save(tmp_path / "table.npy", bad, allow_pickle=True)
    with pytest.raises(DataError):
        read_target_table(tmp_path / "table.npy")
    np.save(arrays(tmp_path) / "v1.npy", bad, allow_pickle=True)
    (tmp_path / "p.txt").write_text("1\n2\n3\n")
    with pytest.raises(DataError, match=r"v1.npy"):
        opened(tmp_path, files="v*.npy", table=Path("p.txt"))
    np.savez(tmp_path / "s.npz", delta=VALUES[0], om=bad)
    with pytest.raises(DataError, match=r"s.npz"):
        opened(tmp_path, files="*.npz", volume="delta", targets=("om",))
    assert not (tmp_path / "evil").exists()


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["delta"] = VALUES[0]
        file.attrs["om"] = 1.0
    with h5py.File(folder / "a.hdf5", "w") as file:
        file["grid/delta"] = h5py.ExternalLink(str(tmp_path / "other.hdf5"), "delta")
        file["Header"] = h5py.ExternalLink(str(tmp_path / "other.hdf5"), "/")
        file["delta"] = VALUES[0]
    with pytest.raises(DataError, match=r"external link 'grid/delta' refers to .*not in the fold"):
        opened(folder, volume="grid/delta", targets=("Header@om",))
    with pytest.raises(DataError, match=r"external link 'Header' refers to .*not in the folder"):
        opened(folder, volume="delta", targets=("Header@om",))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, "has no targets\n    say where they are: data.table=params.txt"),
        ({"files": "x*"}, "holds no x*\n    data.files is a pattern"),
        ({"table": Path("no.txt")}, "data.table: there is no no.txt"),
        ({"volume": "a", "table": Path("p.txt")}, "is one array, without keys"),
        ({"targets": ("a",)}, "is one array, without keys: give its targets by data.table"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, said: dict[str, Any], words: str) -> None:
    (arrays(tmp_path) / "p.txt").write_text("1\n2\n3\n")
    with pytest.raises(DataError) as caught:
        opened(tmp_path, **said)
    assert words in str(caught.value)


def test_one_row_does_not_make_channels_of_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "all.npy", VALUES)
    table = tmp_path / "p.txt"
    table.write_text("1\n")
    with pytest.raises(DataError, match=r"all.npy: is <f4 \(3, 5, 6, 7\), but .*p.txt has 1 rows"):
        opened(tmp_path / "all.npy", table=table)
    said = DataMap(table=table)
    source = source_of(tmp_path / "all.npy", hs.Grid(), channels="first", mapping=said)
    assert source.shape == VALUES.shape


def test_channels_that_are_as_many_as_targets_are_no_samples(tmp_path: Path) -> None:
    for i in range(N):
        with h5py.File(tmp_path / f"sim_{i}.h5", "w") as file:
            file["delta"] = np.stack([VALUES[i], 2 * VALUES[i]])
            file["one hot"] = np.ones((2, *SHAPE), np.uint8)
            file.attrs["params"] = [OMEGA[i], 1.0 - i]
    said = DataMap(volume="delta", targets=("@params",))
    source = source_of(tmp_path, hs.Grid(), "first", mapping=said)
    assert (source.shape, len(source.names)) == ((2, *SHAPE), N)
    assert source.parameters.physical(source.target(1)) == pytest.approx([OMEGA[1], 0])
    said = DataMap(volume="delta", labels="one hot", classes=("a", "b"))
    with pytest.raises(DataError, match=r"the labels 'one hot' are .*u1 \(2, 5, 6, 7\); needs"):
        source_of(tmp_path, hs.Grid(), "first", mapping=said)


def test_a_damaged_zip_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", delta=VALUES[0], om=1.0)
    data = bytearray((tmp_path / "s.npz").read_bytes())
    data[:40] = b"x" * 40
    (tmp_path / "s.npz").write_bytes(data)
    with pytest.raises(DataError, match=r"s.npz: cannot be read as npz"):
        opened(tmp_path, volume="delta", targets=("om",))


def test_an_array_of_a_zip_ends_where_the_zip_says(tmp_path: Path) -> None:
    """A header that claims more would read what lies behind it."""
    np.savez(tmp_path / "s.npz", delta=VALUES[0], om=1.0, other=np.ones(1000))
    data = (tmp_path / "s.npz").read_bytes()
    assert data.count(b"(5, 6, 7)") == 1
    (tmp_path / "s.npz").write_bytes(data.replace(b"(5, 6, 7)", b"(6, 6, 7)"))
    with pytest.raises(DataError, match=r"s\.npz: 'delta' has \d+ bytes, which are no"):
        opened(tmp_path, files="*.npz", volume="delta", targets=("om",))


def test_types_and_shapes_that_are_no_volumes(tmp_path: Path) -> None:
    table = tmp_path / "p.txt"
    table.write_text("1\n")
    for bad, words in (
        (np.ones((2, 3)), r"needs \(D, H, W\).*\n.*volumes of depth 1"),
        (np.ones(SHAPE, "c8"), "complex"),
    ):
        np.save(tmp_path / "v.npy", bad)
        with pytest.raises(DataError, match=words):
            opened(tmp_path / "v.npy", table=table)


def test_labels_of_an_image_are_no_labels_of_a_volume(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["image"] = np.zeros((6, 5, 3), np.uint8)
        file["mask"] = np.zeros((6, 5), np.uint8)
    with pytest.raises(DataError, match=r"needs whole numbers \(6, 5, 3\).*\n.*of depth 1: \(C, 1"):
        opened(tmp_path, volume="image", labels="mask", classes=("a", "b"))


def test_a_dict_is_no_map(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mapping=\{'volume': 'x'\} is no DataMap; .*DataMap\(vol"):
        hs.open(tmp_path, hs.Grid(), batch_size=1, mapping={"volume": "x"})  # type: ignore[arg-type]


def table_of(folder: Path, text: str) -> TargetTable:
    (folder / "table.txt").write_text(text)
    return read_target_table(folder / "table.txt")


def test_a_first_row_with_a_slip_is_no_header(tmp_path: Path) -> None:
    """Else every sample would have the row of the one after it."""
    with pytest.raises(DataError, match=r"line 1: 'o\.9' is not a number"):
        table_of(tmp_path, "0.3 o.9\n0.2 0.8\n0.1 0.7\n")
    assert table_of(tmp_path, "a b\n0.2 0.8\n").columns == ("a", "b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Omega_m,sigma_8,\n0.2,0.8\n0.3,0.9\n", r"first line names .*'sigma_8', ''\], but a row"),
        ("Omega_m\n0.2,0.8\n0.3,0.9\n", "first line names"),
        ("a,a\n0.2,0.8\n0.3,0.9\n", r"\['a', 'a'\], but .*\n.*data.columns"),
        ("a;b\n0,2;0,8\n0,3;0,9\n", "line 2: '0,8' is not a number"),
        ("a\tb\n0,2\t0,8\n0,3\t0,9\n", "line 2: '0,8' is not a number"),
        ("a,b\n0.2,0.8\n,0.9\n0.2,0.7\n", "line 3 has an empty first field"),
    ],
)
def test_slips_of_a_table_are_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        table_of(tmp_path, text)


def test_a_comment_need_not_name_columns(tmp_path: Path) -> None:
    assert table_of(tmp_path, "# Omega_m, sigma_8, no units\n0.2 0.8\n").columns == ()
    assert table_of(tmp_path, "# a, b\n0.2;0.8\n").columns == ("a", "b")
    assert table_of(tmp_path, "a,\tb\n0.2,\t0.8\n").columns == ("a", "b")


def test_rows_of_other_folders_are_not_taken(tmp_path: Path) -> None:
    table = table_of(tmp_path, "name y\nrun2/a 1\nrun2/b 2\nc.npy 3\n")
    assert rows_of_samples(table, ["run2/b", "deep/run2/a", "deep/c"]) == [1, 0, 2]
    assert rows_of_samples(table, ["b"]) == [1]
    with pytest.raises(DataError, match="has no row for sample 'run1/a'"):
        rows_of_samples(table, ["run1/a"])
    with pytest.raises(DataError, match="two rows for one sample"):
        rows_of_samples(table_of(tmp_path, "a 1\na.npy 2\n"), ["a"])


def test_rows_of_one_array_have_the_numbers_that_are_their_names(tmp_path: Path) -> None:
    np.save(tmp_path / "all.npy", VALUES)
    table = tmp_path / "table.csv"

    def found(text: str) -> list[float]:
        table.write_text(text)
        source = opened(tmp_path / "all.npy", table=table)
        return [source.parameters.physical(source.target(i))[0] for i in range(N)]

    for text in (
        "a\n1\n2\n3\n",
        "sample,a\n2,3\n0,1\n1,2\n",
        ",a\n2,2\n1,1\n3,3\n",
        "id a\n3.0 3\n1.0 1\n2.0 2\n",
    ):
        assert found(text) == pytest.approx([1, 2, 3])
    with pytest.raises(DataError, match=r"names its rows 4 to 9, .*\n.*number the rows so"):
        found("id,a\n4,1\n9,2\n5,3\n")
    with pytest.raises(DataError, match="two rows of one number"):
        found("id,a\n0,1\n1,2\n01,3\n")


def test_of_one_file_with_several_numbers_no_row_is_guessed(tmp_path: Path) -> None:
    table = table_of(tmp_path, "1\n" * 200)
    assert rows_of_samples(table, ["simulation_7"]) == [7]
    with pytest.raises(DataError, match="is not clear"):
        rows_of_samples(table, ["7/df_m_128_z=0"])


def test_headers_are_parsed_by_several_threads(tmp_path: Path) -> None:
    """Python 3.11's parser of literals fails if a collection switches threads amid it."""
    paths = [tmp_path / f"{extent}.npy" for extent in range(1, 101)]
    for extent, path in enumerate(paths, 1):
        np.save(path, np.zeros((extent, 2), np.float32))

    def shapes(_: int) -> list[tuple[int, ...]]:
        found = []
        for path in paths:
            with path.open("rb", buffering=0) as file:
                found.append(array_header(file, path)[0].shape)
        return found

    def switch(_: str, __: dict[str, int]) -> None:
        time.sleep(0)

    threshold = gc.get_threshold()
    gc.callbacks.append(switch)
    gc.set_threshold(5)
    try:
        with ThreadPoolExecutor(4) as threads:
            every = list(threads.map(shapes, range(8)))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(switch)
    assert every == [[(extent, 2) for extent in range(1, 101)]] * 8
