"""The figures that show how fast a run was: throughput, memory, waiting for data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hyperslab.report.figures.learning import evenly, running_median, whole_numbers
from hyperslab.report.figures.svg import FIRST, MUTED, SECOND, THIRD, Canvas, Picture
from hyperslab.report.number_format import number, scale_of, size
from hyperslab.report.run_folder import Table

FLOPS = ((1e15, "Pflop"), (1e12, "Tflop"), (1e9, "Gflop"), (1e6, "Mflop"), (1.0, "flop"))


def throughput(steps: Table) -> Picture:
    """Samples per second of each step, over all ranks together."""
    rate = steps["samples_per_second"]
    median = float(np.nanmedian(rate))
    canvas = _over_steps("throughput", steps["step"], rate, color=FIRST)
    canvas.axes.axhline(median, color=MUTED, linewidth=1, linestyle="--")
    canvas.axes.set(ylabel="samples / s")
    pace = float(np.nanmedian(steps["step_seconds"]))
    return canvas.picture(
        title="Throughput",
        alt=f"Samples per second over {len(rate)} steps; the median is {number(median)}.",
        caption=f"All ranks together; median {number(median)} samples/s (dashed), "
        f"{number(pace)} s a step.",
    )


def arithmetic(steps: Table) -> Picture:
    """Floating-point operations per second of each step, over all ranks together."""
    rate = steps["flops_per_second"]
    median = float(np.nanmedian(rate))
    scale, unit = next((s, u) for s, u in FLOPS if median >= s or s == 1)
    canvas = _over_steps("flops", steps["step"], rate / scale, color=THIRD)
    canvas.axes.set(ylabel=f"{unit}/s")
    shares = steps.get("peak_share", np.array([]))
    known = np.isfinite(shares).any()
    of_peak = f", {number(100 * float(np.nanmedian(shares)))} % of the peak" if known else ""
    words = f"median {number(median / scale)} {unit}/s{of_peak}"
    return canvas.picture(
        title="Arithmetic",
        alt=f"Floating-point operations per second over {len(rate)} steps; {words}.",
        caption=f"Convolutions and products of matrices, all ranks together; {words}.",
    )


def memory(steps: Table) -> Picture:
    """The most memory that any rank has held, up to each step."""
    used = steps["memory_bytes"]
    peak = float(np.nanmax(used))
    scale, unit = scale_of(peak)
    canvas = _over_steps("memory", steps["step"], used / scale, color=THIRD)
    canvas.axes.set(ylabel=f"memory [{unit}]")
    return canvas.picture(
        title="Memory",
        alt=f"Highest memory of all ranks over {len(used)} steps; the peak is {size(peak)}.",
        caption=f"The most that any rank has held up to then; {size(peak)} in the end.",
    )


def waiting(steps: Table) -> Picture:
    """Share of each step that the slowest rank spent waiting for data."""
    share = 100 * steps["wait_seconds"] / np.maximum(steps["step_seconds"], 1e-9)
    canvas = _over_steps("waiting", steps["step"], share, color=SECOND)
    canvas.axes.set(ylabel="waiting for data [%]")
    overall = number(100 * waiting_share(steps))
    return canvas.picture(
        title="Waiting for data",
        alt=f"Share of each of {len(share)} steps spent waiting for data; {overall} % overall.",
        caption=f"Share of the step that the slowest rank had no data; {overall} % overall.",
    )


def waiting_share(steps: Table) -> float:
    """Time spent waiting for data over the time of all steps."""
    return float(np.nansum(steps["wait_seconds"]) / max(np.nansum(steps["step_seconds"]), 1e-9))


def _over_steps(
    name: str, step: NDArray[np.float64], values: NDArray[np.float64], *, color: str
) -> Canvas:
    """Every step faintly and the running median on top, from zero up."""
    canvas = Canvas(name, width=360, height=230)
    chosen = evenly(len(step))
    few = len(step) < 20
    canvas.axes.plot(
        step[chosen],
        values[chosen],
        color=color,
        alpha=1.0 if few else 0.5,
        linewidth=1,
        marker="o" if few else "",
        markersize=4,
    )
    smooth = running_median(values)
    if not few:
        canvas.axes.plot(step[chosen], smooth[chosen], color=color, linewidth=2)
    # A slow first step must not flatten all the others.
    top = max(float(np.nanmax(smooth)), float(np.nanpercentile(values, 98)))
    canvas.axes.set(xlabel="step", ylim=(0, 1.15 * top if top > 0 else 1))
    whole_numbers(canvas)
    return canvas
