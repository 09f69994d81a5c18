"""What the suite does without a library (tier: no process)."""

from __future__ import annotations

import pytest

from tests.conftest import skip_without_library


def test_a_library_that_is_not_installed_is_named() -> None:
    missing = ModuleNotFoundError("No module named 'monai.losses'", name="monai.losses")
    with pytest.raises(pytest.skip.Exception, match="monai is not installed"):
        skip_without_library(missing)


@pytest.mark.parametrize("name", ["hyperslab.nothing", "tests.nothing", "torch"])
def test_others_are_errors(name: str) -> None:
    skip_without_library(ModuleNotFoundError(name, name=name))
