"""Jobs of the library tests: worker0 drives, the others serve. The one place that knows the tests' harness."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
import workers
from torch import nn

__all__ = [
    "BACKENDS",
    "KILLED",
    "PATIENCE_S",
    "Stalls",
    "die",
    "drive",
    "drive_with_deaths",
    "eventually",
    "expect_death",
    "kill",
    "on",
    "processes_of",
    "reference_step",
    "small_model",
]

BACKENDS = ("UCX", "TENSORPIPE")
# The exit code of a worker that was killed.
KILLED = -signal.SIGKILL
# Jobs of seconds, on machines that may have much else to do. Calls have their own 60 s, within that.
PATIENCE_S = 150.0
Stalls = workers.Stalls
eventually = workers.eventually

_may_go = threading.Event()


def drive(body: Callable[..., Any], of: int, *args: Any, **job: Any) -> Any:
    """Run ``body(*args)`` in worker0 of a job with ``of`` workers; what it returned."""
    __tracebackhide__ = True
    return workers.run_workers(of, _in_worker0, body, args, **{"timeout": PATIENCE_S, **job})[0]


def _in_worker0(rank: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return body(*args) if rank == 0 else None


def drive_with_deaths(body: Callable[..., Any], of: int, dying: tuple[int, ...], *args: Any, **job: Any) -> Any:
    """The same where these ranks are killed by ``body``; the others leave without waiting for them."""
    __tracebackhide__ = True
    codes = dict.fromkeys(dying, KILLED)
    job = {"timeout": PATIENCE_S, **job}
    return workers.run_workers(
        of, _until_let_go, body, args, of, dying, exit_codes=codes, shutdown=False, silent=False, **job
    )[0]


def _until_let_go(rank: int, body: Callable[..., Any], args: tuple[Any, ...], of: int, dying: tuple[int, ...]) -> Any:
    result = None
    if rank == 0:
        try:
            result = body(*args)
        finally:
            for other in range(1, of):
                if other not in dying:
                    # It may leave before its answer does. A worker that has not heard fails by itself.
                    with contextlib.suppress(RuntimeError):
                        rpc.rpc_sync(f"worker{other}", let_go)
    else:
        assert _may_go.wait(PATIENCE_S), "not let go"
    # A call that is still being answered has its time.
    time.sleep(0.05)
    rpc.shutdown(graceful=False)
    return result


def let_go() -> None:
    _may_go.set()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill(worker: str) -> None:
    """Have it die in a call, which fails."""
    assert expect_death(rpc.rpc_async(worker, die)) in (worker, None)


def expect_death(call: torch.futures.Future[Any]) -> str | None:
    """Wait for the failure of a call of `die`; the name of the worker that it has killed, where the backend tells."""
    from torch_ucx_rpc.errors import WorkerLost

    on_ucx = type(workers.agent()).__name__ == "UcxRpcAgent"
    with pytest.raises(WorkerLost if on_ucx else RuntimeError) as raised:
        call.wait()
    return raised.value.name if on_ucx else None


def on(worker: str, function: Callable[..., Any], *args: Any) -> Any:
    # In a function of ours: torch sends its own as operators, which must return something.
    return rpc.rpc_sync(worker, _call, (function, args))


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = function(*args)
    return None if isinstance(result, torch.Generator) else result


def processes_of(worker: str) -> int:
    return int(on(worker, os.getpid))


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 24),
        nn.Tanh(),
        nn.Linear(24, 24),
        nn.ReLU(),
        nn.Linear(24, 16),
        nn.Tanh(),
        nn.Linear(16, 4),
        nn.Tanh(),
    )


def reference_step(
    model: Callable[..., Any],
    loss: Callable[..., torch.Tensor],
    chunks: int,
    *args: torch.Tensor,
    target: torch.Tensor,
    last_first: bool = False,
) -> torch.Tensor:
    """What a step is in one process: the same micro-batches, one after the other. With ``last_first`` all go forward
    and then come back from the last one on."""
    total = torch.zeros(())
    waiting = []
    parts = zip(*(one.tensor_split(chunks) for one in (*args, target)), strict=True)
    for *inputs, wanted in parts:
        one = loss(model(*inputs), wanted)
        total = total + one.detach()
        if last_first:
            waiting.append(one)
        else:
            (one / chunks).backward()
    for one in reversed(waiting):
        (one / chunks).backward()
    return total / chunks
