"""Runs the workers of a test as real processes.

* ``run_workers(2, body)`` calls ``body(rank)`` in two processes that are already members of one RPC job, shuts RPC
  down and returns what the bodies returned. A worker that raises, dies or hangs fails the test with every worker's
  traceback, stacks and output. (``_job``)
* ``@in_worker0(of=2)`` and ``@in_every_worker(of=2)`` turn the workers' code into a test. The test runs over shared
  memory and over TCP, or with ``@over_shared_memory`` over shared memory only. (``_decorators``)
* ``init_rpc(rank)`` joins the job by hand, for tests of joining and leaving. ``agent()`` is the running agent.
  (``_worker``)
* ``run_program(source)`` runs a script in an interpreter of its own, for tests of its start and exit. (``_program``)
* ``keep_process_group()`` works around a hang in torch. (``_processes``)
* ``reserved_port()``, ``process_context()``, ``PRELOADED``, ``dump_stacks()``, ``stacks_file()``,
  ``native_stacks()``: the parts, shared with the conformance suites. (``_processes``)
* ``stop(pid)`` stops a process as a debugger does. (``_processes``)
* ``eventually(condition)`` waits for a state of a remote worker. (``_eventually``)
* ``Stalls()`` measures how long this process was kept from running, for bounds on times. (``_stalls``)
* ``Steps(directory)`` orders the steps of processes, without RPC. (``_steps``)
* ``Worker`` is the inside of a worker process, for crews whose workers come and go. (``_worker``)
"""

from ._decorators import in_every_worker, in_worker0, over_shared_memory
from ._eventually import eventually
from ._job import SAID_OVER_TCP, WorkersFailed, run_workers
from ._processes import (
    PRELOADED,
    dump_stacks,
    dump_stacks_on_request,
    keep_process_group,
    kill,
    native_stacks,
    process_context,
    reserved_port,
    stacks_file,
    stop,
    stopped,
)
from ._program import run_program
from ._stalls import Stalls
from ._steps import Steps
from ._worker import (
    ACCEPTED_WARNINGS,
    FOREIGN_MODULES,
    Transport,
    Worker,
    agent,
    backend_options,
    init_rpc,
    worker_name,
)

__all__ = [
    "ACCEPTED_WARNINGS",
    "FOREIGN_MODULES",
    "PRELOADED",
    "SAID_OVER_TCP",
    "Stalls",
    "Steps",
    "Transport",
    "Worker",
    "WorkersFailed",
    "agent",
    "backend_options",
    "dump_stacks",
    "dump_stacks_on_request",
    "eventually",
    "in_every_worker",
    "in_worker0",
    "init_rpc",
    "keep_process_group",
    "kill",
    "native_stacks",
    "over_shared_memory",
    "process_context",
    "reserved_port",
    "run_program",
    "run_workers",
    "stacks_file",
    "stop",
    "stopped",
    "worker_name",
]
