"""The kinds of campaigns there are, by the name that the command takes."""

from __future__ import annotations

from tests.soak.cables import Cables
from tests.soak.campaign import Campaign
from tests.soak.checkpoints import Checkpoints
from tests.soak.inputs import Inputs
from tests.soak.kills import Kills
from tests.soak.launches import Launches
from tests.soak.moves import Moves
from tests.soak.pipeline.rounds import Pipeline
from tests.soak.predictions import Predictions

KINDS: dict[str, type[Campaign]] = {
    "cables": Cables,
    "checkpoints": Checkpoints,
    "inputs": Inputs,
    "kills": Kills,
    "launches": Launches,
    "moves": Moves,
    "pipeline": Pipeline,
    "predictions": Predictions,
}
