"""How the suites' processes are started, and what is left of a test that hangs."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from workers import dump_stacks, dump_stacks_on_request, kill, process_context

# A directory that the parent and all processes of a test know: beside the file through which they meet.
_STACKS = Path(tempfile.gettempdir())


class PreloadedProcesses:
    """To be mixed in before torch's MultiProcessTestCase: starts a test's processes from a fork server.

    torch starts each by ``spawn``, which imports torch again, four times a test. Nothing else changes for the test.
    """

    def _spawn_processes(self) -> None:
        self._start_processes(process_context().Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        dump_stacks_on_request(_STACKS)
        _keep_ddp_models()
        super()._run(rank, test_name, file_name, parent_pipe, **kwargs)

    def _get_timedout_process_traceback(self) -> None:
        # Called when the test's time is up, before its processes are ended. torch's own version asks a Python thread
        # in each process, which cannot answer while another holds the GIL, and cannot see C++.
        alive = [process.pid for process in self.processes if process.is_alive()]
        print(*dump_stacks(alive, _STACKS).values(), sep="\n")

    def tearDown(self) -> None:
        processes = list(self.processes)
        super().tearDown()
        kill(processes)
        for file in (Path(self.file_name), *(_STACKS / f"{process.pid}.stacks" for process in processes)):
            file.unlink(missing_ok=True)


def _keep_ddp_models() -> None:
    """Let no DistributedDataParallel be destroyed before its process ends, which is by ``os._exit``.

    In torch 2.13 the destructor of its Reducer joins Gloo's threads with the GIL held, while one of them may be waiting
    for the GIL to release a tensor. test_ddp_comparison_uneven_inputs then hangs as it returns, whatever the RPC agent:
    a program that does the same without RPC hangs within a few repetitions on one core.
    """
    kept = []
    init = DistributedDataParallel.__init__

    @functools.wraps(init)
    def init_and_keep(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        kept.append(self)
        init(self, *args, **kwargs)

    DistributedDataParallel.__init__ = init_and_keep
