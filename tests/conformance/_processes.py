"""The start of the suites' processes, and the stacks of a test that hangs."""

from __future__ import annotations

import faulthandler
import functools
import os
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from tests.support.workers import dump_stacks, dump_stacks_on_request, kill, process_context, stacks_file

# The parent and all processes of a test know this directory; the file of their Store is in it too.
_STACKS = Path(tempfile.gettempdir())


class PreloadedProcesses:
    """Starts a test's processes from a fork server. Mix this class in before torch's MultiProcessTestCase.

    torch itself starts each by ``spawn``, which imports torch four times a test.
    """

    def _spawn_processes(self) -> None:
        self._start_processes(process_context().Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        dump_stacks_on_request(_STACKS)
        # A crash writes its stack to the same file: the report of a test lacks the stderr of its processes.
        faulthandler.enable(stacks_file(_STACKS, os.getpid()).open("a"))
        _keep_ddp_models()
        super()._run(rank, test_name, file_name, parent_pipe, **kwargs)

    def _get_timedout_process_traceback(self) -> None:
        # torch calls this at the test's time limit, before it ends the processes. Its own version asks a Python thread
        # in each process. That thread cannot answer while another one holds the GIL, and cannot see C++.
        alive = [process.pid for process in self.processes if process.is_alive()]
        print(*dump_stacks(alive, _STACKS).values(), sep="\n")

    def _check_return_codes(self, *arguments: Any) -> None:
        # torch's error has only exceptions of processes, and hides an earlier crash of another process.
        try:
            super()._check_return_codes(*arguments)
        except (RuntimeError, AssertionError) as error:
            raise AssertionError("\n".join([*map(_how_it_ended, self.processes), str(error)])) from None

    def tearDown(self) -> None:
        processes = list(self.processes)
        super().tearDown()
        kill(processes)
        for file in (Path(self.file_name), *(stacks_file(_STACKS, process.pid) for process in processes)):
            file.unlink(missing_ok=True)


def _how_it_ended(process: BaseProcess) -> str:
    """Say how a process of a failed test ended. -15 comes from torch, which ends the other processes after the first
    error."""
    process.join(5)
    stacks = stacks_file(_STACKS, process.pid)
    return f"{process.name}: exit code {process.exitcode}\n{stacks.read_text() if stacks.exists() else ''}"


def _keep_ddp_models() -> None:
    """Let no DistributedDataParallel be destroyed before its process ends by ``os._exit``.

    In torch 2.13 the destructor of its Reducer holds the GIL while it joins Gloo's threads. One of these threads may be
    waiting for the GIL to release a tensor. test_ddp_comparison_uneven_inputs then hangs as it returns, whatever the
    RPC agent. A program that does the same without RPC hangs within a few repetitions on one core.
    """
    kept = []
    init = DistributedDataParallel.__init__

    @functools.wraps(init)
    def init_and_keep(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        kept.append(self)
        init(self, *args, **kwargs)

    DistributedDataParallel.__init__ = init_and_keep
