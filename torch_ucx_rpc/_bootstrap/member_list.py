"""The list of the members of a group without a size, in the Store.

::

    arrivals    how many places have ever been taken
    member/0    record of the first worker; empty when it has left, or when another member has noticed that it died
    member/1    record of the second ...
    compacted   a place, and the earlier places that still had a record when a worker last read the list up to there

The records are JSON. In a job with a secret, workers authenticate them, and ``compacted`` too.

A worker takes a place and then fills it. If it dies in between, the next worker that joins closes the place, so that no
worker waits for it again. A worker that was only slow finds its place closed, and takes another place. A place that is
empty or closed stays so. Hence an old version of ``compacted`` is still right: it only leaves out places that no worker
needs to read.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import time

from torch._C._distributed_c10d import PrefixStore, Store

from torch_ucx_rpc._bootstrap.deadline import Deadline
from torch_ucx_rpc._bootstrap.members import read_records
from torch_ucx_rpc._bootstrap.record import Record
from torch_ucx_rpc._bootstrap.secret import Secret, read_entry, write_entry
from torch_ucx_rpc.errors import JoinFailed

_PREFIX = "torch_ucx_rpc/dynamic"
_ARRIVALS = "arrivals"
_COMPACTED = "compacted"

# The entry of a place whose worker did not fill it in time. `read_records` treats it as empty, and `add` does not.
_CLOSED = " "

# A worker takes its place in the list, and writes its record in the next line of code. Other workers wait this long for
# the record.
_WRITING_S = 5.0

# More arrivals than any group has. The counter in the Store cannot be authenticated, so this module checks its range.
_MOST_ARRIVALS = 1_000_000


class MemberList:
    """The list, as the worker ``own`` reads and writes it. Methods raise DistError when the Store has ended."""

    def __init__(self, store: Store, own: Record, secret: Secret | None) -> None:
        self._store = PrefixStore(_PREFIX, store)
        self._own = own
        self._secret = secret
        self._position = 0

    def add(self) -> str:
        """Put this worker's record at the end of the list. Returns its place."""
        entry = self._entry(self._own)
        while True:
            self._position = self._store.add(_ARRIVALS, 1) - 1
            place = _place(self._position)
            # Another worker may have closed the place: then try the next one.
            if self._store.compare_set(place, "", entry).decode() == entry:
                return place

    def earlier(self) -> dict[str, Record]:
        """Read the records before this worker's own, by place and in the order of the list. Call `add` first.

        Raises JoinFailed for a record of another version of this package, or of a worker with another secret.
        """
        positions = self._positions(self._position)
        places = [_place(position) for position in positions]
        self._await_filled(places)
        records = self._read(places)
        if len(records) < len(places):
            remaining = [position for position in positions if _place(position) in records]
            compacted = {"before": self._position, "remaining": remaining}
            self._store.set(_COMPACTED, write_entry(compacted, self._secret))
        return records

    def present(self) -> list[Record]:
        """Read all records, for a worker that is not going to enter. Raises the errors of `earlier`."""
        if not self._store.check([_ARRIVALS]):
            return []
        places = map(_place, self._positions(self._store.add(_ARRIVALS, 0)))
        return list(self._read([place for place in places if self._store.check([place])]).values())

    def at(self, place: str) -> Record | None:
        """Return the record at a place; None if the member has left."""
        return self._read([place]).get(place)

    def strike(self, place: str) -> None:
        """Empty a place that has a record."""
        self._store.set(place, "")

    def replace(self, place: str, record: Record | None) -> None:
        """Replace another worker's record; None empties its place. A worker that left the list stays off it."""
        if text := self._store.get(place):
            self._store.compare_set(place, text.decode(), "" if record is None else self._entry(record))

    def _entry(self, record: Record) -> str:
        return write_entry(record.to_values(), self._secret)

    def _positions(self, arrivals: int) -> list[int]:
        """Positions below ``arrivals`` whose places may have a record."""
        if not 0 <= arrivals <= _MOST_ARRIVALS:
            raise JoinFailed(
                f"this Store counts {arrivals} workers that have joined, which no worker wrote: give the job a Store "
                f"of its own."
            )
        before, remaining = self._compacted()
        return [position for position in (*remaining, *range(before, arrivals)) if position < arrivals]

    def _compacted(self) -> tuple[int, list[int]]:
        """Return the position up to which the list was last read in full, and the positions that had a record then."""
        if self._store.check([_COMPACTED]):
            entry = read_entry(self._store.get(_COMPACTED), self._secret)
            before, remaining = entry.values.get("before"), entry.values.get("remaining")
            # An entry of another form is not from this job. This worker then reads all places, which is right too.
            if not entry.doubt and isinstance(before, int) and 0 <= before <= _MOST_ARRIVALS:
                wanted = range(before)
                if isinstance(remaining, list) and all(isinstance(one, int) and one in wanted for one in remaining):
                    return before, sorted(set(remaining))
        return 0, []

    def _await_filled(self, places: list[str]) -> None:
        """Wait until each of these places is filled; close those whose workers take too long."""
        deadline = Deadline(_WRITING_S)
        while places and not self._store.check(places):
            if deadline.passed():
                for place in places:
                    # Write only over a missing or empty text.
                    self._store.compare_set(place, "", _CLOSED)
                return
            time.sleep(0.01)

    def _read(self, places: list[str]) -> dict[str, Record]:
        return read_records(self._store, places, self._own, self._secret)


def _place(position: int) -> str:
    return f"member/{position}"
