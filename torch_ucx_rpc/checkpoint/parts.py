"""The parts of a state, and their workers."""

from __future__ import annotations

import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch._C._distributed_rpc import PyRRef, _is_current_rpc_agent_set
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.nn.api.remote_module import _RemoteModule

from torch_ucx_rpc._arguments import check_number, check_path, check_type, wrong_type, wrong_value
from torch_ucx_rpc.checkpoint import optimizers

__all__ = [
    "CheckpointError",
    "Part",
    "Path",
    "Planned",
    "check_wishes",
    "drop_everywhere",
    "parts_of",
    "restore_keys",
    "run_everywhere",
    "under",
]

# Seconds between two questions to a worker that has not answered.
_ASKING_S = 1.0

# The keys from the top of a state down to a value.
Path = tuple[Any, ...]

_Plan = TypeVar("_Plan")


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; the message names the worker and the reason."""


class Part(NamedTuple):
    """One worker's part of an object.

    ``collect(*args)`` returns the object's state there, a dict that may be nested, with the living tensors.
    ``template(*args, saved)`` is a dict of tensors to read into; non-tensor entries may hold any placeholder. ``saved``
    maps the paths that the checkpoint has below the object to DCP's metadata. ``template`` raises ValueError if the
    object cannot take that state. ``apply(*args, state)`` gets the template after the read. `save` and `load` pickle
    the functions and arguments. But if ``worker`` is None, the functions run in the process that calls `save` or
    `load`.
    """

    worker: str | None
    collect: Callable[..., dict[str, Any]]
    template: Callable[..., dict[str, Any]]
    apply: Callable[..., None]
    args: tuple[Any, ...] = ()
    optional: bool = False
    """Whether a checkpoint without this part can be loaded."""


def check_wishes(path: Any, *, timeout: float | None, **objects: tuple[Any, type]) -> None:
    """Check arguments of `save` and `load`: a path or a storage, and objects of DCP, given with their class."""
    for name, (value, kind) in objects.items():
        if value is not None:
            check_type(name, kind, f"a torch.distributed.checkpoint.{kind.__name__}", value)
    if path is not None or all(value is None for name, (value, _) in objects.items() if name.startswith("storage")):
        check_path("path", path)
    if timeout is not None:
        check_number("timeout", timeout)
        if timeout <= 0:
            raise wrong_value("timeout", "above 0", timeout)


def parts_of(state: Mapping[str, Any]) -> list[tuple[Path, Part]]:
    """Collect the parts of a state, each with its path."""
    return list(_walk((), state))


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Part]]:
    if hasattr(value, "checkpoint_parts"):
        for part in value.checkpoint_parts():
            yield path, part
    elif isinstance(value, (_RemoteModule, PyRRef)):
        rref = value.get_module_rref() if isinstance(value, _RemoteModule) else value
        yield path, Part(rref.owner_name(), _state_behind, _room_behind, _set_state_behind, (rref,))
    elif hasattr(value, "remote_optimizers"):
        # A DistributedOptimizer: an optimizer on each worker.
        for number, rref in enumerate(value.remote_optimizers):
            args = (rref,)
            yield (*path, f"{number}"), Part(rref.owner_name(), _state_behind, _room_behind, _set_state_behind, args)
    elif isinstance(value, (nn.Module, Stateful)):
        yield path, _of_stateful(value)
    elif isinstance(value, Mapping):
        plain = {}
        for key, inner in value.items():
            if _is_leaf(inner):
                plain[key] = inner
            else:
                yield from _walk((*path, key), inner)
        if plain:
            yield path, _of_values(value, plain)
    else:
        raise wrong_type(".".join(map(str, path)) or "state", "a dict", value)


def _is_leaf(value: Any) -> bool:
    return not (
        hasattr(value, "checkpoint_parts")
        or hasattr(value, "remote_optimizers")
        or isinstance(value, (_RemoteModule, PyRRef, nn.Module, Mapping))
        or (isinstance(value, Stateful) and not isinstance(value, type))
    )


def _of_stateful(value: Any) -> Part:
    return Part(None, lambda: _state(value), lambda saved: _room(value, saved), lambda state: _set_state(value, state))


def _of_values(holder: Any, plain: dict[str, Any]) -> Part:
    def apply(state: dict[str, Any]) -> None:
        # The read has filled tensors in place. Other values replace the old ones.
        holder.update({key: state[key] for key in plain if key in state})

    return Part(None, lambda: plain, lambda saved: dict(plain), apply)


def _state_behind(rref: Any) -> dict[str, Any]:
    """Return the state of an RRef's object, on its owner."""
    return _state(optimizers.of_torch(rref.local_value()))


def _room_behind(rref: Any, saved: Mapping[Path, Any]) -> dict[str, Any]:
    return _room(optimizers.of_torch(rref.local_value()), saved)


def _set_state_behind(rref: Any, state: dict[str, Any]) -> None:
    _set_state(optimizers.of_torch(rref.local_value()), state)


