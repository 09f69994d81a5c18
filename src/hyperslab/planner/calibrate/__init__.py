"""Measures what a machine can do, on the ranks that this is started on, all of them at once."""

from hyperslab.planner.calibrate.run import Calibration, Measurement, calibrate

__all__ = ["Calibration", "Measurement", "calibrate"]
