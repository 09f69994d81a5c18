"""Predict whole volumes with a trained network, each cut over all ranks.

The way of a volume: `inputs` lists it, `volumes` opens it and gives each rank its box, `network`
predicts, the main rank collects the mask, `journal` notes that it is done; `run` does it all.
"""

from hyperslab.predict.run import InputOutcome, predict

__all__ = ["InputOutcome", "predict"]
