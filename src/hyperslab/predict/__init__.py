"""Predict whole volumes with a trained network, each cut over all ranks.

The way of a volume: `inputs` lists it, `volumes` opens it and gives each rank its box, `network`
predicts, the main rank collects the mask, `journal` notes that it is done; `result_folder`
does so for one input after the other, `run` for a run and its grid.
"""

from hyperslab.predict.result_folder import InputOutcome
from hyperslab.predict.run import predict

__all__ = ["InputOutcome", "predict"]
