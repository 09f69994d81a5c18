"""The example of docs/formats.md runs as it is printed (tier: two gloo ranks)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def run_example(code: str) -> Any:
    names: dict[str, Any] = {}
    exec(code, names)
    shapes = [x.shape for x, _ in names["batches"]]
    return shapes, [(x.box.lo, x.local.numpy(), y.local.numpy()) for x, y in names["batches"]]


def test_the_example_runs() -> None:
    code, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    for rank, (shapes, batches) in enumerate(run_ranks(2, run_example, code)):
        assert [tuple(shape) for shape in shapes] == [(n, 1, 8, 8, 8) for n in (4, 4, 2)]
        for lo, x, y in batches:
            assert lo[2] == 4 * rank
            depth = np.arange(4 * rank, 4 * rank + 4)
            np.testing.assert_allclose(x[:, 0, :, 3, 5], np.sin(y * depth), atol=1e-6)
