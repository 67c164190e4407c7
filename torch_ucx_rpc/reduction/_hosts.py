"""The hosts on this worker (`Hosts`), and what other workers call of them."""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from torch_ucx_rpc._workers.life import Life, PerLife
from torch_ucx_rpc._workers.lost import Gone
from torch_ucx_rpc.reduction._host import Host
from torch_ucx_rpc.reduction._messages import (
    UNKNOWN,
    Admission,
    Answer,
    Entry,
    Kept,
    Opened,
    Push,
    Spec,
    Trainer,
    Update,
)


class _OtherHosts:
    """Those of a server but this worker, for its pieces with parameters."""

    def __init__(self, spec: Spec, life: Life) -> None:
        self._spec = spec
        self._life = life

    def next_host(self) -> str | None:
        # One that was started anew keeps the replica, though trainers do not push to it.
        hosts, own_name = self._spec.hosts, self._life.info.name
        living = {info.name for info in self._life.living()} - {own_name}
        ring = self._spec.ring(hosts.index(own_name) if own_name in hosts else 0)
        return next((name for name in ring if name in living), None)

    def send_update(self, host: str, update: Update) -> Future[None]:
        sent: Future[None] = rpc.rpc_async(host, take_update, args=(update,))
        return sent


class Hosts:
    """The hosts on this worker, by the key of their server. Any thread may use it."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._lock = threading.Lock()
        self._hosts: dict[str, Host] = {}
        self._gone: list[Gone] = []
        life.watch(self._on_gone)
        life.before_leaving(self._close)

    def _close(self) -> None:
        with self._lock:
            hosts = list(self._hosts.values())
        for host in hosts:
            host.close()

    def __getitem__(self, key: str) -> Host:
        return self._hosts[key]

    def get(self, key: str) -> Host | None:
        return self._hosts.get(key)

    def open(self, spec: Spec, lost: Iterable[str] = (), trainer: Trainer | None = None) -> Opened:
        """Make the host of a server, or find it made; a refusal if it was made otherwise.

        ``lost``: the hosts that the trainer does not use any more. ``trainer``: who asks, if it is one.
        """
        with self._lock:
            host = self._hosts.get(spec.key)
            is_new = host is None
            if host is None:
                host = self._hosts[spec.key] = Host(spec, self._life, _OtherHosts(spec, self._life))
                living = {info.name for info in self._life.living()}
                for gone in self._gone:
                    host.on_gone(gone.session, gone.name, has_successor=gone.name in living)
        if refusal := host.refusal(spec):
            return Opened(refusal)
        if trainer is not None:
            host.note_serve(trainer)
        return Opened(None, host.note_lost(lost), is_new)

    def close_unused(self, key: str) -> None:
        """Take back what `open` has made, unless a trainer has used it since."""
        with self._lock:
            if (host := self._hosts.get(key)) is not None and host.is_unused:
                del self._hosts[key]

    def _on_gone(self, gone: Gone) -> None:
        with self._lock:
            self._gone.append(gone)
            hosts = list(self._hosts.values())
        for host in hosts:
            host.on_gone(gone.session, gone.name)


hosts = PerLife(Hosts)


# --------------------------------------------------------------------------------------------- what other workers call


def open_host(spec: Spec, lost: tuple[str, ...], trainer: Trainer) -> Opened:
    return hosts().open(spec, lost, trainer)


def hosts_of(key: str) -> tuple[str, ...] | None:
    host = hosts().get(key)
    return None if host is None else host.spec.hosts


def is_newcomer(key: str, trainer: Trainer) -> bool:
    return hosts()[key].is_newcomer(trainer)


@rpc.functions.async_execution
def push(push: Push, is_owned: bool) -> Future[Answer]:
    return take_push(push, is_owned)


def take_push(push: Push, is_owned: bool) -> Future[Answer]:
    """The same here, without a call."""
    host = hosts().get(push.key)
    if host is None:
        future: Future[Answer] = Future()
        future.set_result(Answer(UNKNOWN))
        return future
    return host.push(push, is_owned)


def keep_copy(push: Push) -> None:
    """A trainer of this worker may write to the tensors of a push from now on, which may still wait to be added."""
    if (host := hosts().get(push.key)) is not None:
        host.keep_copy(push)


def take_update(update: Update) -> None:
    if update.everything is not None:
        hosts().open(update.everything[0])
    hosts()[update.key].parameters(update.piece).take_update(update)


@rpc.functions.async_execution
def fill(key: str, piece: str, trainer: Trainer) -> Future[str]:
    return hosts()[key].parameters(piece).fill(trainer)


@rpc.functions.async_execution
def take_parameters(key: str, piece: str, parameters: list[Tensor]) -> Future[None]:
    return hosts()[key].parameters(piece).take_parameters(parameters)


def kept(key: str, piece: str) -> Kept | None:
    return hosts()[key].parameters(piece).kept()


@rpc.functions.async_execution
def enter(key: str, model: str, trainer: Trainer) -> Future[Entry]:
    return hosts()[key].enter(model, trainer)


def expect(key: str, trainers: int, names: tuple[str, ...], is_all: bool = False) -> None:
    hosts()[key].expect(trainers, names, is_all)


def hold(key: str, model: str, trainer: Trainer) -> None:
    hosts()[key].hold(model, trainer)


def models(key: str) -> list[str]:
    return hosts()[key].models()


def hold_no_more(key: str, model: str, trainer: Trainer, request: int) -> None:
    if (host := hosts().get(key)) is not None:
        host.hold_no_more(model, trainer, request)


def admit(key: str, admission: Admission) -> None:
    hosts()[key].admit(admission)


def close_unused(key: str) -> None:
    hosts().close_unused(key)


def let_go(key: str, model: str, trainer: Trainer) -> None:
    hosts()[key].let_go(model, trainer)


def leave(key: str, trainer: Trainer) -> None:
    # One that was started anew may not know the server.
    if (host := hosts().get(key)) is not None:
        host.leave(trainer)


def absent(key: str, piece: str) -> list[str]:
    return hosts()[key].absent(piece)
