"""The hosts of a server as one trainer calls them: `HostRing`."""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import get_rpc_timeout

from torch_ucx_rpc._workers.life import Life
from torch_ucx_rpc._workers.lost import was_lost
from torch_ucx_rpc.reduction import _hosts
from torch_ucx_rpc.reduction._meeting import joined_trainers, other_trainers_as_hosts
from torch_ucx_rpc.reduction._messages import Opened, Spec, Trainer

# Between two looks for a host that was started anew; and how long they go on where calls have no timeout.
_LOOK_AGAIN_S = 0.05
_PATIENCE_S = 60.0


class HostRing:
    """The hosts of a server, each of which takes over from those before it. Any thread may use it.

    When all are lost, others become the hosts: those of the same names that have been started anew, or trainers.
    """

    def __init__(
        self, spec: Spec, life: Life, trainer: Trainer, lost: Iterable[str], on_other_host: Callable[[str], None]
    ) -> None:
        """``lost``: hosts that others do not use. ``on_other_host`` is called with each host that takes over."""
        self.spec = spec
        self._life = life
        self._trainer = trainer
        self._on_other_host = on_other_host
        self._lock = threading.Lock()
        self._lost: set[str] = set(lost)
        self._finding = threading.Lock()

    # -- which are there

    def lose(self, name: str) -> None:
        """Send nothing more to a host."""
        with self._lock:
            self._lost.add(name)

    def living(self) -> list[str]:
        """Those that are not known to be lost."""
        with self._lock:
            return [name for name in self.spec.hosts if name not in self._lost]

    def lost(self) -> tuple[str, ...]:
        """Those that are lost."""
        with self._lock:
            return tuple(self._lost)

    def host_of(self, shard: int) -> str | None:
        """The host of a shard: its own, or the next one that is not lost."""
        with self._lock:
            return next((name for name in self.spec.ring(shard) if name not in self._lost), None)

    @property
    def may_move(self) -> bool:
        """Whether other trainers can become the hosts: nothing is lost with the last ones."""
        return self.spec.on_trainers and (self.spec.optimizer is None or self.spec.checkpoint is not None)

    @property
    def may_change(self) -> bool:
        """Whether another one can take over from a host: also one of its name, in a group that workers may join."""
        return len(self.spec.hosts) > 1 or self.may_move or not self._life.is_static

    # -- what they are told

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the host, here or there. One that waits for others is a call here too, for its timeout."""
        if name == self._trainer.name and not hasattr(function, "_wrapped_async_rpc_function"):
            return function(*arguments)
        return rpc.rpc_sync(name, function, args=arguments)

    def call_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function of every host, but those that are lost: their answers."""
        answers = []
        for name in self.living():
            try:
                answers.append(self.call(name, function, *arguments))
            except RuntimeError as error:
                if not was_lost(error):
                    raise
                self.lose(name)
        return answers

    def is_known(self) -> bool:
        """Whether a living host has the server with the same hosts; those that are no living workers are lost."""
        living = {info.name for info in self._life.living()}
        for name in self.spec.hosts:
            if name not in living:
                self.lose(name)
        for name in self.living():
            try:
                if self.call(name, _hosts.hosts_of, self.spec.key) == self.spec.hosts:
                    return True
            except RuntimeError as error:
                if not was_lost(error):
                    raise
        return False

    def open_all(self, spec: Spec) -> None:
        """Have all hosts know the server, but those that are lost. Where one refuses, no other keeps a new server."""
        made = []
        try:
            for name in self.living():
                if (opened := self._open(name, spec)) is not None and opened.is_new:
                    made.append(name)
        except ValueError:
            for name in made:
                with contextlib.suppress(RuntimeError):
                    self.call(name, _hosts.close_unused, self.spec.key)
            raise

    def _open(self, name: str, spec: Spec) -> Opened | None:
        """Have a host know the server, and learn from it which hosts are lost; None if this one is."""
        lost = self.lost()
        try:
            opened: Opened = self.call(name, _hosts.open_host, spec, lost, self._trainer)
        except RuntimeError as error:
            if not was_lost(error):
                raise
            self.lose(name)
            return None
        if opened.refusal is not None:
            raise ValueError(opened.refusal)
        with self._lock:
            self._lost.update(opened.lost)
        return opened

    # -- others in their place

    def find(self, shard: int) -> str:
        """A host for a shard whose own is lost, ready for pushes; finds other hosts where none is left."""
        patience = get_rpc_timeout() or _PATIENCE_S
        deadline = time.monotonic() + patience
        while True:
            name = self.host_of(shard)
            if name is not None:
                # By what it says of others, it may be another one's.
                if self._open(name, self.spec) is not None and self.host_of(shard) == name:
                    break
            elif (self._life.is_static and not self.may_move) or time.monotonic() > deadline:
                raise RuntimeError(
                    f"all hosts of the server {self.spec.name!r} are lost: {', '.join(self.spec.hosts)}. More hosts, "
                    f"as in reduction.serve('ps0', 'ps1'), take over from each other"
                )
            elif not self._find_others():
                time.sleep(_LOOK_AGAIN_S)
        self._on_other_host(name)
        return name

    def _find_others(self) -> bool:
        """When all hosts are lost: those of the same names that have come since, or the trainers that there are now."""
        with self._finding:
            if self.living():
                return True
            if self.may_move:
                found = other_trainers_as_hosts(self.spec.name, self.spec.generation + 1, self._life)
                expected = found.expected
                with self._lock:
                    self._lost.clear()
                    self.spec = self.spec._replace(hosts=found.hosts.names, generation=found.hosts.generation)
            else:
                living = {info.name for info in self._life.living()}
                is_one_back = bool(living.intersection(self.spec.hosts))
                expected = joined_trainers(self.spec.name, self._life) if is_one_back else ()
                with self._lock:
                    self._lost -= living
            self.open_all(self.spec._replace(expected=len(expected), expected_names=expected))
            # One that does not train yet may have opened them before.
            self.call_all(_hosts.expect, self.spec.key, len(expected), expected, True)
            for name in self.living():
                self._on_other_host(name)
            return bool(self.living())
