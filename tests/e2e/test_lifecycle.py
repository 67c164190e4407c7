"""Joins, leaves and ends of processes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from tests.support import workers
from tests.support.workers import (
    Stalls,
    backend_options,
    eventually,
    in_every_worker,
    init_rpc,
    over_shared_memory,
    reserved_port,
    run_program,
)
from torch_ucx_rpc import _build_info
from torch_ucx_rpc.errors import JoinFailed, JoinTimedOut, ShutDown, WorkerLeft

pytestmark = pytest.mark.ucx_only


def add_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def assert_calls_work(world_size: int) -> None:
    for peer in range(world_size):
        for n in (3, 1 << 18):
            tensor = torch.full((n,), float(peer))
            assert torch.equal(rpc.rpc_sync(peer, add_one, args=(tensor,)), tensor + 1)


# ---- Joining ---------------------------------------------------------------------------------------------------------


@in_every_worker(of=2, init=False)
def test_the_backend_is_given_by_name_or_as_a_member(rank: int) -> None:
    for backend in ("UCX", rpc.BackendType.UCX, rpc.backend_registry.BackendType["UCX"]):
        init_rpc(rank, backend=backend)
        assert_calls_work(2)
        rpc.shutdown()
        init_rpc(rank, backend=backend, rpc_backend_options=None)
        rpc.shutdown()


@over_shared_memory
@in_every_worker(of=2)
def test_the_store_asks_no_resolver_for_names(rank: int) -> None:
    from torch_ucx_rpc._native import _C

    assert _C.spare_name_lookups(), "torch's library imports getnameinfo"
    assert _C.name_lookups_spared() > 0, f"rank {rank} has connected to the Store, or opened it"


@over_shared_memory
@in_every_worker(of=2, init=False)
def test_the_backend_is_inferred_from_the_options(rank: int) -> None:
    import torch_ucx_rpc

    init_rpc(rank, backend=None, rpc_backend_options=torch_ucx_rpc.UcxRpcBackendOptions(num_worker_threads=3))
    assert type(workers.agent()).__name__ == "UcxRpcAgent"
    assert workers.agent().get_debug_info()["agent.num_worker_threads"] == "3"
    rpc.shutdown()


@in_every_worker(of=2, init=False, silent=False)
def test_tensorpipe_goes_on_working_in_the_same_process(rank: int) -> None:
    for backend, options in (
        (rpc.BackendType.TENSORPIPE, rpc.TensorPipeRpcBackendOptions()),
        ("UCX", None),
        (None, rpc.TensorPipeRpcBackendOptions()),
        ("UCX", None),
        (None, None),
    ):
        with warnings.catch_warnings():
            # torch itself warns of deprecated functions at TensorPipe's start.
            warnings.simplefilter("ignore")
            init_rpc(rank, backend=backend, rpc_backend_options=options)
        expected = "UcxRpcAgent" if backend == "UCX" else "TensorPipeAgent"
        assert type(workers.agent()).__name__ == expected
        assert_calls_work(2)
        rpc.shutdown()


def test_names_bound_before_the_import_work() -> None:
    [ended] = run_program("""
        import os, warnings
        from torch.distributed.rpc import BackendType, init_rpc, rpc_sync, shutdown
        import torch

        tensorpipe = BackendType.TENSORPIPE
        import torch_ucx_rpc

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        init_rpc("w0", backend="UCX", rank=0, world_size=1)
        assert rpc_sync("w0", torch.add, args=(torch.ones(1), 1)).item() == 2
        shutdown()

        warnings.simplefilter("ignore")
        init_rpc("w0", backend=tensorpipe, rank=0, world_size=1)
        assert rpc_sync("w0", torch.add, args=(torch.ones(1), 1)).item() == 2
        shutdown()
        print("done")
    """)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


@over_shared_memory
@in_every_worker(of=2, init=False)
def test_only_one_agent_at_a_time(rank: int) -> None:
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.rpc_sync("worker0", add_one, args=(torch.ones(1),))
    init_rpc(rank)
    with pytest.raises(JoinFailed, match="RPC is already initialized"):
        init_rpc(rank)
    assert_calls_work(2)
    rpc.shutdown()
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.rpc_sync("worker0", add_one, args=(torch.ones(1),))


@over_shared_memory
@in_every_worker(of=2, init=False)
def test_missing_workers_are_named(rank: int) -> None:
    # On a loaded machine processes start seconds apart, but they leave a group at the same time.
    init_rpc(rank)
    rpc.shutdown()
    with pytest.raises(JoinTimedOut, match=r"these ranks have not come: 2-4\b") as raised:
        init_rpc(rank, world_size=5, rpc_backend_options=backend_options(init_timeout=5))
    assert isinstance(raised.value, TimeoutError)
    assert raised.value.missing == (2, 3, 4)
    assert raised.value.timeout == 5
    # The failed attempt leaves no trace.
    init_rpc(rank)
    assert_calls_work(2)
    rpc.shutdown()


@over_shared_memory
@in_every_worker(of=2, init=False)
def test_init_timeout_bounds_the_start_and_rpc_timeout_the_calls(rank: int) -> None:
    init_rpc(rank)
    rpc.shutdown()
    with pytest.raises(JoinTimedOut, match=r"3 s \(init_timeout\)"):
        init_rpc(rank, world_size=3, rpc_backend_options=backend_options(init_timeout=3, rpc_timeout=600))
    # A worker waits longer for a late worker than for a call. Programs for TensorPipe rely on that.
    for patience in ({"init_timeout": 60}, {}):
        if rank == 1:
            time.sleep(2)
        init_rpc(rank, rpc_backend_options=backend_options(rpc_timeout=0.5, **patience))
        assert rpc.get_rpc_timeout() == 0.5
        rpc._set_rpc_timeout(60)
        rpc.shutdown()


@over_shared_memory
@in_every_worker(of=2, init=False)
def test_without_a_limit_of_time_workers_meet_and_call(rank: int) -> None:
    for unlimited in ({"rpc_timeout": 0}, {"rpc_timeout": 0, "init_timeout": 0}):
        if rank == 1:
            time.sleep(0.5)
        init_rpc(rank, rpc_backend_options=backend_options(**unlimited))
        assert_calls_work(2)
        rpc.shutdown()


@over_shared_memory
@in_every_worker(of=3, init=False)
def test_a_name_taken_twice_is_refused_naming_both(rank: int) -> None:
    with pytest.raises(JoinFailed, match="is not unique") as raised:
        init_rpc(rank, name="only" if rank == 0 else "twin")
    for word in ("'twin'", "rank 1", "rank 2", "pid"):
        assert word in str(raised.value)
    assert "'only'" not in str(raised.value)
    init_rpc(rank)
    assert_calls_work(3)
    rpc.shutdown()


@over_shared_memory
@in_every_worker(of=2, init=False)
def test_a_rank_or_world_size_that_does_not_fit_is_refused(rank: int) -> None:
    with pytest.raises(JoinFailed, match="disagree on world_size"):
        init_rpc(rank, world_size=2 + rank, rpc_backend_options=backend_options(rpc_timeout=10))


@over_shared_memory
@in_every_worker(of=2, init=False)
def test_different_package_versions_are_refused_naming_both(rank: int) -> None:
    own = _build_info.VERSION
    if rank == 1:
        _build_info.VERSION = "0.0.0"
    with pytest.raises(JoinFailed, match="different versions of torch_ucx_rpc") as raised:
        init_rpc(rank)
    for word in (own, "0.0.0", "rank 0", "rank 1"):
        assert word in str(raised.value)


@over_shared_memory
@in_every_worker(of=1, init=False)
def test_ctrl_c_interrupts_waiting_for_missing_workers(rank: int) -> None:
    interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        init_rpc(rank, world_size=2)
    init_rpc(rank, world_size=1)
    assert_calls_work(1)
    rpc.shutdown()


def meet_by_file(rank: int, file: Path) -> None:
    init_rpc(rank, rpc_backend_options=backend_options(init_method=file.as_uri()))
    assert_calls_work(2)
    rpc.shutdown()


@over_shared_memory
def test_workers_meet_through_a_file_too(run_workers: Callable[..., list], tmp_path: Path) -> None:
    run_workers(2, meet_by_file, tmp_path / "store", init=False)


# ---- Many ------------------------------------------------------------------------------------------------------------


def call_everybody(rank: int) -> int:
    me, names = f"worker{rank}", [info.name for info in workers.agent().get_worker_infos()]
    futures = [rpc.rpc_async(name, add_one, args=(torch.tensor([rank]),)) for name in names]
    assert [int(future.wait()) for future in futures] == [rank + 1] * len(names)
    assert me in names
    return len(names)


@pytest.mark.field
def test_forty_workers_start_call_each_other_and_shut_down(run_workers: Callable[..., list]) -> None:
    # All processes are on this machine, so the test does not check times.
    assert run_workers(40, call_everybody, options={"num_worker_threads": 4}, timeout=150) == [40] * 40


# ---- Leaving ---------------------------------------------------------------------------------------------------------


def belongings() -> dict[str, int]:
    gc.collect()
    return {what: len(list(Path("/proc/self", what).iterdir())) for what in ("task", "fd")}


def assert_all_is_given_back(had: dict[int, dict[str, int]]) -> None:
    """Check that only the first two attempts leave something: torch and Python keep it for the life of the process."""
    # A connection to the Store may take a moment to end.
    eventually(lambda: all(now <= had[1][what] for what, now in belongings().items()), f"no more than in {had}")


@pytest.mark.field
@in_every_worker(of=2, init=False)
def test_joining_again_and_again_leaves_nothing_behind(rank: int) -> None:
    had = {}
    for attempt in range(6):
        init_rpc(rank, name=f"worker{rank}-{attempt}")
        assert_calls_work(2)
        rpc.shutdown()
        had[attempt] = belongings()
    assert_all_is_given_back(had)


unfinished: list[torch.futures.Future[None]] = []


@rpc.functions.async_execution
def finish_never() -> torch.futures.Future[None]:
    unfinished.append(torch.futures.Future())
    return unfinished[-1]


@over_shared_memory
@in_every_worker(of=2, init=False)
def test_an_unfinished_handler_does_not_keep_its_agent_alive(rank: int) -> None:
    had = {}
    for attempt in range(4):
        init_rpc(rank, name=f"worker{rank}-{attempt}")
        if rank == 0:
            with pytest.raises(WorkerLeft):
                rpc.rpc_sync(1, finish_never)
        else:
            eventually(lambda handled=attempt: len(unfinished) > handled, "the call is being handled")
        rpc.shutdown(graceful=False)
        had[attempt] = belongings()
    assert_all_is_given_back(had)
    for future in unfinished:
        future.set_result(None)  # the caller of this handler has ended too


def test_rrefs_and_gradients_work_in_every_life(run_workers: Callable[..., list], tmp_path: Path) -> None:
    run_workers(2, live_three_times, tmp_path, init=False)


def live_three_times(rank: int, directory: Path) -> None:
    for attempt in range(3):
        # The ranks also change, which plain torch does not allow.
        own = (rank + attempt) % 2
        init_rpc(own, rpc_backend_options=backend_options(init_method=(directory / str(attempt)).as_uri()))
        if own == 1:
            rref = rpc.remote("worker0", add_one, args=(torch.ones(2),))
            assert rref.to_here().sum() == 4
            assert rpc.rpc_sync("worker0", owned_rrefs) == 1
            del rref
            eventually(lambda: rpc.rpc_sync("worker0", owned_rrefs) == 0, "the RRef is deleted on its owner")
            with dist_autograd.context() as context:
                x = torch.ones(2, requires_grad=True)
                dist_autograd.backward(context, [rpc.rpc_sync("worker0", add_one, args=(x,)).sum()])
                assert torch.equal(dist_autograd.get_gradients(context)[x], torch.ones(2))
        rpc.shutdown()


def owned_rrefs() -> int:
    return int(rpc._get_debug_info()["num_owner_rrefs"])


_released = threading.Event()
_recorded = threading.Event()


def wait_then_record() -> None:
    assert _released.wait(60)
    _recorded.set()


def release() -> None:
    _released.set()


@in_every_worker(of=2, shutdown=False)
def test_a_graceful_shutdown_waits_for_calls_in_flight(rank: int) -> None:
    if rank == 0:
        future = rpc.rpc_async("worker1", wait_then_record)
        rpc.rpc_async("worker1", release)
    rpc.shutdown()
    if rank == 0:
        assert future.done()
    else:
        assert _recorded.is_set()


def leave_at_once(rank: int, done: Path) -> None:
    if rank == 0:
        assert _waiting.wait(50)
        future = rpc.rpc_async("worker1", wait_for_file, args=(done,))
        with Stalls() as stalls:
            started = time.monotonic()
            rpc.shutdown(graceful=False)
            took = time.monotonic() - started
        # worker0 waits half a second for its own handler. Both handlers run until the file is there.
        assert 0.5 <= took < 1.5 + stalls.seconds()
        with pytest.raises(ShutDown, match="RPC was shut down on worker 'worker0' before worker") as raised:
            future.wait()
        assert raised.value.name == "worker1"
        done.touch()
    else:
        rpc.rpc_async("worker0", wait_for_file, args=(done,))
        eventually(done.exists, "worker0 has left", timeout=50)
        rpc.shutdown(graceful=False)


_waiting = threading.Event()


def wait_for_file(file: Path) -> None:
    _waiting.set()
    eventually(file.exists, f"{file} exists", timeout=50)


def test_an_ungraceful_shutdown_waits_for_no_worker(run_workers: Callable[..., list], tmp_path: Path) -> None:
    # Not silent: worker1 may log that the receiver of its answer is gone.
    run_workers(2, leave_at_once, tmp_path / "done", shutdown=False, silent=False)


_leaving = threading.Event()


def have_worker1_leave() -> str:
    _leaving.set()
    time.sleep(0.05)  # less than the half second that a handler has
    return "answer"


def leave_while_answering(rank: int) -> None:
    if rank == 0:
        assert rpc.rpc_sync("worker1", have_worker1_leave) == "answer"
    else:
        assert _leaving.wait(50)
    rpc.shutdown(graceful=False)


def test_prompt_answers_leave_before_an_ungraceful_shutdown(run_workers: Callable[..., list]) -> None:
    run_workers(2, leave_while_answering, shutdown=False)


@over_shared_memory
@in_every_worker(of=2, shutdown=False)
def test_a_second_shutdown_says_that_there_is_no_agent(rank: int) -> None:
    rpc.shutdown()
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.shutdown()


# ---- Ends of an interpreter ------------------------------------------------------------------------------------------

JOIN_AND_CALL = """
import os, sys, threading, time
import torch, torch.distributed.rpc as rpc
import torch_ucx_rpc