def _state(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if not hasattr(value, "state_dict"):
        raise TypeError(f"the RRef refers to a {type(value).__name__}, which has no state_dict()")
    state: dict[str, Any] = value.state_dict()
    return state


def _room(value: Any, saved: Mapping[Path, Any]) -> dict[str, Any]:
    if isinstance(value, optimizers.Scripted):
        return value.room(saved)
    return optimizers.room_in(value, saved) if isinstance(value, torch.optim.Optimizer) else _state(value)


def _set_state(value: Any, state: dict[str, Any]) -> None:
    if isinstance(value, torch.optim.Optimizer):
        optimizers.load_state(value, state)
    elif isinstance(value, Mapping):
        value.update(state)  # type: ignore[attr-defined]
    else:
        value.load_state_dict(state)


def under(path: Path, inner: dict[str, Any], into: dict[str, Any]) -> None:
    """Put ``inner`` into ``into`` at ``path``, beside the present entries."""
    for key in path:
        into = into.setdefault(str(key), {})
    for key, value in inner.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            under((), dict(value), into[key])
        elif isinstance(value, dict):
            # A copy of the same type: a scheduler has a Counter.
            into[key] = value.copy()
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def restore_keys(value: Any) -> None:
    """Put what DCP has read under the keys of the template. DCP turns keys into strings, so it has put values other
    than tensors beside those of keys such as numbers."""
    if isinstance(value, dict):
        for key in list(value):
            if not isinstance(key, str) and str(key) in value:
                value[key] = value.pop(str(key))
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            restore_keys(inner)


# ------------------------------------------------------------------------------------------------ on many workers


def own_name() -> str | None:
    """Return the name of this worker; None without RPC."""
    return rpc.get_worker_info().name if _is_current_rpc_agent_set() else None


def by_worker(parts: Sequence[tuple[Path, Part]]) -> dict[str | None, list[tuple[Path, Part]]]:
    """Group parts by worker. Parts of this process, which may be outside RPC, are under None."""
    here = own_name()
    found: dict[str | None, list[tuple[Path, Part]]] = {None: []}
    for path, part in parts:
        found.setdefault(None if part.worker == here else part.worker, []).append((path, part))
    return found


def _try(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    """Run a function on a worker. Returns whether it succeeded, and its result or the text of its exception.

    RPC would also write a raised exception to the worker's stderr.
    """
    try:
        return True, function(*args)
    except Exception as error:
        return False, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _answer_of(worker: str, future: Any, until: float) -> Any:
    """Wait for a worker's answer. Raises RuntimeError if it is late, or if the worker answers no questions."""
    answered = threading.Event()
    future.add_done_callback(lambda _: answered.set())
    question: Any = None
    while not answered.wait(max(0.0, min(_ASKING_S, until - time.monotonic()))):
        if time.monotonic() >= until:
            raise CheckpointError("it has not done its part within the timeout")
        if question is not None and question.done():
            question.value()
            question = None
        if question is None:
            # This call fails after rpc_timeout.
            question = rpc.rpc_async(worker, own_name)
    return future.value()


def run_everywhere(
    what: str,
    function: Callable[..., Any],
    arguments: Mapping[str | None, tuple[Any, ...]],
    timeout: float | None = None,
) -> dict[str | None, Any]:
    """Call ``function`` on each worker with its arguments, and here with the arguments under None.

    A worker that answers questions within ``rpc_timeout`` may take ``timeout`` seconds; None is no limit.
    Raises CheckpointError for the first failure.
    """
    until = math.inf if timeout is None else time.monotonic() + timeout
    futures = {}
    failures: list[tuple[str, Exception]] = []
    results: dict[str | None, Any] = {}
    for worker, some in arguments.items():
        if worker is not None:
            try:
                futures[worker] = rpc.rpc_async(worker, _try, (function, some), timeout=0)
            except RuntimeError as error:
                failures.append((worker, error))
    if None in arguments:
        try:
            results[None] = function(*arguments[None])
        except Exception as error:
            failures.append((own_name() or "this process", error))
    for worker, future in futures.items():
        assert worker is not None
        try:
            succeeded, results[worker] = _answer_of(worker, future, until)
        except RuntimeError as error:
            failures.append((worker, error))
        else:
            if not succeeded:
                failures.append((worker, CheckpointError(results[worker])))
    if failures:
        name, reason = failures[0]
        raise CheckpointError(f"{what} failed on {name!r}: {reason}") from reason
    return results


def drop_everywhere(drop: Callable[..., None], args: tuple[Any, ...], workers: Iterable[str | None]) -> None:
    """Call ``drop`` here and on all workers that still live, without waiting for them."""
    for worker in workers:
        if worker is not None:
            with contextlib.suppress(RuntimeError):
                rpc.rpc_async(worker, drop, args)
    # The file system that has failed may fail again.
    with contextlib.suppress(OSError):
        drop(*args)


class Planned(Generic[_Plan]):
    """The plans of a worker between the two rounds of a save or a load, by session. Thread-safe."""

    def __init__(self) -> None:
        self._plans: dict[str, _Plan] = {}
        # Sessions that were given up, perhaps before this worker had a plan.
        self._dropped: collections.deque[str] = collections.deque(maxlen=1000)
        self._lock = threading.Lock()

    def add(self, session: str, plan: _Plan) -> bool:
        """Keep a plan. Returns False if the caller has given up the session."""
        with self._lock:
            if session in self._dropped:
                return False
            self._plans[session] = plan
            return True

    def take(self, session: str) -> _Plan:
        with self._lock:
            return self._plans.pop(session)

    def drop(self, session: str) -> _Plan | None:
        """Give up a session. Returns its plan if there is one."""
        with self._lock:
            self._dropped.append(session)
            return self._plans.pop(session, None)
