"""Events as the profiler would take them down, by hand; times in seconds."""

from __future__ import annotations

from hyperslab.train.profile.events import LAYER, MARK, NODE, STEP, Event


def a_step() -> list[Event]:
    """A convolution of 4 s that sends a halo, 1 s of Python, its backward, a sum, a late batch."""
    step = Event(f"{STEP}7", 10, 30)
    data = Event(f"{MARK}data:a mini-batch", 10, 12, step)
    passes = Event(f"{MARK}framework:between operators", 12, 29, step)
    layer = Event(f"{LAYER}conv1", 13, 20, passes)
    begin = Event(f"{MARK}halos:1:the halo", 13, 14, layer)
    pack = Event("aten::clone", 13.2, 13.8, begin)
    conv = Event("aten::convolution", 14, 18, layer, sequence=5)
    inner = Event("aten::mkldnn_convolution", 14.5, 17.5, conv)
    end = Event(f"{MARK}halos:1:the halo", 18, 19.5, layer)
    node = Event(f"{NODE}SlabConvBackward", 20, 26, passes, sequence=5)
    back = Event("aten::convolution_backward", 20, 25, node)
    total = Event(f"{MARK}gradients:the average of the gradients", 26, 28, passes)
    last = Event("Optimizer.step#Adam.step", 28, 29, passes)
    update = Event("aten::add_", 28, 29, last)
    return [step, data, passes, layer, begin, pack, conv, inner, end, node, back, total, last,
            update]  # fmt: skip
