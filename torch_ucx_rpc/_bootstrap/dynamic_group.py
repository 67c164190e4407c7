"""A group without a size, which workers join and leave as they like.

A joining worker enters the list of members in the Store (``member_list``), and reads the records of earlier members
there. It asks each earlier member, over UCX, to admit it. Later workers ask it in turn. So of two workers that join at
the same time, the later one asks the earlier one. Only joining needs the Store: its host may leave the group, and even
end, without harm to members. In a job with a secret, workers authenticate the list and the announcements.

A worker asks each member until the member answers or is lost. A network cut delays a join, but both workers know each
other in the end.

After a cut longer than ``reconnect_limit``, each side loses the workers of the other side. In the list, every worker
may mark the workers that it has lost. A marked worker may merely have fallen silent, so it stays on the list, in doubt,
until another worker takes its rank or its name. A worker that joins also asks members in doubt, but does not wait long
for them.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from torch._C._distributed_c10d import Store
from torch._C._distributed_rpc import WorkerInfo

from torch_ucx_rpc._bootstrap.deadline import Deadline
from torch_ucx_rpc._bootstrap.expendable import ExpendableStore
from torch_ucx_rpc._bootstrap.member_list import MemberList
from torch_ucx_rpc._bootstrap.members import ask_again
from torch_ucx_rpc._bootstrap.record import Record
from torch_ucx_rpc._bootstrap.secret import Secret, read_entry, write_entry
from torch_ucx_rpc._devices import maps as device_maps
from torch_ucx_rpc.errors import JoinFailed, JoinTimedOut

# Rank 0 of a group with a size writes this key into the Store.
_STATIC = "torch_ucx_rpc/static"

# Seconds for members in doubt to admit a worker that joins: living ones do so within milliseconds.
_DOUBTED_S = 1.0


class Agent(Protocol):
    """The part of the agent (``_agent``) that a dynamic group uses; ``_C.pyi`` declares the methods in C++."""

    def add_records(self, records: Iterable[Record], members: Collection[Record]) -> None: ...
    def get_worker_infos(self) -> list[WorkerInfo]: ...
    def _set_membership(
        self, on_join: Callable[[str], None], on_lost: Callable[[int], None], join_key: bytes
    ) -> None: ...
    def _announce_join(self, record: str, members: Sequence[int]) -> None: ...
    def _unadmitted(self) -> list[WorkerInfo]: ...
    def _remove_member(self, session: int) -> None: ...


class DynamicGroup:
    """A group that workers join and leave, as one of its members sees it.

    Attributes:
        replaced (set): name and session of each member whose rank or name another worker has taken. The member is gone
            for certain, even if this worker has only lost contact with it.
    """

    is_static = False

    def __init__(self, store: Store, own: Record, agent: Agent, secret: Secret | None) -> None:
        self._secret = secret
        self._store = store
        self._expendable = ExpendableStore(store)
        self._list = MemberList(store, own, secret)
        self._own = own
        # A weak reference, since the agent holds methods of this object.
        self._agent = weakref.ref(agent)
        self._lock = threading.Lock()
        # The members that this worker knows, by place in the list. A member that has left stays until another worker
        # takes its rank or its name.
        self._members: dict[str, Record] = {}
        self.replaced: set[tuple[str, int]] = set()
        self._place: str | None = None
        # The members that this worker found in the list when it came. Each must admit it.
        self._earlier: dict[str, Record] = {}
        # Places of earlier members that this worker or another has lost, and that have not admitted this worker yet.
        self._doubted: set[str] = set()

    def enter(self) -> None:
        """Put this worker into the list, and all earlier members into the agent, which is not running yet.

        Raises JoinFailed when the rank or the name is taken, or when the group at this Store has a fixed size. Raises
        it also when the group's workers have another version of this package. Raises ValueError when the device maps do
        not fit together.
        """
        if self._store.check([_STATIC]) and (text := self._store.get(_STATIC)):
            raise _mixture(read_entry(text, self._secret).values.get("member"), has_size=True)
        place = self._place = self._list.add()
        earlier = self._list.earlier()
        later = [self._own]
        for other_place, other in reversed(list(earlier.items())):
            rivals = [record for record in later if other.rank == record.rank or other.name == record.name]
            if not rivals:
                later.append(other)
            # The other side of a cut may have written this entry after the worker was replaced.
            elif other.in_doubt or other.has_ended_beside(self._own):
                self._list.strike(other_place)
                del earlier[other_place]
                self.replaced.add((other.name, other.session))
            elif self._own in rivals:
                raise _place_is_taken(self._own, other)
        device_maps.check([self._own, *earlier.values()], is_static_group=False)
        agent = self._running_agent()
        agent._set_membership(
            self._admit, self._forget, b"" if self._secret is None else self._secret.join_key(self._own.session)
        )
        self._earlier = earlier
        with self._lock:
            self._doubted = {other_place for other_place, other in earlier.items() if other.in_doubt}
            self._members = {place: self._own, **earlier}
            agent.add_records([self._own, *earlier.values()], self._members.values())

    def meet(self, deadline: Deadline) -> None:
        """Wait until all earlier members have admitted this worker, whose agent is running now.

        Lost members do not count. Members in doubt count for one second. Raises JoinTimedOut at the deadline.
        """
        agent = self._running_agent()
        announcement = json.dumps({"place": self._place, "record": self._own.to_values()})
        patience = Deadline(_DOUBTED_S)
        # Hold the lock: `_admit`, on another thread, may give a member's rank to its successor.
        with self._lock:
            sessions = [record.session for place, record in self._earlier.items() if place in self._members]
            agent._announce_join(announcement, sessions)
        for is_over in ask_again(len(self._earlier), deadline):
            # This question comes first: a member that is lost in between has not admitted this worker.
            silent = {info.id for info in agent._unadmitted()}
            present = {info.id for info in agent.get_worker_infos()}
            with self._lock:
                earlier = {place: record for place, record in self._earlier.items() if place in self._members}
            self._trust(place for place, record in earlier.items() if record.rank in present - silent)
            waited_for = {
                place: record
                for place, record in earlier.items()
                if record.rank in silent and not (place in self._doubted and patience.passed())
            }
            if not waited_for:
                break
            if is_over:
                raise JoinTimedOut(
                    f"{self._own} has waited {deadline.timeout:g} s (init_timeout) to be admitted to the group by "
                    f"{', '.join(map(str, waited_for.values()))}: they are in its list of members, but do not answer. "
                    f"They may hang, be cut off, or have died with their host. With an init_timeout above "
                    f"heartbeat_limit and reconnect_limit together, init_rpc goes on once they are lost.",
                    timeout=deadline.timeout,
                    missing=tuple(sorted(record.rank for record in waited_for.values())),
                )
            self._look_up(waited_for)

    def leave(self) -> None:
        """Take this worker off the list, if it is on the list and the Store still exists."""
        place, self._place = self._place, None
        if place is not None:
            with self._expendable.attempt():
                self._list.strike(place)

    def _running_agent(self) -> Agent:
        agent = self._agent()
        assert agent is not None
        return agent

    def _admit(self, text: str) -> None:
        """Admit a worker that joins; ``text`` is the announcement of its `meet`."""
        values = json.loads(text)
        place, record = str(values["place"]), Record.from_values(values["record"])
        # The joining worker found its rank and name free in the list. So the worker that had them is gone, even if this
        # one has not noticed.
        rivals = {
            earlier: member
            for earlier, member in list(self._members.items())
            if earlier != place and (member.rank == record.rank or member.name == record.name)
        }
        self._remove(rivals)
        self.replaced.update((member.name, member.session) for member in rivals.values())
        with self._lock:
            if place not in self._members:
                self._members[place] = record
                self._running_agent().add_records([record], self._members.values())

    def _remove(self, places: Iterable[str]) -> None:
        for place in places:
            if self._members.get(place) is self._own:
                raise RuntimeError(f"{self._own} is here, and its rank and name are not free")
            with self._lock:
                record = self._members.pop(place, None)
            if record is not None:
                self._running_agent()._remove_member(record.session)

    def _forget(self, session: int) -> None:
        """Take a lost member off the list if its process has certainly ended; otherwise mark it as in doubt.

        So workers that join do not wait long for it.
        """
        with self._lock:
            lost = {place: record for place, record in self._members.items() if record.session == session}
        for place, record in lost.items():
            has_ended = record.has_ended_beside(self._own)
            self._replace(place, None if has_ended else record._replace(in_doubt=True))

    def _trust(self, places: Iterable[str]) -> None:
        """Clear the doubt about members that have admitted this worker."""
        for place in self._doubted.intersection(places):
            self._doubted.discard(place)
            self._replace(place, self._earlier[place]._replace(in_doubt=False))

    def _look_up(self, places: Iterable[str]) -> None:
        """Drop members that have left the list, and note the members that another worker has lost since."""
        with self._expendable.attempt():
            for place in places:
                record = self._list.at(place)
                if record is None:
                    self._remove([place])
                elif record.in_doubt:
                    self._doubted.add(place)

    def _replace(self, place: str, record: Record | None) -> None:
        # If the Store has ended, no worker reads the list any more.
        with self._expendable.attempt():
            self._list.replace(place, record)


class StaticGroup:
    """A group of fixed size. Its entry in the Store shows it to workers that would start a group without a size
    there."""

    is_static = True

    def __init__(self, store: Store, own: Record, secret: Secret | None) -> None:
        self._store = store
        self._own = own
        self._secret = secret
        self._is_announced = False

    def refuse_mixture(self) -> None:
        """Raise JoinFailed if workers at this Store are in a group without a size."""
        for member in MemberList(self._store, self._own, self._secret).present():
            if not member.has_ended_beside(self._own):
                raise _mixture(member, has_size=False)

    def announce(self) -> None:
        """Write the group into the Store; rank 0 does it for all workers."""
        if self._own.rank == 0:
            self._store.set(_STATIC, write_entry({"member": str(self._own)}, self._secret))
            self._is_announced = True

    def leave(self) -> None:
        """Mark the group as over; rank 0 does it for all workers."""
        if self._is_announced:
            self._is_announced = False
            with ExpendableStore(self._store).attempt():
                self._store.set(_STATIC, "")


def _mixture(member: object, has_size: bool) -> JoinFailed:
    # torch uses the same sentence, which programs and tests may look for.
    return JoinFailed(
        "RPC group mixes statically and dynamically initialized members which is not supported. The group at this "
        f"Store has {'a' if has_size else 'no'} world_size; {member} belongs to it: pass world_size to every init_rpc, "
        "or to none."
    )


def _place_is_taken(own: Record, other: Record) -> JoinFailed:
    what = f"name {own.name!r}" if own.name == other.name else f"rank {own.rank}"
    return JoinFailed(
        f"the worker {what} is not unique: {own} wants to join the group, and {other} is a member; give every worker a "
        f"rank and a name of its own. If the member has died, the other workers have not noticed yet."
    )
