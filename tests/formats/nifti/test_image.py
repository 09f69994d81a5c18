"""NIfTI files of every orientation, damaged ones and odd ones (tier: no process)."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperslab.errors import DataError, HyperslabError
from hyperslab.formats.convert.scans import read_scan
from hyperslab.formats.nifti import image as nifti
from hyperslab.formats.nifti import resample
from hyperslab.formats.nifti.source import Pair
from hyperslab.formats.storage_order import StorageOrder
from hyperslab.geometry import Box
from tests.formats.convert.scans import (
    ORIENTATIONS,
    SPACING,
    affine_of,
    classes,
    nib,
    numbers,
    write,
)

XYZ = (6, 5, 4)


def whole(path: Path) -> Any:
    (values,) = nifti.open_nifti(path).read()
    return values


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_every_orientation_is_the_same_volume(tmp_path: Path, orientation: str) -> None:
    xyz = numbers(XYZ)
    path = write(tmp_path / "v.nii", xyz, orientation)
    values = whole(path)
    np.testing.assert_array_equal(values, xyz.transpose(2, 1, 0))
    assert values.dtype == np.int16
    affine = nifti.open_nifti(path).affine
    np.testing.assert_allclose(affine, affine_of()[:, [2, 1, 0, 3]], atol=1e-4)
    np.testing.assert_allclose(resample.spacing(affine), SPACING[::-1], rtol=1e-6)
    canonical = nib.as_closest_canonical(nib.load(path))
    np.testing.assert_array_equal(values, canonical.get_fdata().transpose(2, 1, 0))


@pytest.mark.parametrize("orientation", ORIENTATIONS[::5])
@pytest.mark.parametrize("suffix", nifti.NIFTI_SUFFIXES)
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
def test_a_mask_goes_back_to_the_very_same_voxels(
    tmp_path: Path, orientation: str, suffix: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = {"cal_max": 400, "descrip": b"scan 7", "sform_code": 1, "qform_code": 2}
    path = write(tmp_path / f"v{suffix}", numbers(XYZ), orientation, kind=kind, **change)
    like = nifti.open_nifti(path)
    mask = (whole(path) > 100).astype(np.uint8)
    out = tmp_path / f"mask{suffix}"
    monkeypatch.setattr(nifti, "MASK_BLOCK", 35)  # one layer or two at a time
    nifti.write_mask(out, lambda box: mask[box.slices()], like)
    scan, image = nib.load(path), nib.load(out)
    np.testing.assert_array_equal(np.asarray(image.dataobj), scan.get_fdata() > 100)
    assert image.get_data_dtype() == np.uint8
    assert type(image) is kind
    np.testing.assert_array_equal(image.affine, scan.affine)
    for key in scan.header:
        if key not in ("datatype", "bitpix", "scl_slope", "scl_inter", "cal_max", "vox_offset"):
            assert image.header[key].tobytes() == scan.header[key].tobytes(), key
    assert image.header["cal_max"] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, out.name])


@pytest.mark.parametrize("suffix", nifti.NIFTI_SUFFIXES)
@pytest.mark.parametrize("affine", [None, np.diag([2.0, 3.0, 4.0, 1.0])])
def test_layers_make_the_file_that_the_library_writes(
    tmp_path: Path, suffix: str, affine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = classes(XYZ).astype(np.uint8)
    nifti.save_image(tmp_path / f"a{suffix}", mask, np.dtype(np.uint8), affine, None)
    monkeypatch.setattr(nifti, "MASK_BLOCK", 35)
    dhw = mask.transpose(2, 1, 0)
    path = tmp_path / f"b{suffix}"
    order = StorageOrder("WHD")
    nifti.write_layers(path, lambda box: dhw[box.slices()], dhw.shape, order, affine, None)
    assert path.read_bytes() == (tmp_path / f"a{suffix}").read_bytes()


@pytest.mark.parametrize("extents", [(1,), (1, 1), (1, 3), (1, 3, 1), (3, 1)])
@pytest.mark.parametrize("suffix", nifti.NIFTI_SUFFIXES)
def test_dims_of_one_do_not_count(tmp_path: Path, suffix: str, extents: tuple[int, ...]) -> None:
    """ITK writes channels along the fifth dim, as components of vectors."""
    raw = np.random.default_rng(0).integers(0, 200, (*XYZ, *extents)).astype("int16")
    path = write(tmp_path / f"v{suffix}", raw, "LAS", intent_code=1007)
    file = nifti.open_nifti(path)
    channels = raw.reshape(*XYZ, -1).transpose(3, 2, 1, 0)
    assert file.shape == channels.shape
    np.testing.assert_array_equal(file.read(), channels)
    box = Box((0, 1, 0, 2), (len(channels), 3, 5, 4))
    np.testing.assert_array_equal(file.read(box), channels[box.slices()])
    nifti.write_mask(tmp_path / f"m{suffix}", lambda box: channels[0][box.slices()] > 99, file)
    image = nib.load(tmp_path / f"m{suffix}")
    assert image.shape == XYZ
    stored = nib.load(path).get_fdata().reshape(*XYZ, -1)
    np.testing.assert_array_equal(image.get_fdata(), stored[..., 0] > 99)
    np.testing.assert_array_equal(image.affine, nib.load(path).affine)
    assert (image.header["intent_code"] == 0) == (len(raw.shape) > 4)


@pytest.mark.parametrize("dtype", ["int16", "uint8", "uint16", "int32", "float32", "float64"])
def test_slope_and_intercept(tmp_path: Path, dtype: str) -> None:
    raw = np.random.default_rng(0).integers(0, 200, XYZ).astype(dtype)
    path = write(tmp_path / "a.nii", raw)
    expected = raw.transpose(2, 1, 0)
    assert whole(path).dtype == (np.int16 if dtype in ("int16", "uint8") else "f4")
    np.testing.assert_array_equal(whole(path), expected)
    patched(path, 112, np.array([0.5, -1024], "<f4").tobytes())
    np.testing.assert_array_equal(whole(path), expected * 0.5 - 1024)


def test_voxels_at_an_odd_place_are_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """nibabel has a line for each read of such a file."""
    raw = np.random.default_rng(0).integers(0, 200, XYZ).astype("int16")
    path = write(tmp_path / "a.nii", raw)
    data = path.read_bytes()
    path.write_bytes(
        data[:108] + np.array(353, "<f4").tobytes() + data[112:352] + b"\0" + data[352:]
    )
    np.testing.assert_array_equal(whole(path), raw.transpose(2, 1, 0))
    assert not caplog.records


@pytest.mark.parametrize("dtype", ["int16", "uint16", "int32", "float32", "float64"])
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_boxes_of_a_scaled_scan_are_those_of_the_whole_to_the_bit(
    tmp_path: Path, dtype: str, suffix: str
) -> None:
    raw = np.random.default_rng(0).integers(0, 30_000, (20, 18, 16)).astype(dtype)
    path = patched(
        write(tmp_path / "v.nii", raw), 112, np.array([0.1234567, -1023.4567], "<f4").tobytes()
    )
    if suffix == ".nii.gz":
        path = put(tmp_path / "v.nii.gz", gzip.compress(path.read_bytes()))
    file = nifti.open_nifti(path)
    expected = whole(path)
    assert file.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(file.image.dataobj, "f4").T, expected)
    for box in (Box((0, 0, 0, 0), (1, 16, 18, 20)), Box((0, 3, 2, 1), (1, 9, 18, 4))):
        np.testing.assert_array_equal(file.read(box)[0], expected[box.slices()[1:]])


def test_big_endian(tmp_path: Path) -> None:
    header = nib.Nifti1Header(endianness=">")
    header.set_data_dtype(">i2")
    xyz = numbers(XYZ)
    nib.Nifti1Image(xyz, affine_of(), header).to_filename(tmp_path / "v.nii")
    values = whole(tmp_path / "v.nii")
    assert values.dtype.isnative
    np.testing.assert_array_equal(values, xyz.transpose(2, 1, 0))


def cut(path: Path, suffix: str) -> Path:
    path = write(path.with_name(f"bad{suffix}"), numbers((20, 20, 20)))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def patched(path: Path, start: int, data: bytes) -> Path:
    """Other bytes in the header, which the library would put right if it wrote them."""
    old = path.read_bytes()
    return put(path, old[:start] + data + old[start + len(data) :])


def spoilt(path: Path, value: float) -> Path:
    xyz = numbers(XYZ).astype("f4")
    xyz[3, 2, 1] = value
    return write(path, xyz)


def degenerate(path: Path, column: Any) -> Path:
    """An affine whose first column is this."""
    write(path, numbers(XYZ), sform_code=1, qform_code=0)
    for row, number in enumerate(column):
        patched(path, 280 + 16 * row, np.float32(number).tobytes())
    return path


def analyze(path: Path) -> Path:
    nib.Spm99AnalyzeImage(numbers(XYZ), affine_of()).to_filename(path.with_suffix(".img"))
    return path.with_suffix(".img")


BAD: dict[str, tuple[Any, str]] = {
    "truncated": (lambda p: cut(p, ".nii"), "truncated or of another format"),
    "truncated gzip": (lambda p: cut(p, ".nii.gz"), "truncated or of another format"),
    "gzip of nothing": (
        lambda p: put(p.with_name("bad.nii.gz"), gzip.compress(b"")),
        "another format",
    ),
    "foreign": (lambda p: put(p, b"not an image" * 100), "another format"),
    "no bytes": (lambda p: put(p, b""), "another format"),
    "missing": (lambda p: p, "cannot be read"),
    "analyze": (analyze, "is not a NIfTI file but a Spm2AnalyzeImage"),
    "5-D": (lambda p: write(p, numbers((*XYZ, 2, 2))), "is 5-D, 6 x 5 x 4 x 2 x 2; needs one"),
    "2-D": (lambda p: write(p, numbers((6, 5))), "is 2-D, 6 x 5"),
    "no slices": (lambda p: write(p, numbers((6, 5, 0))), r"is empty: 6 x 5 x 0 voxels"),
    "all zero": (lambda p: write(p, np.zeros(XYZ, "i2")), "is empty: every voxel is 0"),
    "constant": (lambda p: write(p, np.full(XYZ, -1024, "i2")), "every voxel is -1024"),
    "NaN": (lambda p: spoilt(p, np.nan), "NaN or infinite"),
    "infinite": (lambda p: spoilt(p, -np.inf), "NaN or infinite"),
    "colours": (
        lambda p: write(p, np.zeros(XYZ, [("R", "u1"), ("G", "u1"), ("B", "u1")])),
        "needs numbers",
    ),
    "no orientation": (
        lambda p: patched(write(p, numbers(XYZ)), 252, bytes(4)),
        "does not say where left is",
    ),
    "oblique": (
        lambda p: write(p, numbers(XYZ), affine=affine_of(tilt=40)),
        "more than 35 degrees from the patient's",
    ),
    "flat": (lambda p: degenerate(p, (0, 0, 0)), "has no inverse"),
    "two axes alike": (lambda p: degenerate(p, (0, 0.8, 0)), "more than 35 degrees"),
    "affine of NaN": (lambda p: degenerate(p, (np.nan, 0, 0)), "has no inverse"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_named(tmp_path: Path, kind: str) -> None:
    make, message = BAD[kind]
    path = make(tmp_path / "bad.nii")
    with pytest.raises(DataError, match=f"(?s)^{path}: .*{message}"):
        read_scan(Pair("bad", path, path), 3)


def test_an_oblique_scan_stays_oblique(tmp_path: Path) -> None:
    xyz = numbers(XYZ)
    affine = affine_of(tilt=30)
    file = nifti.open_nifti(write(tmp_path / "v.nii", xyz, "LPS", affine=affine))
    np.testing.assert_array_equal(file.read()[0], xyz.transpose(2, 1, 0))
    np.testing.assert_allclose(file.affine, affine[:, [2, 1, 0, 3]], atol=1e-4)
    np.testing.assert_allclose(resample.spacing(file.affine), SPACING[::-1], rtol=1e-6)


LABELS: dict[str, tuple[Any, str]] = {
    "shape": (
        lambda p: write(p, classes((6, 5, 3))),
        r"has \(3, 5, 6\) voxels .* v.nii has \(4, 5, 6\)",
    ),
    "place": (
        lambda p: write(p, classes(XYZ), affine=affine_of((0.7, 0.8, 3.0))),
        r"affine is off by 0\.6 voxels from v.nii's",
    ),
    "mirrored": (
        lambda p: write(p, classes(XYZ), affine=affine_of() * [[-1], [1], [1], [1]]),
        "affine is off by",
    ),
    "two channels": (lambda p: write(p, classes((*XYZ, 2))), "has 2 channels; needs one label"),
    "four classes": (lambda p: write(p, classes(XYZ) + np.uint8(1)), "labels 1 to 3; needs 0 to 2"),
    "negative": (lambda p: write(p, classes(XYZ).astype("i2") - 1), "holds labels -1 to 1"),
    "fractions": (lambda p: write(p, classes(XYZ) * np.float32(0.5)), "not whole numbers"),
    "NaN": (lambda p: spoilt(p, np.nan), "not whole numbers"),
    "missing": (lambda p: p, "cannot be read"),
}


@pytest.mark.parametrize(
    ("unit", "millimetre"), [("unknown", 1), ("mm", 1), ("meter", 1e-3), ("micron", 1e3)]
)
def test_the_unit_of_a_scan(tmp_path: Path, unit: str, millimetre: float) -> None:
    affine = np.diag([2 * millimetre, 3 * millimetre, 5 * millimetre, 1])
    scan = nib.Nifti1Image(numbers((4, 3, 2)), affine)
    scan.header.set_xyzt_units(unit)
    nib.save(scan, tmp_path / "ct.nii")
    affine = nifti.open_nifti(tmp_path / "ct.nii").affine
    assert resample.spacing(affine) == pytest.approx((5, 3, 2))
    write(tmp_path / "mm.nii", numbers((4, 3, 2)), affine=np.diag([2.0, 3, 5, 1]))
    np.testing.assert_allclose(affine, nifti.open_nifti(tmp_path / "mm.nii").affine)


@pytest.mark.parametrize("kind", LABELS)
def test_labels_that_do_not_fit_are_named(tmp_path: Path, kind: str) -> None:
    volume = write(tmp_path / "v.nii", numbers(XYZ))
    make, message = LABELS[kind]
    path = make(tmp_path / "s.nii")
    with pytest.raises(DataError, match=f"^{path}: .*{message}"):
        read_scan(Pair("v", volume, path), 3)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64", ">f4"])
def test_labels_may_be_stored_otherwise(tmp_path: Path, dtype: str) -> None:
    volume = write(tmp_path / "v.nii", numbers(XYZ), "LPS")
    affine = affine_of()
    affine[0, 3] += 0.3 * SPACING[0]  # the headers of a pair are not always rounded alike
    path = write(tmp_path / "s.nii.gz", classes(XYZ).astype(dtype), "PIR", affine=affine)
    _, _, got = read_scan(Pair("v", volume, path), 3)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, classes(XYZ).transpose(2, 1, 0))


def test_labels_may_have_a_fourth_dim_of_one(tmp_path: Path) -> None:
    volume = write(tmp_path / "v.nii", numbers(XYZ), "LPS")
    path = write(tmp_path / "s.nii.gz", classes((*XYZ, 1)), "PIR")
    _, _, found = read_scan(Pair("v", volume, path), 3)
    np.testing.assert_array_equal(found, classes((*XYZ, 1))[..., 0].transpose(2, 1, 0))


def test_channels_of_several_files_lie_at_one_place(tmp_path: Path) -> None:
    first = write(tmp_path / "s_0000.nii", numbers(XYZ), "LPS")
    turned = write(tmp_path / "s_0001.nii", numbers(XYZ, 1), "PIR")
    labels = write(tmp_path / "s.nii", classes(XYZ))
    _, both, _ = read_scan(Pair("s", first, labels, channels=(turned,)), 3)
    np.testing.assert_array_equal(both[1], numbers(XYZ, 1).transpose(2, 1, 0))
    for place in (affine_of((0.7, 0.8, 3.0)), affine_of() + np.eye(4, k=3) * 5):
        other = write(tmp_path / "s_0002.nii", numbers(XYZ, 1), affine=place)
        with pytest.raises(DataError, match=f"^{other}: its affine is off by .* from s_0000.nii's"):
            read_scan(Pair("s", first, labels, channels=(other,)), 3)


def test_a_mask_that_cannot_be_written(tmp_path: Path) -> None:
    like = nifti.open_nifti(write(tmp_path / "v.nii", numbers(XYZ)))

    def mask(box: Box) -> Any:
        return np.zeros(box.shape, np.uint8)

    with pytest.raises(DataError, match=r"mask.mgz: the name of a NIfTI file ends in \.nii or"):
        nifti.write_mask(tmp_path / "mask.mgz", mask, like)
    with pytest.raises(DataError, match=r"cannot write .*mask\.nii"):
        nifti.write_mask(tmp_path / "nowhere/mask.nii", mask, like)
    assert [p.name for p in tmp_path.iterdir()] == ["v.nii"]


def test_without_the_extra_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(HyperslabError, match=r'pip install "nibabel.*"'):
        nifti.open_nifti(tmp_path / "v.nii")
