"""`ExpendableStore`: the Store of a running group. The group goes on if the Store ends."""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Iterator

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

# A reachable Store answers within milliseconds, a busy one within a second or two.
_PATIENCE = datetime.timedelta(seconds=5)


class ExpendableStore:
    """``store``, which may have ended, for reads and writes that a running group does not need."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # All threads share the timeout of a Store.
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Give up the block if the Store has ended, or does not answer within some 5 s.

        A Store over TCP that has ended fails at once. A Store in a deleted file looks for the file until its timeout, a
        minute by default. The end of the process would wait that long.
        """
        with self._lock, contextlib.suppress(DistError):
            usual = self._store.timeout  # type: ignore[attr-defined]  # not in torch's stubs
            self._store.set_timeout(min(usual, _PATIENCE))
            try:
                yield
            finally:
                self._store.set_timeout(usual)
