"""Events as the profiler would take them down, by hand; times in seconds."""

from __future__ import annotations

from hyperslab.train.profiler import BACKWARD_NODE, LAYER_MARK, MARK, STEP_MARK, ProfiledRange


def a_step() -> list[ProfiledRange]:
    """A convolution of 4 s that sends a halo, 1 s of Python, its backward, a sum, a late batch."""
    step = ProfiledRange(f"{STEP_MARK}7", 10, 30)
    data = ProfiledRange(f"{MARK}data:a mini-batch", 10, 12, step)
    passes = ProfiledRange(f"{MARK}framework:between operators", 12, 29, step)
    layer = ProfiledRange(f"{LAYER_MARK}conv1", 13, 20, passes)
    begin = ProfiledRange(f"{MARK}halos:1:the halo", 13, 14, layer)
    pack = ProfiledRange("aten::clone", 13.2, 13.8, begin)
    conv = ProfiledRange("aten::convolution", 14, 18, layer, sequence=5)
    inner = ProfiledRange("aten::mkldnn_convolution", 14.5, 17.5, conv)
    end = ProfiledRange(f"{MARK}halos:1:the halo", 18, 19.5, layer)
    node = ProfiledRange(f"{BACKWARD_NODE}SlabConvBackward", 20, 26, passes, sequence=5)
    back = ProfiledRange("aten::convolution_backward", 20, 25, node)
    total = ProfiledRange(f"{MARK}gradients:the average of the gradients", 26, 28, passes)
    last = ProfiledRange("Optimizer.step#Adam.step", 28, 29, passes)
    update = ProfiledRange("aten::add_", 28, 29, last)
    return [step, data, passes, layer, begin, pack, conv, inner, end, node, back, total, last,
            update]  # fmt: skip
