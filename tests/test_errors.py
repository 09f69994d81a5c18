"""What an error may quote (tier: no process)."""

from __future__ import annotations

import pickle

import pytest

from hyperslab.errors import LONGEST_LINE, CheckpointError, DataError, HyperslabError, RecipeError


@pytest.mark.parametrize("kind", [HyperslabError, DataError, RecipeError, CheckpointError])
def test_a_file_that_is_quoted_does_not_fill_the_screen(kind: type[HyperslabError]) -> None:
    error = kind(f"t.csv, line 3: {'é' * 70_000!r} is not a number\n    mend it")
    first, last = str(error).splitlines()
    assert len(first) <= LONGEST_LINE
    assert first.startswith("t.csv, line 3: 'éé")
    assert first.endswith("éé' is not a number")
    assert last == "    mend it"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_shorter_words_stay_as_they_are() -> None:
    words = "\n".join(["a" * LONGEST_LINE] * 3)
    assert str(DataError(words)) == words
    assert DataError(3, "b").args == (3, "b")
