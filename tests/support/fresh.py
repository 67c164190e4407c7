"""Scripts that run before torch_ucx_rpc has been imported and UCX been loaded."""

from __future__ import annotations

import textwrap
from typing import Any

from tests.support import workers


def run_fresh(script: str, **job: Any) -> None:
    """Run ``script`` in a new process; ``workers.WorkersFailed``, with the traceback and the output, if it fails.

    The process is forked from one that has imported torch, so this takes a tenth of a new interpreter's time
    (``workers.run_program``, for tests of torch's import, the loader's environment or the interpreter's end). ``job``
    are arguments of `workers.run_workers`.
    """
    __tracebackhide__ = True
    # A worker for TensorPipe does not import this package unasked.
    workers.run_workers(1, _run, textwrap.dedent(script), backend="TENSORPIPE", init=False, **job)


def _run(rank: int, script: str) -> None:
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
