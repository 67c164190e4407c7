"""The part of a job that is on this machine: an agent of torch.distributed.elastic. It gives workers roles, and ends
all of them together."""

# mypy: allow-untyped-calls

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing import api as elastic_processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from _torch_ucx_rpc_cli import ExitCode
from torch_ucx_rpc._cli import _children
from torch_ucx_rpc._cli._output import WorkerOutput
from torch_ucx_rpc._cli._signals import Signals, signal_name
from torch_ucx_rpc._cli._starter.client import Starter
from torch_ucx_rpc._launch.environment import default_name

# Seconds between two checks of the workers, and of the Store, which has news of other machines.
MONITOR_INTERVAL_S = 0.05

# After a worker has failed, wait this long for a running worker that has written a traceback: that worker may have
# failed first.
_LAST_MOMENTS_S = 3.0
# The same for a worker that the failed worker names in its last words. That worker is ending, which takes long on a
# busy machine.
_GOODBYE_S = 30.0

# When a job or an attempt has ended, a machine waits at most this long for the others to learn of it.
_NEWS_S = 5.0

# Keys of the Store. The first two have the first failure of each attempt and the first signal of the job, as JSON. The
# others count the machines that are done with an attempt, and those that have refused to start. A key with "/read"
# appended counts the machines that know that news.
_FAILED = "torch_ucx_rpc/run/{attempt}/failed"
_INTERRUPTED = "torch_ucx_rpc/run/interrupted"
_DONE = "torch_ucx_rpc/run/{attempt}/done"
_REFUSED = "torch_ucx_rpc/run/refused"


@dataclasses.dataclass(frozen=True)
class Failure(Exception):
    """The first failure of an attempt: its reason and place, the exit code of the job, and the worker's stderr.

    ``is_final`` is True if a restart does not help.
    """

    reason: str
    exit_code: int
    last_words: str = ""
    is_final: bool = False

    def __str__(self) -> str:
        return f"the others were ended, since {self.reason}"


class WorkerNames(LogsSpecs):
    """Gives each worker a role, a name and an output of its own; elastic has one of each for a machine.

    Roles go by rank: with ``{"ps": 2, "trainer": 8}``, ranks 0 and 1 are ``ps0`` and ``ps1``.
    """

    def __init__(self, roles: Mapping[str, int], output: WorkerOutput) -> None:
        super().__init__()
        self._roles = roles
        self._output = output
        # Names of this machine's workers, by rank.
        self.names: dict[int, str] = {}

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = LogsDest()
        for local_rank, environ in envs.items():
            rank = int(environ["RANK"])
            name = self._assign_role(rank, environ)
            self.names[rank] = name
            destinations.stdouts[local_rank] = self._output.path(name, "stdout")
            destinations.stderrs[local_rank] = self._output.path(name, "stderr")
            destinations.error_files[local_rank] = self._output.error_file(name)
            environ["TORCHELASTIC_ERROR_FILE"] = destinations.error_files[local_rank]
        self._output.start()
        return destinations

    def _assign_role(self, rank: int, environ: dict[str, str]) -> str:
        if not self._roles:
            return default_name(rank)
        size, world_size = sum(self._roles.values()), int(environ["WORLD_SIZE"])
        if size != world_size:
            raise ValueError(f"the roles are for {size} workers, and all machines together start {world_size}")
        index = rank
        for role, count in self._roles.items():
            if index < count:
                environ.update(ROLE_NAME=role, ROLE_RANK=str(index), ROLE_WORLD_SIZE=str(count))
                return f"{role}{index}"
            index -= count
        raise AssertionError(f"rank {rank} of {world_size}")


