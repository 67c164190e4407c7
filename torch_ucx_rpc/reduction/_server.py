"""A server as one trainer sees it: `Server`, which `serve` returns, and all of them on this worker (`servers`)."""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch._C._distributed_rpc import get_rpc_timeout

from torch_ucx_rpc._observe.life import Life, PerLife
from torch_ucx_rpc._observe.lost import Gone, was_lost
from torch_ucx_rpc.reduction import _host
from torch_ucx_rpc.reduction._messages import Answer, Push, Spec, Trainer
from torch_ucx_rpc.reduction._results import results

_T = TypeVar("_T")

# Between two looks for a host that was started anew; and how long they go on where calls have no timeout.
_LOOK_AGAIN_S = 0.05
_PATIENCE_S = 60.0


class User(Protocol):
    """A model that is trained by way of a server."""

    def on_leave(self) -> None:
        """This trainer takes part no more."""


class Server:
    """What `serve` returns: the server as one trainer sees it.

    The names of lost hosts and the users have a lock each; the positions are written by the pushes, one piece at a
    time.

    Attributes:
        hosts (tuple[str, ...]): the workers that share it.
        trainers (int): how many trainers the first step waits for; 1 where that is not known.
    """

    def __init__(self, spec: Spec, life: Life) -> None:
        self.spec = spec
        self.life = life
        self.trainer = Trainer.of(life)
        self._lock = threading.Lock()
        self._lost: set[str] = set()
        # By piece: the round of the next push, and how many there have been. Without a round yet, that of the others.
        self.positions: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self.first_round: int | None = 0
        self._names = itertools.count()
        self._shapes: list[tuple[int, ...]] | None = None
        self._assignment: list[int] = []
        self.has_left = False
        # Models that are trained by way of it; the hosts are told when there is none any more.
        self._users: weakref.WeakSet[User] = weakref.WeakSet()
        self._open_users = 0
        self._using = threading.Lock()

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.spec.hosts

    @property
    def trainers(self) -> int:
        return self.spec.expected

    def __repr__(self) -> str:
        return f"<reduction.Server {self.spec.key!r} on {', '.join(self.hosts)}>"

    # -- its users on this worker

    def leave(self) -> None:
        """Take part no more: the other trainers do not wait for this one from now on."""
        self.has_left = True
        for user in list(self._users):
            user.on_leave()
        for name in self.hosts:
            try:
                self.call(name, _host.leave, self.spec.key, self.trainer)
            except RuntimeError as error:
                if not was_lost(error):
                    raise

    def name_for(self, kind: str, user: User) -> str:
        """A prefix for the pieces of a model; trainers that ask in the same order get the same.

        When the last user is gone, this trainer is not waited for any more, until it pushes again.
        """
        with self._using:
            self._open_users += 1
        self._users.add(user)
        # Whatever thread collects garbage may hold any lock.
        weakref.finalize(user, self._begin_to_let_go).atexit = False
        return f"{kind}{next(self._names)}"

    def _begin_to_let_go(self) -> None:
        threading.Thread(target=self._let_go, name="torch_ucx_rpc-leave", daemon=True).start()

    def _let_go(self) -> None:
        with self._using:
            self._open_users -= 1
            if self._open_users or self.has_left:
                return
            # After the shutdown of RPC nobody waits.
            with contextlib.suppress(RuntimeError):
                self.call_all(_host.leave, self.spec.key, self.trainer)

    def check_quorum(self, quorum: int | None) -> None:
        """ValueError for a quorum that there can never be."""
        if quorum is None:
            return
        if not isinstance(quorum, int) or isinstance(quorum, bool):
            raise TypeError(f"quorum must be an int; {quorum!r} is none")
        if quorum < 1:
            raise ValueError(f"quorum must be 1 at least; it cannot be {quorum}: without a quorum all trainers count")
        most = max(self.trainers, 1 if self.trainers > 1 else len(self.life.living()))
        if quorum > most:
            raise ValueError(
                f"quorum={quorum} can never be reached: there are {most} trainers, of which that many would have to "
                f"come for each step; give at most {most}, or serve(..., trainers=N) if more will join"
            )

    # -- its hosts

    def on_gone(self, name: str) -> None:
        """A worker has ended."""
        if name in self.hosts:
            self.lose(name)

    def lose(self, name: str) -> None:
        """Send nothing more to a host."""
        with self._lock:
            self._lost.add(name)

    def living_hosts(self) -> list[str]:
        """Those that are not known to be lost."""
        with self._lock:
            return [name for name in self.hosts if name not in self._lost]

    def host_of(self, shard: int) -> str | None:
        """The host of a shard: its own, or the next one that is not lost."""
        hosts = self.hosts
        with self._lock:
            for name in (*hosts[shard:], *hosts[:shard]):
                if name not in self._lost:
                    return name
        return None

    def find_host(self, shard: int) -> str:
        """A host for a shard whose own is lost, ready for pushes; waits for one to come back where none is left."""
        patience = get_rpc_timeout() or _PATIENCE_S
        deadline = time.monotonic() + patience
        while True:
            name = self.host_of(shard)
            if name is None and not self.life.is_static:
                living = {info.name for info in self.life.living()}
                with self._lock:
                    # Others of the same names, by now.
                    self._lost.difference_update(living)
                name = self.host_of(shard)
            if name is not None:
                try:
                    if refusal := self.call(name, _host.open_host, self.spec):
                        raise ValueError(refusal)
                    return name
                except RuntimeError as error:
                    if not was_lost(error):
                        raise
                    self.lose(name)
                    continue
            if self.life.is_static or time.monotonic() > deadline:
                raise RuntimeError(
                    f"all hosts of the server {self.spec.key!r} are lost: {', '.join(self.hosts)}. More hosts, as in "
                    f"reduction.serve('ps0', 'ps1'), take over from each other"
                )
            time.sleep(_LOOK_AGAIN_S)

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the host, here or there."""
        if name == self.trainer.name:
            answer = function(*arguments)
            return answer.wait() if isinstance(answer, torch.futures.Future) else answer
        return rpc.rpc_sync(name, function, args=arguments)

    def call_all(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function of every host, but those that are lost."""
        for name in self.living_hosts():
            try:
                self.call(name, function, *arguments)
            except RuntimeError as error:
                if not was_lost(error):
                    raise
                self.lose(name)

    # -- pushes

    def next_push(self, piece: str, tensors: list[Tensor], quorum: int | None) -> Push:
        """The push of a piece that is to be sent now. RuntimeError if this trainer has left."""
        if self.has_left:
            raise RuntimeError(f"this trainer has left {self!r}: call reduction.serve again to take part")
        number = self._numbers.get(piece, 0)
        self._numbers[piece] = number + 1
        at = self.positions.get(piece, self.first_round)
        return Push(self.spec.key, piece, self.trainer, at, quorum, number, False, tensors)

    def accept(self, push: Push, answer: Answer) -> None:
        """Note what an answer says of the rounds to come."""
        self.positions[push.piece] = answer.next_round
        if len(self.hosts) > 1 and self.spec.optimizer is None and answer.rounds == 1 and answer.tensors:
            results().keep(push.key, push.piece, answer.next_round - 1, answer.tensors)

    def assign(self, tensors: Sequence[Tensor]) -> list[int]:
        """The shard of each tensor: the largest first, each to the shard with the least so far.

        Raises ValueError for tensors of other shapes than those of the first call.
        """
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if self._shapes is None:
            self._shapes = shapes
            self._assignment = spread([tensor.numel() for tensor in tensors], len(self.hosts))
        elif shapes != self._shapes:
            index = next(
                (index for index, pair in enumerate(zip(shapes, self._shapes, strict=False)) if pair[0] != pair[1]),
                min(len(shapes), len(self._shapes)),
            )
            raise ValueError(
                f"gradients of another shape than the server's: there are {len(shapes)} tensors, of which number "
                f"{index} is {list(shapes[index]) if index < len(shapes) else 'missing'}; the server has "
                f"{len(self._shapes)}, and that one "
                f"{'is ' + str(list(self._shapes[index])) if index < len(self._shapes) else 'not'}. "
                f"Push the gradients of all parameters, in the same order, each time"
            )
        return self._assignment


def spread(sizes: Sequence[int], shards: int) -> list[int]:
    """The shard of each of these, so that all shards get about as much; the same in every process."""
    loads = [0] * shards
    assignment = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        shard = loads.index(min(loads))
        assignment[index] = shard
        loads[shard] += sizes[index]
    return assignment


class Servers:
    """The servers that this worker uses, by key. Any thread may use it."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self._lock = threading.Lock()
        self._servers: dict[str, Server] = {}
        life.watch(self._on_gone)

    def get(self, key: str) -> Server | None:
        with self._lock:
            return self._servers.get(key)

    def keep(self, server: Server) -> None:
        with self._lock:
            self._servers[server.spec.key] = server

    def _on_gone(self, gone: Gone) -> None:
        with self._lock:
            servers = list(self._servers.values())
        for server in servers:
            server.on_gone(gone.name)


servers = PerLife(Servers)


def hosts_of(key: str) -> tuple[str, ...] | None:
    """For other workers: the hosts of a server, if this one uses it."""
    server = servers().get(key)
    return None if server is None else server.hosts
