"""The part of a job that is on this machine: an agent of torch.distributed.elastic, with roles and one end for all."""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from torch_ucx_rpc._cli._output import WorkerOutput
from torch_ucx_rpc._launch.environment import default_name

# Seconds between two looks at the workers, and at the Store, which has the news of other machines.
MONITOR_INTERVAL_S = 0.05

# A worker with a traceback of its last moments has this long to end by itself when another one has failed: it may be
# the one that began it.
_LAST_MOMENTS_S = 3.0

# Whoever cannot start its workers stays for so long at most, for others to find the same.
_REFUSAL_S = 5.0

# Keys of the Store: how many machines have refused to start, how many are done, and the first failure as JSON.
_REFUSED = "torch_ucx_rpc/run/refused"
_DONE = "torch_ucx_rpc/run/done"
_FAILED = "torch_ucx_rpc/run/failed"


@dataclasses.dataclass(frozen=True)
class Failure(Exception):
    """The first failure of the job: the worker, where it was, how it ended, and the end of what it wrote to stderr."""

    worker: str
    pid: int
    host: str
    exit_code: int
    last_words: str

    def __str__(self) -> str:
        end = f"exit code {self.exit_code}"
        if self.exit_code < 0:
            end = signal.Signals(-self.exit_code).name
        return f"the others have been ended, since {self.worker} (pid {self.pid} on {self.host}) ended with {end}"


class WorkerNames(LogsSpecs):
    """Gives each worker its role, its name and its output, of which elastic would have one for all of a machine.

    The workers of the job have roles by their rank: of ``{"ps": 2, "trainer": 8}`` 0 and 1 are ``ps0`` and ``ps1``.
    """

    def __init__(self, roles: Mapping[str, int], output: WorkerOutput) -> None:
        super().__init__()
        self._roles = roles
        self._output = output
        # By rank, of those of this machine.
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
    """elastic's agent of this machine; it raises the first `Failure` of the job, be it here or on another machine."""

    def __init__(self, spec: WorkerSpec, names: WorkerNames, output: WorkerOutput) -> None:
        super().__init__(spec, logs_specs=names)
        self._names = names
        self._output = output
        # What came of this machine's workers, once they have all ended well.
        self._result: RunResult | None = None

    def _initialize_workers(self, worker_group: Any) -> None:
        try:
            super()._initialize_workers(worker_group)
        except ValueError:
            self._wait_for_other_refusals(worker_group)
            raise

    def _wait_for_other_refusals(self, worker_group: Any) -> None:
        """All find the same, each when it has read the Store; which may be in this process."""
        until = time.monotonic() + _REFUSAL_S
        # Where it is gone, all have.
        with contextlib.suppress(DistError):
            worker_group.store.add(_REFUSED, 1)
            while worker_group.store.add(_REFUSED, 0) < worker_group.group_world_size and time.monotonic() < until:
                time.sleep(MONITOR_INTERVAL_S)

    # Any: torch declares what a group has only once it has started as None.
    def _monitor_workers(self, worker_group: Any) -> RunResult:
        if self._result is None:
            if self._is_one_ending():
                return RunResult(state=WorkerState.HEALTHY)
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state is WorkerState.FAILED:
                raise self._told_others(worker_group, self._first_failure(result))
            if result.state is not WorkerState.SUCCEEDED:
                self._look_elsewhere(worker_group)
                return result
            self._result = result
            # Where it is gone, that is seen next.
            with contextlib.suppress(DistError):
                worker_group.store.add(_DONE, 1)
        return self._result if self._are_others_done(worker_group) else RunResult(state=WorkerState.HEALTHY)

    def _exit_barrier(self) -> None:
        # All are done, on all machines.
        pass

    def _is_one_ending(self) -> bool:
        """Whether one has failed while another, still there, wrote a traceback just before."""
        context: Any = self._pcontext
        # Local ranks are counted in the order of ranks, and so are the names.
        names = list(self._names.names.values())
        processes = {names[local]: handler.proc for local, handler in context.subprocess_handlers.items()}
        if not any(process.poll() for process in processes.values()):
            return False
        since = time.monotonic() - _LAST_MOMENTS_S
        return any(
            process.poll() is None and self._output.last_traceback(name) > since for name, process in processes.items()
        )

    def _are_others_done(self, worker_group: Any) -> bool:
        try:
            self._look_elsewhere(worker_group)
            done: int = worker_group.store.add(_DONE, 0)
        except (DistError, _StoreLost):
            # Its machine leaves when all are done.
            return True
        size: int = worker_group.group_world_size
        return done == size

    def _look_elsewhere(self, worker_group: Any) -> None:
        if worker_group.group_world_size == 1:
            return
        try:
            news = worker_group.store.get(_FAILED) if worker_group.store.check([_FAILED]) else None
        except DistError as error:
            raise _StoreLost(
                f"the launcher that holds the Store of the job has ended, or cannot be reached any more: {error}"
            ) from error
        if news is not None:
            raise Failure(**json.loads(news))

    def _told_others(self, worker_group: Any, failure: Failure) -> Failure:
        if worker_group.group_world_size > 1:
            try:
                worker_group.store.set(_FAILED, json.dumps(dataclasses.asdict(failure)))
            except DistError:
                # They know that something is wrong.
                return failure
            # The Store may be in this process.
            time.sleep(10 * MONITOR_INTERVAL_S)
        return failure

    def _first_failure(self, result: RunResult) -> Failure:
        """Of several that were found at once: who was killed did not do that because of another's end."""
        # Theirs is passed on by now, or nearly so: they have ended.
        self._output.close()

        def order(item: tuple[int, Any]) -> tuple[int, float]:
            rank, failure = item
            code = failure.exitcode
            if code < 0:
                # By this agent, which ends the rest.
                return (2 if code == -signal.SIGTERM else 0), 0.0
            return 1, self._output.last_traceback(self._names.names[rank])

        # Without a traceback, in the order in which they were found.
        rank, failure = min(result.failures.items(), key=order)
        name = self._names.names[rank]
        return Failure(
            worker=name,
            pid=failure.pid,
            host=socket.gethostname(),
            exit_code=failure.exitcode,
            last_words=self._output.last_words(name),
        )


class _StoreLost(RuntimeError):
    pass
