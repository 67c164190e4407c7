"""This trainer's copy of a model: how it gets its state from another trainer, and gives it to others (`Copy`)."""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import weakref
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.futures import Future

from torch_ucx_rpc._workers.life import PerLife
from torch_ucx_rpc._workers.lost import timed_out, was_lost
from torch_ucx_rpc.reduction import _hosts
from torch_ucx_rpc.reduction._asking import Asking, Request
from torch_ucx_rpc.reduction._messages import Admission, Trainer
from torch_ucx_rpc.reduction._results import results
from torch_ucx_rpc.reduction._server import Server

_logger = logging.getLogger(__name__)

# Until another trainer has made its model.
_PAUSE_S = 0.01


class Copy:
    """A copy of a model, which begins as that of another trainer, and of which others begin.

    All trainers have the same parameters at the beginning of a step. There the state is given, to a trainer from that
    step on. A trainer that has missed a step (`is_behind`) takes over another one's state at its next step.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, server: Server) -> None:
        self._module = module
        self._optimizer = optimizer
        self._server = server
        self.asking = Asking()
        self.name = server.name_for("model", self, self.asking.refuse)
        self.is_behind = False
        self._can_give = False
        # As it was before the first step, until that is over.
        self._initial: dict[str, Any] | None = None
        # Trainers that have been given the state at the beginning of this step.
        self._given: list[Admission] = []
        # The last request for a state.
        self._request = -1

    @property
    def has_joined(self) -> bool:
        """Whether this trainer has the state of the others, and can give it."""
        return self._can_give

    @property
    def may_be_replaced(self) -> bool:
        """Whether another one's state is all that this trainer needs: its optimizer is known."""
        return self._optimizer is not None

    @property
    def _key(self) -> str:
        return f"{self._server.name}/{self.name}"

    def begin(self) -> None:
        """Begin together with the first trainers, or with the state of one that is further."""
        _copies()[self._key] = self
        # The others of the first may come for it when this trainer is in its first step, which waits for them.
        self._initial = self._state()
        try:
            is_initial = self._take_over()
        except BaseException as error:
            # A traceback may keep the model, as in notebooks.
            with contextlib.suppress(RuntimeError):
                self._hold_no_more()
            if not (isinstance(error, RuntimeError) and timed_out(error)):
                raise
            raise RuntimeError(
                f"{self._server.trainer} cannot begin: the others, or a step of one of them, did not come within the "
                f"time of a call. serve(..., trainers=N) says how many there are at the start ({error})"
            ) from error
        self._initial = self._state() if is_initial else None
        self._hold()

    def begin_step(self) -> None:
        """Take over what this trainer has missed, and give the state to those that ask for it."""
        if self.is_behind:
            self._catch_up()
        self._give_to_those_asking()

    def end_step(self) -> None:
        """The first step is over: who comes now begins later."""
        self._initial = None

    def _catch_up(self) -> None:
        """Take over the state of another trainer, after steps that this one has missed."""
        # Others that are behind must not wait for this one, while it waits for them. Nor may a host be told otherwise.
        self._can_give = False
        self._hold_no_more()
        self.asking.turn_away()
        try:
            self._take_over()
        except RuntimeError as error:
            if not timed_out(error):
                raise
            _logger.warning(
                "%s goes on with what it has: no other has begun a step meanwhile (%s)", self._server.trainer, error
            )
        finally:
            self.is_behind = False
        self._hold()

    def _take_over(self) -> bool:
        """Load the state of a trainer that is further, if there is one. Returns whether this one is of the first."""
        server = self._server
        while True:
            host = server.ring.find(0)
            try:
                donor, is_initial, is_leaving = server.ring.call(
                    host, _hosts.enter, server.spec.key, self.name, server.trainer
                )
                if is_leaving:
                    server.ring.lose(host)
                    continue
                if donor is None or self._take_from(donor, is_initial):
                    return bool(is_initial)
            except RuntimeError as error:
                if not was_lost(error):
                    raise
                _logger.info("%s begins again: %s", server.trainer, error)
                continue
            # That one has ended with the model, or has not made it yet.
            time.sleep(_PAUSE_S)

    def _take_from(self, donor: Trainer, is_initial: bool) -> bool:
        """Load the state of a trainer, if it has one."""
        with results().expect_state(self._server.name, self.name, donor.name):
            self._request = next(_requests)
            state = rpc.rpc_sync(donor.name, _give, args=(self._key, self._server.trainer, self._request, is_initial))
            if state is not None:
                self._load(state)
            return state is not None

    def _hold(self) -> None:
        """Have the hosts know that this trainer can give its state to others."""
        self._can_give = True
        self._server.ring.call_all(_hosts.hold, self._server.spec.key, self.name, self._server.trainer)

    def _hold_no_more(self) -> None:
        """Have the hosts wait for this trainer no more, and give its state to nobody, until it has one again."""
        server = self._server
        server.ring.call_all(_hosts.hold_no_more, server.spec.key, self.name, server.trainer, self._request)

    def on_other_host(self, host: str) -> None:
        """Have a host that takes over know who has the state: this trainer, and those that have just been given it."""
        if self._can_give:
            key = self._server.spec.key
            try:
                self._server.ring.call(host, _hosts.hold, key, self.name, self._server.trainer)
                for admission in self._given:
                    self._server.ring.call(host, _hosts.admit, key, admission._replace(is_repeated=True))
            except RuntimeError as error:
                if not was_lost(error):
                    raise

    def _load(self, state: dict[str, Any]) -> None:
        own = dict(self._module.state_dict(keep_vars=True))
        theirs = state["module"]
        if {name: t.shape for name, t in own.items() if isinstance(t, Tensor)} != {
            name: t.shape for name, t in theirs.items() if isinstance(t, Tensor)
        }:
            raise ValueError("the trainers of a server must have the same model; this one's has other parameters")
        self._module.load_state_dict(theirs)
        if self._optimizer is not None and state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        self._server.positions.update(state["positions"])
        results().adopt(self._server.name, state["results"])
        if not state["positions"]:
            # The first step goes on.
            self._server.first_round = 0

    def give(self, trainer: Trainer, request: int, is_initial: bool) -> Future[dict[str, Any] | None]:
        """This trainer's state at the beginning of a step, for another one: of the first step, if both are in that."""
        future: Future[dict[str, Any] | None] = Future(devices=self._server.life.devices)
        initial = self._initial if is_initial else None
        if self.is_behind:
            future.set_result(None)
        elif initial is None:
            self.asking.add(Request(trainer, request, future))
        else:
            future.set_result(initial)
        return future

    def _give_to_those_asking(self) -> None:
        self._given = []
        server = self._server
        for request in self.asking.take():
            # From now on the others wait for it, this step included: it is not complete without this trainer.
            admission = Admission(request.trainer, server.trainer, request.number, tuple(server.positions))
            self._given.append(admission)
            server.ring.call_all(_hosts.admit, server.spec.key, admission)
            request.state.set_result(self._state())

    def on_leave(self) -> None:
        """Nobody gets the state from here any more."""
        self.asking.refuse()

    def _state(self) -> dict[str, Any]:
        return {
            "module": {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in self._module.state_dict().items()
            },
            "optimizer": None if self._optimizer is None else _copied(self._optimizer.state_dict()),
            "positions": dict(self._server.positions),
            # Its host may have answered this trainer alone, and die.
            "results": results().of_model(self._server.name, self.name),
        }


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


# Numbers of this worker's requests for a state.
_requests = itertools.count()
# Those of this worker, by key of the server and name.
_copies: PerLife[weakref.WeakValueDictionary[str, Copy]] = PerLife(lambda life: weakref.WeakValueDictionary())


@rpc.functions.async_execution
def _give(key: str, trainer: Trainer, request: int, is_initial: bool) -> Future[dict[str, Any] | None]:
    copy = _copies().get(key)
    if copy is None:
        # It has ended with the model, but not yet with RPC, or has not made it yet: another one is asked.
        nothing: Future[dict[str, Any] | None] = Future()
        nothing.set_result(None)
        return nothing
    return copy.give(trainer, request, is_initial)
