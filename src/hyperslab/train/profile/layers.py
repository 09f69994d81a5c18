"""From the events of steps to the time of each layer, by stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from hyperslab.trace.records import Stage
from hyperslab.train.profile.events import LAYER, NODE, OPTIMIZER, Recorded
from hyperslab.train.profile.rows import COMMUNICATION, COMPUTE, row_of
from hyperslab.train.profile.schema import LayerTime

Place = tuple[str, Stage]
"""A layer's name, and the stage of the step."""


def layer_times(events: Sequence[Recorded], steps: int) -> list[LayerTime]:
    """The mean time [s] of each layer and stage in a step, in the order in which they begin.

    A forward operator belongs to the innermost submodule that runs; a node of the backward pass to
    the layer of the operator whose sequence number it has.
    """
    layers = _layers_by_number(events)
    compute: defaultdict[Place, float] = defaultdict(float)
    waited: defaultdict[Place, float] = defaultdict(float)
    for event in events:
        row = None if event.on_device else row_of(event)
        if row is None or (row in COMPUTE and _waits(event)):
            continue
        place = place_of(event, layers)
        if row in COMPUTE:
            compute[place] += event.device_seconds or event.end - event.begin
        elif row in COMMUNICATION:
            compute[place] += 0.0  # it has its place in the order
            waited[place] += event.end - event.begin
    return [
        LayerTime(
            layer=layer,
            stage=stage,
            compute=compute[layer, stage] / steps,
            communication=waited[layer, stage] / steps,
        )
        for layer, stage in compute
    ]


def _waits(event: Recorded) -> bool:
    """Whether an operator is part of a wait."""
    return any(row_of(e) not in (None, *COMPUTE, "framework") for e in event.ancestors)


def _layers_by_number(events: Iterable[Recorded]) -> dict[int, str]:
    """Whose forward pass took which of autograd's numbers; the first that has one made its node."""
    found: dict[int, str] = {}
    for event in events:
        if event.sequence >= 0 and not event.name.startswith(NODE) and event.within(NODE) is None:
            layer = event.within(LAYER)
            if layer is not None:
                found.setdefault(event.sequence, layer.name.removeprefix(LAYER))
    return found


def place_of(event: Recorded, layers: dict[int, str]) -> Place:
    """Where an event belongs; recomputed layers count to the backward pass."""
    node = event.within(NODE)
    layer = event.within(LAYER)
    if node is not None:
        known = layers.get(node.sequence, "") if layer is None else layer.name.removeprefix(LAYER)
        return known, "backward"
    if event.within(OPTIMIZER) is not None:
        return "", "optimizer"
    return ("" if layer is None else layer.name.removeprefix(LAYER)), "forward"
