"""Data sets of scans in the published layouts, written by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray

SPACING = (0.9, 1.2, 2.5)
"""Along x, y and z [mm]."""

SHAPES = ((9, 8, 10), (7, 11, 8), (9, 8, 10), (12, 9, 8))
"""(D, H, W) of the scans of `decathlon`."""

CLASSES = ("background", "edema", "tumour")

Case = tuple[NDArray[Any], NDArray[Any]]


def case(seed: int, shape: Sequence[int], channels: int = 1) -> Case:
    """Values (C, D, H, W), brighter where labels (D, H, W) are."""
    rng = np.random.default_rng(seed)
    labels = np.zeros(shape, np.uint8)
    depth, height, width = shape
    labels[1 : depth // 2 + 1, 1 : height - 1, 2 : width - 2] = 1
    labels[2 : depth // 2, 2 : height // 2, 3 : width // 2] = 2
    values = rng.integers(-50, 50, (channels, *shape)) + 150 * labels
    return values.astype(np.int16), labels


def save(path: Path, values: NDArray[Any], spacing: Sequence[float] = SPACING) -> None:
    """Values (D, H, W) or (C, D, H, W), the channels along the fourth dim."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ras = values.T if values.ndim == 3 else values.transpose(3, 2, 1, 0)
    nibabel.save(nibabel.Nifti1Image(ras, np.diag([*spacing, 1.0])), path)


def decathlon(
    folder: Path,
    shapes: Sequence[Sequence[int]] = SHAPES,
    channels: int = 1,
    **change: Any,
) -> list[Case]:
    """As the Medical Segmentation Decathlon's Task01: 4-D where there are several channels."""
    cases = [case(seed, shape, channels) for seed, shape in enumerate(shapes)]
    training = []
    for number, (values, labels) in enumerate(cases):
        image, label = (f"{part}/BRATS_{number:03}.nii.gz" for part in ("imagesTr", "labelsTr"))
        save(folder / image, values if channels > 1 else values[0])
        save(folder / label, labels)
        training.append({"image": f"./{image}", "label": f"./{label}"})
    content = {
        "name": "BRATS",
        "tensorImageSize": "4D" if channels > 1 else "3D",
        "modality": {str(c): name for c, name in enumerate(("FLAIR", "T1w", "t1gd")[:channels])},
        "labels": {str(number): name for number, name in enumerate(CLASSES)},
        "numTraining": len(training),
        "numTest": 1,
        "training": training,
        "test": ["./imagesTs/BRATS_485.nii.gz"],
    } | change
    (folder / "dataset.json").write_text(json.dumps(content))
    return cases


def nnunet(folder: Path, shapes: Sequence[Sequence[int]] = SHAPES, channels: int = 2) -> list[Case]:
    """As nnU-Net v2's Dataset001: a file for each channel."""
    cases = [case(seed, shape, channels) for seed, shape in enumerate(shapes)]
    for number, (values, labels) in enumerate(cases):
        for channel, part in enumerate(values):
            save(folder / f"imagesTr/case_{number:03}_{channel:04}.nii.gz", part)
        save(folder / f"labelsTr/case_{number:03}.nii.gz", labels)
    content = {
        "channel_names": {"0": "T1", "1": "T2"} if channels == 2 else {"0": "CT"},
        "labels": {name: number for number, name in enumerate(CLASSES)},
        "numTraining": len(cases),
        "file_ending": ".nii.gz",
    }
    (folder / "dataset.json").write_text(json.dumps(content))
    return cases


def listed(folder: Path, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Case]:
    """A CSV file with a split for each scan."""
    cases = [case(seed, shape) for seed, shape in enumerate(shapes)]
    rows = ["# classes: background, edema, tumour", "image,label,split"]
    splits = ["train"] * (len(cases) - 2) + ["validation", "test"]
    for number, ((values, labels), split) in enumerate(zip(cases, splits, strict=True)):
        save(folder / f"p{number}/ct.nii", values[0])
        save(folder / f"p{number}/mask.nii", labels)
        rows.append(f"p{number}/ct.nii,p{number}/mask.nii,{split}")
    (folder / "scans.csv").write_text("\n".join(rows) + "\n")
    return cases