rank, world_size, meeting = int(sys.argv[1]), 2, os.environ["MEETING"]

rpc.init_rpc(f"worker{rank}", backend="UCX", rank=rank, world_size=world_size)
received = [rpc.rpc_sync(peer, torch.add, args=(torch.zeros(1 << n), 1)) for n in (1, 20) for peer in range(world_size)]
"""

# Neither worker ends before the other has its answer.
MEET = """
open(f"{meeting}/{rank}", "w").close()
while len(os.listdir(meeting)) < world_size:
    time.sleep(0.01)
"""


def end(last_lines: str, meeting: Path, *, lines: str = "") -> list:
    """Run two interpreters that form a job, call each other, run ``lines``, meet, and run ``last_lines``."""
    with reserved_port() as port:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "MEETING": str(meeting)}
        return run_program(JOIN_AND_CALL + lines + MEET + last_lines, ranks=(0, 1), env=env)


@pytest.mark.parametrize(
    ("last_lines", "exit_code"),
    [
        pytest.param("", 0, id="the end of the script"),
        pytest.param("sys.exit(3)", 3, id="sys.exit"),
        pytest.param("rpc.shutdown()", 0, id="a graceful shutdown"),
        pytest.param("rpc.shutdown(graceful=False)", 0, id="an ungraceful shutdown"),
        pytest.param("rpc.shutdown(); del received", 0, id="a graceful shutdown, then the tensors"),
        pytest.param("future = rpc.rpc_async(rank, time.sleep, args=(0.05,))", 0, id="a call to itself in flight"),
        pytest.param("threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()", 0, id="a daemon thread"),
    ],
)
def test_an_interpreter_ends_quietly(last_lines: str, exit_code: int, tmp_path: Path) -> None:
    for ended in end(last_lines, tmp_path):
        assert ended.stderr == ""
        assert ended.returncode == exit_code


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param("rref = rpc.remote(1 - rank, torch.add, args=(torch.zeros(3), 1))", id="a remote reference"),
        pytest.param("future = rpc.rpc_async(1 - rank, time.sleep, args=(3600,))", id="a handler that never returns"),
        # At its end the interpreter ends this thread when the thread next requests the GIL.
        pytest.param(
            "def busy():\n    while True:\n        time.sleep(0.001)\nfuture = rpc.rpc_async(1 - rank, busy)\n",
            id="a handler that comes back to Python",
        ),
        pytest.param(
            "from torch_ucx_rpc import services\n"
            "def busy(service):\n    while True:\n        received[-1].add(1)\n"
            "services.watch('score', busy)\n",
            id="a thread of a library that computes",
        ),
    ],
)
def test_an_interpreter_ends_despite_unfinished_work(lines: str, tmp_path: Path) -> None:
    # torch and the agent complain, but nothing hangs or fails.
    for ended in end("", tmp_path, lines=lines):
        assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "work",
    [
        pytest.param("torch_ucx_rpc.statistics", id="statistics"),
        pytest.param("lambda: ring.take(f'worker{1 - rank}', 'tag', timeout=0.001)", id="errors"),
        pytest.param("lambda: ring.take(f'worker{1 - rank}', 'tag')", id="a wait"),
    ],
)
def test_daemon_threads_do_not_abort_the_end(work: str, tmp_path: Path) -> None:
    # Python ends or suspends these threads when they request the GIL.
    lines = f"""
