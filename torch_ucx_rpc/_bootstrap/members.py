"""The members of a group of fixed size: each worker leaves its record in the Store, and every worker reads all records.

The entries are JSON, and authenticated in a job with a secret (``secret``). Workers unpickle nothing from the Store.
Its keys::

    arrivals              how many workers have come
    arrival/0             record of the first; empty after that worker gave up
    arrival/1             record of the second ...
    relay/<rank>          where the workers below this rank get the records of all (``relay``)
    members/<session>/0   by rank 0: the first part of these records, packed (``packing``)
    members/<session>/1   the next part ...
    verdict               by rank 0: the size and digest of all parts, or the error that all workers raise
    read/<session>        how many have read it; rank 0 waits for them, since it may host the Store and leave

Only rank 0 reads the records, and judges them when enough have come or time is up. So every worker starts with the same
members, or raises the same error. The requests to the Store, and the bytes that it sends, grow linearly with the number
of workers. A worker reads one part after the other: the Store keeps a copy of each answer that is under way.

Workers wait by asking again, in growing intervals. A wait inside the Store would ignore Ctrl-C, since it is in C++. It
would also warn on stderr whenever it ends without a result.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from torch_ucx_rpc._bootstrap import packing
from torch_ucx_rpc._bootstrap.deadline import Deadline
from torch_ucx_rpc._bootstrap.record import Record
from torch_ucx_rpc._bootstrap.relay import Relay, above, number_below, take
from torch_ucx_rpc._bootstrap.secret import Entry, Secret, read_entry, refusal, write_entry
from torch_ucx_rpc._devices import maps as device_maps
from torch_ucx_rpc.errors import JoinFailed, JoinTimedOut

_logger = logging.getLogger(__name__)

# The Store answers on one thread. All workers together send it about this many requests a second.
_QUESTIONS_PER_S = 1000
_FIRST_QUESTIONS_PER_S = 50_000
_LONGEST_PAUSE_S = 1.0
# Number of arrivals that one request reads.
_PART = 512
# Size of one part of the packed records, in bytes. If 10,000 workers all wait for a part, the Store holds 160 MB. The
# Store limits its values to 8 MiB.
_PART_BYTES = 1 << 14
# Rank 0 waits this long for the others to read the verdict.
_FAREWELL_S = 4.0


def gather_members(store: Store, own: Record, timeout: float, secret: Secret | None = None) -> list[Record]:
    """Announce this worker to the others, and return the records of all workers by rank, this one included.

    All ``own.world_size`` workers call this, each with its record, on the same Store. After an error they can call it
    again, on the same Store, with new sessions.

    Args:
        timeout: seconds to wait for workers that have not come; 0 is no limit.
        secret: the secret of the job; None for a job without one.

    Raises JoinFailed when workers do not come, have the same rank or name, or do not fit together. Raises ValueError
    when their device maps do not fit together. All workers that have come raise the same error, except workers whose
    secret differs from rank 0's.
    """
    store = PrefixStore("torch_ucx_rpc", store)
    deadline = Deadline(timeout)
    try:
        verdict = _read_verdict(store, secret)
        if verdict is not None and "members" in verdict.values:
            packed = _read_packed(store, own, secret, verdict)
            raise _came_too_late(own, verdict, packing.unpack(packed) if packed else [])
        part = _lead if own.rank == 0 else _follow
        return part(store, own, secret, deadline)
    except DistError as error:
        raise JoinFailed(
            f"{own} lost the Store while it waited for the other workers: rank 0, or the process that hosts the Store, "
            f"has ended or given up, and its output says why. ({error})"
        ) from error


def _lead(store: Store, own: Record, secret: Secret | None, deadline: Deadline) -> list[Record]:
    """Do rank 0's part: wait for the others, judge, and publish the verdict."""
    arrivals = _Arrivals(store, own, secret)
    # Rank 0 stays in the list until its verdict is in the Store. Otherwise a worker whose time ends now would call it
    # absent.
    with _listed(store, own, secret):
        try:
            members = _await_members(arrivals, own, deadline)
        except DistError:
            raise
        except (JoinFailed, ValueError) as error:
            # Later workers hear of the error too, unless rank 0 has stopped waiting for them.
            expected = 0 if deadline.passed() else max(arrivals.world_sizes())
            _announce(store, own, secret, _to_verdict(error), arrivals.read_sessions, expected)
            raise
    packed = packing.pack(members)
    for number, start in enumerate(range(0, len(packed), _PART_BYTES)):
        part = packed[start : start + _PART_BYTES]
        store.set(_part_key(own.session, number), part)  # type: ignore[arg-type]  # set takes bytes too
    verdict = {"members": len(members), "bytes": len(packed), "digest": _digest(packed)}
    _announce(store, own, secret, verdict, lambda: set(), len(members))
    return members


