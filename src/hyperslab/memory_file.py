"""Files without a name, which nothing can leave behind: memory that ends with its last user."""

from __future__ import annotations

import os
import sys
import tempfile


class MemoryFile:
    """A file in memory, for this process and those that inherit its ``descriptor``.

    They open it as ``path``. Other users of the machine cannot. Outside Linux it is a temporary
    file of this user's, which has a name for as long as this process lives.

    Raises:
        OSError: the system has no memory or no descriptor for it.
    """

    def __init__(self) -> None:
        self._named = None
        if sys.platform == "linux":
            self.descriptor = os.memfd_create("hyperslab")
            self.path = f"/proc/self/fd/{self.descriptor}"
        else:
            self._named = tempfile.NamedTemporaryFile(prefix="hyperslab-")  # noqa: SIM115 - closed in close
            self.descriptor = self._named.fileno()
            self.path = self._named.name

    def read(self) -> bytes:
        """All that has been written into it."""
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)

    @property
    def changed(self) -> int:
        """When it was written last [ns since the epoch]."""
        return os.fstat(self.descriptor).st_mtime_ns

    def close(self) -> None:
        if self._named is None:
            os.close(self.descriptor)
        else:
            self._named.close()

    def __enter__(self) -> MemoryFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
