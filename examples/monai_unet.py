"""A 3D U-Net of MONAI on whole scans that a dataset.json lists, in a plain loop of torch.

    python examples/monai_unet_serial.py FOLDER
    torchrun --nproc-per-node 2 --local-ranks-filter 0 examples/monai_unet.py FOLDER --depth 2

The first is MONAI and torch alone; in the second every scan is cut over the ranks, in training and
in each window of the inference. They differ by five lines. See docs/medical.md.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import hyperslab as hs
import torch
from monai.data import DataLoader, Dataset, load_decathlon_datalist
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.networks.utils import one_hot
from monai.transforms import (
    Compose,
    DivisiblePadd,
    EnsureChannelFirstd,
    EnsureTyped,
    LoadImaged,
    Orientationd,
    RandFlipd,
    ScaleIntensityRanged,
)
from monai.utils import set_determinism

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, help="of a dataset.json of the Decathlon's kind")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--depth", type=int, default=1, help="ranks along the first axis of a scan")
arguments = parser.parse_args()

set_determinism(0)
keys = ["image", "label"]
load = [
    LoadImaged(keys),
    EnsureChannelFirstd(keys),
    Orientationd(keys, axcodes="RAS", labels=None),
    ScaleIntensityRanged("image", -100, 250, 0, 1, clip=True),
]
finish = [DivisiblePadd(keys, k=8), EnsureTyped(keys, track_meta=False)]
flips = [RandFlipd(keys, prob=0.5, spatial_axis=axis) for axis in range(3)]

path = arguments.folder / "dataset.json"
classes = len(json.loads(path.read_text())["labels"])
scans = load_decathlon_datalist(path, data_list_key="training")
held_out = max(1, len(scans) // 4)
training = DataLoader(Dataset(scans[held_out:], Compose([*load, *flips, *finish])), shuffle=True)
testing = DataLoader(Dataset(scans[:held_out], Compose([*load, *finish])))

model = UNet(3, 1, classes, channels=(8, 16, 32, 64), strides=(2, 2, 2), num_res_units=2)
model = hs.parallelize(model, grid := hs.Grid(depth=arguments.depth))
criterion = DiceCELoss(to_onehot_y=True, softmax=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for epoch in range(1, arguments.epochs + 1):
    model.train()
    losses = []
    for batch in training:  # one whole scan, each of a shape of its own
        x, y = hs.shard(batch["image"], grid), hs.shard(batch["label"], grid)
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"epoch {epoch}: loss {sum(losses) / len(losses):.6f}", flush=True)

model.eval()
dice = DiceMetric(include_background=False)
slide = partial(
    sliding_window_inference, roi_size=(32, 32, 32), sw_batch_size=1, overlap=0.5, mode="gaussian"
)
with torch.no_grad():
    for batch in testing:
        x, y = batch["image"], batch["label"]
        scores = slide(x, predictor=lambda part: model(hs.shard(part, grid)).full())
        found = one_hot(scores.argmax(1, keepdim=True), classes)
        dice(found, one_hot(y, classes))
print(f"mean Dice of {held_out} scans: {dice.aggregate().item():.4f}", flush=True)
