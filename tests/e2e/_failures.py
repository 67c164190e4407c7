"""Bodies of workers for tests of failures: a worker dies, stays until it may leave, or returns the failure of a
call."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from torch_ucx_rpc import errors

Failure = TypeVar("Failure", bound=errors.RpcError)

# Arguments of `run_workers`. UCX itself may also log a death.
DEATH_OF_WORKER1: dict[str, Any] = {"exit_codes": {1: -signal.SIGKILL}, "shutdown": False, "silent": False}

# A short heartbeat_limit, in seconds: for a loss that comes soon, or for a longer silence that causes no loss.
SHORT_LIMIT = 1.0
# With these options a worker is lost when it has been silent for that limit.
LOST_SOON = {"heartbeat_limit": SHORT_LIMIT, "reconnect_limit": 0}

_gone = threading.Event()


class leave_ungracefully_after:  # noqa: N801 - used as a function, and pickled
    """Run the body, then shut down without waiting for other workers."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body

    def __call__(self, *arguments: object) -> None:
        self._body(*arguments)
        rpc.shutdown(graceful=False)


def let_go() -> None:
    """End the `stay` of this worker."""
    _gone.set()


def stay() -> None:
    assert _gone.wait(60), "not released"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def echo(value: object) -> object:
    return value


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def failure_of(call: Callable[[], object], kind: type[Failure]) -> Failure:
    with pytest.raises(kind) as raised:
        call()
    return raised.value


def autograd_contexts() -> int:
    return int(dist_autograd._get_debug_info()["num_autograd_contexts"])


def is_lost(name: str) -> bool:
    try:
        rpc.rpc_sync(name, echo, (1,))
    except RuntimeError as error:
        return isinstance(error, errors.WorkerLost) and error.name == name
    return False
