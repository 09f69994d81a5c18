"""Whether all ranks have built the same network, before their parameters are made equal."""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from hyperslab.comm import Grid
from hyperslab.comm.agreement import from_all
from hyperslab.comm.start.roll_call import compare_facts
from hyperslab.errors import LayoutError

WITH_DEVICES = (nn.ParameterList, nn.ParameterDict)
"""What they say of themselves has the device in it, which ranks do not have alike."""


def check_same_network(module: nn.Module, grid: Grid, options: Mapping[str, Any]) -> None:
    """Compare parameters, buffers, torch's own layers, and how `parallelize` was called.

    What a layer of a user's says of itself may be different on every rank, and is not compared.

    Raises:
        LayoutError: names the first difference, with the ranks.
    """
    facts = {
        "options": dict(options),
        "tensors": {
            name: f"{tuple(t.shape)} {t.dtype}" + " frozen" * (not t.requires_grad)
            for name, t in (*module.named_parameters(), *module.named_buffers())
        },
        "layers": dict(_layers(module)),
    }
    words = json.dumps(facts)
    if grid.same_on_all(zlib.crc32(words.encode())):
        return
    found = from_all((socket.gethostname(), words))
    difference = compare_facts([json.loads(w) for _, w in found], [host for host, _ in found])
    first = difference.splitlines()[0].removeprefix("the ranks differ in ")
    raise LayoutError(
        f"the ranks' {type(module).__name__} differ in {first or 'the order of their parameters'}\n"
        "    build the same network on every rank, and parallelize it alike"
    )


def _layers(module: nn.Module) -> list[tuple[str, str]]:
    return [
        (name, f"{type(part).__name__}({part.extra_repr()})")
        for name, part in module.named_modules()
        if type(part).__module__.startswith("torch.nn.") and not isinstance(part, WITH_DEVICES)
    ]