class JobAgent(LocalElasticAgent):
    """elastic's agent of this machine. It raises the first `Failure` of the job on any machine.

    While restarts are left, elastic instead restarts the workers on all machines, since each machine learns of the
    failure. A signal to one of the launchers ends all of them, with elastic's SignalException.
    """

    def __init__(
        self, spec: WorkerSpec, names: WorkerNames, output: WorkerOutput, signals: Signals, starter: Starter
    ) -> None:
        super().__init__(spec, logs_specs=names)
        self._starter = starter
        self._names = names
        self._output = output
        self._signals = signals
        # The number of restarts so far, as the workers know it from TORCHELASTIC_RESTART_COUNT.
        self._attempt = 0
        # The result of this machine's workers, once all of them have ended well.
        self._result: RunResult | None = None
        # When a failed worker was first seen in this attempt, by time.monotonic.
        self._failed_at: float | None = None

    def _initialize_workers(self, worker_group: Any) -> None:
        try:
            super()._initialize_workers(worker_group)
        except ValueError:
            self._stay_for_others(worker_group, _REFUSED)
            raise

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        self._attempt = worker_group.spec.max_restarts - self._remaining_restarts
        try:
            # From here on, this process only notes signals. Until then, Ctrl-C ends a job whose imports hang.
            with (
                self._starter.batch(self._signals.note),
                _started_by(self._starter),
                # On the main thread elastic would install handlers of its own. They raise, which would leave a starting
                # worker behind. They also replace the handlers of signals that this process should ignore.
                concurrent.futures.ThreadPoolExecutor(1) as executor,
            ):
                pids: dict[int, Any] = executor.submit(super()._start_workers, worker_group).result()
        except (OSError, RuntimeError) as error:
            failure = self._first_of_all(worker_group, _not_started(worker_group.spec.local_world_size, error))
            # elastic has forgotten the workers that it did start.
            _children.end(self._starter.workers)
            self._stay_for_others(worker_group, _FAILED.format(attempt=self._attempt) + "/read")
            raise failure from error
        if self._remaining_restarts == 0:
            self._starter.close()
        return pids

    def _stop_workers(self, worker_group: Any) -> None:
        super()._stop_workers(worker_group)
        # Another attempt may follow, with the same names.
        self._output.finish()
        self._result = None
        self._failed_at = None

    # The type is Any: torch declares as None the attributes that a started group sets.
    def _monitor_workers(self, worker_group: Any) -> RunResult:
        try:
            return self._look(worker_group)
        except Failure as failure:
            self._stay_for_others(worker_group, _FAILED.format(attempt=self._attempt) + "/read")
            if failure.is_final or self._remaining_restarts == 0:
                raise
            count = f"{self._attempt + 1} of {worker_group.spec.max_restarts}"
            print(f"torch_ucx_rpc run: restart {count} of all workers, since {failure.reason}", file=sys.stderr)
            # elastic restarts the workers of this machine.
            return RunResult(state=WorkerState.FAILED)
        except SignalException:
            self._stay_for_others(worker_group, _INTERRUPTED + "/read")
            raise

    def _look(self, worker_group: Any) -> RunResult:
        self._heed_signals(worker_group)
        try:
            self._look_elsewhere(worker_group)
        except _StoreLost:
            if self._result is None:
                raise
            # The machine with the Store leaves only when all machines are done.
            return self._result
        if self._result is None:
            if self._is_one_ending():
                return RunResult(state=WorkerState.HEALTHY)
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state is WorkerState.FAILED:
                raise self._first_of_all(worker_group, self._first_failure(result))
            if result.state is WorkerState.UNHEALTHY:
                raise self._first_of_all(worker_group, _hung())
            if result.state is not WorkerState.SUCCEEDED:
                return result
            self._result = result
            # If the Store is gone, `_are_others_done` notices.
            with contextlib.suppress(DistError):
                worker_group.store.add(_DONE.format(attempt=self._attempt), 1)
        return self._result if self._are_others_done(worker_group) else RunResult(state=WorkerState.HEALTHY)

    def _exit_barrier(self) -> None:
        # The workers of all machines are done by now.
        pass

    def _are_others_done(self, worker_group: Any) -> bool:
        try:
            done: int = worker_group.store.add(_DONE.format(attempt=self._attempt), 0)
        except DistError:
            # The machine with the Store leaves only when all machines are done.
            return True
        size: int = worker_group.group_world_size
        return done == size

    # ---- What machines tell each other -------------------------------------------------------------------------------

    def _heed_signals(self, worker_group: Any) -> None:
        received = self._signals.first
        if received is None:
            return
        what = received.name
        if worker_group.group_world_size > 1:
            what += f" on {socket.gethostname()} (--node-rank {worker_group.group_rank})"
        self._tell(worker_group, _INTERRUPTED, json.dumps([received, what]))
        raise SignalException(what, received)

    def _look_elsewhere(self, worker_group: Any) -> None:
        if news := self._hear(worker_group, _INTERRUPTED):
            number, what = json.loads(news)
            raise SignalException(what, self._signals.for_workers(signal.Signals(number)))
        if news := self._hear(worker_group, _FAILED.format(attempt=self._attempt)):
            raise Failure(**json.loads(news))

    def _first_of_all(self, worker_group: Any, failure: Failure) -> Failure:
        """The first failure of this attempt on all machines: this one, unless another was published before."""
        told = self._tell(worker_group, _FAILED.format(attempt=self._attempt), json.dumps(dataclasses.asdict(failure)))
        return Failure(**json.loads(told))

    def _tell(self, worker_group: Any, key: str, news: str) -> str:
        """Publish ``news`` to all machines, unless another machine was faster. Return the published news."""
        if worker_group.group_world_size > 1:
            # If the Store is gone, the other machines notice that themselves.
            with contextlib.suppress(DistError):
                told: str = worker_group.store.compare_set(key, "", news).decode()
                return told
        return news

    def _hear(self, worker_group: Any, key: str) -> str | None:
        if worker_group.group_world_size == 1:
            return None
        try:
            return worker_group.store.get(key).decode() if worker_group.store.check([key]) else None
        except DistError as error:
            raise _StoreLost(
                f"the launcher that holds the Store of the job has ended, or cannot be reached any more: {error}"
            ) from error

    def _stay_for_others(self, worker_group: Any, key: str) -> None:
        """Stay until every machine has come here: the Store, where they find the reason, may be in this process."""
        until = time.monotonic() + _NEWS_S
        # If the Store is gone, its machine has seen all others here, or has stopped waiting for them.
        with contextlib.suppress(DistError):
            worker_group.store.add(key, 1)
            while worker_group.store.add(key, 0) < worker_group.group_world_size and time.monotonic() < until:
                time.sleep(MONITOR_INTERVAL_S)

    # ---- Which failure was the first ---------------------------------------------------------------------------------

    def _is_one_ending(self) -> bool:
        """Whether a worker has failed while another one, still running, may be ending with an earlier failure."""
        context: Any = self._pcontext
        # elastic counts local ranks in the order of ranks, and the names follow the same order.
        names = list(self._names.names.values())
        processes = {names[local]: handler.proc for local, handler in context.subprocess_handlers.items()}
        failed = [name for name, process in processes.items() if process.poll()]
        if not failed:
            return False
        if self._failed_at is None:
            self._failed_at = time.monotonic()
        waited = time.monotonic() - self._failed_at
        # The output written before the failure shows which worker failed first.
        self._output.catch_up()
        suspects = [
            process.pid
            for name, process in processes.items()
            if process.poll() is None and self._output.last_traceback(name) > float("-inf")
        ]
        if not suspects or waited < _LAST_MOMENTS_S:
            return bool(suspects)
        words = "\n".join(map(self._output.last_words, failed))
        # Errors name a worker in this form.
        return waited < _GOODBYE_S and any(f", pid {pid} on {socket.gethostname()})" in words for pid in suspects)

    def _first_failure(self, result: RunResult) -> Failure:
        """The first of several failures found at once. A worker that was killed did not fail because of another one."""
        # The failed workers have ended, so their output has arrived, or is about to.
        self._output.finish()

        def order(item: tuple[int, Any]) -> tuple[int, float]:
            rank, failure = item
            code = failure.exitcode
            if code < 0:
                # SIGTERM comes from this agent, which ends the other workers.
                return (2 if code == -signal.SIGTERM else 0), 0.0
            return 1, self._output.last_traceback(self._names.names[rank])

        # Failures without a traceback stay in the order in which they were found.
        rank, failure = min(result.failures.items(), key=order)
        name, code = self._names.names[rank], failure.exitcode
        end = f"exit code {code}" if code > 0 else signal_name(-code)
        return Failure(
            f"{name} (pid {failure.pid} on {socket.gethostname()}) ended with {end}",
            exit_code=code if code > 0 else 128 - code,
            last_words=self._output.last_words(name),
        )


@contextlib.contextmanager
def _started_by(starter: Starter) -> Iterator[None]:
    """Let ``starter`` start elastic's workers. elastic has no setting for this, so replace its function."""

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            assert self._stdout is not None
            assert self._stderr is not None
            return starter.start(env, self._stdout, self._stderr)

    api: Any = elastic_processes
    before = api.get_subprocess_handler
    api.get_subprocess_handler = Handler
    try:
        yield
    finally:
        api.get_subprocess_handler = before


def _not_started(count: int, error: Exception) -> Failure:
    return Failure(
        f"the {count} workers of {socket.gethostname()} could not all be started: {error}{_children.cure_for(error)}",
        exit_code=ExitCode.NOT_STARTED,
        is_final=True,
    )


def _hung() -> Failure:
    # elastic looks for hung workers only if the user sets this variable. No signal ends them.
    return Failure(
        f"a worker on {socket.gethostname()} has hung in the kernel (state D) for longer than "
        f"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT: see which device or file system of that machine does not answer",
        exit_code=ExitCode.BROKEN,
        is_final=True,
    )


class _StoreLost(RuntimeError):
    pass