def _follow(store: Store, own: Record, secret: Secret | None, deadline: Deadline) -> list[Record]:
    """Do another rank's part: wait for the verdict of rank 0."""
    with contextlib.closing(Relay(store, number_below(own.rank, own.world_size))) as relay:
        # Publish the relay before this worker enters the list.
        if relay.places:
            store.set(_relay_key(own.rank), write_entry({"places": relay.places}, secret))
        with _listed(store, own, secret) as position:
            entry = _await_verdict(store, own, secret, deadline)
            packed = _read_packed(store, own, secret, entry)
            if packed:
                relay.serve(packed)
            members = packing.unpack(packed) if packed else []
            if members and all(member.session != own.session for member in members):
                raise _came_too_late(own, entry, members)
    verdict = entry.values
    if not members:
        store.set(position, "")
    # This is the last request to the Store: rank 0 may end the Store once all workers have sent it.
    store.add(f"read/{verdict.get('by')}", 1)
    if entry.doubt:
        raise refusal(entry, own, verdict.get("judge"))
    if "error" in verdict:
        raise _error_of(verdict)
    return members


def _relay_key(rank: int) -> str:
    return f"relay/{rank}"


def _part_key(judge: int, number: int) -> str:
    return f"members/{judge}/{number}"


def _digest(packed: bytes) -> str:
    return hashlib.sha256(packed).hexdigest()


def _read_packed(store: Store, own: Record, secret: Secret | None, verdict: Entry) -> bytes:
    """Return the records as rank 0 has packed them; none if the verdict is an error, or in doubt."""
    if verdict.doubt or "bytes" not in verdict.values:
        return b""
    size, digest = verdict.values["bytes"], verdict.values["digest"]
    packed = _read_relay(store, own, secret, size)
    if _digest(packed) != digest:
        packed = _read_parts(store, verdict.values["by"], size)
    if _digest(packed) != digest:
        raise JoinFailed(
            f"{own} found something in the Store that rank 0 did not write: give the job its own Store, an address and "
            f"port or a file."
        )
    return packed


def _read_relay(store: Store, own: Record, secret: Secret | None, size: int) -> bytes:
    """Return the bytes that the worker above this one sends; none for rank 0 and the workers right below it."""
    key = _relay_key(above(own.rank))
    if above(own.rank) <= 0 or not store.check([key]):
        return b""
    relay = read_entry(store.get(key), secret)
    places = relay.values.get("places")
    return take(places, size) if isinstance(places, list) and not relay.doubt else b""


