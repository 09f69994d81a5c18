"""The top of the page: which run this is, and its most important numbers."""

from __future__ import annotations

import numpy as np

from hyperslab.report.chapters.learnt import learnt, ratios_of
from hyperslab.report.chapters.segmentation import dice_of
from hyperslab.report.figures import timeline
from hyperslab.report.number_format import counted, duration, label, number, size, times
from hyperslab.report.page.blocks import Tile
from hyperslab.report.run_folder import Run

Fact = tuple[str, str]
SETTINGS = {
    "model": "model.name",
    "variant": "model.variant",
    "channels": "model.channels",
    "levels": "model.levels",
    "batch norm": "model.batch_norm",
    "loss": "loss",
    "batch size": "data.batch_size",
    "optimizer": "optimizer.name",
    "learning rate": "optimizer.learning_rate",
    "precision": "precision",
    "device": "device",
    "seed": "seed",
}
CALLED = {"model.name": "model", "optimizer.name": "optimizer", "loss": "loss"}
"""Settings that may be targets, by the section that says so."""


def lede(run: Run) -> str:
    """The run in one sentence."""
    grid = times(f"{axis} {n}" for axis, n in run.grid.items() if n > 1)
    ranks = int(np.prod(list(run.grid.values()) or [1]))
    parts = [
        " ".join(str(k) for k in (run.called("model"), run.setting("model.variant")) if k),
        f"{ranks} ranks: {grid}" if ranks > 1 else "one rank",
        counted(len(run.epochs.get("epoch", ())), "epoch"),
    ]
    return " · ".join(part for part in parts if part)


def key_numbers(run: Run) -> list[Tile]:
    """The numbers one looks for first; those that are not there yet are left out."""
    return [Tile(*words) for words in (*_learnt(run), *_measured(run))]


def facts_of(run: Run) -> list[Fact]:
    """Everything that says where the numbers come from."""
    found = [
        (what, run.called(CALLED[key]) if key in CALLED else run.setting(key))
        for what, key in SETTINGS.items()
    ]
    found.insert(list(SETTINGS).index("loss") + 1, ("data", run.data))
    found += [("grid", times(f"{axis} {n}" for axis, n in run.grid.items()))]
    if run.started is not None:
        found.append(("training started", f"{run.started:%Y-%m-%d %H:%M} UTC"))
    if run.epochs:
        found.append(("training took", duration(float(np.nansum(run.epochs["seconds"])))))
    found += _evaluated(run)
    return [(what, _words(value)) for what, value in found if value is not None]


def _words(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _evaluated(run: Run) -> list[tuple[str, object]]:
    of = run.evaluation
    weights = of.get("weights")
    seconds = of.get("seconds")
    versions = of.get("versions")
    named = versions.items() if isinstance(versions, dict) else ()
    return [
        ("weights", f"{weights:,}" if isinstance(weights, int) else None),
        ("evaluated", str(of["date"])[:16].replace("T", " ") + " UTC" if "date" in of else None),
        ("evaluation took", duration(seconds) if isinstance(seconds, float) else None),
        ("evaluated on", of.get("device")),
        ("versions", ", ".join(f"{k} {v}" for k, v in named) or None),
    ]


def _learnt(run: Run) -> list[tuple[str, str, str]]:
    found = [
        (f"Dice: {name}", number(dice), "of the test voxels") for name, dice in dice_of(run.scores)
    ]
    if ratios := ratios_of(run):
        names = learnt(ratios)
        which = ", ".join(map(label, names)) or "none"
        remark = f"{which}: less error than the mean, 95 %"
        found.append(("Learnt", f"{len(names)} of {len(ratios)}", remark))
    loss = run.epochs.get("validation_loss", np.array([]))
    if np.isfinite(loss).any():
        at = int(np.nanargmin(loss))
        found.append(
            ("Best validation loss", number(loss[at]), f"epoch {run.epochs['epoch'][at] + 1:.0f}")
        )
    return found


def _measured(run: Run) -> list[tuple[str, str, str]]:
    if not run.steps:
        return []
    rate = float(np.nanmedian(run.steps["samples_per_second"]))
    found = [("Throughput", number(rate), "samples/s, median")]
    memory = run.steps.get("memory_bytes", np.array([]))
    if np.isfinite(memory).any():
        found.append(("Peak memory", size(float(np.nanmax(memory))), "of any one rank"))
    waited = number(100 * timeline.waiting_share(run.steps))
    found.append(("Waiting for data", f"{waited} %", "of all step time"))
    if run.epochs:
        total = float(np.nansum(run.epochs["seconds"]))
        found.append(("Training time", duration(total), counted(len(run.epochs["epoch"]), "epoch")))
    return found
