"""Whether ranks that failed are started again, and how many of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hyperslab.errors import CommError, HyperslabError
from hyperslab.launch.failures import RankFailed, RankLost


@dataclass
class Restarts:
    """Decides after each failure of a run.

    Again, at most ``left`` times: after a rank that died or hung, ranks that lost each other, and
    an error that is none of this package's. Not after what the package refuses (a `DataError`, a
    `RecipeError`, a full disk), which would come again, nor after such another error for the
    second time.

    A rank *cannot come back* if the rank of the same number is lost twice in a row and the run has
    written no checkpoint between: its device or its memory is no good. Then, if the grid
    ``shrinks``, there is one rank less.

    ``newest`` says which checkpoint is the newest, or nothing.
    """

    left: int
    ranks: int
    shrinks: bool
    newest: Callable[[], str | None]

    def __post_init__(self) -> None:
        self._before: tuple[type[HyperslabError], int | None, str | None] | None = None

    def after(self, error: HyperslabError) -> int:
        """On how many ranks to go on.

        Raises:
            HyperslabError: this one, where the run has ended.
        """
        if self.left == 0 or not isinstance(error, CommError | RankFailed):
            raise error
        rank = error.rank if isinstance(error, RankLost | RankFailed) else None
        now = (type(error), rank, self.newest())
        again = now == self._before
        if again and isinstance(error, RankFailed):
            raise error
        if again and isinstance(error, RankLost) and self.shrinks and self.ranks > 1:
            self.ranks -= 1
            now = (type(error), None, now[2])  # the numbers mean others from here on
        self.left -= 1
        self._before = now
        return self.ranks
