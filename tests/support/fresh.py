"""Scripts that run before torch_ucx_rpc is imported and UCX is loaded."""

from __future__ import annotations

import textwrap
from typing import Any

from tests.support import workers

# `runs` makes a group of one worker, and checks its agent's type. `refused` expects that init_rpc raises an error.
PRELUDE = """
import os, sys, warnings
# TensorPipe's start-up uses what torch itself calls deprecated.
warnings.simplefilter("ignore", FutureWarning)
warnings.simplefilter("ignore", UserWarning)
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "0")}
import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import (
    BackendType, TensorPipeRpcBackendOptions, backend_registry, init_rpc, rpc_sync, shutdown
)

def runs(expected, **arguments):
    init_rpc("w0", rank=0, world_size=1, **arguments)
    agent = rpc.api._get_current_rpc_agent()
    assert type(agent).__name__ == expected, agent
    assert rpc_sync("w0", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    options = agent._get_backend_options()
    shutdown()
    return options

def refused(error, *words, **arguments):
    try:
        init_rpc(*arguments.pop("args", ("w0",)), **{"rank": 0, "world_size": 1, **arguments})
    except error as raised:
        assert all(word in str(raised) for word in words), raised
    else:
        raise AssertionError("not refused")
    assert not rpc.api._is_current_rpc_agent_set()
"""


def run_fresh(script: str, **job: Any) -> None:
    """Run ``script`` in a new process. If it fails, raise ``workers.WorkersFailed`` with the traceback and the output.

    The process is forked from one that has imported torch. This takes a tenth of a new interpreter's time. Tests of
    torch's import, the loader's environment or the interpreter's end need ``workers.run_program`` instead. ``job`` are
    arguments of `workers.run_workers`.
    """
    __tracebackhide__ = True
    # A worker for TensorPipe does not import this package unasked.
    workers.run_workers(1, _run, textwrap.dedent(script), backend="TENSORPIPE", init=False, **job)


def _run(rank: int, script: str) -> None:
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
