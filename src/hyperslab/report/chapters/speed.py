"""The chapter on speed: throughput, memory and waiting for data."""

from __future__ import annotations

import numpy as np

from hyperslab.report.figures import timeline
from hyperslab.report.page.blocks import Chapter, Figures, Paragraph
from hyperslab.report.run_folder import Run


def speed(run: Run) -> Chapter:
    """Throughput, memory and waiting, by step."""
    if not run.steps:
        nothing = Paragraph("No step is done yet, so nothing has been measured.")
        return Chapter("speed", "Speed and memory", [nothing])
    pictures = [timeline.throughput(run.steps)]
    if np.isfinite(run.steps.get("memory_bytes", np.array([]))).any():
        pictures.append(timeline.memory(run.steps))
    if np.isfinite(run.steps.get("flops_per_second", np.array([]))).any():
        pictures.append(timeline.arithmetic(run.steps))
    pictures.append(timeline.waiting(run.steps))
    return Chapter("speed", "Speed and memory", [Figures(pictures, "medium")])
