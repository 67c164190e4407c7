"""Jobs of the library tests: worker0 drives, and the others serve."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from torch import nn

from tests.support import workers

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
# The limit of a job, which takes seconds on an idle machine. Its calls have 60 s.
PATIENCE_S = 150.0
Stalls = workers.Stalls
eventually = workers.eventually


def drive(body: Callable[..., Any], of: int, *args: Any, **job: Any) -> Any:
    """Run ``body(*args)`` in worker0 of a job with ``of`` workers, and return its result."""
    __tracebackhide__ = True
    return workers.run_workers(of, _in_worker0, body, args, **{"timeout": PATIENCE_S, **job})[0]


def _in_worker0(rank: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return body(*args) if rank == 0 else None


def drive_with_deaths(body: Callable[..., Any], of: int, dying: tuple[int, ...], *args: Any, **job: Any) -> Any:
    """`drive` a ``body`` that kills these ranks. The others serve in ``rpc.shutdown()``, as in a user's program."""
    __tracebackhide__ = True
    codes = dict.fromkeys(dying, KILLED)
    job = {"timeout": PATIENCE_S, "shutdown": False, "silent": False, **job}
    return workers.run_workers(of, _with_deaths, body, args, dying, exit_codes=codes, **job)[0]


def _with_deaths(rank: int, body: Callable[..., Any], args: tuple[Any, ...], dying: tuple[int, ...]) -> Any:
    result = body(*args) if rank == 0 else None
    if _is_on_ucx():
        with pytest.raises(RuntimeError) as ended:
            rpc.shutdown()
        assert all(f"lost worker 'worker{dead}'" in str(ended.value) for dead in dying), ended.value
    else:
        # The part of rpc.shutdown() in which workers serve. In the rest TensorPipe waits a minute for dead workers.
        with contextlib.suppress(RuntimeError):
            rpc.api._wait_all_workers(0)
        rpc.shutdown(graceful=False)
    return result


def _is_on_ucx() -> bool:
    return type(workers.agent()).__name__ == "UcxRpcAgent"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill(worker: str) -> None:
    """Make a worker die in a call, and expect the call to fail."""
    assert expect_death(rpc.rpc_async(worker, die)) in (worker, None)


def expect_death(call: torch.futures.Future[Any]) -> str | None:
    """Wait for the failure of a call of `die`. Return the name of the dead worker, if the backend names it."""
    from torch_ucx_rpc.errors import WorkerLost

    on_ucx = _is_on_ucx()
    with pytest.raises(WorkerLost if on_ucx else RuntimeError) as raised:
        call.wait()
    return raised.value.name if on_ucx else None


def on(worker: str, function: Callable[..., Any], *args: Any) -> Any:
    # _call wraps the function: torch sends its own functions as operators, which must return something.
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
    """Run a step in one process, with the same micro-batches one after the other. With ``last_first`` all forwards run
    first, and then the backwards from the last one to the first."""
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