from torch_ucx_rpc.channel import Channel

ring = Channel("ring")

def repeat(work):
    while True:
        try:
            work()
        except Exception:
            pass

for _ in range(3):
    threading.Thread(target=repeat, args=({work},), daemon=True).start()
"""
    for ended in end("", tmp_path, lines=lines):
        assert ended.returncode == 0, ended.stderr


def test_uncaught_exception_prints_only_its_traceback(tmp_path: Path) -> None:
    for ended in end("raise ValueError('enough')", tmp_path):
        assert ended.returncode == 1
        assert ended.stderr.startswith("Traceback")
        assert ended.stderr.endswith("ValueError: enough\n")
        assert ended.stderr.count("Traceback") == 1


def test_ctrl_c_ends_an_interpreter_in_a_call(tmp_path: Path) -> None:
    interrupted, other = end(
        """
if rank == 0:
    rpc.rpc_sync("worker1", interrupt, args=(os.getpid(),))
while not os.path.exists(f"{meeting}/interrupted"):
    time.sleep(0.01)
""",
        tmp_path,
        lines="""
def interrupt(pid):
    os.kill(pid, 2)
    while os.path.exists(f"/proc/{pid}/exe"):
        time.sleep(0.01)
    open(f"{meeting}/interrupted", "w").close()
""",
    )
    assert interrupted.returncode == -signal.SIGINT
    assert interrupted.stderr.endswith("KeyboardInterrupt\n")
    assert other.returncode == 0
