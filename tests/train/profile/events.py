"""Events as the profiler would take them down, by hand; times in seconds."""

from __future__ import annotations

from hyperslab.train.profile.events import LAYER, MARK, NODE, STEP, Recorded


def a_step() -> list[Recorded]:
    """A convolution of 4 s that sends a halo, 1 s of Python, its backward, a sum, a late batch."""
    step = Recorded(f"{STEP}7", 10, 30)
    data = Recorded(f"{MARK}data:a mini-batch", 10, 12, step)
    passes = Recorded(f"{MARK}framework:between operators", 12, 29, step)
    layer = Recorded(f"{LAYER}conv1", 13, 20, passes)
    begin = Recorded(f"{MARK}halos:1:the halo", 13, 14, layer)
    pack = Recorded("aten::clone", 13.2, 13.8, begin)
    conv = Recorded("aten::convolution", 14, 18, layer, sequence=5)
    inner = Recorded("aten::mkldnn_convolution", 14.5, 17.5, conv)
    end = Recorded(f"{MARK}halos:1:the halo", 18, 19.5, layer)
    node = Recorded(f"{NODE}SlabConvBackward", 20, 26, passes, sequence=5)
    back = Recorded("aten::convolution_backward", 20, 25, node)
    total = Recorded(f"{MARK}gradients:the average of the gradients", 26, 28, passes)
    last = Recorded("Optimizer.step#Adam.step", 28, 29, passes)
    update = Recorded("aten::add_", 28, 29, last)
    return [step, data, passes, layer, begin, pack, conv, inner, end, node, back, total, last,
            update]  # fmt: skip
