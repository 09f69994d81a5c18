from __future__ import annotations

import pytest

from hyperslab.simulate.nbody import Nbody

SIZE, STEPS = 6, 4


@pytest.fixture(scope="session")
def small() -> Nbody:
    """One simulation for all tests that need files and no physics."""
    return Nbody(size=SIZE, particles=SIZE, steps=STEPS)
