"""Tests of the harness: a worker that fails in any way fails its test, with all known facts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
import warnings
from pathlib import Path

import pytest

from tests.support.workers import PRELOADED, SAID_OVER_TCP, Transport, WorkersFailed, run_program, run_workers

CSRC = Path(__file__).resolve().parents[2] / "torch_ucx_rpc" / "csrc"


UCX_LINE = "[1795873104.368832] [vm:23017:0]         mm_sysv.c:61   UCX  ERROR   shmat(shmid=5) failed"


def give_rank(rank: int) -> int:
    return 10 * rank


def fail(rank: int) -> None:
    print("before it failed")
    values = {"rank": rank}
    assert values["rank"] != 1


def crash(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def leave(rank: int, code: int) -> None:
    if rank == 1:
        os._exit(code)


def say(rank: int, what: str, file: str) -> None:
    if rank == 1:
        print(what, file=getattr(sys, file), flush=True)


def warn_as(rank: int, module: str) -> None:
    if rank == 1:
        exec("import warnings; warnings.warn('of no account')", types.ModuleType(module).__dict__)


def wait_for_ever(rank: int) -> None:
    if rank == 1:
        threading.Event().wait()


def account_of(body: object, *args: object, **job: object) -> str:
    with pytest.raises(WorkersFailed) as failed:
        run_workers(2, body, *args, init=False, **job)
    # The worker that failed comes first.
    assert str(failed.value).startswith("worker1 (process ")
    return str(failed.value)


def test_results_come_back_by_rank() -> None:
    assert run_workers(3, give_rank, init=False) == [0, 10, 20]


@pytest.mark.parametrize(
    ("body", "arguments", "lines"),
    [
        (fail, (), ('assert values["rank"] != 1', "AssertionError: assert 1 != 1", "before it failed")),
        (crash, (), ("ended with SIGSEGV", "in crash")),
        (leave, (0,), ("ended within its body",)),
        (leave, (3,), ("ended with exit code 3",)),
        (say, ("something is wrong", "stderr"), ("wrote to stderr", "something is wrong")),
        (say, (UCX_LINE, "stdout"), ("printed a line of UCX's log", "shmat")),
        (say, (SAID_OVER_TCP, "stderr"), ("wrote to stderr",)),
        (warn_as, ("torch_ucx_rpc.numba",), ("of no account",)),
    ],
)
def test_a_worker_that_fails_fails_the_test_saying_how(body: object, arguments: tuple, lines: tuple[str, ...]) -> None:
    account = account_of(body, *arguments)
    assert [line for line in lines if line not in account] == []


def test_expected_ends_and_output_are_no_failure() -> None:
    assert "ended with exit code 3" in account_of(leave, 3, exit_codes={1: 4})
    assert run_workers(2, leave, 3, init=False, exit_codes={1: 3}) == [None, None]
    run_workers(2, say, "something is wrong", "stderr", init=False, silent=False)
    # The agent's warning that GPU tensors go over TCP does not fail a test over TCP.
    assert SAID_OVER_TCP in (CSRC / "messaging" / "messenger.cpp").read_text(encoding="utf-8").replace('"\n', "")
    run_workers(2, say, SAID_OVER_TCP, "stderr", init=False, transport=Transport.TCP)
    # Warnings from other packages fail nothing, neither in a worker nor in this process.
    run_workers(2, warn_as, "numba.cuda.typing", init=False)
    for module in ("numba_cuda.numba", "cupy", "rmm.pylibrmm", "cuda.core"):
        with warnings.catch_warnings():
            warn_as(1, module)


def test_a_hang_is_reported_with_the_stacks_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    # gdb takes many seconds; this test does not need the C++ stacks.
    monkeypatch.setenv("PATH", "")
    account = account_of(wait_for_ever, timeout=5)
    assert "had not finished after 5 s, and was killed" in account
    assert "in wait_for_ever" in account
    pid = int(account.partition("(process ")[2].partition(")")[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# Pretend that torch is built with CUDA, and make each question to CUDA an error.
IMPORT_WITH_CUDA_POISONED = """
    import importlib, sys
    import torch

    def poisoned(name):
        def ask(*args, **kwargs):
            raise RuntimeError(f"{name} was asked by {sys._getframe(1).f_globals['__name__']}")
        return ask

    torch.cuda._is_compiled = lambda: True
    for name in ("is_available", "device_count", "_device_count_nvml", "_lazy_init", "init"):
        setattr(torch.cuda, name, poisoned(name))
    for name in ("_cuda_getDeviceCount", "_cuda_init"):
        setattr(torch._C, name, poisoned(name))
    try:
        import torch.testing._internal.common_cuda  # which is known to ask
    except RuntimeError as error:
        assert "was asked by" in str(error), error
    else:
        sys.exit("the poison does not work")
    for module in {preloaded!r}:
        importlib.import_module(module)
"""


def test_preloaded_modules_ask_cuda_nothing() -> None:
    [ended] = run_program(IMPORT_WITH_CUDA_POISONED.replace("{preloaded!r}", repr(PRELOADED)))
    assert ended.returncode == 0, ended.stderr