def _read_parts(store: Store, judge: int, size: int) -> bytes:
    return b"".join(store.get(_part_key(judge, number)) for number in range(-(-size // _PART_BYTES)))


@contextlib.contextmanager
def _listed(store: Store, own: Record, secret: Secret | None) -> Iterator[str]:
    """Put this worker into the list, and yield its key; take it off after an error, Ctrl-C included."""
    position = f"arrival/{store.add('arrivals', 1) - 1}"
    store.set(position, write_entry(own.to_values(), secret))
    try:
        yield position
    except DistError:
        # The Store is gone, and another request would print a warning on stderr.
        raise
    except BaseException:
        store.set(position, "")
        raise


def _await_members(arrivals: _Arrivals, own: Record, deadline: Deadline) -> list[Record]:
    # Rank 0 is the only one that asks here, so it may ask often.
    for is_over in ask_again(1, deadline):
        has_new = arrivals.read()
        # Raise an error only when all workers have come, so that every worker hears of it.
        if is_over or (has_new and arrivals.are_all()):
            arrivals.forget_those_who_left()
            if is_over or arrivals.are_all():
                break
    records = arrivals.records()
    _check_agreement(records)
    if len(records) < own.world_size:
        raise _absent(records, own, deadline)
    device_maps.check(records)
    _warn_of_different_torchs(records)
    return records


def _await_verdict(store: Store, own: Record, secret: Secret | None, deadline: Deadline) -> Entry:
    arrivals = _Arrivals(store, own, secret)
    # If rank 0 is present, it tells all workers when time is up. Rank 0 may have begun to wait a little later than this
    # worker.
    limit = Deadline(deadline.timeout and deadline.timeout + _FAREWELL_S)
    for is_over in ask_again(own.world_size, limit):
        verdict = _read_verdict(store, secret)
        # An error that is not for this session is left over from an earlier attempt.
        if verdict is not None and ("members" in verdict.values or own.session in verdict.values["sessions"]):
            return verdict
        if deadline.passed():
            arrivals.read()
            if is_over or 0 not in arrivals.ranks():
                break
    arrivals.forget_those_who_left()
    raise _absent(arrivals.records(), own, deadline)


def _announce(
    store: Store,
    own: Record,
    secret: Secret | None,
    verdict: dict[str, Any],
    whom: Callable[[], set[int]],
    at_least: int,
) -> None:
    """Publish the verdict until all of ``whom`` (by session), and ``at_least`` workers, have read it, or time is up."""
    told: set[int] | None = None
    for is_over in ask_again(own.world_size, Deadline(_FAREWELL_S)):
        sessions = whom()
        if sessions != told:
            values = {**verdict, "by": own.session, "judge": str(own), "sessions": sorted(sessions)}
            store.set("verdict", write_entry(values, secret))
            told = sessions
        # Add one, since rank 0 knows the verdict itself.
        if is_over or store.add(f"read/{own.session}", 0) + 1 >= max(len(told), at_least):
            break


def _to_verdict(error: JoinFailed | ValueError) -> dict[str, Any]:
    return {"error": type(error).__name__, "text": str(error), "attributes": vars(error)}


def _error_of(verdict: dict[str, Any]) -> JoinFailed | ValueError:
    """The error that `_to_verdict` converted."""
    text = verdict["text"]
    if verdict["error"] == "ValueError":
        return ValueError(text)
    if verdict["error"] == "JoinTimedOut":
        attributes = verdict["attributes"]
        return JoinTimedOut(text, timeout=attributes["timeout"], missing=tuple(attributes["missing"]))
    return JoinFailed(text)


def _read_verdict(store: Store, secret: Secret | None) -> Entry | None:
    if not store.check(["verdict"]):
        return None
    verdict = read_entry(store.get("verdict"), secret)
    # Values of another form are not rank 0's, and rank 0 will overwrite them.
    is_group = isinstance(verdict.values.get("members"), int)
    kinds = {"by": int, "bytes": int, "digest": str} if is_group else {"sessions": list}
    is_whole = all(isinstance(verdict.values.get(name), kind) for name, kind in kinds.items())
    return verdict if is_whole else None


def ask_again(workers: int, deadline: Deadline) -> Iterator[bool]:
    """Yield False again and again, with growing pauses in between; at the end of the deadline, yield True."""
    longest = min(_LONGEST_PAUSE_S, max(0.01, workers / _QUESTIONS_PER_S))
    # All workers ask their first questions at about the same time.
    pause = max(0.001, workers / _FIRST_QUESTIONS_PER_S)
    while not deadline.passed():
        yield False
        time.sleep(min(pause, deadline.remaining()))
        pause = min(2 * pause, longest)
    yield True


class _Arrivals:
    """The part of the list in the Store that this worker has read."""

    def __init__(self, store: Store, own: Record, secret: Secret | None) -> None:
        self._store = store
        self.own = own
        self._secret = secret
        self._position = 0
        # Entries by key. An entry of another version of this package, or of a stranger, may contain anything.
        self._present: dict[str, Entry] = {}

    def read(self) -> bool:
        """Read the new entries. Returns False if there are none."""
        before = self._position
        count = 1
        while True:
            keys = [f"arrival/{self._position + offset}" for offset in range(count)]
            if self._store.check(keys):
                self._position += count
                texts = zip(keys, _read_texts(self._store, keys), strict=True)
                self._present |= {key: read_entry(text, self._secret) for key, text in texts if text}
                count = min(2 * count, _PART)
            elif count > 1:
                count = 1
            else:
                return self._position != before

    def forget_those_who_left(self) -> None:
        keys = list(self._present)
        texts = _read_texts(self._store, keys)
        self._present = {key: self._present[key] for key, text in zip(keys, texts, strict=True) if text}

    def are_all(self) -> bool:
        """Tell whether all workers of the group have come. If workers disagree on its size, the smallest size
        counts."""
        return len(self._present) >= min(self.world_sizes())

    def read_sessions(self) -> set[int]:
        """Return the first session of each process, of valid and invalid entries. A process's later sessions belong to
        its next attempt."""
        self.read()
        first_of_process: dict[str, int] = {}
        for values in self._values():
            if isinstance(session := values.get("session"), int):
                first_of_process.setdefault(f"{values.get('pid')} on {values.get('host')}", session)
        return {self.own.session, *first_of_process.values()}

    def ranks(self) -> set[int]:
        return self._numbers("rank")

    def world_sizes(self) -> set[int]:
        return self._numbers("world_size") | {self.own.world_size}

    def _numbers(self, field: str) -> set[int]:
        return {number for values in self._values() if isinstance(number := values.get(field), int)}

    def _values(self) -> list[dict[str, Any]]:
        return [entry.values for entry in self._present.values()]

    def records(self) -> list[Record]:
        """Return records by rank. Raises JoinFailed for an entry of another version or secret, and for bytes that are
        not a record."""
        return sorted((_check_record(entry, self.own) for entry in self._present.values()), key=lambda r: r.rank)


def read_records(store: Store, keys: list[str], own: Record, secret: Secret | None) -> dict[str, Record]:
    """The records at these keys, without empty and blank ones.

    Raises JoinFailed for a record of another version of this package, or of a worker with another secret.
    """
    texts = zip(keys, _read_texts(store, keys), strict=True)
    return {key: _check_record(read_entry(text, secret), own) for key, text in texts if text.strip()}


def _read_texts(store: Store, keys: list[str]) -> list[bytes]:
    if not store.has_extended_api():  # type: ignore[attr-defined]
        return [store.get(key) for key in keys]
    parts = (keys[start : start + _PART] for start in range(0, len(keys), _PART))
    return [text for part in parts for text in store.multi_get(part)]


def _check_record(entry: Entry, own: Record) -> Record:
    values = entry.values
    who = f"rank {values.get('rank')} ({values.get('name')!r}, pid {values.get('pid')} on {values.get('host')})"
    version = values.get("package_version")
    if isinstance(version, str) and version != own.package_version:
        raise JoinFailed(
            f"the workers have different versions of torch_ucx_rpc: {own} has {own.package_version} and {who} has "
            f"{version}; install the same everywhere."
        )
    if entry.doubt and values:
        raise refusal(entry, own, who)
    try:
        return Record.from_values(values)
    except ValueError as error:
        raise JoinFailed(
            f"{own} found something in the Store that no worker wrote, or {who} did ({error}): give the job its own "
            f"Store, an address and port or a file."
        ) from error


def _check_agreement(records: list[Record]) -> None:
    """Raise JoinFailed unless these records, of workers that have come so far, can belong to one group."""
    for earlier, later in itertools.pairwise(sorted(records, key=lambda record: record.world_size)):
        if earlier.world_size != later.world_size:
            raise JoinFailed(
                f"the workers disagree on world_size: {earlier} says {earlier.world_size} and {later} says "
                f"{later.world_size}; pass the same number to every init_rpc."
            )
    for record in records:
        if not 0 <= record.rank < record.world_size:
            raise JoinFailed(f"{record} has no place in a group of {record.world_size}: ranks are counted from 0.")
    for earlier, later in itertools.pairwise(records):
        if earlier.rank == later.rank:
            raise JoinFailed(
                f"rank {earlier.rank} is taken twice, by {earlier} and by {later}; start every worker with a rank of "
                f"its own. If one of the two is left over from an earlier run, restart all workers."
            )
    for earlier, later in itertools.pairwise(sorted(records, key=lambda record: record.name)):
        if earlier.name == later.name:
            # "is not unique" are torch's words, which programs and tests may look for.
            raise JoinFailed(
                f"the worker name {earlier.name!r} is not unique: {earlier} and {later} use it; give every worker a "
                f"name of its own."
            )


def _warn_of_different_torchs(records: list[Record]) -> None:
    # The CPU and the CUDA build of one release may work together.
    releases = {record.torch_version.partition("+")[0]: record for record in records}
    if len(releases) > 1:
        _logger.warning(
            "the workers run different releases of torch, which may not understand each other: %s",
            ", ".join(f"{release} on {record}" for release, record in sorted(releases.items())),
        )


def _absent(records: list[Record], own: Record, deadline: Deadline) -> JoinTimedOut:
    absent = set(range(own.world_size)) - {record.rank for record in records}
    ranks_by_host: dict[str, set[int]] = {}
    for record in records:
        ranks_by_host.setdefault(record.host, set()).add(record.rank)
    present = ", ".join(f"{_numbers(ranks)} on {host}" for host, ranks in sorted(ranks_by_host.items()))
    # Without rank 0 the workers give up at different times: others may have come and just left.
    not_come = "have not come" if own.rank == 0 else "have not come, or have given up"
    return JoinTimedOut(
        f"init_rpc has waited {deadline.timeout:g} s (init_timeout) for all {own.world_size} workers, and these ranks "
        f"{not_come}: {_numbers(absent)}. Ranks that have come: {present}. Check that every worker has been "
        f"started and got as far as init_rpc, with the same world_size and init_method; or give them more time, a "
        f"larger init_timeout.",
        timeout=deadline.timeout,
        missing=tuple(sorted(absent)),
    )


def _came_too_late(own: Record, verdict: Entry, members: list[Record]) -> JoinFailed:
    if verdict.doubt:
        return refusal(verdict, own, verdict.values.get("judge"))
    rival = next((member for member in members if member.rank == own.rank), members[0])
    return JoinFailed(
        f"{own} came too late: the group of {len(members)} workers at this Store has formed without it, "
        f"with {rival}. Restart all workers, and remove a file:// Store that an earlier run left behind."
    )


def _numbers(numbers: Iterable[int]) -> str:
    """ "0-2, 5" for 0, 1, 2 and 5."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)
