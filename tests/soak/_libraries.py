"""Names and pushes: the services of each worker, and `Ledger`, a server that counts each push by itself."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch
import torch.distributed.rpc as rpc
from torch.futures import Future

from torch_ucx_rpc import reduction, services

# The pushes to a ledger: in a burst they may overtake each other. Another trainer may make all pushes but each burst's
# first.
BURSTS = ((0,), (1, 2, 3), (4, 5, 6), (7,))
_PUSHES = 8
_LIFE = "life "


class LostUpdate(Exception):
    """A server has answered a push, and has lost it."""


# ---- Names -----------------------------------------------------------------------------------------------------------


def offer(life: str) -> None:
    """Offer a service, of which every worker is a replica, and the name of this life."""
    services.register("negative", torch.neg, idempotent=True)
    services.pair(f"{_LIFE}{life}", life)


def lives_seen() -> list[str]:
    """The lives that offer their names, as known here."""
    return [service.name.removeprefix(_LIFE) for service in services.names() if service.name.startswith(_LIFE)]


# ---- Pushes ----------------------------------------------------------------------------------------------------------


class Ledger:
    """An asynchronous server on two hosts, each with the other's replica. Every push adds one to a number of its own.

    So the numbers in an answer show lost pushes, and pushes that were applied twice.

    Attributes:
        answered: the pushes whose answers have been checked.
    """

    def __init__(self, name: str, hosts: Sequence[str]) -> None:
        self._name, self._hosts = name, hosts
        self._answered_before: dict[int, frozenset[int]] = {}
        self.answered: set[int] = set()
        self.began = time.monotonic()

    def push(self, push: int, by: str | None) -> Future:
        """Push, as this worker or by another one."""
        self._answered_before[push] = frozenset(self.answered)
        if by is None:
            return reduction.push_pull_async(self._server, _one(push))
        return rpc.rpc_async(by, _push, args=(self._name, self._hosts, push))

    def check(self, push: int, counts: Sequence[torch.Tensor]) -> str:
        """The fault of an answer; empty if it has none. LostUpdate if it lacks an earlier answer's push."""
        for count in counts:
            if doubled := (count > 1).nonzero().flatten().tolist():
                return f"pushes {doubled} are in the state more than once: {count.tolist()}"
            if not count[push]:
                return f"push {push} is not in the state that it was answered with: {count.tolist()}"
            if lost := [known for known in sorted(self._answered_before[push]) if not count[known]]:
                raise LostUpdate(f"pushes {lost} are not in the state any more: {count.tolist()}")
        self.answered.add(push)
        return ""

    @functools.cached_property
    def _server(self) -> reduction.Server:
        return _serve(self._name, self._hosts)


def _push(name: str, hosts: Sequence[str], push: int) -> list[torch.Tensor]:
    return reduction.push_pull(_serve(name, hosts), _one(push))


def _serve(name: str, hosts: Sequence[str]) -> reduction.Server:
    return reduction.serve(
        *hosts,
        name=name,
        trainers=1,
        # One for each host.
        parameters=[torch.zeros(_PUSHES, dtype=torch.float64) for _ in hosts],
        optimizer=functools.partial(torch.optim.SGD, lr=1.0, maximize=True),
        asynchronous=True,
        replica=True,
    )


def _one(push: int) -> list[torch.Tensor]:
    count = torch.zeros(_PUSHES, dtype=torch.float64)
    count[push] = 1
    return [count, count.clone()]
